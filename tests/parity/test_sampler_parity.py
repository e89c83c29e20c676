"""Samplers against numbers of improved-diffusion, guided-diffusion [d06] and diffusion-policy [c03], noise given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.process.base import Denoised, Denoiser, Grid
from image_diffusion.process.continuous import Continuous, CosineGamma, LinearGamma, SigmoidGamma
from image_diffusion.process.denoiser import NetworkDenoiser, Prediction, Variance, to_x0_and_eps
from image_diffusion.process.discrete import Cosine, Discrete, DiscreteProcess, Linear
from image_diffusion.samplers.ancestral import Ddim, Ddpm
from image_diffusion.samplers.base import SamplerConfig, clipped, initial_scale
from image_diffusion.samplers.guidance import guided

F64 = {"rtol": 1e-8, "atol": 1e-9}
F32 = {"rtol": 2e-3, "atol": 1e-3}


@dataclass(frozen=True)
class GivenNoise(Streams):
    """Streams that return stored noise: noise[step] at each step."""

    noise: Tensor

    def normal(self, purpose: str, shape: tuple[int, ...] = ()) -> Tensor:
        assert purpose == "sampler"
        drawn = self.noise[int(self.epoch[0])]
        assert tuple(drawn.shape[1:]) == shape
        return drawn


def given(noise: Tensor) -> GivenNoise:
    zeros = torch.zeros(noise.shape[1], dtype=torch.int64)
    return GivenNoise(0, zeros, zeros, noise)


def discrete_process(params: dict[str, Any]) -> DiscreteProcess:
    schedule = {"linear": Linear(), "cosine": Cosine()}[params["schedule"]]
    rescale = params.get("rescale_timesteps", False)
    return Discrete(schedule=schedule, num_timesteps=params["steps"], rescale_timesteps=rescale).build()


def discrete_grid(params: dict[str, Any]) -> Grid:
    return discrete_process(params).grid(params["respacing"])


def toy_denoiser(golden: Any, case: str, grid: Grid, dtype: torch.dtype, offset: int = 0) -> Denoiser:
    """Our denoiser around the toy network of [d06]; i counts from point `offset` of the grid.

    The second half of the network's output is of a learned variance.
    """
    params = golden.params(case)
    A, B, C, A2, B2, C2 = (golden[f"{case}/{name}"].to(dtype) for name in ("A", "B", "C0", "A2", "B2", "C2"))
    learned = params["var_type"] == "LEARNED_RANGE"

    def network(x: Tensor, t: Tensor) -> Tensor:
        share = t.view(-1, 1, 1, 1) / 1000
        halves = [A * x + B * share + C, A2 * x + B2 * share + C2]
        return torch.cat(halves if learned else halves[:1], 1)

    prediction: Prediction = "eps" if params["mean_type"] == "EPSILON" else "x0"
    variance: Variance = "learned_range" if learned else "fixed_small"
    denoiser = NetworkDenoiser(network, discrete_process(params), grid, prediction, variance)
    return lambda x, i: denoiser(x, i + offset)


def one_step(grid: Grid, i: int) -> Grid:
    """Return the grid of the single step from point i to the next."""
    return Grid(grid.time[i : i + 1], grid.alpha[i : i + 2], grid.sigma[i : i + 2])


def ddpm(params: dict[str, Any], **options: Any) -> Ddpm:
    return Ddpm(variance="fixed_large" if params["var_type"] == "FIXED_LARGE" else "fixed_small", **options)


@pytest.fixture(scope="module")
def d06(golden: Callable[[str], Any]) -> Any:
    return golden("d06_sampling_steps.npz")


@pytest.fixture(scope="module")
def c03(golden: Callable[[str], Any]) -> Any:
    return golden("c03_sampling.npz")


def single_steps(d06: Any, case: str, sampler: SamplerConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x_{t-1} and the predicted x0 of every row, each as its own batch, since their timesteps differ."""
    grid = discrete_grid(d06.params(case))
    after, predicted = [], []
    for x, t, noise in zip(d06[f"{case}/x_t"].to(dtype), d06[f"{case}/t"].tolist(), d06[f"{case}/noise"], strict=True):
        i = grid.num_steps - 1 - t
        step = one_step(grid, i)
        denoiser = toy_denoiser(d06, case, grid, dtype, offset=i)
        denoiser = clipped(denoiser, step) if sampler.clip_denoised else denoiser
        (result,) = sampler.steps(denoiser, step, x[None], given(noise[None, None]))
        after.append(result.x)
        predicted.append(result.x0)
    return torch.cat(after), torch.cat(predicted)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("case", ["step_lin1000", "step_cos4000r25", "step_lin1000x0"])
