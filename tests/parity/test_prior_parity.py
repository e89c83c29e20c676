"""The prior against the original (DALLE2-pytorch): schedules, network, losses, samplers, similarities.

Differences are wanted where the original is wrong; each has a test of its own here, named test_difference_….
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.random.streams import Streams, image_streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.data.shards.order import share
from image_diffusion.metrics.images.embedding_similarity import similarities, similarity_estimates
from image_diffusion.networks.prior import Norm, Prior, PriorConfig, bucket_of
from image_diffusion.objectives.denoising import P2Weighting
from image_diffusion.objectives.embedding import EmbeddingDenoising, with_norm
from image_diffusion.process.base import Denoised, broadcast
from image_diffusion.process.denoiser import clamp, read_output, target, to_x0_and_eps
from image_diffusion.process.discrete import Cosine, Discrete, Jsd, Linear, Quad, Sigmoid
from image_diffusion.samplers.ancestral import Ddim, LegacyDdim
from image_diffusion.samplers.guidance import guided
from image_diffusion.systems.prior.generator import EmbeddingGenerator, EmbeddingSampling, pair_batch
from image_diffusion.systems.prior.prior import PriorSystem

CLOSE = {"rtol": 1e-3, "atol": 5e-5}
NETS = ["net_a", "net_normformer_selfcond", "net_continuous_time"]
NAMES = {
    "heads": "num_heads",
    "dim_head": "head_width",
    "rotary_emb": "rotary",
}


def network_of(file: Any, case: str, **changes: Any) -> Prior:
    """Return the network of a golden case, with its weights."""
    params = file.params(case)
    known = {NAMES.get(name, name): value for name, value in params.items()}
    settings = {name: value for name, value in known.items() if name in PriorConfig.model_fields}
    network = PriorConfig(**{"divide_by_maximum": True, **settings, **changes}).build(
        DataSpec(channels=params["dim"], resolution=1)
    )
    network.load_state_dict(file.tensors(f"{case}/sd"))
    return network.eval()


@pytest.mark.parametrize("case", NETS)
@torch.no_grad()
def test_the_network_is_that_of_the_original(golden, case):
    file = golden("m05_prior.npz")
    network = network_of(file, case)
    x, t, text = (file[f"{case}/{name}"] for name in ("image_embed", "t", "text_embed"))
    encodings = file[f"{case}/text_encodings"]
    no = torch.zeros(len(x), dtype=torch.bool)

    def check(found: Tensor, name: str) -> None:
        torch.testing.assert_close(found, file[f"{case}/{name}"], **CLOSE)

    check(network(x, t, text, encodings), "out")
    check(network(x, t, text), "out_no_encodings")
    check(network(x, t, text, encodings, text_keep=no), "out_text_dropped")
    check(network(x, t, text, encodings, text_keep=no, image_keep=no), "out_all_dropped")
    if f"{case}/self_cond" in file:
        check(network(x, t, text, encodings, self_cond=file[f"{case}/self_cond"]), "out_self_cond")


def test_distances_fall_into_the_buckets_of_t5(golden):
    file = golden("m05_prior.npz")
    assert torch.equal(bucket_of(file["rel_pos_bucket/relative_position"]), file["rel_pos_bucket/bucket"])


@torch.no_grad()
@pytest.mark.parametrize("case", NETS)
def test_guidance_extrapolates_from_null_conditions(golden, case):
    file = golden("m05_prior.npz")
    yes = torch.ones(4, dtype=torch.bool)
    cond = {name: file[f"{case}/{name}"] for name in ("text_embed", "text_encodings")}
    no = {"text_keep": ~yes[:1], "image_keep": ~yes[:1]}
    network = guided(network_of(file, case), 2.5, no)
    out = network(file[f"{case}/image_embed"], file[f"{case}/t"], **cond, text_keep=yes, image_keep=yes)
    torch.testing.assert_close(out, file[f"{case}/out_cond_scale_2.5"], **CLOSE)


SCHEDULES = {"cosine": Cosine(), "linear": Linear(), "quadratic": Quad(scaled=True), "jsd": Jsd(),
             "sigmoid": Sigmoid(scaled=True)}  # fmt: skip


@pytest.mark.parametrize("steps", [100, 1000])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedules_are_those_of_the_original(golden, name, steps):
    file, case = golden("m05_prior.npz"), f"schedule_{name}_{steps}"
    process = Discrete(schedule=SCHEDULES[name], num_timesteps=steps).build()
    close = {"rtol": 2e-5, "atol": 1e-7}
    torch.testing.assert_close(process.betas.float(), file[f"{case}/betas"], **close)
    torch.testing.assert_close(process.alpha_bar.float(), file[f"{case}/alphas_cumprod"], **close)
    variance = file[f"{case}/posterior_variance"]
    torch.testing.assert_close(process.steps.variance.float(), variance, rtol=1e-3, atol=1e-7)
    # The last step, t = 0, has no variance: the original takes the logarithm of 1e-20 for it, we the one of the step
    # before, as IDDPM does. No noise is drawn in it, so that nothing follows from either.
    log = file[f"{case}/posterior_log_variance_clipped"]
    torch.testing.assert_close(process.steps.log_variance[1:].float(), log[1:], rtol=1e-3, atol=1e-5)
    assert log[0].item() == pytest.approx(math.log(1e-20))
    assert process.steps.log_variance[0] == process.steps.log_variance[1]
    torch.testing.assert_close(
        process.steps.x0_weight.float(), file[f"{case}/posterior_mean_coef1"], rtol=1e-3, atol=1e-6
    )
    torch.testing.assert_close(
        process.steps.x_t_weight.float(), file[f"{case}/posterior_mean_coef2"], rtol=1e-3, atol=1e-6
    )
    weight = P2Weighting(gamma=file.params(case)["p2_loss_weight_gamma"]).weight(
        "x0", *process.levels(torch.arange(steps))
    )
    torch.testing.assert_close(weight.float(), file[f"{case}/p2_loss_weight"], rtol=1e-3, atol=1e-6)


def test_the_forward_process_is_that_of_the_original(golden):
    file = golden("m05_prior.npz")
    x0, eps, x_t, t = (file[f"forward_process/{name}"] for name in ("x_start", "noise", "x_t", "t"))
    process = Discrete(schedule=Cosine(), num_timesteps=100).build()
    alpha, sigma = broadcast(process.levels(t), x0)

    def close(found: Tensor, name: str) -> None:
        torch.testing.assert_close(found, file[f"forward_process/{name}"], rtol=1e-3, atol=1e-5)

    close(alpha * x0 + sigma * eps, "q_sample")
    close(target("v", x0, eps, alpha, sigma), "v")
    close(to_x0_and_eps("v", eps, x_t, alpha, sigma)[0], "start_from_v")
    close(to_x0_and_eps("eps", eps, x_t, alpha, sigma)[0], "start_from_noise")
    close(to_x0_and_eps("x0", x0, x_t, alpha, sigma)[1], "noise_from_start")
    step = process.steps.at(t, x0)
    close(step.posterior_mean(x0, x_t), "post_mean")
    snr = P2Weighting(gamma=0.5).weight("x0", *process.levels(t))
    torch.testing.assert_close(
        eps[:, 0].abs() * snr.float(), file["forward_process/p2_reweighed"], rtol=1e-3, atol=1e-5
    )


KINDS = {"x0": "x0", "eps": "eps", "v": "v", "x0_l2": "x0"}
"""Prediction in the cases prior_<kind>_<loss>; in x0_l2 every norm is clamped."""


def system_of(file: Any, kind: str, loss: str = "l2", **changes: Any) -> PriorSystem:
    params = file.params("prior_in")
    network = {
        NAMES.get(name, name): value
        for name, value in params.items()
        if name not in ("dim", "timesteps", "beta_schedule")
    }
    return PriorSystem(
        network={"divide_by_maximum": True, **network},
        process={"schedule": {"type": params["beta_schedule"]}, "num_timesteps": params["timesteps"]},
        objective={"prediction": KINDS[kind], "loss": loss, "clamp_norm": kind == "x0_l2", **changes},
    )


@dataclass(frozen=True)
class GivenNoise(Streams):
    """Streams that return the noise of a golden case, step after step."""

    noise: Tensor

    def normal(self, purpose: str, shape: tuple[int, ...] = ()) -> Tensor:
        assert purpose == "sampler"
        return self.noise[int(self.epoch[0])]


def sampled(file: Any, kind: str, sampler: Any, **changes: Any) -> Tensor:
    """Return the embeddings of a golden loop; x_t is the noise it starts from."""
    system, clamps = system_of(file, kind), kind == "x0_l2"
    settings = EmbeddingSampling(sampler=sampler, clamp_x0=clamps, clamp_start=clamps, clamp_result=clamps, **changes)
    network = network_of(file, "prior_in")
    generator = EmbeddingGenerator(network, system.reading(network.spec), network.spec, settings)
    zeros = torch.zeros(4, dtype=torch.int64)
    streams = GivenNoise(0, zeros, zeros, file["prior_in/step_noise"])
    cond = {name: file[f"prior_in/{name}"] for name in ("text_embed", "text_encodings")}
    return generator.from_noise(cond, file["prior_in/x_t"], streams)


def pairs_of(file: Any) -> Tensor:
    """Return the pairs of the golden case in their stored form."""
    image, text = (file[f"prior_in/{name}"][:, None] for name in ("image_embed", "text_embed"))
    return torch.cat([image, text, file["prior_in/text_encodings"]], dim=1)


def streams_of(count: int) -> Streams:
    return Streams(0, torch.zeros(count, dtype=torch.int64), torch.arange(count))


def batch_of(system: PriorSystem, pairs: Tensor) -> Batch:
    scaling = system.reading(DataSpec(channels=pairs.shape[2], resolution=1)).scaling
    return pair_batch(pairs, streams_of(len(pairs)), scaling, system.token_encodings)


LOOPS = {"rtol": 2e-3, "atol": 2e-4}


@pytest.mark.parametrize("loss", ["l2", "l1", "huber"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_loss_is_that_of_the_original(golden, kind, loss):
    file = golden("m05_prior.npz")
    system, network = system_of(file, kind, loss), network_of(file, "prior_in")
    pairs = pairs_of(file)
    batch = batch_of(system, pairs)
    objective = system.build_objective(network.spec)
    losses = objective.losses_at(network, batch.x, file["prior_in/t"], file["prior_in/noise"], batch.cond, None)
    torch.testing.assert_close(losses.loss.mean(), file[f"prior_{kind}_{loss}/loss"], **LOOPS)
    assert torch.equal(pairs, pairs_of(file)), "D-40: the original scales the caller's tensor"


@pytest.mark.parametrize("kind", KINDS)
def test_the_ancestral_sampler_is_that_of_the_original(golden, kind):
    file = golden("m05_prior.npz")
    sampler = {"type": "ddpm", "num_steps": "", "clip_denoised": kind == "eps"}
    torch.testing.assert_close(sampled(file, kind, sampler), file[f"prior_{kind}_l2/loop_ddpm"], **LOOPS)


@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_legacy_ddim_is_that_of_the_original(golden, kind, eta):
    file = golden("m05_prior.npz")
    sampler = {"type": "legacy_ddim", "num_steps": 7, "eta": eta, "clip_denoised": kind == "eps"}
    torch.testing.assert_close(sampled(file, kind, sampler), file[f"prior_{kind}_l2/loop_ddim_7_eta{eta}"], **LOOPS)
    grid = LegacyDdim(num_steps=7).grid(system_of(file, kind).process)
    assert grid.time.long().tolist() == file["ddim_times/times"].tolist()[:-1]


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_step_is_that_of_the_original(golden, kind, clip):
    """One step of the ancestral sampler from each sample's own timestep."""
    file = golden("m05_prior.npz")
    system, network = system_of(file, kind), network_of(file, "prior_in")
    x_t, t = file["prior_in/x_t"], file["prior_in/t"]
    cond = {name: file[f"prior_in/{name}"] for name in ("text_embed", "text_encodings")}
    process = system.process.build()
    step = process.steps_on(x_t.device).at(t, x_t)
    norm = system.scale(network.spec)
    restrict = (lambda x: with_norm(x, norm)) if kind == "x0_l2" else clamp if kind == "eps" and clip else None
    denoised = read_output(network(x_t, t.float(), **cond), x_t, step, KINDS[kind], "fixed_small", restrict)
    torch.testing.assert_close(denoised.x0, file[f"prior_{kind}_l2/x_start_clip{clip}"], **LOOPS)
    noise = (0.5 * step.log_variance).exp() * file["prior_in/noise"] * (t > 0)[:, None]
    torch.testing.assert_close(
        step.reverse_mean(denoised, x_t) + noise, file[f"prior_{kind}_l2/p_sample_clip{clip}"], **LOOPS
    )


