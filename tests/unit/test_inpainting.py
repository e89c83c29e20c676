"""Samples made from images by the stage `sample`: inpainting, variation and tiles."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from image_diffusion.codecs.base import from_uint8, to_uint8
from image_diffusion.core.config.base import dump, parse, read_inherited, to_yaml
from image_diffusion.core.files.atomic import write_json, write_text
from image_diffusion.core.files.image_arrays import read_arrays
from image_diffusion.core.types import DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.image import crop_image
from image_diffusion.experiments.checks import check_experiment
from image_diffusion.experiments.experiment import parse_experiment
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.stages import sample
from image_diffusion.systems.base import Others
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.generator import Generator, SampleConfig
from image_diffusion.systems.diffusion.image_generation import ImageMaker
from image_diffusion.systems.pictures import Pictures
from image_diffusion.workflow.plans import plan_file
from plans import a_plan
from tiny_models import write_model

DATA = DataConfig.model_validate({"name": "dots", "source": {"type": "folder", "path": "images"}, "resolution": 8})
ROOT = Path(__file__).parents[2]
GIVEN = "{images: images, mask: mask.png, resamplings: 2}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained experiment `mine` of 8 x 8 pixels, three images of 12 x 10 and a mask of their known left half."""
    monkeypatch.chdir(tmp_path)
    write_model(Path("results/mine"), step=3)
    plan = a_plan("mine")
    write_json(plan_file(Path("results"), "mine"), asdict(plan))
    write_text(Path(plan.configs["crop"]), to_yaml(dump(DATA)))
    Path("images").mkdir()
    draw = np.random.default_rng(0)
    for name in ("b", "a", "c"):
        Image.fromarray(draw.integers(0, 256, (10, 12, 3), np.uint8)).save(f"images/{name}.png")
    write_mask(Path("mask.png"), known_columns=6)
    return tmp_path


def write_mask(path: Path, known_columns: int, size: tuple[int, int] = (12, 10)) -> None:
    mask = np.zeros(size[::-1], np.uint8)
    mask[:, :known_columns] = 255
    Image.fromarray(mask).save(path)


def drawn(*changes: str, num: int = 4) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    sample.main(["mine", "--num", str(num), *(word for change in changes for word in ("--set", f"sample.{change}"))])
    return read_arrays(Path("drawn/mine/samples.npz"))["arr_0"], json.loads(Path("drawn/mine/samples.json").read_text())


def crops() -> np.ndarray[Any, Any]:
    """Crops of images a, b, c and a again, as made by the stage `crop`."""
    squares = [crop_image(Path(f"images/{name}.png").read_bytes(), DATA).crops[0] for name in "abca"]
    return np.stack(squares).transpose(0, 2, 3, 1)


def test_inpainting_keeps_known_pixels_and_generates_the_rest(project: Path) -> None:
    images, described = drawn(f"given={GIVEN}")
    known = crops()
    assert (images[:, :, :4] == known[:, :, :4]).all()
    assert not (images[:, :, 4:] == known[:, :, 4:]).all()
    assert not (images[0] == images[3]).all(), "the same image for another seed"
    assert set(described["pictures"]) == {"known", "mask"} and described["settings"]["given"]["resamplings"] == 2
    assert set(Path("drawn/mine").iterdir()) == {
        Path("drawn/mine", name) for name in ("samples.npz", "samples.json", "grid.png", "steps.png")
    }


def test_stopped_samples_resume_and_changed_images_restart_them(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, described = drawn(f"given={GIVEN}")
    whole = Path("drawn/mine/samples.npz").read_bytes()
    make = ImageMaker.__call__

    def stopped(self: ImageMaker, rows: slice) -> Tensor:
        if rows.start > 0:
            raise KeyboardInterrupt
        return make(self, rows)

    def stop() -> None:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(ImageMaker, "__call__", stopped)
            drawn(f"given={GIVEN}")

    stop()
    capsys.readouterr()
    drawn(f"given={GIVEN}")
    assert "1 of 2 batches are reused" in capsys.readouterr().out
    assert Path("drawn/mine/samples.npz").read_bytes() == whole

    stop()
    Image.fromarray(np.zeros((10, 12, 3), np.uint8)).save("images/a.png")
    capsys.readouterr()
    images, changed = drawn(f"given={GIVEN}")
    assert "reused" not in capsys.readouterr().out
    assert (images[0, :, :4] == 0).all()
    assert changed["pictures"]["known"] != described["pictures"]["known"]
    assert changed["pictures"]["mask"] == described["pictures"]["mask"]


def test_strength_0_returns_the_start_images_and_1_ignores_them(project: Path) -> None:
    plain, _ = drawn()
    assert (drawn("start={images: images, strength: 0}")[0] == crops()).all()
    assert (drawn("start={images: images, strength: 1}")[0] == plain).all()
    half, described = drawn("start={images: images, strength: 0.5}")
    assert not (half == plain).all() and list(described["pictures"]) == ["start"]


def test_tiles_make_larger_images_and_one_tile_changes_nothing(project: Path) -> None:
    plain, described = drawn(num=2)
    assert not {"given", "start", "tiles"} & described["settings"].keys(), "files of before keep their bytes"
    assert (drawn("tiles={rows: 1, columns: 1, overlap: 0}", num=2)[0] == plain).all()
    assert drawn("tiles={rows: 2, columns: 3, overlap: 0.25}", num=2)[0].shape == (2, 14, 20, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("given={images: none, mask: mask.png}", "sample.given.images: none does not exist. Give the folder"),
        ("given={images: empty, mask: mask.png}", "sample.given.images: empty holds no files."),
        ("given={images: images, mask: small.png}", "small.png has 8 x 8 pixels, but images/a.png has 12 x 10. Give"),
        ("given={images: images, mask: white.png}", "white.png leaves nothing to fill in of its image, once cropped."),
        ("given={images: images, mask: black.png}", "black.png leaves nothing known of its image, once cropped."),
        ("given={images: images, mask: masks}", "sample.given.mask holds 2 masks that are not named like the 3 images"),
        ("given={images: text, mask: mask.png}", "text/note.md cannot be read: not an image"),
        ("start={images: images, strength: 1.5}", "sample: start.strength is 1.5: input should be less than or equal"),
        ("start={images: none}", "sample.start.images: none does not exist."),
        ("tiles={rows: 2, overlap: 1}", "sample: tiles.overlap is 1: input should be less than 1"),
    ],
)
def test_a_mistake_is_one_clear_line_before_any_work(project: Path, change: str, message: str) -> None:
    for folder in ("empty", "masks", "text"):
        Path(folder).mkdir()
    Path("text/note.md").write_text("words")
    write_mask(Path("small.png"), 4, size=(8, 8))
    for path, columns in (("white.png", 12), ("black.png", 0), ("masks/a.png", 6), ("masks/b.png", 6)):
        write_mask(Path(path), columns)
    with pytest.raises(ValueError) as caught:
        drawn(change)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("drawn/mine/samples.npz").exists()


