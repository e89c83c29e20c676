"""REPA and iREPA: features encoded once, the loss term, the projector that is not saved, and rejected settings."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import dump, parse, read_yaml, to_yaml
from image_diffusion.core.files.weights import read_weights
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded.pairs import write_pairs
from image_diffusion.data.shards.loader import Batches
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.experiments.checks import check_experiment
from image_diffusion.experiments.experiment import parse_experiment
from image_diffusion.metrics.features.classifier import Classifier, InPipeDetector
from image_diffusion.metrics.features.pretrained import ClassToken, Dinov2, Encoder
from image_diffusion.objectives.alignment import PROJECTOR, Alignment, Projector, target
from image_diffusion.stages.train import Training, prepare_training
from image_diffusion.systems.base import Others
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.pairs.captions import CaptionPairs
from image_diffusion.systems.pairs.inputs import PairInputs
from image_diffusion.systems.pairs.teacher_features import FeaturePairs, TeacherFeatures
from image_diffusion.training.checkpoint.averaged_weights import weights_at
from image_diffusion.training.load_model import load_model
from image_diffusion.training.parallel.world import World
from image_diffusion.training.session import run
from image_diffusion.training.trainer import Trainer
from tiny_towers import write_tower

ALONE = World(0, 1, torch.device("cpu"))
SPEC = DataSpec(channels=4, resolution=8, num_classes=3, features=(5, 3, 3))
NETWORK = {"depth": 2, "width": 16, "num_heads": 2, "patch": 2, "class_tokens": 1, "class_tokens_from": 1}


def a_system(**alignment: Any) -> DiTSystem:
    settings: dict[str, Any] = {"network": NETWORK, "process": {"type": "flow"}, "objective": {"type": "flow_matching"}}
    found: DiTSystem = parse(DiTSystem, settings | {"alignment": {"block": 2} | alignment}, "system")
    return found


def a_batch(step: int = 1) -> Batch:
    ids = torch.arange(6)
    streams = Streams(0, torch.zeros_like(ids), ids)
    features = streams.normal("features", SPEC.features or ())
    return Batch(streams.normal("x", (4, 8, 8)), {"label": ids % 3}, streams, step, features)


class Blurred:
    """Teacher whose features distinguish left from right."""

    identity: dict[str, Any] = {"type": "blurred"}  # noqa: RUF012

    def maps(self, images: Tensor) -> Tensor:
        return F.avg_pool2d(images.float(), 4)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with crops of noise in three classes, and with a teacher's features of them."""
    folder = tmp_path_factory.mktemp("sets")
    generator = np.random.default_rng(0)
    for number in range(60):
        (folder / "in" / str(number % 3)).mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(256, size=192, dtype=np.uint8).tobytes()
        (folder / "in" / str(number % 3) / f"{number}.ppm").write_bytes(b"P6 8 8 255\n" + pixels)
    source = {"type": "folder", "path": str(folder / "in")}
    data = {"name": "x", "source": source, "resolution": 8, "num_shards": 3, "validation_fraction": 0.2}
    crop_dataset(parse(DataConfig, data, "data"), folder / "crops")
    assert embedded(folder) == 3 and embedded(folder) == 0, "what is up to date is kept"
    return folder


def embedded(folder: Path) -> int:
    """Encode the features; return the number of shards written."""
    made = TeacherFeatures(folder / "crops", Blurred(), {"encoder": FeaturePairs().encoded_by})
    return write_pairs(made, "x", FeaturePairs().splits, "float16", folder / "features")[1]


def test_resaved_images_with_equal_pixels_change_ids_but_embed_nothing(tmp_path: Path) -> None:
    def made(folder: Path) -> dict[str, bytes]:
        source = {"type": "folder", "path": str(tmp_path / "in")}
        data = {"name": "x", "source": source, "resolution": 8, "num_shards": 1}
        crop_dataset(parse(DataConfig, data, "data"), folder / "crops")
        written.append(embedded(folder))
        return {path.name: path.read_bytes() for path in (folder / "features").iterdir()}

    written: list[int] = []
    (tmp_path / "in").mkdir()
    for number in range(8):
        (tmp_path / f"in/{number}.ppm").write_bytes(b"P6 8 8 255\n" + bytes([number * 30] * 192))
    made(tmp_path)
    for image in (tmp_path / "in").iterdir():
        image.write_bytes(image.read_bytes().replace(b"P6 ", b"P6 # x\n"))
    assert made(tmp_path) == made(tmp_path / "fresh") and written == [1, 0, 1]