def test_single_steps(d06: Any, case: str, clip: bool) -> None:
    name = "clip" if clip else "noclip"
    for dtype, suffix, tolerance in ((torch.float64, "f64", F64), (torch.float32, "f32", F32)):
        x, x0 = single_steps(d06, case, ddpm(d06.params(case), clip_denoised=clip), dtype)
        torch.testing.assert_close(x, d06[f"{case}/ddpm_{name}_{suffix}"], **tolerance)
        if suffix == "f64":
            torch.testing.assert_close(x0, d06[f"{case}/pred_xstart_{name}_f64"], **tolerance)
        for eta in (0.0, 0.5, 1.0) if suffix == "f64" else (0.0,):
            x, _ = single_steps(d06, case, Ddim(eta=eta, clip_denoised=clip), dtype)
            torch.testing.assert_close(x, d06[f"{case}/ddim_eta{eta}_{name}_{suffix}"], **tolerance)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("case", ["step_lin1000", "step_cos4000r25", "step_lin1000x0"])
def test_reverse_ddim_steps(d06: Any, case: str, clip: bool) -> None:
    """One step of `encode` on a grid of two levels; above the last timestep the original takes alpha_bar = 0."""
    grid = discrete_grid(d06.params(case))
    results = []
    for x, t in zip(d06[f"{case}/x_t"].double(), d06[f"{case}/t"].tolist(), strict=True):
        i = grid.num_steps - 1 - t
        above = (grid.alpha[i - 1], grid.sigma[i - 1]) if i > 0 else (torch.zeros(()), torch.ones(()))
        levels = Grid(
            time=grid.time[i].expand(2),
            alpha=torch.stack([above[0].double(), grid.alpha[i], torch.ones_like(grid.alpha[i])]),
            sigma=torch.stack([above[1].double(), grid.sigma[i], torch.zeros_like(grid.sigma[i])]),
        )
        denoiser = toy_denoiser(d06, case, grid, torch.float64, offset=i - 1)
        results.append(Ddim(clip_denoised=clip).encode(denoiser, levels, x[None]))
    name = "clip" if clip else "noclip"
    torch.testing.assert_close(torch.cat(results), d06[f"{case}/ddim_reverse_{name}_f64"], **F64)


@pytest.mark.parametrize("case", ["loop_ddpm", "loop_ddim"])
def test_loops(d06: Any, case: str) -> None:
    """Every state of whole loops, and the finished sample."""
    params = d06.params(case)
    grid = discrete_grid(params)
    clip = params["clip_denoised"]
    sampler = ddpm(params, clip_denoised=clip) if params["eta"] is None else Ddim(eta=params["eta"], clip_denoised=clip)
    for dtype, suffix, tolerance in ((torch.float64, "f64", F64), (torch.float32, "f32", F32)):
        denoiser, noise = toy_denoiser(d06, case, grid, dtype), d06[f"{case}/x_T"].to(dtype)
        streams = given(d06[f"{case}/step_noise"])
        expected = d06[f"{case}/trajectory_{suffix}"]
        states = torch.stack([step.x for step in sampler.trajectory(denoiser, grid, noise, streams)])
        torch.testing.assert_close(states, expected, **tolerance)
        torch.testing.assert_close(sampler(denoiser, grid, noise, streams), expected[-1], **tolerance)


@pytest.mark.parametrize("scale", [1.0, 1.5, 4.0])
def test_guidance_of_dit(golden: Callable[[str], Any], scale: float) -> None:
    """The original takes [x; x] with labels [y; null] and guides the first three channels; here that is a wrapper."""
    m01 = golden("m01_dit.npz")
    params = m01.params("a")
    config = DiTConfig(
        depth=params["depth"],
        width=params["hidden_size"],
        num_heads=params["num_heads"],
        patch=params["patch_size"],
        time_frequencies="dit",
    )
    spec = DataSpec(channels=params["in_channels"], resolution=params["input_size"], num_classes=params["num_classes"])
    network = config.build(spec, learned_variance=True).eval()
    network.load_state_dict(m01.tensors("a/sd"))
    null = {"label": torch.tensor(params["num_classes"])}
    with torch.no_grad():
        out = guided(network, scale, null, "first_three")(m01["a/x"][:2], m01["a/cfg_t"][:2], label=m01["a/cfg_y"][:2])
    torch.testing.assert_close(out, m01[f"a/cfg_{scale}"][:2], rtol=1e-3, atol=5e-5)


