"""Self-conditioning: two passes in training, and latents and estimates carried between sampling steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import dump, parse, to_yaml
from image_diffusion.core.random.streams import Streams, image_streams, initial_noise
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.experiments.resolve import load_all
from image_diffusion.objectives.denoising import Denoising, SelfConditioning
from image_diffusion.objectives.timestep_sampling import LossSecondMoment
from image_diffusion.process.base import broadcast
from image_diffusion.process.continuous import Continuous
from image_diffusion.process.denoiser import target, to_x0_and_eps
from image_diffusion.samplers.ancestral import Ddim, Ddpm
from image_diffusion.samplers.guidance import Guidance
from image_diffusion.samplers.ode import DpmSolver, Euler, Heun, UniPc
from image_diffusion.systems import AnySystem
from image_diffusion.systems.diffusion.generator import Generator, SampleConfig
from image_diffusion.systems.diffusion.rin import RinSystem
from image_diffusion.training.optim.numerics import Precision

SPEC = DataSpec(channels=3, resolution=4, num_classes=5)
NETWORK = {"width": 16, "patch": 2, "depth": 1, "num_latents": 3, "latent_width": 8, "num_heads": 2, "head_width": 4}
SAMPLERS = [Ddpm(num_steps=5), Ddim(num_steps=5), Euler(num_steps=5), DpmSolver(num_steps=5), UniPc(num_steps=5)]


class Recorder(torch.nn.Module):
    """Records its inputs; predicts a blend of x and the estimate, and counts its calls in the latents."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(0.5))
        self.calls: list[dict[str, Tensor | bool | None]] = []

    def forward(self, x, t, /, label=None, self_cond=None, latents=None, return_latents=False):
        given = {"x": x, "t": t, "label": label, "self_cond": self_cond, "latents": latents}
        self.calls.append(given | {"learns": torch.is_grad_enabled()})
        output = self.gain * x if self_cond is None else self.gain * (x + self_cond)
        latents = torch.full((len(x), 2, 3), float(len(self.calls)))
        return (output, latents, latents.mean((1, 2))) if return_latents else output


def batch_of(samples: list[int]) -> Batch:
    sample = torch.tensor(samples)
    x = torch.stack([torch.sin(torch.arange(48.0) * (1 + s)).view(3, 4, 4) for s in samples])
    return Batch(x, {"label": sample % 5}, Streams(seed=1, epoch=torch.zeros_like(sample), sample=sample))


def rin(**changes) -> RinSystem:
    return RinSystem(network=NETWORK, **changes)


def test_self_conditioning_is_drawn_separately_for_each_sample():
    """A difference from the original, which decides once for a whole batch."""
    network, batch = Recorder(), batch_of(list(range(500)))
    rin(self_conditioning=SelfConditioning(probability=0.7)).build_objective(SPEC)(network, batch)
    first, second = network.calls
    given = batch.streams.event("self_conditioning", 0.7)
    assert 0.6 < given.float().mean() < 0.8
    assert torch.equal(second["latents"].flatten(1).any(1), given) and torch.equal(
        second["self_cond"].flatten(1).any(1), given
    )
    assert first["self_cond"] is None and first["latents"] is None
    assert not first["learns"] and second["learns"] and not second["self_cond"].requires_grad


