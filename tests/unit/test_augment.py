"""Augmentation as a condition of the network: drawn per sample and epoch, exact for integer shifts and symmetries, and
absent from saved weights and samples."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from crops import crops_of_twelve
from image_diffusion.core.config.base import to_yaml
from image_diffusion.core.files.weights import read_weights
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.data.augment import NUM_LABELS, Affine, Augment, Draws, augmented, warp
from image_diffusion.data.shards.loader import Batches
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.networks.rin import RinConfig
from image_diffusion.networks.unet import UNetConfig
from image_diffusion.nn.inputs import AUGMENTATION, add_augmentation
from image_diffusion.samplers.ancestral import Ddim
from image_diffusion.stages.train import Training, prepare_training
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.training.checkpoint.averaged_weights import weights_at
from image_diffusion.training.load_model import load_model
from image_diffusion.training.parallel.world import World
from image_diffusion.training.session import run
from image_diffusion.training.trainer import Trainer

ALONE = World(0, 1, torch.device("cpu"))
STRONG = Augment(probability=0.5, transpose=True, brightness=0.2, contrast=0.5, saturation=1.0)
NETWORKS: dict[str, Any] = {
    "dit": DiTConfig(depth=1, width=16, num_heads=2, patch=4),
    "unet": UNetConfig(channels=32, multipliers=(1,), num_res_blocks=1, attention_resolutions=()),
    "rin": RinConfig(width=16, patch=4, depth=1, num_latents=4, num_heads=2, head_width=4),
}


def images(count: int, size: int = 16, channels: int = 3) -> Tensor:
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(0)) * 2 - 1


def a_batch(samples: Tensor, epoch: int = 3) -> Batch:
    """Return a batch of some of 64 images."""
    return Batch(images(64)[samples], {"label": samples}, Streams(7, torch.full_like(samples, epoch), samples))


def draws(count: int = 1, **values: Any) -> Draws:
    """Return draws in which only the given operations are set."""
    zeros = {field.name: torch.zeros(count, dtype=torch.float64) for field in fields(Draws)}
    flips = {name: torch.zeros(count, dtype=torch.bool) for name in ("horizontal_flip", "vertical_flip", "transpose")}
    given = {name: torch.as_tensor(value).expand(count) for name, value in values.items()}
    return Draws(**zeros | flips | given)


def affine(count: int = 1, **values: float) -> Affine:
    """Return affine maps that are the identity except for the given values."""
    return Affine(*(torch.full((count,), values.get(field.name, 0.0), dtype=torch.float64) for field in fields(Affine)))


def test_augmentation_depends_on_sample_and_epoch_but_not_on_batch() -> None:
    samples = torch.arange(64)
    whole = augmented(a_batch(samples), STRONG, 0.5)
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    for parts in ([shuffled], list(shuffled.split(7)), list(samples.split(1))):
        for part in parts:
            other = augmented(a_batch(part), STRONG, 0.5)
            assert torch.equal(other.x, whole.x[part])
            assert torch.equal(other.cond["augment"], whole.cond["augment"][part])
    assert not torch.equal(augmented(a_batch(samples, epoch=4), STRONG, 0.5).cond["augment"], whole.cond["augment"])
    assert whole.x.abs().max() <= 1 and whole.cond["augment"].shape == (64, NUM_LABELS)


def test_operations_have_the_frequency_and_strength_of_the_paper() -> None:
    samples = torch.arange(40_000)
    labels = Augment(transpose=True).draw(Streams(0, torch.zeros_like(samples), samples), 0.5).labels().double()
    shares = labels.ne(0).double().mean(0).tolist()
    assert shares == pytest.approx([0.5, 0.06, 0.06, *[0.12] * 7, 0, 0, 0], abs=0.01)
    for column in (3, 8, 9):
        drawn = labels[:, column][labels[:, column] != 0]
        assert abs(float(drawn.mean())) < 0.05 and float(drawn.std()) == pytest.approx(1, abs=0.04)
    angle = torch.atan2(labels[:, 5], labels[:, 4] + 1)[labels[:, 5] != 0]
    assert float(angle.std()) == pytest.approx(math.pi / math.sqrt(3), abs=0.05)
    small = Augment(rotation=30).draw(Streams(0, samples, samples), 0).rotation
    assert math.radians(28) < float(small.abs().max()) <= math.radians(30)


@pytest.mark.parametrize(
    "nothing",
    [
        Augment(probability=0),
        Augment(probability=1, vertical_flip=False, scale=0, rotation=0, anisotropy=0, shift=0),
    ],
)
def test_zero_strength_changes_nothing(nothing: Augment) -> None:
    batch = a_batch(torch.arange(64))
    result = augmented(batch, nothing, 0.0)
    assert torch.equal(result.x, batch.x) and not result.cond["augment"].any()
    assert torch.equal(STRONG.apply(batch.x, draws(64)), batch.x), "an image on which no operation is drawn"


def test_the_eight_symmetries_keep_every_value() -> None:
    x, found = images(1), set()
    for mirrored, upside_down, transposed in product((False, True), repeat=3):
        seen = x.flip(3) if mirrored else x  # mirrored when it is read
        seen = STRONG.apply(seen, draws(vertical_flip=upside_down, transpose=transposed))
        expected = x.flip(3) if mirrored else x
        expected = expected.flip(2) if upside_down else expected
        expected = expected.transpose(2, 3) if transposed else expected
        assert torch.equal(seen, expected)
        found.add(seen.contiguous().numpy().tobytes())
    turned = [torch.rot90(x, quarter, (2, 3)) for quarter in range(4)]
    assert found == {y.contiguous().numpy().tobytes() for turn in turned for y in (turn, turn.flip(3))}


@pytest.mark.parametrize(("size", "error"), [(16, 0.0), (32, 0.0), (28, 1e-5)])
def test_integer_shift_copies_pixels_and_reflects_at_edges(size: int, error: float) -> None:
    x = images(2, size)
    moved = warp(x, affine(2, shift_x=3 / size, shift_y=-2 / size))
    torch.testing.assert_close(moved[:, :, :-2, 3:], x[:, :, 2:, :-3], rtol=0, atol=error)
    torch.testing.assert_close(moved[:, :, :-2, :3], x[:, :, 2:, :3].flip(3), rtol=0, atol=error)


def test_resampled_quarter_turn_equals_rot90() -> None:
    x = images(1)
    for angle, quarters in ((math.pi / 2, -1), (-math.pi / 2, 1), (math.pi, 2)):
        torch.testing.assert_close(warp(x, affine(rotation=angle)), torch.rot90(x, quarters, (2, 3)), rtol=0, atol=1e-5)


def test_affine_maps_are_composed_in_order() -> None:
    """Compare with source points by matrices multiplied in the order of the operations and then inverted."""
    maps = affine(log2_scale=0.5, rotation=0.4, log2_stretch=-0.7, direction=1.1)

    def turn(angle: float) -> np.ndarray:
        return np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])

    stretch = turn(1.1) @ np.diag([2**-0.7, 2**0.7]) @ turn(-1.1)
    expected = np.linalg.inv(stretch @ turn(0.4) * 2**0.5)
    np.testing.assert_allclose(maps.inverse()[0].numpy(), expected, rtol=1e-12)


def test_enlarging_a_ramp_makes_it_flatter() -> None:
    """Exact up to the error of PyTorch's bicubic kernel on a ramp."""
    ramp = torch.linspace(-0.9, 0.9, 32).expand(1, 1, 32, 32)
    inside = (..., slice(8, 24), slice(8, 24))
    torch.testing.assert_close(warp(ramp, affine(log2_scale=1.0))[inside], ramp[inside] / 2, rtol=0, atol=5e-3)
    wide = warp(ramp, affine(log2_stretch=1.0))[inside]
    torch.testing.assert_close(wide, ramp[inside] / 2, rtol=0, atol=5e-3)
    narrow = warp(ramp, affine(log2_stretch=1.0, direction=math.pi / 2))[..., 14:18]
    torch.testing.assert_close(narrow, ramp[..., 14:18] * 2, rtol=0, atol=5e-3)


