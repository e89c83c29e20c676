"""Losses of denoising and flow matching in a training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from image_diffusion.core.config.base import Config, dump, parse
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec, Losses
from image_diffusion.objectives import Objective
from image_diffusion.objectives.denoising import (
    Denoising,
    EdmDenoising,
    MinSnrWeighting,
    P2Weighting,
    SnrWeighting,
    UniformWeighting,
)
from image_diffusion.objectives.flow_matching import FlowMatching
from image_diffusion.objectives.label_dropout import LabelDropout
from image_diffusion.objectives.timestep_sampling import ImportanceSampled, LossSecondMoment
from image_diffusion.process import Continuous, Discrete, Flow
from image_diffusion.process.denoiser import target, to_x0_and_eps

SPEC = DataSpec(channels=3, resolution=4, num_classes=5)
CASES = [
    (Denoising(), Discrete()),
    (Denoising(variance="learned_range", loss="hybrid"), Discrete()),
    (Denoising(prediction="x0", variance="learned", loss="rescaled_kl"), Discrete(respacing="ddim50")),
    (Denoising(prediction="previous_x", loss="kl"), Discrete(rescale_timesteps=True)),
    (Denoising(prediction="v", weighting=MinSnrWeighting()), Continuous(scale=0.7)),
    (Denoising(prediction="v", weighting=P2Weighting()), Discrete()),
    (Denoising(timestep_sampling=LossSecondMoment()), Discrete(num_timesteps=50)),
    (FlowMatching(), Flow()),
    (FlowMatching(prediction="x0"), Flow()),
]


def batch_of(samples: list[int], device: str = "cpu") -> Batch:
    sample = torch.tensor(samples, device=device)
    x = torch.stack([torch.sin(torch.arange(48.0, device=device) * (1 + s)).view(3, 4, 4) for s in samples])
    streams = Streams(seed=1, epoch=torch.zeros_like(sample), sample=sample)
    return Batch(x, {"label": sample % 5}, streams)


class Network(torch.nn.Module):
    """A linear function of x, the time and the label."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(channels, 3, generator=generator) * 0.3)
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor, t: Tensor, /, label: Tensor) -> Tensor:
        self.seen = {"t": t, "label": label}
        out = torch.einsum("oc,bchw->bohw", self.weight, x)
        return out + 1e-3 * (t + label).view(-1, 1, 1, 1)


def network_for(config: Denoising | FlowMatching) -> Network:
    return Network(6 if config.variance.startswith("learned") else 3)


@pytest.mark.parametrize(("config", "process"), CASES)
def test_loss_of_each_sample_does_not_depend_on_the_batch(config: Denoising, process: Discrete) -> None:
    """One batch of six and two of three give the same numbers, so neither ranks nor micro-batches matter."""
    objective, network = config.build(process.build(), SPEC), network_for(config)
    whole = objective(network, batch_of([0, 1, 2, 3, 4, 5]))
    halves = [objective(network, batch_of(part)) for part in ([0, 1, 2], [3, 4, 5])]
    torch.testing.assert_close(whole.loss, torch.cat([half.loss for half in halves]))
    assert torch.equal(whole.time, torch.cat([half.time for half in halves]))
    assert whole.loss.shape == (6,) and whole.loss.isfinite().all() and whole.loss.requires_grad
    assert ((whole.time >= 0) & (whole.time < 1)).all()
    assert not any(part.requires_grad for part in whole.parts.values())
    torch.testing.assert_close(torch.stack(list(whole.parts.values())).sum(0), whole.loss.detach())
    whole.loss.mean().backward()
    assert network.weight.grad.isfinite().all()


def losses(config: Denoising | FlowMatching, process: Discrete | Continuous | Flow, error: float) -> Losses:
    """Losses of a network that predicts the target plus a constant error in each element."""
    built = process.build()
    objective, batch = config.build(built, SPEC), batch_of([0, 1, 2, 3])
    noise = batch.streams.normal("noise", (3, 4, 4))
    t = built.draw(batch.streams)
    alpha, sigma = (level.float().view(-1, 1, 1, 1) for level in built.levels(t))
    output = target(config.prediction, batch.x, noise, alpha, sigma) + error
    return objective.losses_at(lambda x, t, label: output, batch.x, t, noise, batch.cond)


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
@pytest.mark.parametrize("process", [Discrete(), Continuous(), Flow()])
def test_exact_prediction_has_zero_loss(prediction: str, process: Discrete) -> None:
    assert losses(Denoising(prediction=prediction), process, 0.0).loss.max() < 1e-10
    torch.testing.assert_close(losses(Denoising(prediction=prediction), process, 0.5).loss, torch.full((4,), 0.25))


