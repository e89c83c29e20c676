"""Schedules and objective in continuous time, against the numbers of diffusion-policy (c01, c02).

Different on purpose, each with its own test:
- the ends of the sigmoid schedule are exact, not float32 (test_difference_ends_of_sigmoid_are_exact);
- D-20: weights multiply their own sample (test_d20_…);
- D-21: the cosine schedule runs (test_c01_gamma_schedules);
- D-22: a scale below 1 is undone in every conversion and at the end of a grid (test_d22_…);
- D-23: time_difference is a property of ancestral steps (test_time_difference_…);
- D-35: no time gives NaN, and training stays away from t = 0 (test_d35_…, tests/unit/test_process_flow.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from image_diffusion.core.config.base import parse
from image_diffusion.core.types import DataSpec
from image_diffusion.objectives.denoising import Denoising, MinSnrWeighting, SnrWeighting
from image_diffusion.process.base import broadcast
from image_diffusion.process.continuous import Continuous, ContinuousProcess, SigmoidGamma
from image_diffusion.process.denoiser import clamp, target, to_x0_and_eps

SPEC = DataSpec(channels=3, resolution=4)


def close(actual: Tensor, expected: Tensor, tolerance: dict[str, Any], label: str) -> None:
    torch.testing.assert_close(
        actual.to(expected.dtype),
        expected,
        rtol=tolerance["rtol"],
        atol=tolerance["atol"],
        msg=lambda text: f"{label}: {text}",
    )


def process_of(schedule: str, arguments: dict[str, Any], scale: float = 1.0) -> ContinuousProcess:
    minimum = {"minimum" if key in ("clip_min", "clamp_min") else key: value for key, value in arguments.items()}
    config: Continuous = parse(Continuous, {"schedule": {"type": schedule, **minimum}, "scale": scale}, "test")
    return config.build()


def objective_of(params: dict[str, Any], process: ContinuousProcess) -> Any:
    weighting = MinSnrWeighting(gamma=params["min_snr_gamma"]) if params["min_snr_loss_weight"] else SnrWeighting()
    return Denoising(prediction=params["objective"], weighting=weighting).build(process, SPEC)


FLOAT32 = 2.0**-24
"""Largest error of gamma in the original's sigmoid: its ends are rounded to float32, ours are exact."""


def test_c01_gamma_schedules(golden: Callable[[str], Any]) -> None:
    """Our alpha, sigma and log-SNR are the original's; of the sigmoid, those of a gamma at most FLOAT32 away.

    D-21: the original's cosine schedule cannot run; these are the numbers of its formula.
    """
    file = golden("c01_gamma_schedules.npz")
    for case in file:
        params, tolerance = file.params(case), file.cases[case]["tolerance"]
        t = file[f"{case}/t"]
        off = FLOAT32 if params["schedule"] == "sigmoid" else 0.0
        for scale in (1.0, 0.5):
            process = process_of(params["schedule"], params["schedule_kwargs"], scale)
            ours = with_log_snr(*process.levels(t))
            gamma = (ours["alpha"] / scale) ** 2
            most, least = (levels(gamma + way * off, scale) for way in (1, -1))  # of signal
            for name, result in ours.items():
                theirs = file[f"{case}/{name}_scale{scale}_f64"]
                bounds = torch.stack([result, most[name], least[name]])
                nearest = theirs.clamp(bounds.amin(0), bounds.amax(0))
                close(nearest, theirs, tolerance["f64"], f"{case}/{name}")
            if scale == 1.0:
                close(gamma, file[f"{case}/gamma_f64"], tolerance["f64"], f"{case}/gamma")
                close(gamma, file[f"{case}/gamma_f32"], tolerance["f32"], f"{case}/gamma in float32")


def levels(gamma: Tensor, scale: float) -> dict[str, Tensor]:
    """Return alpha, sigma and log-SNR for gamma."""
    gamma = gamma.clamp(1e-9, 1)
    return with_log_snr(scale * gamma.sqrt(), (1 - gamma).sqrt())


def with_log_snr(alpha: Tensor, sigma: Tensor) -> dict[str, Tensor]:
    return {"alpha": alpha, "sigma": sigma, "log_snr": (alpha**2 / sigma**2).clamp(min=1e-5).log()}


def test_difference_ends_of_sigmoid_are_exact(golden: Callable[[str], Any]) -> None:
    """The original has the ends of its sigmoid and their difference in float32: at t = 0, where there is no noise, it
    may leave some (sigma 8.8e-5). With its rounding in place of our exact ends every number is the original's."""
    file = golden("c01_gamma_schedules.npz")
    cases = [case for case in file if file.params(case)["schedule"] == "sigmoid"]
    leaves_noise = []
    for case in cases:
        arguments, t = file.params(case)["schedule_kwargs"], file[f"{case}/t"]
        start, end, tau = (arguments.get(key, default) for key, default in (("start", -3), ("end", 3), ("tau", 1)))
        schedule = SigmoidGamma(start=start, end=end, tau=tau, minimum=1e-30)
        assert schedule.gamma(torch.zeros(1).double()).item() == pytest.approx(1, abs=1e-15)
        leaves_noise.append(bool(file[f"{case}/sigma_scale1.0_f64"][0] > 0))
        first, last = torch.tensor([start / tau, end / tau], dtype=torch.float64).sigmoid()
        value = last - schedule.gamma(t) * (last - first)
        first, last = torch.tensor([start / tau, end / tau]).sigmoid()
        rounded = ((last.double() - value) / (last - first).double()).clamp(arguments.get("clamp_min", 1e-9), 1)
        for scale in (1.0, 0.5):
            for name, result in levels(rounded, scale).items():
                theirs = file[f"{case}/{name}_scale{scale}_f64"]
                close(result, theirs, file.cases[case]["tolerance"]["f64"], f"{case}/{name}")
    assert any(leaves_noise)