def training_of(folder: Path, sets: Path, steps: int, features: str | Path = "features", **changes: Any) -> Training:
    """Small training on these sets. changes: changes to the system section."""
    plain = changes.get("alignment", 1) is None
    stage = {
        "experiment": "x",
        "codec": {"type": "rgb"},
        "system": {"type": "dit"} | dump(a_system(until_step=3)) | changes,
        "train": {"steps": steps, "global_batch": 6, "flip_probability": 0.5, "schedule": {"type": "constant"}}
        | {"validate_every_steps": 2, "grid_every_steps": None, "keep_raw": True}
        | {"checkpoint": {"every_steps": 2, "keep_every": 2}},
        "encoder": None if plain else FeaturePairs().encoded_by,
    }
    (folder / "train.yaml").write_text(to_yaml(stage))
    pairs = [] if plain else [sets / features / "manifest.json"]
    return prepare_training(folder / "train.yaml", sets / "crops" / "manifest.json", None, pairs)


def trained(training: Training, output: Path, start: Path | None = None) -> bytes:
    """Train, and return the final weights."""
    torch.manual_seed(0)
    run(training.build, training.stage.train, training.model, training.data, output, None, start)
    return (output / "weights.safetensors").read_bytes()


def test_mirrored_images_come_with_features_of_mirrored_images(sets: Path) -> None:
    features = open_shards(sets / "features", "all")
    assert features.manifest["kind"] == "features" and features.shape == (3, 2, 2)
    crops = open_shards(sets / "crops", "train").join(features)
    (examples,) = Batches(crops, crops.num_samples, 0, flip_probability=0.5, epochs=1)
    mirrored = (examples.stored != crops.gather(examples.sample.numpy())).flatten(1).any(1)
    assert 0.3 < mirrored.float().mean() < 0.7
    assert torch.equal(examples.joined_sets[0].float(), Blurred().maps(examples.stored).half().float())


def test_teachers_return_feature_maps() -> None:
    torch.manual_seed(0)
    images = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    description = {
        "channels": 3,
        "labels": "classes",
        "classes": ["a", "b"],
        "accuracy": 1.0,
        "chance": 0.5,
        "num_held_out": 9,
    }
    detector = InPipeDetector(Classifier(3, 2, 16), description | {"sha256": "x"})
    maps = detector.maps(images)
    assert maps.shape == (2, 192, 4, 4)
    torch.testing.assert_close(detector._network.features(maps.mean((2, 3))), detector(images).features)

    class Patches(torch.nn.Module):
        def forward_features(self, x: Tensor) -> dict[str, Tensor]:
            return {"x_norm_patchtokens": F.avg_pool2d(x, 14).flatten(2).transpose(1, 2)}

    teacher = Encoder(ClassToken(Patches()), Dinov2().metric_name, "dinov2_vitl14", "x", 224, "cpu")
    seen = teacher.maps(images)
    assert seen.shape == (2, 3, 16, 16)
    torch.testing.assert_close(seen.flip(-1), teacher.maps(images.flip(-1)))
    with pytest.raises(ValueError, match="images have 4 channels but dinov2_vitl14 takes 1 or 3"):
        teacher.maps(torch.zeros(2, 4, 16, 16, dtype=torch.uint8))


def test_transformers_teacher_is_encoded_again_when_its_weights_change(sets: Path, tmp_path: Path) -> None:
    """Images of 8 x 8 pixels are resized to 32 x 32; patches of 8 give 4 x 4 features, whatever the token grid."""

    def made(seed: int) -> tuple[int, Any]:
        write_tower("Dinov2", tmp_path / "tower", seed)
        pairs = config.build(PairInputs(sets / "crops", None, 3, None, torch.device("cpu")))
        return write_pairs(pairs, "x", config.splits, "float16", tmp_path / config.name)[1], pairs.shape

    teacher = {"type": "transformers", "weights": str(tmp_path / "tower"), "name": "tiny"}
    config = parse(FeaturePairs, {"teacher": teacher}, "pairs")
    assert config.name == "features-tiny" and not config.needs_detector
    assert made(0) == (3, (16, 4, 4)) and made(0)[0] == 0 and made(1)[0] == 3
    crops = open_shards(sets / "crops", "all").join(open_shards(tmp_path / config.name, "all"))
    (examples,) = Batches(crops, crops.num_samples, 0, flip_probability=0.5, epochs=1)
    expected = config.teacher.build(None, "cpu").maps(examples.stored)
    torch.testing.assert_close(examples.joined_sets[0].float(), expected, atol=2e-3, rtol=2e-3)  # stored in float16
    with pytest.raises(ValueError, match="were encoded by .*tiny.*, but the experiment names .*inpipe.* Run embed"):
        training_of(tmp_path, sets, 1, tmp_path / config.name)


