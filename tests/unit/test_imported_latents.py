"""Latents encoded by other tools: stored values of each layout, reuse of shards, and rejected input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from image_diffusion.codecs.diffusers import Diffusers
from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded.imported_latents import Import
from image_diffusion.data.encoded.latents import EncodeConfig, encode_shards, write_manifest
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.data.sources.changes import refresh
from image_diffusion.experiments.checks import check_experiment
from image_diffusion.experiments.experiment import parse_experiment
from image_diffusion.systems.base import Others
from latents import write_edm2, write_fastdit, write_lightningdit
from tiny_autoencoders import write_autoencoder

CPU = torch.device("cpu")
COUNT, EDGE = 24, 16
LABELS = [number % 3 for number in range(COUNT)]
SETTINGS = EncodeConfig(dtype="float32", precision="float32", batch_size=1)


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vae") / "kl4"
    write_autoencoder("kl4", folder)
    return folder


def codec_of(vae: Path, pixels: str = "signed") -> Any:
    return Diffusers(weights=str(vae), pixels=pixels).build(None, None, CPU, torch.float32)  # type: ignore[arg-type]


def images() -> Tensor:
    return torch.randint(0, 256, (COUNT, 3, EDGE, EDGE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def moments(codec: Any, mirrored: bool = False) -> np.ndarray[Any, Any]:
    each = images().flip(-1) if mirrored else images()
    return torch.cat([codec.encode(image[None]) for image in each]).numpy()


def the_import(source: dict[str, Any], vae: Path, output: Path, **changes: Any) -> Import:
    data = {"name": "x", "source": source, "resolution": EDGE, "num_shards": 3} | changes.pop("data", {})
    codec = codec_of(vae, "unit" if source["type"] == "edm2_latents" else "signed")
    settings = changes.pop("settings", SETTINGS)
    return Import(DataConfig(**data), DataSpec(channels=4, resolution=8, num_classes=1), codec, settings, output)


def imported(source: dict[str, Any], vae: Path, output: Path, **changes: Any) -> Shards:
    task = the_import(source, vae, output, **changes)
    task.write_shards()
    refresh(task.data.source, output.parent / "source.json")
    task.write_manifest(output.parent / "source.json")
    return open_shards(output, "all", in_background=False)


def in_order(shards: Shards, count: int = COUNT) -> list[int]:
    """The number of each sample's image, from the name in its record."""
    folder = shards._folder
    assert isinstance(folder, Path)
    found = []
    for entry in shards.manifest["shards"]:
        for sample in read_json((folder / entry["file"]).with_suffix(".json"))["samples"]:
            digits = sample["path"].removesuffix(".npy").replace("/", "-").rsplit("-", 1)[-1]
            found.append(int(digits) + (10 * int(sample["path"][20:23]) if "rank" in sample["path"] else 0))
    assert sorted(found) == list(range(count))
    return found


@pytest.mark.parametrize("name", ["edm2.zip", "edm2"])
def test_edm2_means_and_deviations_are_stored_unchanged(name: str, vae: Path, tmp_path: Path) -> None:
    ours = moments(codec_of(vae, "unit"))
    path = write_edm2(tmp_path / name, ours.reshape(COUNT, 8, 8, 8), LABELS)
    found = imported({"type": "edm2_latents", "path": str(path)}, vae, tmp_path / "out")
    order = in_order(found)
    assert found.shape == (2, 4, 8, 8) and not found.has_mirror_images
    assert (found.gather(np.arange(COUNT)).numpy() == ours[order]).all()
    assert found.labels.tolist() == [LABELS[each] for each in order] and found.classes == ["0", "1", "2"]


def test_imported_latents_match_the_encode_stage(vae: Path, tmp_path: Path) -> None:
    from PIL import Image

    for number, image in enumerate(images()):
        (tmp_path / "in").mkdir(exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"in/{number:08d}.png")
    codec = codec_of(vae, "unit")
    source: Any = {"type": "folder", "path": str(tmp_path / "in")}
    crop_dataset(DataConfig(name="x", source=source, resolution=EDGE, num_shards=1), tmp_path / "crops")
    encode_shards(tmp_path / "crops", tmp_path / "encoded", codec, SETTINGS, CPU)
    write_manifest(tmp_path / "crops", tmp_path / "encoded", codec, SETTINGS)
    path = write_edm2(tmp_path / "edm2", moments(codec).reshape(COUNT, 8, 8, 8), None)
    about = {"type": "edm2_latents", "path": str(path), "classes": "none"}
    found = imported(about, vae, tmp_path / "out", data={"num_shards": 1})
    ours = open_shards(tmp_path / "encoded", "all")
    assert found.classes == [] and torch.equal(found.gather(np.arange(COUNT)), ours.gather(np.arange(COUNT)))


