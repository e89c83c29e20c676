"""Paired images from a second folder: cropped and mirrored together with their images, stored with them, read in
training and sampling; invalid pairs are reported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from image_diffusion.codecs.base import from_uint8
from image_diffusion.core.config.base import dump, parse, to_yaml
from image_diffusion.core.types import IMAGE
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded.latents import EncodeConfig, encode_shards, write_manifest
from image_diffusion.data.encoded.pairs import write_pairs
from image_diffusion.data.shards.loader import Batches
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.data.shards.records import read_record
from image_diffusion.data.sources.scikit_digits import GROUNDS, INKS, attributes_of, painted
from image_diffusion.experiments.resolve import embed_stage, load_all
from image_diffusion.nn.inputs import with_image
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems import AnySystem
from image_diffusion.systems.diffusion.conditions.paired_image import as_condition, mask_picture
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.pairs.images import ImageFilePairs
from image_diffusion.systems.pairs.inputs import PairInputs
from image_diffusion.systems.sampling import SamplingInputs, SamplingSources
from image_diffusion.training.load_model import load_codec, load_model
from image_diffusion.training.session import run

CPU = torch.device("cpu")
ORIENTATION = 0x0112
NAMES = {"background": 0, "cell": 255}
MASK = __file__  # a file that exists
ON_LATENTS: dict[str, Any] = {
    "data": {"name": "digits", "source": {"type": "digits"}, "resolution": 64, "validation_fraction": 0.2},
    "codec": {"type": "stability_vae"},
}
SAMPLER = {"type": "euler", "num_steps": 2}
PAIRED = {"type": "image", "from": "pairs"}
SYSTEM: dict[str, Any] = {
    "type": "dit",
    "network": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4},
    "process": {"type": "flow"},
    "objective": {"type": "flow_matching", "label_drop_probability": 0.2},
}


def data_config(folder: Path, **settings: Any) -> DataConfig:
    source = {"type": "folder", "path": str(folder / "in")}
    data = {"name": "x", "source": source, "resolution": 8, "num_shards": 2} | settings
    config: DataConfig = parse(DataConfig, data, "data")
    return config


def write_images(folder: Path, pixels: dict[str, NDArray[np.uint8]], exif: dict[str, int] | None = None) -> None:
    for name, image in pixels.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        about = Image.Exif()
        about[ORIENTATION] = (exif or {}).get(name, 1)
        Image.fromarray(image).save(path, exif=about)


def stored(folder: Path, config: DataConfig, max_bad_fraction: float = 0.0, **pairs: Any) -> tuple[Any, int]:
    """Write the images of the folder `masks` into `images`."""
    settings: ImageFilePairs = parse(ImageFilePairs, {"path": str(folder / "masks")} | pairs, "pairs")
    made = settings.build(PairInputs(folder / "crops", None, config.num_shards, None, CPU, data=config))
    return write_pairs(made, "x", settings.splits, settings.dtype, folder / "images", max_bad_fraction)


def joined(folder: Path, split: Any = "all") -> Shards:
    return open_shards(folder / "crops", split).join(open_shards(folder / "images", "all"))


def noise(*shape: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


SIZES = [(8, 8), (9, 13), (40, 33), (21, 16), (64, 64), (16, 50)]


@pytest.mark.parametrize("crop", [{}, {"type": "resize"}, {"type": "pad"}, {"type": "multi", "max_crops": 3}])
def test_paired_images_are_cropped_like_the_images_pixel_for_pixel(tmp_path: Path, crop: dict[str, Any]) -> None:
    pixels = {f"a/{i}.png": noise(*size, 3, seed=i) for i, size in enumerate(SIZES)}
    exif = {"a/1.png": 6, "a/3.png": 4}
    write_images(tmp_path / "in", pixels, exif)
    write_images(tmp_path / "masks", pixels, exif)
    config = data_config(tmp_path, **({"crop": crop} if crop else {}))
    crop_dataset(config, tmp_path / "crops")
    manifest, _ = stored(tmp_path, config)
    assert (manifest["kind"], manifest["dtype"], manifest["quarantined"]) == ("images", "uint8", 0)
    both = joined(tmp_path)
    rows = np.arange(both.num_samples)
    assert both.num_samples >= len(SIZES) and torch.equal(both.gather(rows), both.gather_joined(rows)[0])


def test_an_image_and_its_pair_are_mirrored_together(tmp_path: Path) -> None:
    pixels = {f"{i}.png": noise(8, 8, 3, seed=i) for i in range(6)}
    write_images(tmp_path / "in", pixels)
    write_images(tmp_path / "masks", pixels)
    config = data_config(tmp_path)
    crop_dataset(config, tmp_path / "crops")
    stored(tmp_path, config)
    both, flips = joined(tmp_path), set[bool]()
    for examples in Batches(both, 6, seed=0, flip_probability=0.5, epochs=2):
        (joined_sets,) = examples.joined_sets
        assert torch.equal(examples.stored, joined_sets)
        plain = both.gather(examples.sample.numpy())
        flips |= {bool(torch.equal(a, b.flip(-1))) for a, b in zip(examples.stored, plain, strict=True)}
    assert flips == {True, False}


class Halved:
    """A codec with exact arithmetic: the latent's mean is every other pixel of an image."""

    identity: ClassVar = {"name": "halved"}

    def encode(self, images: Tensor) -> Tensor:
        mean = images[:, :, ::2, ::2].float() / 256
        return torch.stack([mean, torch.full_like(mean, 0.5)], dim=1)