def test_spatial_norm_equals_hand_computed_values() -> None:
    """Positions 0, 0, 0, 4 of one channel: mean 1, deviation 2 (over n - 1)."""
    features = torch.tensor([0.0, 0.0, 0.0, 4.0]).view(1, 1, 2, 2)
    for share, expected in ((1.0, [-0.5, -0.5, -0.5, 1.5]), (0.5, [-0.25, -0.25, -0.25, 1.75]), (None, [0, 0, 0, 4])):
        torch.testing.assert_close(
            target(features, 2, share).flatten(), torch.tensor(expected).float(), atol=1e-5, rtol=0
        )
    assert target(features, 1, None).item() == 1 and target(features, 4, None).shape == (1, 4, 4, 1)


@pytest.mark.parametrize("projector", ["conv", "mlp"])
def test_alignment_term_is_negative_mean_cosine_of_projected_tokens_and_features(projector: str) -> None:
    system = a_system(projector=projector, projector_width=8, weight=0.7)
    torch.manual_seed(0)
    network, objective = system.build_network(SPEC), system.build_objective(SPEC)
    network.add_module(PROJECTOR, objective.layers[PROJECTOR]())
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    losses, seen = objective(network, a_batch()), []
    network.blocks[1].register_forward_hook(lambda module, given, tokens: seen.append(tokens))
    plain = system.model_copy(update={"alignment": None}).build_objective(SPEC)(network, a_batch())
    projected = network.get_submodule(PROJECTOR)(seen[0][:, 1:].unflatten(1, (4, 4)))  # except the class token
    goal = target(a_batch().features, 4, 1.0)  # type: ignore[arg-type]
    cosine = (F.normalize(projected, dim=-1) * F.normalize(goal, dim=-1)).sum(-1).mean((1, 2))
    torch.testing.assert_close(losses.loss, plain.loss - 0.7 * cosine)
    torch.testing.assert_close(losses.loss.detach(), torch.stack(list(losses.parts.values())).sum(0))
    assert torch.equal(objective.uniform()(network, a_batch()).loss, plain.loss)  # type: ignore[attr-defined]


def test_projectors_have_the_shapes_of_the_papers() -> None:
    conv, mlp = (Projector(Alignment(block=1, projector=each), 16, 5) for each in ("conv", "mlp"))
    shapes = [tuple(each.shape) for each in (*conv.parameters(), *mlp.parameters())]
    assert shapes == [(5, 16, 3, 3), (5,), (2048, 16), (2048,), (2048, 2048), (2048,), (5, 2048), (5,)]