def test_lightningdit_flipped_latents_are_stored_as_mirror_images(vae: Path, tmp_path: Path) -> None:
    plain, flipped = (moments(codec_of(vae), mirrored)[:, 0] for mirrored in (False, True))
    path = write_lightningdit(tmp_path / "in", plain, flipped, LABELS)
    found = imported({"type": "lightningdit_latents", "path": str(path)}, vae, tmp_path / "out")
    every, order = np.arange(COUNT), in_order(found)
    assert found.shape == (1, 4, 8, 8) and found.has_mirror_images
    assert (found.gather(every)[:, 0].numpy() == plain[order]).all()
    assert (found.gather(every, np.ones(COUNT, bool))[:, 0].numpy() == flipped[order]).all()
    assert found.labels.tolist() == [LABELS[each] for each in order]


def test_fastdit_scale_is_removed_within_float32_rounding(vae: Path, tmp_path: Path) -> None:
    plain = moments(codec_of(vae))[:, 0]
    path = write_fastdit(tmp_path / "in", plain, LABELS)
    found = imported({"type": "fastdit_latents", "path": str(path)}, vae, tmp_path / "out")
    order, stored = in_order(found), found.gather(np.arange(COUNT))[:, 0].numpy()
    np.testing.assert_allclose(stored, plain[order], rtol=2**-22, atol=0)
    assert found.labels.tolist() == [LABELS[each] for each in order]
    scaled = codec_of(vae).draw(torch.from_numpy(stored[:, None]), Streams(0, torch.zeros(COUNT), torch.arange(COUNT)))
    assert torch.equal(scaled, torch.from_numpy(stored)), "a latent that was drawn is not drawn again"


def test_edm2_pixel_range_round_trips_colours(vae: Path) -> None:
    signed, unit = codec_of(vae), codec_of(vae, "unit")
    assert unit.identity != signed.identity and Diffusers(weights=str(vae), pixels="unit").name == "kl4-unit"
    given = images()
    assert torch.equal(unit.pixels(given), given / 127.5 / 2) or (unit.pixels(given) - given / 255).abs().max() < 1e-6
    assert torch.equal(unit.shown(unit.pixels(given)), signed.shown(signed.pixels(given)))


def test_second_import_writes_only_changed_shards(vae: Path, tmp_path: Path) -> None:
    path = write_edm2(tmp_path / "in", moments(codec_of(vae, "unit")).reshape(COUNT, 8, 8, 8), LABELS)
    source = {"type": "edm2_latents", "path": str(path)}
    task = the_import(source, vae, tmp_path / "out")
    assert task.write_shards((1, 2)) == 1, "a part alone"
    assert task.write_shards() == 2, "the rest"
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert task.write_shards() == 0
    refresh(task.data.source, tmp_path / "source.json")
    task.write_manifest(tmp_path / "source.json")
    assert not refresh(task.data.source, tmp_path / "source.json")
    one = path / "00000/img-mean-std-00000003.npy"
    np.save(one, np.load(one) + 1)
    assert refresh(task.data.source, tmp_path / "source.json")
    assert the_import(source, vae, tmp_path / "out").write_shards() == 1
    after = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert sum(before[name] != after[name] for name in before if name.endswith(".tar")) == 1