def test_c02_objective(golden: Callable[[str], Any]) -> None:
    """Levels, network input, target, errors, weights and the loss of all 36 combinations."""
    file = golden("c02_training_objective.npz")
    given = file.tensors("in")
    x0, noise, t, output = 2 * given["img"] - 1, given["noise"], given["times"], given["model_output"]
    cases = [case for case in file if case != "in"]
    assert len(cases) == 36
    for case in cases:
        params, tolerance = file.params(case), file.cases[case]["tolerance"]
        process = process_of(params["noise_schedule"], params["schedule_kwargs"], params["scale"])
        objective = objective_of(params, process)
        seen: dict[str, Tensor] = {}

        def network(x: Tensor, t: Tensor, seen: dict[str, Tensor] = seen) -> Tensor:
            seen["net_input"] = x
            return output

        levels = process.levels(t)
        alpha, sigma = broadcast(levels, x0)
        losses = objective.losses_at(network, x0, t, noise, {})
        weight = objective._config.weighting.weight(params["objective"], *levels)
        first = given["model_output_selfcond_pass"]
        x_t = alpha * x0 + sigma * noise
        results = seen | {
            "alpha": alpha.flatten(),
            "sigma": sigma.flatten(),
            "gamma": (alpha.flatten() / params["scale"]) ** 2,
            "target": target(params["objective"], x0, noise, alpha, sigma),
            "mse_per_sample": losses.loss / weight,
            "snr": (levels[0] / levels[1]) ** 2,
            "loss_weight": weight,
            "loss_correct": losses.loss.mean(),
        }
        if params["scale"] == 1:  # below 1 the original's conversion is wrong: see D-22
            results["self_cond"] = clamp(to_x0_and_eps(params["objective"], first, x_t, alpha, sigma)[0])
        for name, result in results.items():
            close(result, file[f"{case}/{name}"], tolerance, f"{case}/{name}")


def test_d20_weights_multiply_their_own_sample(golden: Callable[[str], Any]) -> None:
    """D-20: the original multiplies the mean error with the mean weight."""
    file = golden("c02_training_objective.npz")
    for case in ("v-sigmoid-scale1-minsnr", "x0-linear-scale1-minsnr"):
        mse, weight = file[f"{case}/mse_per_sample"], file[f"{case}/loss_weight"]
        tolerance = file.cases[case]["tolerance"]
        close(mse.mean() * weight.mean(), file[f"{case}/loss_upstream_defective"], tolerance, case)
        assert abs(file[f"{case}/loss_correct"] - file[f"{case}/loss_upstream_defective"]) > 1e-2


@pytest.mark.parametrize("prediction", ["v", "eps", "x0"])
def test_d22_scale_below_one_returns_the_image(prediction: str) -> None:
    """D-22: the original inverts v as if alpha^2 + sigma^2 were 1, and from the normalised input at that."""
    process = Continuous(scale=0.5).build()
    x0, eps = torch.randn(4, 3, 4, 4).double(), torch.randn(4, 3, 4, 4).double()
    alpha, sigma = broadcast(process.levels(torch.tensor([0.1, 0.4, 0.7, 0.95])), x0)
    output = target(prediction, x0, eps, alpha, sigma)
    recovered = to_x0_and_eps(prediction, output, alpha * x0 + sigma * eps, alpha, sigma)
    torch.testing.assert_close(recovered, (x0, eps))


def test_d22_a_grid_ends_at_the_image_itself() -> None:
    """D-22: the original's last step returns the image times the scale."""
    grid = Continuous(scale=0.5).build().grid(10)
    assert grid.alpha[-1] == 1 and grid.sigma[-1] == 0
    last = grid.steps.at(9, torch.zeros(1, 1).double())
    assert last.x0_weight == 1 and last.x_t_weight == 0


@pytest.mark.parametrize("schedule", ["linear", "cosine", "sigmoid"])
@pytest.mark.parametrize("prediction", ["v", "eps", "x0"])
@pytest.mark.parametrize("weighting", [SnrWeighting(), MinSnrWeighting()])
def test_d35_no_time_gives_nan(schedule: str, prediction: str, weighting: Any) -> None:
    """D-35: in the original the weight at t = 0 is NaN."""
    objective = Denoising(prediction=prediction, weighting=weighting).build(process_of(schedule, {}), SPEC)
    x, noise = torch.randn(3, 3, 4, 4), torch.randn(3, 3, 4, 4)
    t = torch.tensor([0.0, 1e-12, 1.0], dtype=torch.float64)
    assert objective.losses_at(lambda x, t: x, x, t, noise, {}).loss.isfinite().all()


def test_time_difference_moves_the_target_of_ancestral_steps_only() -> None:
    """D-23: the original applies it in one of its two samplers; it is a property of ancestral steps."""
    plain, moved = Continuous().build().grid(5), Continuous().build().grid(5, time_difference=0.05)
    assert torch.equal(plain.alpha, moved.alpha) and plain.target is None and moved.target is not None
    alpha, sigma = Continuous().build().levels(torch.tensor([0.75, 0.55]))
    torch.testing.assert_close(moved.target[0][:2], alpha)
    torch.testing.assert_close(moved.target[1][:2], sigma)