def test_exact_velocity_has_zero_loss() -> None:
    assert losses(FlowMatching(), Flow(), 0.0).loss.max() < 1e-10
    torch.testing.assert_close(losses(FlowMatching(), Flow(), 0.5).loss, torch.full((4,), 0.25))


def test_snr_weighted_loss_equals_the_error_in_eps_for_every_prediction() -> None:
    process = Discrete().build()
    alpha, sigma = process.levels(torch.tensor([0, 100, 500, 999]))
    x_t = torch.ones(4).double()
    for prediction in ("eps", "x0", "v"):
        wrong = to_x0_and_eps(prediction, x_t * 0.1, x_t, alpha, sigma)[1]
        right = to_x0_and_eps(prediction, x_t * 0.3, x_t, alpha, sigma)[1]
        weight = SnrWeighting().weight(prediction, alpha, sigma)
        torch.testing.assert_close((wrong - right) ** 2, weight * 0.2**2)


def test_loss_weights_match_their_papers() -> None:
    alpha, sigma = torch.tensor([0.8, 0.6]).double().sqrt(), torch.tensor([0.2, 0.4]).double().sqrt()  # SNR 4 and 1.5
    assert MinSnrWeighting(gamma=2).weight("x0", alpha, sigma).tolist() == pytest.approx([2, 1.5])
    assert MinSnrWeighting(gamma=2).weight("eps", alpha, sigma).tolist() == pytest.approx([0.5, 1])
    assert MinSnrWeighting(gamma=2).weight("v", alpha, sigma).tolist() == pytest.approx([2 / 5, 1.5 / 2.5])
    assert P2Weighting(gamma=0.5, k=2).weight("eps", alpha, sigma).tolist() == pytest.approx([6**-0.5, 3.5**-0.5])
    assert UniformWeighting().weight("v", alpha, sigma).tolist() == [1, 1]


def test_variational_bound_trains_only_the_variance() -> None:
    config = Denoising(variance="learned_range", loss="hybrid")
    objective, batch = config.build(Discrete().build(), SPEC), batch_of([0, 1])
    t, noise = torch.tensor([0, 400]), torch.randn(2, 3, 4, 4)
    output = torch.zeros(2, 6, 4, 4, requires_grad=True)
    mean_half = output[:, :3].detach().requires_grad_()
    objective.losses_at(lambda x, t, label: output, batch.x, t, noise, batch.cond).loss.sum().backward()
    (noise - mean_half).square().flatten(1).mean(1).sum().backward()
    torch.testing.assert_close(output.grad[:, :3], mean_half.grad)
    assert (output.grad[:, 3:] != 0).all()


def test_dropped_labels_become_the_null_label() -> None:
    config = Denoising(label_drop_probability=0.3)
    objective, network = config.build(Discrete().build(), SPEC), Network(3)
    batch = batch_of(list(range(400)))
    objective(network, batch)
    dropped = network.seen["label"] == SPEC.num_classes
    assert 0.2 < dropped.float().mean() < 0.4
    assert torch.equal(network.seen["label"][~dropped], batch.cond["label"][~dropped])
    assert torch.equal(dropped, batch.streams.event("label_drop", 0.3))
    objective = Denoising().build(Discrete().build(), SPEC)
    objective(network, batch)
    assert torch.equal(network.seen["label"], batch.cond["label"])


def test_network_receives_timesteps_of_the_full_schedule() -> None:
    process = Discrete(num_timesteps=500, respacing="50", rescale_timesteps=True).build()
    network = Network(3)
    Denoising().build(process, SPEC)(network, batch_of([0, 1, 2]))
    t = process.draw(batch_of([0, 1, 2]).streams)
    assert torch.equal(network.seen["t"], process.timestep_map[t].float() * 2)