C03 = {"rtol": 5e-3, "atol": 5e-3}
GAMMAS = {"linear": LinearGamma(), "cosine": CosineGamma(), "sigmoid": SigmoidGamma()}


def continuous_case(c03: Any, case: str) -> tuple[SamplerConfig, Continuous]:
    params = c03.params(case)
    sampler = {"ddpm": Ddpm, "ddim": Ddim}[params["sampler"]](
        num_steps=params["timesteps"], clip_denoised=True, time_difference=params["time_difference"]
    )
    return sampler, Continuous(schedule=GAMMAS[params["noise_schedule"]], scale=params["scale"])


def replayed(c03: Any, case: str, process: Continuous, grid: Grid, upstream_v: bool) -> Denoiser:
    """The stored network outputs, read as x0 and eps. upstream_v: with the original's inverse of v (D-22)."""
    params = c03.params(case)

    def denoiser(x: Tensor, i: int) -> Denoised:
        expected = c03[f"{case}/net_input"][i]
        torch.testing.assert_close(process.build().network_input(x).float(), expected, **C03)
        out, alpha, sigma = c03["in/model_outputs"][i].double(), grid.alpha[i], grid.sigma[i]
        x0, eps = to_x0_and_eps(params["objective"], out, x, alpha, sigma)
        return (
            Denoised(alpha * x - sigma * out, eps) if upstream_v and params["objective"] == "v" else Denoised(x0, eps)
        )

    return denoiser


SCALE_1 = [
    *(
        f"{sampler}-{prediction}-sigmoid-scale1-td0"
        for sampler in ("ddpm", "ddim")
        for prediction in ("v", "eps", "x0")
    ),
    *(f"{sampler}-v-{schedule}-scale1-td0" for sampler in ("ddpm", "ddim") for schedule in ("linear", "cosine")),
    "ddpm-v-sigmoid-scale1-td0.05",
]
SCALE_HALF = [f"{s}-{prediction}-sigmoid-scale0.5-td0" for s in ("ddpm", "ddim") for prediction in ("v", "eps")]