def test_latent_and_paired_mask_are_mirrored_together(tmp_path: Path) -> None:
    pixels = {f"{i}.png": noise(8, 8, 3, seed=i) for i in range(6)}
    write_images(tmp_path / "in", pixels)
    write_images(tmp_path / "masks", pixels)
    config = data_config(tmp_path)
    crop_dataset(config, tmp_path / "crops")
    stored(tmp_path, config)
    settings = EncodeConfig(dtype="float32")
    encode_shards(tmp_path / "crops", tmp_path / "latents", Halved(), settings, CPU)  # type: ignore[arg-type]
    write_manifest(tmp_path / "crops", tmp_path / "latents", Halved(), settings)  # type: ignore[arg-type]
    both = open_shards(tmp_path / "latents", "all").join(open_shards(tmp_path / "images", "all"))
    flips = set[bool]()
    for examples in Batches(both, 6, seed=0, flip_probability=0.5, epochs=2):
        (joined_sets,) = examples.joined_sets
        torch.testing.assert_close(examples.stored, Halved().encode(joined_sets))
        (plain,) = both.gather_joined(examples.sample.numpy())
        flips |= {bool(torch.equal(a, b.flip(-1))) for a, b in zip(joined_sets, plain, strict=True)}
    assert flips == {True, False}


def test_network_on_latents_receives_label_fractions_per_latent_element() -> None:
    labels = torch.randint(3, (2, 1, 8, 16), generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 4, 2, 4)
    seen = with_image(x, as_condition(labels, 3))
    shares = torch.stack([(labels[:, 0] == label).float() for label in range(3)], 1)
    expected = shares.view(2, 3, 2, 4, 4, 4).mean((3, 5))
    assert torch.equal(seen[:, :4], x)
    torch.testing.assert_close(seen[:, 4:], 2 * expected - 1)
    small = torch.rand(2, 3, 4, 4)
    enlarged = torch.nn.functional.interpolate(small, (8, 8), mode="bilinear")
    assert torch.equal(with_image(torch.zeros(2, 1, 8, 8), small)[:, 1:], enlarged)