SIMILARITIES = {"baseline_similarity": "baseline_mean", "similarity_with_text": "with_text_mean",
                "similarity_with_image": "with_image_mean", "similarity_with_unrelated_caption": "unrelated_mean",
                "difference_from_baseline": "difference"}  # fmt: skip


@pytest.mark.parametrize("case", ["cosine_a", "cosine_b_one_zero"])
def test_the_similarities_are_those_of_the_original(golden, case):
    file = golden("p02_prior_metrics.npz")
    names = ("text_embed", "image_embed", "pred_for_text", "pred_for_rolled_text")
    found = similarities(*(file[f"{case}/{name}"] for name in names))
    for name, theirs in SIMILARITIES.items():
        torch.testing.assert_close(found[name].mean(), file[f"{case}/{theirs}"], rtol=1e-5, atol=1e-6)
    rolled = F.normalize(file[f"{case}/text_embed"].roll(1, 0), dim=1)
    torch.testing.assert_close(rolled, file[f"{case}/rolled_text_embed_normalised"], rtol=1e-5, atol=1e-6)


def test_difference_a_similarity_of_zero_counts(golden):
    """D-41: gathering from processes, the original takes zeros for padding and leaves them out of the mean."""
    file = golden("p02_prior_metrics.npz")
    each = similarities(*(file[f"cosine_b_one_zero/{name}"] for name in
                          ("text_embed", "image_embed", "pred_for_text", "pred_for_rolled_text")))  # fmt: skip
    baseline, theirs = each["baseline_similarity"], file["cosine_b_one_zero/upstream_baseline"].item()
    assert (baseline.abs() < 1e-6).sum() == 1
    assert theirs == pytest.approx(baseline.sum().item() / (len(baseline) - 1), rel=1e-4)
    assert abs(theirs - baseline.mean().item()) > 1e-3
    ours = similarity_estimates(each)["baseline_similarity"]
    assert ours.value == pytest.approx(baseline.mean().item()) and ours.n == len(baseline)