def states(c03: Any, case: str, upstream_v: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """x after each step, the clamped x0 of each step, and the finished samples.

    The ancestral sampler starts from the original's state after its first step, which the original computes with a
    floor under the log-SNR: see `test_difference_log_snr_has_no_floor`.
    """
    sampler, process = continuous_case(c03, case)
    grid = sampler.grid(process)
    assert torch.allclose(grid.time.float(), c03[f"{case}/times"])
    first = 1 if sampler.type == "ddpm" else 0
    denoiser = replayed(c03, case, process, grid, upstream_v)
    later = Grid(grid.time[first:], grid.alpha[first:], grid.sigma[first:], target_from(grid, first))
    noise = c03[f"{case}/x_in"][first].double() / initial_scale(later)
    streams = given(c03["in/step_noise"][first:])

    def from_first(x: Tensor, i: int) -> Denoised:
        return denoiser(x, i + first)

    steps = list(sampler.trajectory(from_first, later, noise, streams))
    finished = sampler(from_first, later, noise, streams)
    return torch.stack([s.x for s in steps]).float(), torch.stack([s.x0 for s in steps]).float(), finished.float()


def target_from(grid: Grid, first: int) -> tuple[Tensor, Tensor] | None:
    return None if grid.target is None else (grid.target[0][first:], grid.target[1][first:])


@pytest.mark.parametrize("case", SCALE_1)
def test_continuous_sampling(c03: Any, case: str) -> None:
    x, x0, finished = states(c03, case)
    torch.testing.assert_close(x, c03[f"{case}/x_out"][-len(x) :], **C03)
    torch.testing.assert_close(x0[:-1], c03[f"{case}/x_start_first_n_minus_1"][1 - len(x0) :], **C03)
    torch.testing.assert_close((finished + 1) / 2, c03[f"{case}/final_unnormalised"], **C03)


@pytest.mark.parametrize("case", [case for case in SCALE_1 if case.startswith("ddpm")])
def test_difference_log_snr_has_no_floor(c03: Any, case: str) -> None:
    """At t = 1 the SNR is 1e-9, but the original takes 1e-5 for it in c and 1e-9 in alpha.

    The mean of its first step then has sqrt(1e-5^2 / 1e-9) = 0.32 sigma_s^2 / alpha_s of x_t, ten thousand times what
    the posterior has, and the next x is too noisy. Here alpha, sigma and c are those of one and the same level.
    """
    sampler, process = continuous_case(c03, case)
    grid = sampler.grid(process)
    x, noise = c03["in/x_T"].double(), c03["in/step_noise"][0].double()
    ours = next(sampler.trajectory(replayed(c03, case, process, grid, False), grid, x, given(noise[None])))
    alpha_s, sigma_s = (level[0] for level in grid.target or (grid.alpha[1:], grid.sigma[1:]))

    def after_first_step(snr: float) -> Tensor:
        kept = snr / (alpha_s / sigma_s) ** 2  # 1 - c
        mean = alpha_s * (x * kept / grid.alpha[0] + (1 - kept) * ours.x0)
        return mean + sigma_s * (1 - kept).sqrt() * noise

    torch.testing.assert_close(ours.x, after_first_step(1e-9), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(after_first_step(1e-5).float(), c03[f"{case}/x_out"][0], **C03)
    assert (ours.x - after_first_step(1e-5)).abs().max() > 0.1


@pytest.mark.parametrize("case", SCALE_HALF)
def test_difference_d22_the_final_sample_is_not_shrunk_by_scale(c03: Any, case: str) -> None:
    """Up to the last step as the original, given its x0; the last state is x0 where the original's is scale * x0."""
    x, x0, finished = states(c03, case, upstream_v=True)
    expected = c03[f"{case}/x_out"][-len(x) :]
    torch.testing.assert_close(x[:-1], expected[:-1], **C03)
    torch.testing.assert_close(x0[:-1], c03[f"{case}/x_start_first_n_minus_1"][1 - len(x0) :], **C03)
    torch.testing.assert_close(finished, expected[-1] / 0.5, **C03)


def test_difference_d22_a_perfect_v_gives_the_image_back_at_any_scale(c03: Any) -> None:
    """The original's inverse of v leaves out alpha^2 + sigma^2, and returns 0.5 for an x0 of 1."""
    process = Continuous(scale=0.5)
    for sampler in (Ddim(num_steps=5), Ddpm(num_steps=5)):
        grid = sampler.grid(process)

        def perfect(x: Tensor, i: int, grid: Grid = grid) -> Denoised:
            alpha, sigma = grid.alpha[i], grid.sigma[i]
            eps = (x - alpha) / sigma
            return Denoised(*to_x0_and_eps("v", alpha * eps - sigma, x, alpha, sigma))

        result = sampler(perfect, grid, c03["in/x_T"].double(), given(c03["in/step_noise"]))
        torch.testing.assert_close(result, torch.ones_like(result), rtol=0, atol=1e-6)


def test_difference_d23_time_difference_works_in_ddim(c03: Any) -> None:
    """The original subtracts it after its last use. Here a step ends at the level of t' - time_difference."""
    case = "ddim-x0-sigmoid-scale1-td0"
    sampler, process = continuous_case(c03, case)
    grid = sampler.model_copy(update={"time_difference": 0.05}).grid(process)
    x0 = c03["in/model_outputs"][0].double().clamp(-1, 1)
    x = c03["in/x_T"].double()
    first = next(sampler.trajectory(lambda x_t, i: Denoised(x0, x_t), grid, x, given(c03["in/step_noise"])))
    (alpha,), (sigma,) = process.build().levels(torch.tensor([0.75]))
    eps = (x - grid.alpha[0] * x0) / grid.sigma[0]
    torch.testing.assert_close(first.x, alpha * x0 + sigma * eps, rtol=1e-6, atol=1e-6)
    assert (first.x - c03[f"{case}/x_out"][0]).abs().max() > 0.01