class Section(Config):
    objective: Objective


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"loss": "hybrid"}, "Loss hybrid teaches a variance, but variance is fixed_large."),
        ({"variance": "learned_range"}, "Loss simple teaches no variance, but variance is learned_range."),
        ({"loss": "kl", "weighting": {"type": "min_snr"}}, "Weighting min_snr is of a squared error"),
        ({"prediction": "previous_x", "weighting": {"type": "snr"}}, "Set weighting to uniform."),
        ({"loss": "mse"}, "Unknown objective.loss 'mse'. Known: simple, hybrid, rescaled_hybrid, kl or rescaled_kl."),
        ({"label_drop_probability": 1.1}, "objective.label_drop_probability is 1.1"),
        ({"timestep_sampling": {"type": "los"}}, "Known: uniform, loss_second_moment."),
        ({"type": "flow"}, "Unknown objective 'flow'. Known: denoising, flow_matching, mean_flow, edm."),
        ({"type": "flow_matching", "variance": "learned"}, "objective.variance is not a known key."),
        ({"type": "flow_matching", "prediction": "previous_x"}, "Known: velocity, x0, eps or v."),
    ],
)
def test_what_people_are_told_of_a_configuration(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(Section, {"objective": {"type": "denoising"} | data}, "x.yaml")
    assert message in str(error.value)


@pytest.mark.parametrize(("config", "process"), CASES)
def test_configurations_survive_being_written_down(config: Denoising, process: Discrete) -> None:
    section = Section(objective=config)
    assert parse(Section, dump(section), "x.yaml") == section


@pytest.mark.parametrize(
    ("config", "process", "message"),
    [
        (Denoising(loss="kl"), Flow(), "Loss kl with prediction eps needs a discrete process."),
        (Denoising(prediction="previous_x"), Continuous(), "needs a discrete process."),
        (FlowMatching(), Discrete(), "Objective flow_matching needs the flow process."),
        (Denoising(timestep_sampling=LossSecondMoment()), Flow(), "loss_second_moment needs a discrete process."),
    ],
)
def test_incompatible_objective_and_process_are_rejected(config: Denoising, process: Flow, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.build(process.build(), SPEC)


def test_conditions_are_dropped_separately_and_all_together() -> None:
    spec = DataSpec(channels=3, resolution=4, num_classes=5, conditions={"text": (2, 3), "numbers": (1, 2)})
    ids = torch.arange(4000)
    streams = Streams(0, torch.zeros_like(ids), ids)
    cond = {"label": ids % 5, "text": torch.ones(4000, 2, 3), "numbers": torch.ones(4000, 1, 2)}
    batch = Batch(torch.zeros(4000, 3, 4, 4), cond, streams)
    network = torch.nn.Identity()
    both = LabelDropout(0.1, spec, {"label": 0.2, "text": 0.4})(batch, network)
    dropped = {
        "label": both["label"] == 5,
        "text": ~both["text"].any(2).any(1),
        "numbers": ~both["numbers"].any(2)[:, 0],
    }
    at_once = streams.event("label_drop", 0.1)
    assert torch.equal(dropped["numbers"], at_once), "it is not dropped alone"
    for name, probability in (("label", 0.2), ("text", 0.4)):
        assert dropped[name][at_once].all()
        assert dropped[name][~at_once].float().mean() == pytest.approx(probability, abs=0.03)
    kept = ~at_once
    assert (dropped["label"] & dropped["text"])[kept].float().mean() == pytest.approx(0.08, abs=0.02), "independently"
    assert torch.equal(both["label"][~dropped["label"]], cond["label"][~dropped["label"]])
    without = LabelDropout(0.1, spec)(batch, network)
    assert torch.equal(without["numbers"], both["numbers"]) and torch.equal(without["label"] == 5, at_once)
    alone = LabelDropout(0.0, spec, {"text": 0.4})(batch, network)
    assert alone["label"] is cond["label"] or torch.equal(alone["label"], cond["label"])
    assert LabelDropout(0.1, spec, {"text": 0.4})(batch, network.eval())["text"] is cond["text"]


@pytest.mark.parametrize("objective", [Denoising, FlowMatching, EdmDenoising])
def test_unset_drop_probabilities_are_not_written(objective: Any) -> None:
    assert "drop_probabilities" not in objective().model_dump()
    assert objective(drop_probabilities={"text": 0.1}).model_dump()["drop_probabilities"] == {"text": 0.1}
    with pytest.raises(ValueError, match="less than or equal to 1"):
        objective(drop_probabilities={"text": 1.1})


def test_label_dropout_requires_classes() -> None:
    with pytest.raises(ValueError, match="but the data have no classes"):
        FlowMatching(label_drop_probability=0.1).build(Flow().build(), DataSpec(channels=3, resolution=4))


def test_network_with_too_few_channels_is_rejected() -> None:
    config = Denoising(variance="learned_range", loss="hybrid")
    with pytest.raises(ValueError, match="returns 3 channels for x of 3, but variance learned_range needs 6"):
        config.build(Discrete().build(), SPEC)(Network(3), batch_of([0]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("config", "process"), CASES)
def test_training_step_does_not_synchronize_with_the_gpu(config: Denoising, process: Discrete) -> None:
    objective, network, batch = (
        config.build(process.build(), SPEC),
        network_for(config).cuda(),
        batch_of([0, 1], "cuda"),
    )

    def step() -> None:
        losses = objective(network, batch)
        losses.loss.mean().backward()
        if isinstance(objective, ImportanceSampled):
            objective.memory.observe(losses)

    step()  # moves the tables to the GPU
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