@pytest.mark.parametrize("crop", [{}, {"type": "resize", "interpolation": "lanczos"}, {"type": "pad"}])
def test_resized_masks_keep_labels_and_alignment(tmp_path: Path, crop: dict[str, Any]) -> None:
    pixels, masks = {}, {}
    for i, (height, width) in enumerate([(64, 64), (80, 66), (33, 70), (130, 131), (8, 8)]):
        y, x = np.mgrid[:height, :width]
        inside = (x - width / 2) ** 2 + (y - height / 3) ** 2 < (min(height, width) / 4) ** 2
        pixels[f"{i}.png"] = np.where(inside, 255, 0).astype(np.uint8)[..., None].repeat(3, 2)
        masks[f"{i}.png"] = np.where(inside, 255, 0).astype(np.uint8)
    exif = {"0.png": 3, "1.png": 8}
    write_images(tmp_path / "in", pixels, exif)
    write_images(tmp_path / "masks", masks, exif)
    config = data_config(tmp_path, resolution=16, background=[0, 0, 0], **({"crop": crop} if crop else {}))
    crop_dataset(config, tmp_path / "crops")
    manifest, _ = stored(tmp_path, config, labels=NAMES)
    assert manifest["shape"] == [1, 16, 16] and manifest["pairs"]["labels"] == NAMES
    both = joined(tmp_path)
    rows = np.arange(both.num_samples)
    (labels,) = both.gather_joined(rows)
    assert set(labels.unique().tolist()) == {0, 1}
    images = both.gather(rows)[:, :1].float()
    clear = (images < 64) | (images > 191)  # away from the border, where values are in between
    assert torch.equal(labels[clear] == 1, images[clear] > 128)
    # No shift: as many borders are rounded up on one side as on the other.
    for axis in (2, 3):
        place = torch.arange(16.0).view(-1, 1) if axis == 2 else torch.arange(16.0)
        for mask, image in zip(labels[:, 0].float(), images[:, 0] / 255, strict=True):
            assert (mask * place).sum() / mask.sum() == pytest.approx(
                ((image * place).sum() / image.sum()).item(), abs=0.3
            )


def saved_masks(folder: Path) -> dict[str, Path]:
    """Save one mask of the labels 0, 1 and 2 in every supported file format."""
    numbers = np.arange(64).reshape(8, 8) // 5 % 3
    palette = Image.fromarray(numbers.astype(np.uint8))
    palette = palette.convert("P")
    palette.frombytes(numbers.astype(np.uint8).tobytes())
    palette.putpalette([9, 9, 9, 200, 0, 0, 0, 0, 200])
    colours = np.array([[9, 9, 9], [200, 0, 0], [0, 0, 200]], dtype=np.uint8)[numbers]
    forms = {
        "grey": Image.fromarray(numbers.astype(np.uint8)),
        "palette": palette,
        "wide": Image.fromarray((numbers * 1000).astype(np.uint16)),
        "colours": Image.fromarray(colours),
    }
    folder.mkdir()
    for name, image in forms.items():
        image.save(folder / f"{name}.png")
    return {name: folder / f"{name}.png" for name in forms}


COLOURS = {"none": [9, 9, 9], "red": [200, 0, 0], "blue": [0, 0, 200]}