@pytest.mark.parametrize("prediction", ["v", "eps", "x0"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_d22_estimate_is_the_image_at_any_scale(prediction, scale):
    """D-22: below scale 1 the original inverts its variance-normalised input and assumes alpha² + sigma² = 1."""
    system = rin(process=Continuous(scale=scale), objective=Denoising(prediction=prediction))
    process, batch = system.process.build(), batch_of([0, 1, 2, 3])
    noise, t = batch.streams.normal("noise", (3, 4, 4)), torch.tensor([0.1, 0.4, 0.7, 0.9])
    alpha, sigma = broadcast(process.levels(t), batch.x)
    answer = target(prediction, batch.x, noise, alpha, sigma)
    seen = {}

    def knows(x, t, /, **cond):
        seen.update(cond)
        return answer, torch.ones(4, 2, 3), torch.ones(4)

    objective = system.build_objective(SPEC)
    losses = objective.losses_at(knows, batch.x, t, noise, torch.ones(4, dtype=torch.bool), batch.cond)
    torch.testing.assert_close(seen["self_cond"], batch.x, rtol=1e-3, atol=1e-4)
    assert losses.loss.max() < 1e-10


@pytest.mark.parametrize("clamps", [True, False])
def test_estimate_is_clamped_to_the_pixel_range_if_set(clamps):
    network, batch = Recorder(), batch_of(list(range(20)))
    system = rin(self_conditioning=SelfConditioning(probability=1, clamp=clamps))
    system.build_objective(SPEC)(network, batch)
    assert (network.calls[1]["self_cond"].abs().max() <= 1) == clamps


class OldCache(TorchFunctionMode):
    """Casts weights once within autocast, as PyTorch 2.9 did: without a gradient if the first pass had none."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[Tensor, Tensor] = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear and torch.is_autocast_cache_enabled():
            x, weight, *rest = args
            args = x, self.casts.setdefault(weight, weight.bfloat16()), *rest
        return function(*args, **(kwargs or {}))


def test_every_weight_gets_gradients_after_a_first_pass_without_them():
    gradients, batch, system = [], batch_of([0, 1]), rin()
    for cached in (False, True):
        torch.manual_seed(0)
        network = system.build_network(SPEC)
        with OldCache():
            precision = Precision("bf16", torch.device("cpu"), keeps_weights=cached)
            with precision.autocast():
                losses = system.build_objective(SPEC)(network, batch)
        losses.loss.mean().backward()
        gradients.append({name: parameter.grad for name, parameter in network.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    with Precision("bf16", torch.device("cpu")).autocast():
        assert torch.is_autocast_cache_enabled() or torch.__version__ < "2.11"


def test_training_without_self_conditioning_takes_one_pass():
    network = Recorder()
    system = rin(self_conditioning=SelfConditioning(probability=0))
    system.build_objective(SPEC)(network, batch_of([0, 1]))
    assert len(network.calls) == 1 and network.calls[0]["latents"] is None
    sample(system, network, Ddim(num_steps=3))
    assert all(call["latents"] is None and call["self_cond"] is None for call in network.calls)


def test_losses_and_latent_norms_are_per_sample():
    torch.manual_seed(0)
    system = rin(objective=Denoising(prediction="v", label_drop_probability=0.3))
    network, objective = system.build_network(SPEC), system.build_objective(SPEC)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    whole = objective(network, batch_of([0, 1, 2, 3, 4, 5]))
    parts = [objective(network, batch_of(part)) for part in ([0, 1], [2, 3, 4, 5])]
    torch.testing.assert_close(whole.loss, torch.cat([part.loss for part in parts]), rtol=1e-4, atol=1e-5)
    norms = [part.parts["latent_norm"] for part in parts]
    torch.testing.assert_close(whole.parts["latent_norm"], torch.cat(norms), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.parts["mse"], whole.loss.detach())
    assert whole.loss.isfinite().all() and (whole.parts["latent_norm"] > 0).all()


def test_d20_the_weighting_changes_the_loss_of_each_sample():
    """D-20: in the original a batch's mean error is multiplied with its mean weight."""
    network, batch = Recorder(), batch_of([0, 1, 2, 3])
    uniform = rin(objective=Denoising(prediction="v")).build_objective(SPEC)(network, batch).loss
    weighted = rin().build_objective(SPEC)(network, batch).loss
    ratio = (weighted / uniform).detach()
    assert ratio.std() > 0.01
    assert abs(weighted.mean() - uniform.mean() * ratio.mean()) > 1e-4


def test_d35_training_never_draws_a_time_without_noise():
    """D-35: the original draws t = 0, where its weight can be NaN."""
    sample = torch.arange(20_000)
    process = rin().process.build()
    t = process.draw(Streams(seed=0, epoch=torch.zeros_like(sample), sample=sample))
    assert t.min() >= 1e-4 and t.max() < 1
    assert process.levels(t)[1].min() > 0


def sample(system: RinSystem, network, sampler, guidance: Guidance | None = None, batch: int = 2) -> Tensor:
    grid = sampler.grid(system.process)
    streams = image_streams(torch.arange(batch))
    noise = initial_noise(streams, (3, 4, 4))
    null = {"label": torch.tensor(SPEC.num_classes)}
    settings = guidance or Guidance()
    with torch.no_grad():
        denoiser = system.reading.denoiser(
            network, grid, {"label": torch.arange(batch)}, lambda plain: settings.build(plain, null, grid)
        )
        return sampler(denoiser, grid, noise, streams)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.type)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_each_step_receives_the_latents_and_estimate_of_the_step_before(sampler, scale):
    network, system = Recorder(), rin(process=Continuous(scale=scale))
    sample(system, network, sampler)
    process = system.process.build()
    assert len(network.calls) == 5
    assert network.calls[0]["self_cond"] is None and network.calls[0]["latents"] is None
    for number, (before, after) in enumerate(zip(network.calls, network.calls[1:], strict=False), start=1):
        assert torch.equal(after["latents"], torch.full((2, 2, 3), float(number)))
        assert after["self_cond"].abs().max() <= 1
        if scale == 1:
            alpha, sigma = broadcast(process.levels(before["t"]), before["x"])
            estimate = 0.5 * (before["x"] if before["self_cond"] is None else before["x"] + before["self_cond"])
            x0, _ = to_x0_and_eps("v", estimate, before["x"], alpha, sigma)
            torch.testing.assert_close(after["self_cond"], x0.clamp(-1, 1), rtol=1e-4, atol=1e-5)


def test_heun_carries_latents_between_its_calls():
    network = Recorder()
    sample(rin(), network, Heun(num_steps=3))
    assert [call["t"][0].item() for call in network.calls] == pytest.approx([1, 2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert [0 if call["latents"] is None else call["latents"][0, 0, 0].item() for call in network.calls] == [
        0, 1, 2, 3, 4,
    ]  # fmt: skip


def test_second_batch_starts_without_carried_latents():
    network, system = Recorder(), rin()
    sampler = Ddim(num_steps=2)
    grid = sampler.grid(system.process)
    denoiser = system.reading.denoiser(network, grid, {})
    streams = image_streams(torch.arange(2))
    with torch.no_grad():
        first, second = (sampler(denoiser, grid, initial_noise(streams, (3, 4, 4)), streams) for _ in range(2))
    assert torch.equal(first, second)
    assert [call["latents"] is None for call in network.calls] == [True, False, True, False]


def test_each_half_of_a_guided_batch_carries_its_own_latents_and_the_guided_estimate():
    class Halves(Recorder):
        def forward(self, x, t, /, label=None, **given):
            output, latents, norm = super().forward(x, t, label=label, **given)
            return output + 0.1 * label.view(-1, 1, 1, 1), latents + label.view(-1, 1, 1), norm

    network = Halves()
    sample(rin(), network, Ddim(num_steps=3), Guidance(guidance_scale=2.0))
    second = network.calls[1]
    assert second["label"].tolist() == [0, 1, 5, 5]
    assert second["latents"][:, 0, 0].tolist() == [1, 2, 6, 6]
    assert torch.equal(second["self_cond"][:2], second["self_cond"][2:])


def test_guidance_may_start_and_end_during_sampling():
    network = Recorder()
    images = sample(rin(), network, Ddim(num_steps=8), Guidance(guidance_scale=2.0, interval=(0.3, 3.0)))
    sizes = [len(call["x"]) for call in network.calls]
    assert sizes == sorted(sizes[:4]) + sorted(sizes[4:], reverse=True) and set(sizes) == {2, 4}
    assert all(len(call["latents"]) == len(call["x"]) for call in network.calls[1:])
    assert images.isfinite().all()


@pytest.mark.parametrize("sampler", [Ddim(num_steps=4), Ddpm(num_steps=4), Heun(num_steps=4)], ids=lambda s: s.type)
def test_r5_perfect_predictor_returns_the_image_at_scale_below_1(sampler):
    """D-22: with scale 0.5 the original ends at pixel 0.75 where x0 is 1."""
    system = rin(process=Continuous(scale=0.5), objective=Denoising(prediction="x0"))

    def knows(x, t, /, **cond):
        return torch.ones_like(x), torch.ones(len(x), 2, 3), torch.ones(len(x))

    torch.testing.assert_close(sample(system, knows, sampler), torch.ones(2, 3, 4, 4), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sampler", [Ddim(num_steps=6), Ddpm(num_steps=6)], ids=lambda s: s.type)
def test_d23_time_difference_works_in_both_samplers(sampler):
    """D-23: in the original it has no effect on DDIM."""
    plain = sample(rin(), Recorder(), sampler)
    moved = sample(rin(), Recorder(), sampler.model_copy(update={"time_difference": 0.1}))
    assert (plain - moved).abs().max() > 1e-2


def test_an_image_is_the_same_in_any_batch():
    torch.manual_seed(0)
    system = rin(objective=Denoising(prediction="v", label_drop_probability=0.1))
    network = system.build_network(SPEC).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    settings = SampleConfig(sampler=Ddim(num_steps=4, clip_denoised=True), guidance=Guidance(guidance_scale=1.5))
    codec = Rgb().build(None, None, torch.device("cpu"), torch.float32)
    generator = Generator(network, system.reading, SPEC, codec, settings)
    seeds, labels = torch.arange(4), torch.arange(4)
    whole = generator(seeds, labels)
    halves = torch.cat([generator(seeds[rows], labels[rows]) for rows in (slice(0, 1), slice(1, 4))])
    assert whole.dtype == torch.uint8 and whole.shape == (4, 3, 4, 4)
    assert (whole.int() - halves.int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"process": {"type": "discrete"}}, "process.type 'discrete'. Known: continuous"),
        ({"process": {"scale": 1.5}}, "process.scale is 1.5"),
        ({"process": {"schedule": {"type": "cosin"}}}, "'cosin'. Known: linear, cosine, sigmoid"),
        ({"objective": {"prediction": "velocity"}}, "Unknown objective.prediction 'velocity'. Known: eps, x0, v"),
        ({"self_conditioning": {"probability": 1.1}}, "self_conditioning.probability is 1.1"),
    ],
)
def test_what_people_are_told_of_a_configuration(data, message):
    with pytest.raises(ValueError, match=message):
        parse(AnySystem, {"type": "rin"} | data, "x.yaml: system")


@pytest.mark.parametrize(
    ("self_conditioning", "refused"), [({}, True), ({"clamp": False}, False), ({"probability": 0.0}, False)]
)
def test_clamping_the_estimate_of_latents_is_rejected(tmp_path, self_conditioning, refused):
    path = tmp_path / "mine.yaml"
    sections = {
        "data": {"name": "digits", "source": {"type": "digits"}, "resolution": 32},
        "codec": {"type": "stability_vae"},
        "system": {"type": "rin", "network": {"patch": 2}, "self_conditioning": self_conditioning},
        "train": {"steps": 1},
    }
    path.write_text(to_yaml(sections))
    if refused:
        with pytest.raises(ValueError, match=r"Set system\.self_conditioning\.clamp to false"):
            load_all([path])
    else:
        assert load_all([path])


@pytest.mark.parametrize("probability", [0.0, 0.9])
def test_autoguidance_leads_away_from_the_weaker_network(probability):
    """The weaker network receives no estimate of its own."""
    system = rin(self_conditioning=SelfConditioning(probability=probability))
    networks = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        networks.append(system.build_network(SPEC).eval())
        for parameter in networks[-1].parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    strong, weak = networks

    def images(network, scale=1.0, weaker=None, of=system):
        settings = SampleConfig(sampler=Ddim(num_steps=4), guidance=Guidance(guidance_scale=scale))
        codec = Rgb().build(None, None, torch.device("cpu"), torch.float32)
        return Generator(network, of.reading, SPEC, codec, settings, weaker)(torch.arange(3), torch.arange(3))

    assert torch.equal(images(strong, 1.0, weak), images(strong))
    alone = images(weak, of=rin(self_conditioning=SelfConditioning(probability=0)))
    assert (images(strong, 0.0, weak).int() - alone.int()).abs().max() <= 1
    assert not torch.equal(images(strong, 2.0, weak), images(strong))


def test_importance_sampling_requires_discrete_timesteps():
    system = rin(objective=Denoising(timestep_sampling=LossSecondMoment()))
    with pytest.raises(ValueError, match="loss_second_moment needs a discrete process"):
        system.build_objective(SPEC)


def test_rin_system_survives_a_round_trip():
    system = rin(process=Continuous(scale=0.5), self_conditioning=SelfConditioning(clamp=False))
    assert parse(AnySystem, dump(system), "x.yaml") == system