def test_difference_the_output_norm_keeps_the_sign_of_a_token(golden):
    """D-47: the original divides by the signed maximum, so a token of negative entries is turned round."""
    token = -1 - torch.arange(8.0)
    ours, theirs = Norm(8)(token), Norm(8, divide_by_maximum=True)(token)
    torch.testing.assert_close(ours, -theirs, rtol=1e-3, atol=1e-3)
    assert ours[0] > 0 > theirs[0]
    assert Norm(4)(torch.tensor([0.0, -1, -2, -3])).isfinite().all()
    assert Norm(4, divide_by_maximum=True)(torch.tensor([0.0, -1, -2, -3])).isnan().any()


def test_difference_a_norm_has_one_epsilon_for_every_type():
    """D-47: the original takes 1e-3 for all types but float32, float64 among them."""
    x = 1e-3 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Norm(64)(x.double()).float(), Norm(64)(x))


@pytest.mark.parametrize("sampler", [Ddim(num_steps=7), LegacyDdim(num_steps=7, eta=0.0)])
def test_difference_ddim_starts_at_the_last_timestep_and_stays_on_the_path(sampler):
    """D-43: with alpha_bar of the timestep before, the original leaves the path alpha x0 + sigma eps of a perfect
    prediction, on which DDIM runs; and it starts below the timestep that the noise belongs to."""
    process = Discrete(schedule=Cosine(), num_timesteps=20)
    grid, legacy = sampler.grid(process), isinstance(sampler, LegacyDdim)
    assert (grid.time[0] == 19) != legacy
    draw = torch.Generator().manual_seed(0)
    x0, eps = torch.randn(2, 3, 8, generator=draw, dtype=torch.float64)
    denoiser = lambda x, i: Denoised(x0, eps)  # noqa: E731
    path = [step.x for step in sampler.trajectory(denoiser, grid, eps, image_streams(torch.arange(3)))][:-1]
    at = [a * x0 + s * eps for a, s in zip(grid.alpha[1:].tolist(), grid.sigma[1:].tolist(), strict=True)]
    errors = [(x - there).abs().max().item() for x, there in zip(path, at, strict=False)]
    assert all(error > 1e-3 for error in errors) if legacy else max(errors) < 1e-12