def test_killed_import_resumes_with_the_remaining_shards(
    vae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written("lightningdit", vae, tmp_path / "in")
    imported(source, vae, tmp_path / "whole" / "out")
    task = the_import(source, vae, tmp_path / "out")
    read, calls = type(task.source).encoded, 0

    def killed(self: Any, item: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise KeyboardInterrupt
        return read(self, item)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(task.source), "encoded", killed)
        task.write_shards()
    there = len(list((tmp_path / "out").glob("shard-*.json")))
    assert there == 1 and task.write_shards() == 2
    for file in (tmp_path / "whole" / "out").glob("shard-*"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def poisoned(path: Path) -> None:
    array = np.load(path)
    array.flat[5] = np.nan
    np.save(path, array)


def relabelled(path: Path) -> None:
    tensors = load_file(path)
    tensors.pop("labels")
    save_file(tensors, path)


E, L, F = "edm2", "lightningdit", "fastdit"
MISTAKES: list[tuple[str, Callable[[Path], object], str]] = [
    (E, lambda p: cut(p / "00000/img-mean-std-00000002.npy"), "img-mean-std-00000002.npy is damaged or cut short"),
    (E, lambda p: poisoned(p / "00000/img-mean-std-00000002.npy"), "img-mean-std-00000002.npy holds a number that is"),
    (E, lambda p: (p / "00000/img-mean-std-00000002.npy").unlink(), "img-mean-std-00000002.npy is missing, which data"),
    (E, lambda p: (p / "dataset.json").unlink(), "dataset.json cannot be read: No such file"),
    (E, lambda p: (p / "dataset.json").write_text('{"labels": null}'), "dataset.json names no classes. Copy it"),
    (E, lambda p: (p / "dataset.json").write_text('{"labels": []}'), "names no class of 00000/img-mean-std-00000000"),
    (L, lambda p: cut(p / "latents_rank00_shard001.safetensors"), "shard001.safetensors is damaged or cut short"),
    (L, lambda p: relabelled(p / "latents_rank00_shard001.safetensors"), "shard001.safetensors has no tensor labels"),
    (L, lambda p: [each.unlink() for each in p.iterdir()], "holds no .safetensors file"),
    (F, lambda p: cut(p / "imagenet256_features/7.npy"), "imagenet256_features/7.npy is damaged or cut short"),
    (F, lambda p: poisoned(p / "imagenet256_features/7.npy"), "7.npy holds a number that is not finite"),
    (F, lambda p: (p / "imagenet256_labels/7.npy").unlink(), "imagenet256_labels/7.npy is missing"),
    (F, lambda p: (p / "imagenet256_labels").rename(p / "other"), "imagenet256_labels is missing"),
    (F, lambda p: np.save(p / "imagenet256_labels/7.npy", np.zeros(2)), "7.npy holds float64 [2], not one class"),
]


def written(kind: str, vae: Path, folder: Path) -> dict[str, Any]:
    codec = codec_of(vae)
    plain = moments(codec)
    if kind == E:
        write_edm2(folder, plain.reshape(COUNT, 8, 8, 8), LABELS)
    elif kind == L:
        write_lightningdit(folder, plain[:, 0], plain[:, 0], LABELS)
    else:
        write_fastdit(folder, plain[:, 0], LABELS)
    return {"type": f"{kind}_latents", "path": str(folder)}


@pytest.mark.parametrize(
    ("kind", "spoil", "told"), MISTAKES, ids=[f"{kind}-{i}" for i, (kind, *_) in enumerate(MISTAKES)]
)
def test_invalid_latent_files_are_one_error_with_the_file_name(
    kind: str, spoil: Callable[[Path], object], told: str, vae: Path, tmp_path: Path
) -> None:
    source = written(kind, vae, tmp_path / "in")
    spoil(tmp_path / "in")
    with pytest.raises(ValueError) as error:
        imported(source, vae, tmp_path / "out")
    assert told in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out/manifest.json").exists()


def test_truncated_zip_is_one_error(vae: Path, tmp_path: Path) -> None:
    path = write_edm2(tmp_path / "in.zip", moments(codec_of(vae)).reshape(COUNT, 8, 8, 8), LABELS)
    cut(path)
    with pytest.raises(ValueError, match=r"in.zip cannot be read as a zip file"):
        imported({"type": "edm2_latents", "path": str(path)}, vae, tmp_path / "out")


@pytest.mark.parametrize("kind", [E, L, F])
def test_latents_of_other_sizes_are_rejected_before_writing(kind: str, vae: Path, tmp_path: Path) -> None:
    source = written(kind, vae, tmp_path / "in")
    data: Any = {"name": "x", "source": source, "resolution": 32}
    spec = DataSpec(channels=4, resolution=16, num_classes=1)
    with pytest.raises(ValueError, match=r"latents of \[4, 8, 8\], but data.resolution 32 and the codec give \[4, 16"):
        Import(DataConfig(**data), spec, codec_of(vae), SETTINGS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def experiment(vae: Path, **changes: Any) -> dict[str, Any]:
    return {
        "data": {"name": "x", "source": {"type": "fastdit_latents", "path": "in"}, "resolution": EDGE},
        "codec": {"type": "diffusers", "weights": str(vae)},
        "system": {"type": "dit", "network": {"depth": 1, "width": 32, "num_heads": 2, "patch": 2}},
        "train": {"steps": 1, "flip_probability": 0},
        "evaluate": {"against": "real.npz", "detectors": ["inception"], "copies": False},
    } | changes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train": {"steps": 1}}, "train.flip_probability is 0.5, but data.source.type is fastdit_latents: those have"),
        ({"evaluate": {}}, "there are no real images that evaluate could look at. Compare with a file of statistics"),
        ({"codec": {"type": "rgb"}}, "but codec.type is rgb. Name the autoencoder that made the latents"),
        ({"encode": {"precision": "bf16"}}, "encode.precision is set, but data.source.type is fastdit_latents"),
    ],
)
def test_settings_unsupported_for_latents_are_rejected_before_any_work(
    changes: dict[str, Any], told: str, vae: Path
) -> None:

    check_experiment(parse_experiment(experiment(vae), "x.yaml"), Others())
    with pytest.raises(ValueError) as error:
        check_experiment(parse_experiment(experiment(vae, **changes), "x.yaml"), Others())
    assert told in str(error.value)


def test_edm2_latents_require_a_codec_with_unit_pixels(vae: Path) -> None:

    data = {"name": "x", "source": {"type": "edm2_latents", "path": "in"}, "resolution": EDGE}
    with pytest.raises(ValueError, match="was given unit pixels, but the codec's is given signed ones. Use codec:"):
        check_experiment(parse_experiment(experiment(vae, data=data), "x.yaml"), Others())
    codec = {"type": "diffusers", "weights": str(vae), "pixels": "unit"}
    check_experiment(parse_experiment(experiment(vae, data=data, codec=codec), "x.yaml"), Others())