def test_color_operations_equal_hand_computed_values() -> None:
    x = torch.tensor([0.5, 0.0, -0.2]).view(1, 3, 1, 1)
    config = Augment(brightness=0.2, contrast=0.5, saturation=1.0)
    for change, expected in (
        ({"brightness": 1.0}, [0.7, 0.2, 0.0]),
        ({"brightness": 4.0}, [1.0, 0.8, 0.6]),
        ({"contrast": 2.0}, [1.0, 0.0, -0.4]),
        ({"saturation": -1.0}, [0.3, 0.05, -0.05]),
    ):
        value = {name: torch.tensor(number, dtype=torch.float64) for name, number in change.items()}
        torch.testing.assert_close(config.apply(x, draws(**value)).flatten(), torch.tensor(expected))


@pytest.fixture(scope="module")
def crops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with crops of noise in three classes."""
    return crops_of_twelve(tmp_path_factory.mktemp("sets"), num_shards=2)


def training_of(folder: Path, crops: Path, steps: int, **train: Any) -> Training:
    """Small training on these crops."""
    stage = {
        "experiment": "x",
        "codec": {"type": "rgb"},
        "system": {"type": "dit", "network": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4}},
        "train": {"steps": steps, "global_batch": 6, "schedule": {"type": "constant"}, "keep_raw": True}
        | {"validate_every_steps": 2, "grid_every_steps": None, "checkpoint": {"every_steps": 2, "keep_every": 2}}
        | {"augment": {"probability": 0.5, "transpose": True}, "optimizer": {"type": "adam", "lr": 0.01}}
        | train,
    }
    (folder / "train.yaml").write_text(to_yaml(stage))
    return prepare_training(folder / "train.yaml", crops / "manifest.json", None)


def trained(training: Training, output: Path) -> bytes:
    """Train, and return the final weights."""
    run(training.build, training.stage.train, training.model, training.data, output)
    return (output / "weights.safetensors").read_bytes()


def test_labels_mark_mirrored_images_with_any_number_of_processes(crops: Path) -> None:
    data = open_shards(crops, "train")
    told: dict[tuple[int, int], Tensor] = {}
    for world in (1, 2, 3):
        for rank in range(world):
            for examples in Batches(data, 6, 5, rank=rank, world_size=world, flip_probability=0.5, epochs=2):
                streams = Streams(5, examples.epoch, examples.sample)
                labels = Augment(probability=0.5).draw(streams, 0.5).labels()
                read = (examples.stored != data.gather(examples.sample.numpy())).flatten(1).any(1)
                assert torch.equal(labels[:, 0].bool(), read)
                for epoch, sample, row in zip(examples.epoch.tolist(), examples.sample.tolist(), labels, strict=True):
                    assert torch.equal(told.setdefault((epoch, sample), row), row)
    assert len(told) == 2 * data.num_samples


def test_training_resumes_bit_exactly_and_writes_no_augmentation_map(crops: Path, tmp_path: Path) -> None:
    always = {"probability": 1, "until": 1}
    whole = trained(training_of(tmp_path, crops, 4, augment=always), tmp_path / "once")
    assert trained(training_of(tmp_path, crops, 2, augment=always), tmp_path / "twice") != whole
    again = trained(training_of(tmp_path, crops, 4, augment=always), tmp_path / "twice")
    assert again == whole, "a checkpoint has the map"
    once = tmp_path / "once"
    model = load_model(once)
    assert not hasattr(model.network, AUGMENTATION)
    for tensors in (read_weights(once / "raw")[0], weights_at(once / "state", once, 2)[0]):
        model.network.load_state_dict(tensors)


def test_augmentation_map_learns_and_is_unused_in_validation_previews_and_samples(crops: Path, tmp_path: Path) -> None:
    """The same weights give the same samples with and without a trained map."""
    training = training_of(tmp_path, crops, 9)
    trainer = Trainer(training.build(ALONE), training.stage.train, ALONE)
    batches = trainer.batches(0)
    for step in range(1, 9):
        trainer.set_learning_rate(step)
        trainer.backward(next(batches), step)
        trainer.update(step)
    learnt = trainer.network.get_submodule(AUGMENTATION).weight
    assert learnt.abs().sum() > 0 and not learnt[:, 10:].any(), "colors are not drawn"
    plain = training.network()
    plain.load_state_dict(trainer.raw_weights())
    settings = SampleConfig(sampler=Ddim(num_steps=3), batch_size=4)
    sampling, codec = (
        training.stage.system.sampling(),
        training.stage.codec.build(None, None, ALONE.device, torch.float32),
    )
    made = []
    for network in (trainer.network.eval(), plain.eval()):
        generator = sampling.generator(network, training.spec, codec, settings)
        made.append(generator(torch.arange(4), torch.arange(4) % 3))
    assert torch.equal(made[0], made[1])


def test_training_loss_uses_augmented_and_validation_loss_unaugmented_images(crops: Path, tmp_path: Path) -> None:
    told, plain = (
        Trainer(training.build(ALONE), training.stage.train, ALONE)
        for training in (training_of(tmp_path, crops, 9, augment=augment) for augment in ({"probability": 1}, None))
    )
    plain.flat.values.copy_(torch.zeros_like(plain.flat.values).normal_(std=0.1))
    for name, value in told.flat.named(told.flat.values).items():
        value.copy_(plain.flat.named(plain.flat.values).get(name, torch.zeros_like(value)))
    examples = next(told.batches(0))
    assert not torch.equal(told.losses(1, examples, 0).loss, plain.losses(1, examples, 0).loss)
    expected = plain.validation_losses(1, examples, 0).loss
    assert torch.equal(told.validation_losses(1, examples, 0).loss, expected)


def test_last_steps_only_mirror_images(crops: Path, tmp_path: Path) -> None:
    fading, mirrored, always = (
        Trainer(training.build(ALONE), training.stage.train, ALONE)
        for training in (
            training_of(tmp_path, crops, 8, augment=augment)
            for augment in ({"probability": 1}, {"probability": 0}, {"probability": 1, "until": 1})
        )
    )
    for trainer in (fading, mirrored, always):
        trainer.flat.values.copy_(torch.full_like(trainer.flat.values, 0.1))
    examples = next(fading.batches(0))
    for step, same in ((6, always), (7, mirrored), (8, mirrored)):
        assert torch.equal(fading.losses(step, examples, 0).loss, same.losses(step, examples, 0).loss)
    assert not torch.equal(always.losses(7, examples, 0).loss, mirrored.losses(7, examples, 0).loss)


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_image_network_adds_a_zero_initialised_map(kind: str) -> None:
    spec = DataSpec(channels=3, resolution=16, num_classes=3)
    torch.manual_seed(0)
    network = NETWORKS[kind].build(spec).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    state = torch.get_rng_state()
    call = partial(network, images(4), torch.full((4,), 0.5), label=torch.arange(4) % 3)
    before, labels = call(), torch.ones(4, NUM_LABELS)
    add_augmentation(network, NUM_LABELS)
    assert torch.equal(torch.get_rng_state(), state), "no other number changes"
    assert torch.equal(call(augment=labels), before)
    torch.nn.init.normal_(network.get_submodule(AUGMENTATION).weight)
    assert torch.equal(call(), before) and torch.equal(call(augment=0 * labels), before)
    assert not torch.allclose(call(augment=labels), before)


def test_section_is_part_of_the_identity_only_if_set(crops: Path, tmp_path: Path) -> None:
    with_it, without = (training_of(tmp_path, crops, 1, augment=value).stage.train for value in ({}, None))
    assert "augment" in with_it.identity() and "augment" not in without.identity()
    always, mirroring = (
        training_of(tmp_path, crops, 1, augment=value).stage.train for value in ({"until": 1}, {"probability": 0})
    )
    ends_at_a_step = ["steps" in train.identity() for train in (with_it, without, always, mirroring)]
    assert ends_at_a_step == [True, False, False, False]


def test_conditions_features_and_latents_cannot_be_augmented() -> None:
    batch = a_batch(torch.arange(4))
    with pytest.raises(ValueError, match="moves the images alone, not their conditions"):
        augmented(replace(batch, cond={"image": batch.x}), STRONG, 0)
    with pytest.raises(ValueError, match="moves the images alone, not their features"):
        augmented(replace(batch, features=batch.x), STRONG, 0)
    with pytest.raises(ValueError, match="the network Linear does not take it as a condition"):
        add_augmentation(torch.nn.Linear(1, 1), NUM_LABELS)
    with pytest.raises(ValueError, match=r"probability is 0\.12, but latents allow the stored mirror image alone"):
        Augment().check("latents", 3, (8, 8))
    Augment(probability=0).check("latents", 3, (8, 8))