def test_input_images_require_the_crop_settings(project: Path) -> None:
    words = ["results/mine/train", "--num", "1", "--set", f"sample.given={GIVEN}"]
    with pytest.raises(ValueError, match="which are cropped as those of the data set. Name how: --crop"):
        sample.main(words)
    sample.main([*words, "--crop", "results/datasets/dots-16/config/crop.yaml"])


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"tiles": {"rows": 2}, "start": {"images": "x"}}, "tiles is set beside given or start"),
        ({"sampler": {"type": "heun", "s_churn": 4.0}, "start": {"images": "x"}}, "cannot start in the middle"),
        ({"sampler": {"type": "heun", "s_churn": 4.0}, "given": {"images": "x", "mask": "y"}}, "resamplings: 1"),
    ],
)
def test_conflicting_sample_settings_are_rejected(plain: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(SampleConfig, plain, "sample")


def experiment(name: str, **sample: Any) -> dict[str, Any]:
    plain, _ = read_inherited(ROOT / f"config/experiments/{name}.yaml")
    return {**plain, "sample": {**plain.get("sample", {}), **sample}}


@pytest.mark.parametrize("name", ["prior_demo", "tokens_demo", "dvae_demo"])
@pytest.mark.parametrize("key", ["given", "start", "tiles"])
def test_systems_without_an_image_denoiser_reject_inpainting_settings(name: str, key: str) -> None:
    value = {"given": {"images": "x", "mask": "y"}, "start": {"images": "x"}, "tiles": {"rows": 2}}[key]
    with pytest.raises(ValueError) as caught:
        parse_experiment(experiment(name, **{key: value}), "x.yaml")
    message = str(caught.value)
    assert "\n" not in message and ("has no use for" in message or "is not a known" in message), message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"given": {"images": "none", "mask": "none"}}, "sample.given.images: none does not exist"),
        ({"start": {"images": "images"}, "keep": False}, "but sample.start needs them again"),
        ({"tiles": {"rows": 2}}, "larger than the real images that evaluate compares them with"),
    ],
)
def test_invalid_inpainting_experiments_are_rejected_before_any_work(
    project: Path, change: dict[str, Any], message: str
) -> None:
    plain = experiment("demo", **change)
    plain.pop("codec")
    check_experiment(parse_experiment(experiment("demo") | {"codec": {"type": "rgb"}}, "x.yaml"), Others())
    with pytest.raises(ValueError, match=message):
        check_experiment(parse_experiment(plain, "x.yaml"), Others())


class Halving:
    """A codec whose latents are means of 2 x 2 pixels, and whose decoder has an error."""

    bounded = False

    def encode(self, images: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(from_uint8(images), 2)[:, None]

    def normalise(self, latent: Tensor) -> Tensor:
        return latent * 0.5

    def decode(self, x: Tensor) -> Tensor:
        return to_uint8(x.repeat_interleave(2, 2).repeat_interleave(2, 3) * 2 + 0.1)


@pytest.mark.parametrize("seed", [0, 7])
def test_latents_are_known_only_if_all_their_pixels_are_known(seed: int) -> None:
    torch.manual_seed(0)
    system = DiTSystem(network=DiTConfig(depth=1, width=16, num_heads=2, patch=4))
    spec = DataSpec(channels=3, resolution=4, num_classes=0)
    settings = SampleConfig.model_validate({"sampler": {"type": "ddim", "num_steps": 3}})
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    mask[..., :5] = True  # the third column of latents is partly known
    known = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8).where(mask, torch.tensor(128, dtype=torch.uint8))
    pictures = Pictures(None, 1.0, known, mask, 2, 2)
    generator = Generator(system.build_network(spec), system.reading, spec, Halving(), settings, pictures=pictures)  # type: ignore[arg-type]
    seeds = torch.tensor([seed, seed + 1])
    images = generator(seeds, None)
    assert torch.equal(images[..., :5], known[seeds % 2][..., :5])
    source = pictures.of_seeds(seeds, generator._encode)
    assert source.mask is not None and source.mask[0, 0, 0].tolist() == [True, True, False, False]