@pytest.mark.parametrize(
    ("form", "labels"),
    [
        ("grey", 3),
        ("palette", 3),
        ("palette", COLOURS),
        ("colours", COLOURS),
        ("wide", {"none": 0, "one": 1000, "two": 2000}),
    ],
)  # fmt: skip
def test_labels_are_grey_values_palette_indices_or_colours(tmp_path: Path, form: str, labels: Any) -> None:
    path = saved_masks(tmp_path / "forms")[form]
    write_images(tmp_path / "in", {"a.png": noise(8, 8, 3)})
    (tmp_path / "masks").mkdir()
    path.rename(tmp_path / "masks" / "a.png")
    config = data_config(tmp_path, num_shards=1)
    crop_dataset(config, tmp_path / "crops")
    stored(tmp_path, config, labels=labels)
    (found,) = joined(tmp_path).gather_joined(np.array([0]))
    assert found[0, 0].tolist() == (np.arange(64).reshape(8, 8) // 5 % 3).tolist()
    one_hot = as_condition(found, 3)
    assert one_hot.shape == (1, 3, 8, 8) and torch.equal(one_hot.argmax(1), found[:, 0].long())
    assert torch.equal(one_hot.sum(1), torch.full((1, 8, 8), -1.0)) and one_hot.abs().min() == 1
    assert mask_picture(one_hot).unique().tolist() == [-1, 0, 1]


def test_the_mask_of_a_painted_digit_is_its_ink(tmp_path: Path) -> None:
    config = data_config(tmp_path, source={"type": "painted_digits", "num_images": 12}, resolution=32)
    crop_dataset(config, tmp_path / "crops")
    settings = parse(ImageFilePairs, {"labels": {"ground": 0, "ink": 1}}, "pairs")
    assert settings.needs_source and settings.other_files is None
    made = settings.build(PairInputs(tmp_path / "crops", config.source, 2, None, CPU, data=config))
    write_pairs(made, "x", settings.splits, settings.dtype, tmp_path / "images")
    (masks,) = joined(tmp_path).gather_joined(np.arange(12))
    samples = [sample for shard in range(2) for sample in read_record(tmp_path / "crops", shard).samples]
    for mask, sample in zip(masks[:, 0].bool(), samples, strict=True):
        number = int(sample.path[2:7])
        colours, shown = painted(number, attributes_of(number)).astype(float), attributes_of(number)
        ground, ink = np.array(GROUNDS[shown.ground]), np.array(INKS[shown.ink])
        amount = (colours - ground) @ (ink - ground) / ((ink - ground) @ (ink - ground))
        clear = abs(amount - 0.5) > 0.01  # colours are rounded
        assert mask.any() and ((amount > 0.5) == mask.numpy())[clear].all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crops of 24 images, whose right or left half is light, with a mask that says which."""
    folder = tmp_path_factory.mktemp("pairs")
    pixels, masks = {}, {}
    for i in range(24):
        mask = np.zeros((8, 8), np.uint8)
        mask[:, i % 5 : i % 5 + 4] = 255
        pixels[f"{'ab'[i % 2]}/{i:02d}.png"] = (noise(8, 8, 3, seed=i) // 4 + mask[..., None] // 2).astype(np.uint8)
        masks[f"{'ab'[i % 2]}/{i:02d}.bmp"] = mask
    write_images(folder / "in", pixels)
    for name, mask in masks.items():
        (folder / "masks" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(folder / "masks" / name)
    config = data_config(folder, validation_fraction=0.25)
    crop_dataset(config, folder / "crops")
    stored(folder, config, labels=NAMES)
    return folder


def copied(data: Path, folder: Path) -> DataConfig:
    """Copy the images, crops and masks; return their data configuration."""
    for name in ("in", "masks", "crops"):
        shutil.copytree(data / name, folder / name)
    return data_config(folder, validation_fraction=0.25)


def test_images_without_a_valid_mask_are_quarantined_with_the_reason(data: Path, tmp_path: Path) -> None:
    config = copied(data, tmp_path)
    masks = tmp_path / "masks"
    (masks / "a/00.bmp").unlink()
    (masks / "b/01.bmp").write_bytes((masks / "b/01.bmp").read_bytes()[:20])
    Image.fromarray(np.zeros((9, 8), np.uint8)).save(masks / "a/02.bmp")
    (masks / "b/03.bmp").unlink()
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(masks / "b/03.png")
    with pytest.raises(ValueError, match=r"4 of 24 pairs \(16.7%\) are of no use, more than data.max_bad_fraction"):
        stored(tmp_path, config, 0.1, labels=NAMES)
    manifest, _ = stored(tmp_path, config, 0.2, labels=NAMES)
    assert (manifest["num_samples"], manifest["quarantined"]) == (20, 4)
    table = (tmp_path / "images/quarantine.csv").read_text()
    for line in (
        "a/00.png,it has no image of its name beside it",
        "b/01.png,the image beside it: damaged",
        'a/02.png,"the image beside it has 8 x 9 pixels, not 8 x 8"',
        'b/03.png,"the image beside it: label values 7, which pairs.labels does not name"',
    ):
        assert line in table, table
    assert joined(tmp_path).num_samples == 20


def test_changed_mask_rewrites_its_shard_and_changed_labels_rewrite_all(data: Path, tmp_path: Path) -> None:
    config = copied(data, tmp_path)
    before, written = stored(tmp_path, config, labels=NAMES)
    assert written == 2 and stored(tmp_path, config, labels=NAMES) == (before, 0)
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(tmp_path / "masks/a/00.bmp")
    after, written = stored(tmp_path, config, labels=NAMES)
    assert written == 1 and after["pairs"] == before["pairs"] and after["shards"] != before["shards"]
    assert stored(tmp_path, config, labels=NAMES | {"other": 9})[1] == 2
    assert stored(tmp_path, config)[1] == 2


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"labels": 1}, "labels: 1 labels; expected 2 to 256. Name each value"),
        ({"labels": {"a": 0, "b": 0}}, "labels: two labels have one value. Give each its own"),
        ({"labels": {"a": 0, "b": [1, 2, 3]}}, "some labels are numbers and some are colours"),
        ({"labels": 2, "channels": 1}, "pairs.channels is set beside pairs.labels"),
        ({"path": "nowhere"}, "pairs.path: nowhere does not exist. Give the folder"),
    ],
)
def test_invalid_labels_and_folders_are_reported_in_one_line(
    data: Path, tmp_path: Path, pairs: dict[str, Any], message: str
) -> None:
    config = data_config(data, validation_fraction=0.25)
    with pytest.raises(ValueError, match=message) as caught:
        settings = parse(ImageFilePairs, {"path": str(data / "masks")} | pairs, "pairs")
        settings.build(PairInputs(data / "crops", None, 2, None, CPU, data=config))
    assert len(str(caught.value).splitlines()) == 1


def test_two_mask_files_with_the_same_stem_are_rejected(data: Path, tmp_path: Path) -> None:
    config = copied(data, tmp_path)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "masks/a/00.png")
    with pytest.raises(ValueError, match=r"pairs.path: .*00.bmp and .*00.png differ in their suffix alone. Remove one"):
        stored(tmp_path, config, labels=NAMES)


def trained(data: Path, output: Path, steps: int = 2, system: Any = None, preview: Any = None, **train: Any) -> bytes:
    """Train on the crops and their masks; return the weights."""
    settings = {"steps": steps, "global_batch": 8, "checkpoint": {"every_steps": 1}, "validate_every_steps": 2}
    settings |= {"ema": {"rates": [0.5], "warmup": None}, "optimizer": {"type": "adamw", "lr": 0.05}} | train
    system = system or SYSTEM | {"condition": [{"type": "label"}, PAIRED]}
    stage = {"experiment": "x", "codec": {"type": "rgb"}, "system": system, "train": settings}
    stage["preview"] = {"num_samples": 3, "sampler": SAMPLER} | (preview or {})
    config = output.with_suffix(".yaml")
    config.write_text(to_yaml(stage))
    joined_sets = [data / "images" / "manifest.json"]
    training = prepare_training(config, data / "crops" / "manifest.json", None, joined_sets)
    run(training.build, training.stage.train, training.model, training.data, output, None)
    return (output / "weights.safetensors").read_bytes()


def images(weights: Path, *folders: Path, **settings: Any) -> tuple[Tensor, Any]:
    """Return the images of `sample`, drawn in two batches, and their maker."""
    model = load_model(weights)
    config = parse(SampleConfig, {"num_samples": 4, "sampler": SAMPLER} | settings, "sample")
    inputs = SamplingInputs(model, config, load_codec(model, None, CPU), load_model, embeddings=folders)
    maker = model.system.sampling().maker(inputs)
    return torch.cat([maker(slice(i, i + 2)) for i in (0, 2)]), maker


@pytest.mark.parametrize("name", ["dit", "iddpm"])
def test_training_on_masks_resumes_bit_exactly_and_samples_by_masks(data: Path, tmp_path: Path, name: str) -> None:
    unet = {"channels": 32, "multipliers": [1], "num_res_blocks": 1, "attention_resolutions": []}
    system = SYSTEM | ({} if name == "dit" else {"type": name, "network": unet})
    system |= {"condition": [{"type": "label"}, PAIRED]}
    whole = trained(data, tmp_path / "once", 4, system, grid_every_steps=2)
    assert trained(data, tmp_path / "twice", 2, system, grid_every_steps=2) != whole
    assert trained(data, tmp_path / "twice", 4, system, grid_every_steps=2) == whole
    model = load_model(tmp_path / "once")
    assert model.spec.conditions == {IMAGE: (2, 8, 8)} and model.spec.num_classes == 2
    assert (tmp_path / "once/previews").is_dir()

    folders = data / "images", data / "crops"
    held_out = joined(data, "validation")
    first, maker = images(tmp_path / "once", *folders)
    turns = np.arange(4) % held_out.num_samples
    assert maker.labels.tolist() == held_out.labels[turns].tolist()
    assert maker.described["image"]["data"] == held_out.digest and maker.described["image"]["split"] == "validation"
    later, _ = images(tmp_path / "once", *folders, first_seed=2)
    assert torch.equal(later[:2], first[2:]), "a seed has its mask"
    above = maker.pictures()["conditions"]
    assert above.size[0] == 2 * above.size[1], "four masks above four images"
    assert list((tmp_path / "once/previews").rglob("step-0000004-conditions.png"))
    guided, _ = images(tmp_path / "once", *folders, guidance={"guidance_scale": 3})
    assert not torch.equal(guided, first)

    for number in turns:  # the same masks as files, through the crop that the model was trained on
        (mask,) = held_out.gather_joined(np.array([number]))
        path = tmp_path / "asked" / f"{number:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(mask[0, 0].numpy() * 255).resize((24, 24), Image.Resampling.NEAREST).save(path)
    labels = [model.classes[label] for label in maker.labels.tolist()]
    asked, of_files = images(tmp_path / "once", small_images=str(tmp_path / "asked"), labels=labels)
    assert torch.equal(asked, first) and "split" not in of_files.described["image"]
    listed = model.system.sampling().pictures(parse(SampleConfig, {"small_images": str(tmp_path / "asked")}, "x"))
    assert [Path(path).name for path in listed] == [path.name for path in sorted((tmp_path / "asked").iterdir())]
    files = sorted((tmp_path / "asked").iterdir())
    rows: Any = [{"image": str(files[turn]), "label": label} for turn, label in zip(turns, labels, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["image,label", *(f"{row['image']},{row['label']}" for row in rows)]))
    for conditions in (rows, str(tmp_path / "rows.csv")):
        listed_in_rows, maker = images(tmp_path / "once", conditions=conditions)
        assert torch.equal(listed_in_rows, first) and maker.pictures()["conditions"].size == above.size
        assert maker.described["image"]["sha256"] and "split" not in maker.described["image"]
        settings = parse(SampleConfig, {"conditions": conditions}, "x")
        assert model.system.sampling().pictures(settings) == [row["image"] for row in rows]
        assert model.system.sampling().sources(settings) == SamplingSources()
    product, maker = images(tmp_path / "once", conditions={"label": ["a", "b"], "image": [str(files[0])]})
    assert maker.labels.tolist() == [0, 1, 0, 1] and not torch.equal(product[0], product[1])
    seen, maker = images(tmp_path / "once", *folders, conditions=[{"label": labels[0]}])
    assert torch.equal(seen[0], first[0]) and maker.described["image"]["split"] == "validation"
    with pytest.raises(ValueError, match="small_images has no labels, .* or as label in sample.conditions"):
        images(tmp_path / "once", conditions=[{"image": str(files[0])}])
    with pytest.raises(ValueError, match="sample.small_images is not set, so held-out images provide the small_images"):
        images(tmp_path / "once")


def test_previews_show_the_images_named_by_their_rows(data: Path, tmp_path: Path) -> None:
    mask = np.zeros((16, 16), np.uint8)
    mask[:8] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    rows = {"conditions": {"image": [str(tmp_path / "mask.png")], "label": ["b"]}}
    trained(data, tmp_path / "out", 2, preview=rows, grid_every_steps=2)
    (shown,) = (tmp_path / "out/previews").rglob("step-0000002-conditions.png")
    above = np.asarray(Image.open(shown).convert("L"))
    above = above[: above.shape[0] // 2]
    light = above.mean(1) > 128
    assert light.any() and not light.all() and light.argmin() > 0, "light above, dark below"
    (saved,) = (tmp_path / "out/previews").rglob("step-0000002.npz")
    assert np.load(saved)["arr_1"].tolist() == [1, 1, 1]


def test_paired_image_without_labels_is_also_a_condition(data: Path, tmp_path: Path) -> None:
    config = copied(data, tmp_path)
    stored(tmp_path, config, channels=1)
    trained(tmp_path, tmp_path / "out", system=SYSTEM | {"condition": PAIRED})
    model = load_model(tmp_path / "out")
    assert model.spec.conditions == {IMAGE: (1, 8, 8)} and model.spec.num_classes == 0
    held_out = joined(tmp_path, "validation")
    _, maker = images(tmp_path / "out", tmp_path / "images", tmp_path / "crops")
    (joined_sets,) = held_out.gather_joined(np.array([0]))
    assert torch.equal(maker.request.conditions[IMAGE][:1], from_uint8(joined_sets))


def mistake(folder: Path, condition: Any, **sections: Any) -> str:
    """Return the error message for an experiment; empty if it is valid."""
    data = {"name": "digits", "source": {"type": "digits"}, "resolution": 8, "validation_fraction": 0.2}
    experiment = {"data": data, "train": {"steps": 1}, "pairs": {"type": "images", "path": "masks"}} | sections
    experiment |= {
        "sample": {"sampler": SAMPLER} | sections.get("sample", {}),
        "preview": {"sampler": SAMPLER} | sections.get("preview", {}),
    }
    experiment["system"] = SYSTEM | {"condition": condition}
    path = folder / "mine.yaml"
    path.write_text(to_yaml({key: value for key, value in experiment.items() if value is not None}))
    try:
        load_all([path])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("condition", "sections", "message"),
    [
        ([{"type": "label"}, PAIRED], {}, ""),
        (PAIRED, {"sample": {"guidance": {"guidance_scale": 2}}}, ""),
        ({"type": "image"}, {}, "system.condition.from is required. Known: pairs, self."),
        ({"type": "image", "from": "other"}, {}, "Unknown system.condition.from 'other'. Known: self, pairs."),
        (PAIRED | {"shrink": 2}, {}, "system.condition.shrink is not a known key."),
        (PAIRED, {"pairs": None}, "pairs is missing. It needs images: add a section, such as pairs: {type: images"),
        (PAIRED, {"pairs": {"type": "images"}}, "pairs.path is unset, but data.source.type: digits has no images"),
        (PAIRED, {"pairs": {"type": "captions"}}, "but pairs.type is captions. It needs images"),
        ({"type": "label"}, {}, "nothing reads them. Leave them out, or add {type: image} to system.condition."),
        ([PAIRED, {"type": "text"}], {}, "pairs.type is images. It needs captions: add {type: captions} to the list"),
        ([PAIRED, {"type": "image", "from": "self", "gray": True}], {}, "image is named twice."),
        (PAIRED, ON_LATENTS, ""),
        (PAIRED, ON_LATENTS | {"pairs": {"type": "images", "path": "masks", "labels": 2}}, ""),
        (
            {"type": "image", "from": "self", "shrink": 2},
            ON_LATENTS | {"pairs": None},
            "made of the image itself, but codec.type is stability_vae: it is made of pixels. Leave one of the two out",
        ),
        (PAIRED, {"sample": {"small_images": {"experiment": "base"}}}, "takes images like those of pairs.path"),
        (PAIRED, {"sample": {"small_images": "nowhere"}}, "sample.small_images is nowhere, but the network takes"),
        (PAIRED, {"sample": {"keep": False}}, "but sample.small_images: validation needs them again"),
        (PAIRED, {"sample": {"conditions": [{"image": MASK}], "keep": False}}, ""),
        (PAIRED, {"preview": {"conditions": {"image": [MASK]}}}, ""),
        (PAIRED, {"sample": {"conditions": [{"image": "no.png"}]}}, "sample.conditions: no.png does not exist. Give"),
        (PAIRED, {"preview": {"conditions": [{"image": "no.png"}]}}, "preview.conditions: no.png does not exist."),
        (PAIRED, {"sample": {"conditions": [{"image": 3}]}}, "sample.conditions: image of row 0 is of type int. Give"),
        (
            [{"type": "label"}, PAIRED],
            {"sample": {"conditions": [{"image": MASK, "label": 1}, {"label": 2}]}},
            "sample.conditions: 1 of 2 rows name an image. Give one to each row, or to none.",
        ),
        (PAIRED, {"sample": {"conditions": "absent.csv"}}, "sample.conditions: absent.csv does not exist. Give a .csv"),
        (PAIRED, {"sample": {"conditions": [{"age": 3}]}}, "sample.conditions names age, which is no column of"),
        (
            PAIRED,
            {"sample": {"conditions": [{"image": MASK, "label": 1}]}},
            "sample.conditions names a label, but the network takes no classes.",
        ),
        (
            PAIRED,
            {"sample": {"conditions": [{"image": MASK}], "small_images": "."}},
            "sample.small_images is set, and sample.conditions names images. Leave one of them out.",
        ),
        (
            PAIRED,
            {"data": {"name": "digits", "source": {"type": "digits"}, "resolution": 8}},
            "sample.small_images is unset, so held-out images provide the small_images, but data has no held-out",
        ),
        (
            PAIRED,
            {
                "data": {
                    "name": "digits", "source": {"type": "digits"}, "resolution": 8, "validation_fraction": 0.2,
                    "crop": {"type": "random_resized"},
                }
            },
            "data.crop.type is random_resized, which draws its parts by the bytes of a file",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_in_one_line_before_any_work(
    tmp_path: Path, condition: Any, sections: dict[str, Any], message: str
) -> None:
    found = mistake(tmp_path, condition, **sections)
    assert (message in found if message else not found) and len(found.splitlines()) <= 1, found


def test_only_image_pairs_receive_the_crop_settings(tmp_path: Path) -> None:
    assert mistake(tmp_path, PAIRED) == ""
    ((_, experiment),) = load_all([tmp_path / "mine.yaml"]).values()
    assert dump(embed_stage(experiment, experiment.pairs))["data"] == dump(experiment.data)
    words = {"prompts": ["a"]}
    text = {"type": "captions", "captions": {"type": "table", "path": "captions.csv"}}
    assert mistake(tmp_path, {"type": "text"}, pairs=text, sample=words, preview=words) == ""
    ((_, experiment),) = load_all([tmp_path / "mine.yaml"]).values()
    assert (
        "data" not in dump(embed_stage(experiment, experiment.pairs)) and experiment.pairs.other_files == "captions.csv"
    )


def test_image_condition_is_parsed_by_type_and_from() -> None:
    for source in ({"from": "pairs"}, {"from": "self", "edges": True}):
        system = parse(AnySystem, {"type": "iddpm", "condition": {"type": "image"} | source}, "system")
        assert dump(system)["condition"]["from"] == source["from"]
        assert parse(AnySystem, dump(system), "system") == system