def test_difference_embeddings_are_not_clamped_to_range_of_pixels(golden):
    """D-43: predicting eps, the original clamps x0 to [-1, 1], though embeddings are scaled by the root of dim."""
    file = golden("m05_prior.npz")
    free, held = (
        sampled(file, "eps", {"type": "ddpm", "num_steps": "", "clip_denoised": clip}) for clip in (False, True)
    )
    root = file.params("prior_in")["dim"] ** 0.5
    assert (held * root).abs().max() <= 1 + 1e-5 < (free * root).abs().max()


def test_difference_conditions_are_dropped_in_training_only(golden):
    """D-42: the original drops conditions in validation as well."""
    file = golden("m05_prior.npz")
    network = network_of(file, "prior_in")
    batch = batch_of(system_of(file, "x0"), pairs_of(file))
    losses = {}
    for often in (0.0, 1.0):
        system = system_of(file, "x0", text_drop_probability=often, image_drop_probability=often)
        for mode in (True, False):
            network.train(mode)
            with torch.no_grad():
                losses[often, mode] = system.build_objective(network.spec)(network, batch).loss
    assert torch.equal(losses[0.0, False], losses[1.0, False]) and torch.equal(losses[0.0, True], losses[0.0, False])
    assert not torch.allclose(losses[0.0, True], losses[1.0, True])


