"""The discrete process, its losses and its bound, against the numbers of improved-diffusion and DiT (d01 to d09).

Different on purpose, each with its own test:
- one timestep only: the variance is finite (test_a_schedule_of_one_timestep_has_a_finite_variance);
- D-17: the loss history takes shares of any length from the processes, and is saved with a checkpoint
  (tests/unit/test_objectives_timestep_sampling.py);
- D-30: previous_x and learned mean what they say (test_d30_…);
- a hybrid loss without a learned variance, or the opposite, is refused (tests/unit/test_objectives_denoising.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from image_diffusion.core.types import DataSpec
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.objectives.timestep_sampling import LossHistory
from image_diffusion.process.denoiser import (
    NetworkDenoiser,
    clamp,
    log_variance,
    read_output,
    split_output,
    to_x0_and_eps,
)
from image_diffusion.process.discrete import (
    Const,
    Cosine,
    Discrete,
    DiscreteProcess,
    Jsd,
    Linear,
    Quad,
    Warmup10,
    Warmup50,
    checked_betas,
    space_timesteps,
)
from image_diffusion.process.likelihood import (
    approximate_normal_cdf,
    bits_per_dim,
    discretized_gaussian_log_likelihood,
    normal_kl,
    prior_bound,
)

SCHEDULES = {"linear": Linear(), "cosine": Cosine(), "squaredcos_cap_v2": Cosine()}
PREDICTIONS = {"PREVIOUS_X": "previous_x", "START_X": "x0", "EPSILON": "eps"}
VARIANCES = {name.upper(): name for name in ("learned", "learned_range", "fixed_small", "fixed_large")}
PRECISIONS = {"f64": torch.float64, "f32": torch.float32}


def close(actual: Tensor, expected: Tensor, tolerance: dict[str, Any], label: str) -> None:
    torch.testing.assert_close(
        actual.to(expected.dtype).broadcast_to(expected.shape),
        expected,
        rtol=tolerance.get("rtol", 0),
        atol=tolerance.get("atol", 0),
        equal_nan=True,
        msg=lambda text: f"{label}: {text}",
    )


def process_of(params: dict[str, Any]) -> DiscreteProcess:
    return Discrete(
        schedule=SCHEDULES[params.get("schedule", params.get("noise_schedule", "linear"))],
        num_timesteps=params.get("steps", params.get("diffusion_steps", params.get("T", 1000))),
        respacing=params.get("respacing", params.get("timestep_respacing", "")),
        rescale_timesteps=params.get("rescale_timesteps", False),
    ).build()


def objective_of(params: dict[str, Any]) -> Denoising:
    variance = VARIANCES[params["var_type"]]
    learned = variance.startswith("learned")
    loss = {
        "MSE": "hybrid" if learned else "simple",
        "RESCALED_MSE": "rescaled_hybrid" if learned else "simple",
        "KL": "kl",
        "RESCALED_KL": "rescaled_kl",
    }[params["loss_type"]]
    return Denoising(prediction=PREDICTIONS[params["mean_type"]], variance=variance, loss=loss)


def test_d01_named_schedules_and_their_tables(golden: Callable[[str], Any]) -> None:
    file = golden("d01_beta_schedules.npz")
    for case in file:
        if case.startswith("legacy"):
            continue
        params, tolerance = file.params(case), file.cases[case]["tolerance"]
        schedule, T = SCHEDULES[params["schedule"]], params["T"]
        close(schedule.betas(T), file[f"{case}/betas"], tolerance["betas"], case)
        if f"{case}/alphas_cumprod" not in file:
            with pytest.raises(ValueError, match=r"got a maximum of 2.0 from linear\(num_steps=10\)"):
                checked_betas(schedule, T)
            continue
        process = Discrete(schedule=schedule, num_timesteps=T).build()
        alpha_bar, steps = process.alpha_bar, process.steps
        tables = {
            "alphas_cumprod": alpha_bar,
            "alphas_cumprod_prev": torch.cat([torch.ones(1), alpha_bar[:-1]]),
            "alphas_cumprod_next": torch.cat([alpha_bar[1:], torch.zeros(1)]),
            "sqrt_alphas_cumprod": steps.alpha,
            "sqrt_one_minus_alphas_cumprod": steps.sigma,
            "log_one_minus_alphas_cumprod": 2 * steps.sigma.log(),
            "sqrt_recip_alphas_cumprod": 1 / steps.alpha,
            "sqrt_recipm1_alphas_cumprod": steps.sigma / steps.alpha,
            "posterior_variance": steps.variance,
            "posterior_log_variance_clipped": steps.log_variance,
            "posterior_mean_coef1": steps.x0_weight,
            "posterior_mean_coef2": steps.x_t_weight,
        }
        for name, table in tables.items():
            close(table, file[f"{case}/{name}"], tolerance["tables"], f"{case}/{name}")


def test_d01_legacy_schedules(golden: Callable[[str], Any]) -> None:
    file = golden("d01_beta_schedules.npz")
    schedules = {
        "linear": Linear(scaled=False),
        "quad": Quad(),
        "warmup10": Warmup10(),
        "warmup50": Warmup50(),
        "const": Const(),
        "jsd": Jsd(),
    }
    cases = [case for case in file if case.startswith("legacy")]
    assert {file.params(case)["beta_schedule"] for case in cases} == set(schedules)
    for case in cases:
        params = file.params(case)
        betas = checked_betas(schedules[params["beta_schedule"]], params["T"])
        close(betas, file[f"{case}/betas"], file.cases[case]["tolerance"], case)


def test_d02_respacing(golden: Callable[[str], Any]) -> None:
    file = golden("d02_respacing.npz")
    for case in file:
        params = file.params(case)
        if case.startswith("steps"):
            assert space_timesteps(params["T"], params["section_counts"]) == file[f"{case}/timesteps"].tolist(), case
        elif case.startswith("error"):
            with pytest.raises(ValueError, match="Respacing"):
                space_timesteps(params["T"], params["section_counts"])
        else:
            process, tolerance = process_of(params), file.cases[case]["tolerance"]
            assert torch.equal(process.timestep_map, file[f"{case}/timestep_map"]), case
            close(process.betas, file[f"{case}/betas"], tolerance, case)
            close(process.alpha_bar, file[f"{case}/alphas_cumprod"], tolerance, case)
            close(process.steps.variance, file[f"{case}/posterior_variance"], tolerance, case)
            close(process.steps.log_variance, file[f"{case}/posterior_log_variance_clipped"], tolerance, case)
            close(process.network_time(file[f"{case}/t_index"]), file[f"{case}/model_timesteps"], tolerance, case)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_d03_forward_process_and_conversions(golden: Callable[[str], Any], precision: str) -> None:
    file = golden("d03_forward_process.npz")
    for case in ("lin1000", "cos4000r100"):
        process, t = process_of(file.params(case)), file[f"{case}/t"]
        x0, noise, other = (file[f"{case}/{name}"].to(PRECISIONS[precision]) for name in ("x_start", "noise", "other"))
        step = process.steps.at(t, x0)
        x_t = step.alpha * x0 + step.sigma * noise
        previous = read_output(other, x_t, step, "previous_x", "fixed_small")
        results = {
            "q_mean": step.alpha * x0,
            "q_var": step.sigma.flatten() ** 2,
            "q_logvar": 2 * step.sigma.flatten().log(),
            "x_t": x_t,
            "post_mean": step.posterior_mean(x0, x_t),
            "post_var": step.variance.flatten(),
            "post_logvar": step.log_variance.flatten(),
            "xstart_from_eps": to_x0_and_eps("eps", other, x_t, step.alpha, step.sigma)[0],
            "xstart_from_xprev": previous.x0,
            "eps_from_xstart": to_x0_and_eps("x0", other, x_t, step.alpha, step.sigma)[1],
            "prior_bpd": prior_bound(x0, process.grid()),
        }
        for name, result in results.items():
            label = f"{case}/{name}_{precision}"
            close(result, file[label], file.cases[case]["tolerance"][precision], label)


def test_d03_likelihood_helpers(golden: Callable[[str], Any]) -> None:
    file = golden("d03_forward_process.npz")
    given, tolerance = file.tensors("helpers"), file.cases["helpers"]["tolerance"]
    zero = torch.zeros((), dtype=torch.float64)
    gaussians = (given["mean1"], given["logvar1"])
    results = {
        "disc_loglik_nats": discretized_gaussian_log_likelihood(given["x"], given["means"], given["log_scales"]),
        "normal_kl_nats": normal_kl(*gaussians, given["mean2"], given["logvar2"]),
        "normal_kl_to_std": normal_kl(*gaussians, zero, zero),
        "approx_cdf": approximate_normal_cdf(given["z"]),
    }
    for name, result in results.items():
        close(result, given[name], tolerance, name)


def test_d04_every_prediction_with_every_variance(golden: Callable[[str], Any]) -> None:
    file = golden("d04_p_mean_variance.npz")
    checked = 0
    for case in file:
        params = file.params(case)
        if "inputs_from" not in params:
            continue
        given = file.tensors(params["inputs_from"])
        process, x_t = process_of(file.params(params["inputs_from"])), given["x_t"].double()
        prediction, variance = PREDICTIONS[params["mean_type"]], VARIANCES[params["var_type"]]
        output = given["model_output"].double()
        output = output if variance.startswith("learned") else output[:, : x_t.shape[1]]
        clip, changed = params["clip_denoised"], "denoised_fn" in params

        def restrict(x0: Tensor, clip: bool = clip, changed: bool = changed) -> Tensor:
            x0 = 0.5 * x0 + 0.25 if changed else x0
            return clamp(x0) if clip else x0

        step = process.steps.at(given["t"], x_t)
        denoised = read_output(output, x_t, step, prediction, variance, restrict)
        log_var = log_variance(split_output(output, x_t.shape[1], variance)[1], variance, step)
        exact = {"fixed_small": step.variance, "fixed_large": step.log_large_variance.exp()}.get(
            variance, log_var.exp()
        )
        results = {"mean_f64": step.reverse_mean(denoised, x_t), "pred_xstart_f64": denoised.x0}
        fixed = variance.startswith("fixed")
        results["log_variance_f64"] = log_var.flatten() if fixed else log_var
        results["variance_f64"] = exact.flatten() if fixed else exact
        tolerance = file.cases[case]["tolerance"]["f64"]
        for name, result in results.items():
            if f"{case}/{name}" in file:
                close(result, file[f"{case}/{name}"], tolerance, f"{case}/{name}")
                checked += 1
    assert checked == 48 * 4 + 2 * 2


@pytest.mark.parametrize("name", ["d05_training_losses.npz", "d09_dit_diffusion.npz"])
def test_d05_and_d09_training_losses(golden: Callable[[str], Any], name: str) -> None:
    file = golden(name)
    checked = 0
    for case in file:
        params = file.params(case)
        if "loss_type" not in params:
            continue
        source = params.get("inputs_from", case)
        given, tolerance = file.tensors(source), file.cases[case]["tolerance"]
        config = objective_of(params)
        process = process_of(file.params(source))
        objective = config.build(process, DataSpec(channels=3, resolution=4))
        for precision, dtype in PRECISIONS.items():
            x0, noise, output = (given[key].to(dtype) for key in ("x_start", "noise", "model_output"))
            output = output if config.variance.startswith("learned") else output[:, : x0.shape[1]]
            output = output.clone().requires_grad_()
            losses = objective.losses_at(lambda x, t, output=output: output, x0, given["t"], noise, {})
            for key, value in {"loss": losses.loss.detach(), **losses.parts}.items():
                if f"{case}/{key}_{precision}" in file:
                    close(value, file[f"{case}/{key}_{precision}"], tolerance[precision], f"{case}/{key}_{precision}")
                    checked += 1
            if precision == "f64" and f"{case}/grad" in file:
                losses.loss.mean().backward()
                close(output.grad[params["grad_rows"]], file[f"{case}/grad"], tolerance["grad"], f"{case}/grad")
                checked += 1
    # d05: the loss in both precisions and the gradient of 96 cases, mse of 48, vb of 24. d09: see its table.
    assert checked == (96 * 3 + 48 + 24 if name.startswith("d05") else 9 * 2 + 7 * 2 + 5 * 2)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", ["a", "b"])
def test_d07_bits_per_dimension(golden: Callable[[str], Any], case: str, precision: str) -> None:
    file = golden("d07_bits_per_dim.npz")
    params, dtype = file.params(case), PRECISIONS[precision]
    given = {key: value.to(dtype) for key, value in file.tensors(case).items()}
    variance = VARIANCES[params["var_type"]]

    def network(x: Tensor, t: Tensor) -> Tensor:
        share = t.view(-1, 1, 1, 1) / 1000
        mean = given["A"] * x + given["B"] * share + given["C0"]
        raw = given["A2"] * x + given["B2"] * share + given["C2"]
        return torch.cat([mean, raw], 1) if variance.startswith("learned") else mean

    process = process_of(params)
    grid = process.grid()
    restrict = clamp if params["clip_denoised"] else None
    denoiser = NetworkDenoiser(network, process, grid, "eps", variance, restrict=restrict)
    bound = bits_per_dim(denoiser, grid, given["x_start"], noise=lambda i: given["step_noise"][i])
    results = {
        "total_bpd": bound.total,
        "prior_bpd": bound.prior,
        "vb": bound.terms,
        "xstart_mse": bound.x0_mse,
        "mse": bound.eps_mse,
    }
    for name, result in results.items():
        label = f"{case}/{name}_{precision}"
        if label in file:
            close(result, file[label], file.cases[case]["tolerance"][precision], label)


@pytest.mark.parametrize("case", ["second_moment_default", "second_moment_short"])
@pytest.mark.parametrize("at_once", [False, True])
def test_d08_loss_second_moment(golden: Callable[[str], Any], case: str, at_once: bool) -> None:
    file = golden("d08_schedule_sampler.npz")
    params, given, tolerance = file.params(case), file.tensors(case), file.cases[case]["tolerance"]
    T, history = params["num_timesteps"], params["history_per_term"]
    loss_history = LossHistory(T, history, params["uniform_prob"])
    losses = given["losses"]
    start = 0
    for row, end in enumerate(given["prefix_lengths"].tolist()):
        size = max(end - start, 1) if at_once else 1
        for first in range(start, end, size):
            loss_history.append(given["ts"][first : first + size], losses[first : first + size])
        weights = given["weights"][row]
        close(loss_history.probabilities(), weights / weights.sum(), tolerance, f"{case} after {end}")
        start = end
    close(loss_history.probabilities(), given["p"], tolerance, case)
    importance = loss_history.importance_weights(given["drawn"])
    close(importance, given["importance_weights"], tolerance["importance_weights"], case)
    state = loss_history.state_dict()
    oldest_first = [state["losses"][t].roll(-int(state["counts"][t]) % history) for t in range(T)]
    close(torch.stack(oldest_first), given["loss_history"], tolerance, case)


def test_d08_uniform_importance_weights(golden: Callable[[str], Any]) -> None:
    file = golden("d08_schedule_sampler.npz")
    loss_history = LossHistory(file.params("uniform")["num_timesteps"])
    weights = loss_history.importance_weights(file["uniform/drawn"])
    close(weights, file["uniform/importance_weights"], file.cases["uniform"]["tolerance"], "uniform")


def test_d08_quartile_of_the_reported_time(golden: Callable[[str], Any]) -> None:
    file = golden("d08_schedule_sampler.npz")
    time = Discrete(num_timesteps=file.params("quartiles")["num_timesteps"]).build().fraction(file["quartiles/t"])
    assert torch.equal((4 * time).long(), file["quartiles/quartile"])


def test_a_schedule_of_one_timestep_has_a_finite_variance() -> None:
    """Differs from improved-diffusion, which fails, and from DiT, whose table is empty."""
    steps = Discrete(schedule=Const(beta=0.3), num_timesteps=1).build().steps
    assert steps.log_variance.tolist() == pytest.approx([math.log(0.3)])


def test_d30_dit_takes_previous_x_for_eps_and_learned_for_learned_range() -> None:
    """D-30: in DiT's copy these two names mean something else; here each means what it says."""
    process = Discrete().build()
    x_t, output = torch.randn(2, 3, 4, 4).double(), torch.randn(2, 6, 4, 4).double()
    step = process.steps.at(torch.tensor([3, 700]), x_t)
    previous = read_output(output, x_t, step, "previous_x", "learned")
    assert torch.equal(step.reverse_mean(previous, x_t), output[:, :3])
    torch.testing.assert_close(step.posterior_mean(previous.x0, x_t), output[:, :3])
    assert torch.equal(previous.log_variance, output[:, 3:])
    assert not torch.equal(previous.log_variance, read_output(output, x_t, step, "eps", "learned_range").log_variance)