def test_gradients_equal_plain_training_after_the_last_aligned_step(sets: Path, tmp_path: Path) -> None:
    """Every parameter has the gradient of plain training, and the projector has none."""

    def gradient(step: int, **changes: Any) -> dict[str, Tensor]:
        training = training_of(tmp_path, sets, 9, **changes)
        parts = Trainer(training.build(ALONE), training.stage.train, ALONE)
        torch.manual_seed(1)
        for name, value in sorted(parts.flat.named(parts.flat.values).items()):
            if not name.startswith(PROJECTOR):
                value.normal_(std=0.1)
        parts.gradients(next(parts.batches(step - 1)), partial(parts.losses, step))
        return {name: tensor.clone() for name, tensor in parts.flat.named(parts.flat.gradient).items()}

    expected, during, after = gradient(4, alignment=None), gradient(3), gradient(4)
    own = {f"{PROJECTOR}.layers.weight", f"{PROJECTOR}.layers.bias"}
    assert during.keys() - expected.keys() == own
    assert all(during[name].any() and not after[name].any() for name in own)
    assert all(torch.equal(after[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(during["blocks.0.attn.qkv.weight"], gradient(3, alignment=None)["blocks.0.attn.qkv.weight"])


def test_written_weights_contain_no_projector(sets: Path, tmp_path: Path) -> None:
    training, once = training_of(tmp_path, sets, 4), tmp_path / "once"
    whole = trained(training, once)
    assert trained(training_of(tmp_path, sets, 2), tmp_path / "twice") != whole
    assert trained(training, tmp_path / "twice") == whole, "a checkpoint has it"
    model = load_model(once)
    assert model.spec.features == (3, 2, 2) and not hasattr(model.network, PROJECTOR)
    for tensors in (read_weights(once / "raw")[0], weights_at(once / "state", once, 2)[0]):
        model.network.load_state_dict(tensors)
    for changes in ({}, {"alignment": None}):
        trained(training_of(tmp_path, sets, 1, **changes), tmp_path / f"next-{len(changes)}", once)


def test_alignment_features_combine_with_caption_conditions(sets: Path, tmp_path: Path) -> None:
    words = parse(CaptionPairs, {"encoder": {"type": "hashed", "dim": 8}, "num_tokens": 2}, "pairs")
    made = words.build(PairInputs(sets / "crops", None, 3, None, torch.device("cpu")))
    write_pairs(made, "x", words.splits, words.dtype, tmp_path / "captions")
    training_of(tmp_path, sets, 1)
    stage = read_yaml(tmp_path / "train.yaml")
    stage["encoder"] = {"captions": words.encoded_by, "features": FeaturePairs().encoded_by}
    stage["system"] |= {"condition": [{"type": "label"}, {"type": "text"}]}
    (tmp_path / "train.yaml").write_text(to_yaml(stage))
    folders = [sets / "features", tmp_path / "captions"]
    manifests = [folder / "manifest.json" for folder in folders]
    training = prepare_training(tmp_path / "train.yaml", sets / "crops" / "manifest.json", None, manifests)
    assert training.spec.conditions == {"text": (3, 8)} and training.spec.features == (3, 2, 2)
    weights = trained(training, tmp_path / "out")
    assert list(load_model(tmp_path / "out").pairs) == ["captions", "features"]
    stage["system"]["alignment"], stage["encoder"] = None, words.encoded_by
    (tmp_path / "train.yaml").write_text(to_yaml(stage))
    alone = prepare_training(tmp_path / "train.yaml", sets / "crops" / "manifest.json", None, manifests[1:])
    assert trained(alone, tmp_path / "alone") != weights
    with pytest.raises(ValueError, match=r"were encoded by .* but the experiment names"):
        stage["encoder"] = {"type": "hashed"}
        (tmp_path / "train.yaml").write_text(to_yaml(stage))
        prepare_training(tmp_path / "train.yaml", sets / "crops" / "manifest.json", None, manifests[1:])


def test_it_is_not_spread_over_processes(sets: Path, tmp_path: Path) -> None:
    training = training_of(tmp_path, sets, 1)
    two, settings = World(0, 2, torch.device("cpu")), training.stage.train.model_copy(update={"sharding": "full"})
    with pytest.raises(ValueError, match="train.sharding is full, but the objective has layers of its own"):
        Trainer(training.build(two), settings, two)


FEATURES = {"type": "features"}


@pytest.mark.parametrize(
    ("system", "pairs", "line"),
    [
        ({"alignment": {"block": 1}}, None, "system.alignment is set, but pairs is missing. It needs features"),
        ({"alignment": {"block": 1}}, {"type": "captions"}, r"but pairs\.type is captions\. It needs features"),
        ({}, FEATURES, "system.alignment is not: nothing reads it. Leave it out, or add system.alignment"),
        (
            {"alignment": {"block": 1}, "condition": {"type": "text"}},
            FEATURES,
            r"but pairs\.type is features\. It needs captions: add {type: captions} to the list pairs",
        ),
        ({"alignment": {"block": 3}}, FEATURES, r"alignment\.block is 3, but the network has 2 blocks"),
        (
            {"alignment": {"block": 1}, "objective": {"type": "mean_flow"}, "process": {"type": "flow"}},
            FEATURES,
            "mean_flow calls its network several times in a step",
        ),
        (
            {"alignment": {"block": 1}, "objective": {"timestep_sampling": {"type": "loss_second_moment"}}},
            FEATURES,
            "timesteps are drawn by loss_second_moment",
        ),
    ],
)
def test_incompatible_alignment_sections_are_reported_in_one_line(system: Any, pairs: Any, line: str) -> None:
    raw = {
        "data": {"name": "x", "source": {"type": "digits"}, "resolution": 8},
        "system": {"type": "dit", "network": NETWORK} | system,
        "train": {"steps": 1},
    }
    experiment = parse_experiment(raw | ({"pairs": pairs} if pairs else {}), "x.yaml")
    with pytest.raises(ValueError, match=line):
        check_experiment(experiment, Others())