@pytest.mark.parametrize("kind", ["x0", "eps", "v"])
def test_difference_self_conditioning_uses_x0_for_every_prediction(kind):
    """The original returns the raw prediction in training, and x0 in sampling."""
    draw = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 4, 8, generator=draw)
    process = Discrete(schedule=Cosine(), num_timesteps=20).build()
    t = torch.arange(4) * 5
    alpha, sigma = broadcast(process.levels(t), x)
    truth = target(kind, x, noise, alpha, sigma)
    seen = []

    def network(x_t: Tensor, time: Tensor, /, **cond: Tensor) -> Tensor:
        seen.append(cond.get("self_cond"))
        return truth

    objective = EmbeddingDenoising(prediction=kind).build(process, norm=1.0, self_conditioned=True)
    given = torch.tensor([True, False, True, True])
    losses = objective.losses_at(network, x, t, noise, {"text_embed": x}, given)
    assert seen[0] is None and losses.loss.max() == 0
    torch.testing.assert_close(seen[1], torch.where(given[:, None], x, 0), rtol=1e-4, atol=1e-4)


def test_difference_no_process_has_an_empty_share(golden):
    """The original gives ceil(n / world) to each process in turn, so that the last ones may get nothing."""
    file = golden("p02_prior_metrics.npz")
    cases, theirs = file["distribute_to_rank/start_stop_world_rank"], file["distribute_to_rank/rank_start_stop"]
    for (start, stop, world, rank), (first, last) in zip(cases.tolist(), theirs.tolist(), strict=True):
        each = -((start - stop) // world)
        assert (first, last) == (start + rank * each, min(start + (rank + 1) * each, stop))
        ours = [share(start, stop, process, world) for process in range(world)]
        sizes = [end - begin for begin, end in ours]
        assert ours[0][0] == start and ours[-1][1] == stop and max(sizes) - min(sizes) <= 1
        assert all(before[1] == after[0] for before, after in pairwise(ours))
    assert [share(0, 5, process, 4) for process in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 5)]
    assert 3 * -(-5 // 4) > 5, "of five pairs the original leaves none for the last of four"
