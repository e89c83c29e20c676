"""Additional losses of codec training: the perceptual and the adversarial term."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import parse
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec, Losses
from image_diffusion.experiments.checks import check_experiment
from image_diffusion.experiments.experiment import parse_experiment
from image_diffusion.objectives.autoencoding import DISCRIMINATOR, Adversarial, PatchDiscriminator, Perceptual
from image_diffusion.systems import AnySystem
from image_diffusion.systems.base import Others
from image_diffusion.systems.codec.base import PerceptualConfig
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.finetune import written
from image_diffusion.training.parallel.world import World
from image_diffusion.training.trainer import Task, Trainer
from tiny_models import lpips_files

SPEC = DataSpec(channels=3, resolution=32)
NETWORKS: dict[str, dict[str, Any]] = {
    "dvae": {"num_tokens": 8, "codebook_dim": 4, "num_layers": 2, "num_resnet_blocks": 1, "hidden_dim": 8},
    "autoencoder": {"block_channels": [16, 16]},
}
SMALL = {"width": 16, "num_layers": 2, "weight": 0.3, "start_step": 2}


def system_of(kind: str, **terms: Any) -> Any:
    return parse(AnySystem, {"type": kind, "network": NETWORKS[kind], **terms}, kind)


def batch_of(count: int = 3, step: int = 5) -> Batch:
    x = F.interpolate(torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1, (32, 32))
    return Batch(x, {}, Streams(0, torch.zeros(count, dtype=torch.int64), torch.arange(count)), step)


def built(kind: str, **terms: Any) -> tuple[nn.Module, Any]:
    """Build the network with the layers of its objective, and the objective."""
    system = system_of(kind, **terms)
    torch.manual_seed(0)
    network, objective = system.build_network(SPEC), system.build_objective(SPEC)
    for name, build in objective.layers.items():
        network.add_module(name, build())
    return network, objective


def gradients(network: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    network.zero_grad()
    loss.backward()
    found = {name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None}
    return {name: gradient.clone() for name, gradient in found.items()}


@pytest.mark.parametrize("kind", NETWORKS)
def test_joint_step_has_the_gradients_of_two_separate_steps(kind: str) -> None:
    network, objective = built(kind, adversarial=SMALL)
    batch = batch_of()
    together = gradients(network, objective(network, batch).loss.mean())

    made: list[Tensor] = []

    class Remembering:
        def __call__(self, *inputs: Tensor) -> Any:
            outputs = network(*inputs)
            made.append(network.images(outputs[0]))  # type: ignore[operator]
            return outputs

    own = objective.uniform()(Remembering(), batch).loss.mean()
    discriminator = network.get_submodule(DISCRIMINATOR)
    codecs = gradients(network, own - 0.3 * discriminator(made[0]).mean())
    fake = made[0].detach()
    told = 0.5 * (F.relu(1 - discriminator(batch.x)).mean() + F.relu(1 + discriminator(fake)).mean())
    discriminators = gradients(network, told)
    assert set(discriminators) == {name for name in together if name.startswith(DISCRIMINATOR)}
    for name, gradient in together.items():
        expected = discriminators[name] if name.startswith(DISCRIMINATOR) else codecs[name]
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_terms_start_after_a_step_and_are_absent_in_validation() -> None:
    network, objective = built("dvae", adversarial=SMALL)
    plain, _ = built("dvae")
    own = system_of("dvae").build_objective(SPEC)
    for step, has in ((1, False), (2, False), (3, True)):
        losses: Losses = objective(network, batch_of(step=step))
        alone = own(plain, batch_of(step=step)).loss
        assert ("adversarial" in losses.parts) == ("discriminator" in losses.parts) == has
        parts = losses.parts
        extra = 0.3 * parts["adversarial"] + parts["discriminator"] if has else torch.zeros(3)
        torch.testing.assert_close(losses.loss, alone + extra)
    assert torch.equal(objective.uniform()(network, batch_of()).loss, own(plain, batch_of()).loss)


def test_loss_of_an_example_does_not_depend_on_others() -> None:
    network, objective = built("dvae", adversarial=SMALL)
    whole = objective(network, batch_of()).loss
    one = batch_of()
    alone = Batch(one.x[1:2], {}, Streams(0, torch.zeros(1, dtype=torch.int64), torch.arange(1, 2)), one.step)
    torch.testing.assert_close(objective(network, alone).loss, whole[1:2])


@pytest.mark.parametrize(("resolution", "num_layers", "seen"), [(32, 3, 2), (16, 2, 2), (64, 3, 6), (8, 1, 2)])
def test_a_discriminator_judges_patches(resolution: int, num_layers: int, seen: int) -> None:
    network = PatchDiscriminator(3, 16, num_layers)
    assert network(torch.zeros(2, 3, resolution, resolution)).shape == (2, 1, seen, seen)
    Adversarial(num_layers=num_layers).check(resolution)
    with pytest.raises(ValueError, match=r"num_layers is 9, too many for images of 8 pixels.*Use 1, or larger"):
        Adversarial(num_layers=9).check(8)


@pytest.mark.parametrize("kind", NETWORKS)
def test_loss_parts_are_float32_under_autocast(kind: str) -> None:
    network, objective = built(kind)
    with torch.autocast("cpu", torch.bfloat16):
        losses = objective(network, batch_of())
    assert {part.dtype for part in losses.parts.values()} == {torch.float32}


def test_written_weights_contain_the_codec_alone(tmp_path: Path) -> None:
    network, _ = built("dvae", adversarial=SMALL, perceptual=terms(tmp_path))
    tensors = network.state_dict()
    assert any(name.startswith(DISCRIMINATOR) for name in tensors)
    assert not any("measure" in name or "convolutions" in name for name in tensors)
    plain, _ = built("dvae")
    plain.load_state_dict(written(tensors, None))


def test_it_is_not_spread_over_processes() -> None:
    system = system_of("dvae", adversarial=SMALL)
    task = Task(system.build_network(SPEC), system.build_objective(SPEC), lambda *_: batch_of(), Any)  # type: ignore[arg-type]
    settings = TrainConfig.model_validate({"sharding": "full", "global_batch": 4, "steps": 1, "weights": "raw"})
    with pytest.raises(ValueError, match="train.sharding is full, but the objective has layers of its own"):
        Trainer(task, settings, World(0, 2, torch.device("cpu")))


def terms(folder: Path, **changes: Any) -> dict[str, Any]:
    files = lpips_files(folder)
    return {"backbone": str(files.backbone), "heads": str(files.heads), **changes}


@pytest.mark.parametrize("kind", NETWORKS)
def test_perceptual_term_is_lpips_and_trains_the_codec(tmp_path: Path, kind: str) -> None:
    network, objective = built(kind, perceptual=terms(tmp_path, weight=2.0))
    assert isinstance(objective, Perceptual)
    plain = system_of(kind).build_objective(SPEC)
    batch = batch_of()
    losses = objective(network, batch)
    torch.testing.assert_close(losses.loss, plain(network, batch).loss + 2.0 * losses.parts["perceptual"])
    found = gradients(network, losses.loss.mean())
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    for _ in range(25):
        optimizer.zero_grad()
        objective(network, batch).loss.mean().backward()
        optimizer.step()
    assert objective(network, batch).parts["perceptual"].mean() < 0.9 * losses.parts["perceptual"].mean()


def test_validation_loss_includes_the_perceptual_term(tmp_path: Path) -> None:
    network, objective = built("dvae", adversarial=SMALL, perceptual=terms(tmp_path, weight=2.0))
    losses = objective.uniform()(network, batch_of())
    own = system_of("dvae").build_objective(SPEC)(network, batch_of()).loss
    torch.testing.assert_close(losses.loss, own + 2.0 * losses.parts["perceptual"])
    assert "adversarial" not in losses.parts


def test_perceptual_distance_equals_the_evaluation_metric(tmp_path: Path) -> None:
    config = PerceptualConfig.model_validate(terms(tmp_path))
    first, second = torch.randint(0, 256, (2, 2, 3, 40, 40), dtype=torch.uint8)
    expected = config.build(torch.device("cpu"))(first, second)
    x = (first.float() / 127.5 - 1).requires_grad_()
    found = config.distance()(x, second.float() / 127.5 - 1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    flat = torch.zeros(1, 3, 40, 40, requires_grad=True)  # the norm has no gradient at zero features
    config.distance()(flat, flat.detach() + 0.1).sum().backward()
    assert flat.grad is not None and bool(flat.grad.isfinite().all())


@pytest.mark.parametrize("key", ["system.perceptual", "evaluate.lpips"])
def test_missing_lpips_files_and_small_images_are_rejected_before_any_work(tmp_path: Path, key: str) -> None:
    section, name = key.split(".")

    def check(**data: Any) -> None:
        experiment: dict[str, Any] = {
            "data": {"name": "x", "source": {"type": "digits"}, "resolution": 32, "channels": 3} | data,
            "system": {"type": "autoencoder", "network": NETWORKS["autoencoder"]},
            "train": {"steps": 2},
        }
        experiment[section] = experiment.get(section, {}) | {name: config}
        check_experiment(parse_experiment(experiment, "x.yaml"), Others())

    config = terms(tmp_path)
    check()
    for wrong in ({"resolution": 16}, {"channels": 4}, {"resolution": [16, 64]}):
        with pytest.raises(ValueError, match=rf"{key} is set, but LPIPS compares grey or RGB images of at least 32"):
            check(**wrong)
    Path(config["heads"]).unlink()
    with pytest.raises(ValueError, match=rf"{key}\.heads is .*alex\.pth, which does not exist\. Bring"):
        check()
