"""Rectangular images: crops, positions, networks, augmentation and warm starts with a height and a width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from image_diffusion.codecs.base import latent_spec
from image_diffusion.core.config.base import dump
from image_diffusion.core.files.atomic import digest, read_json, write_json
from image_diffusion.core.resolution import divided, resolution_of, size_text
from image_diffusion.core.types import DataSpec
from image_diffusion.data.augment import Affine, Augment, warp
from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.centre_crop import centre_crop, pillow_crop
from image_diffusion.data.crop.image import crop_image, quiet_pillow
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded.captions import BesideCaptions, CaptionedCrops
from image_diffusion.data.encoded.pairs import Splits
from image_diffusion.data.quality.duplicates import grey
from image_diffusion.data.sources.scikit_digits import PaintedDigits
from image_diffusion.metrics.features.classifier_training import shifted
from image_diffusion.networks.autoencoder import AutoencoderConfig
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.networks.dvae import DVAEConfig
from image_diffusion.networks.rin import RinConfig
from image_diffusion.networks.token_transformer import TokenTransformerConfig
from image_diffusion.networks.unet import UNetConfig
from image_diffusion.nn.positions import grid_positions, rotary_angles
from image_diffusion.process.tiles import Tiles
from image_diffusion.systems.diffusion.conditions.image import ImageCondition
from image_diffusion.systems.pairs.contrastive import FORMAT, ContrastiveTraining, _CaptionedImages, trained_towers
from image_diffusion.systems.warm_start import _interpolated

SIZE = 16, 24
SPEC = DataSpec(channels=3, resolution=SIZE)


def data(resolution: Any, **crop: Any) -> DataConfig:
    return DataConfig.model_validate(
        {"name": "x", "source": {"type": "digits"}, "resolution": resolution, **({"crop": crop} if crop else {})}
    )


def gradient(width: int, height: int) -> Image.Image:
    """Return an image whose red grows from left to right and green from top to bottom."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[:, :, 0] = np.linspace(0, 255, width).astype(np.uint8)
    pixels[:, :, 1] = np.linspace(0, 255, height).astype(np.uint8)[:, None]
    return Image.fromarray(pixels)


def test_square_resolutions_have_one_notation() -> None:
    assert (data(16).resolution, data([16, 16]).resolution, data([16, 24]).resolution) == (16, 16, SIZE)
    assert (data(16).folder, data([16, 24]).folder) == ("x-16", "x-16x24")
    assert data([16, 16]).crop_identity() == data(16).crop_identity()
    assert data([16, 24]).crop_identity()["resolution"] == [16, 24]
    assert (size_text(16), size_text(SIZE), resolution_of(4, 4), divided(SIZE, 8), divided(SIZE, 16)) == (
        "16 x 16",
        "16 x 24",
        4,
        (2, 3),
        None,
    )


@pytest.mark.parametrize("resolution", [0, 4097, [16], [], [16, 24, 3], "16", [16, 0], 16.5, True])
def test_invalid_resolutions_are_rejected(resolution: Any) -> None:
    with pytest.raises(ValueError, match=r"\[48, 96\]"):
        data(resolution)


def covering(image: Image.Image, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Return ADM's crop of a rectangle by its formula."""
    while image.width >= 2 * columns and image.height >= 2 * rows:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(rows / image.height, columns / image.width)
    scaled = np.asarray(
        image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    )
    top, left = (scaled.shape[0] - rows) // 2, (scaled.shape[1] - columns) // 2
    return scaled[top : top + rows, left : left + columns]


@pytest.mark.parametrize(
    "size", [(40, 40), (97, 41), (41, 97), (24, 16), (7, 90), (200, 130), (25, 17), (27, 80), (40, 150)]
)
@pytest.mark.parametrize("resolution", [(16, 24), (24, 16), (5, 31), (48, 16), (64, 22), (90, 7)])
def test_the_centre_crop_follows_the_formula(size: tuple[int, int], resolution: tuple[int, int]) -> None:
    rng = np.random.default_rng(size)
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    expected = covering(image, *resolution)
    assert expected.shape == (*resolution, 3)
    assert (centre_crop(image, resolution) == expected).all()
    assert (np.asarray(pillow_crop(image, resolution)) == expected).all()


@pytest.mark.parametrize("kind", ["adm", "resize", "pad", "multi", "random_resized"])
@pytest.mark.parametrize("size", [(60, 20), (20, 60), (48, 32), (33, 31)])
def test_every_crop_has_the_requested_shape(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    gradient(*size).save(tmp_path / "image.png")
    with quiet_pillow():
        crops = crop_image((tmp_path / "image.png").read_bytes(), data([16, 24], type=kind)).crops
    assert crops and {crop.shape for crop in crops} == {(3, *SIZE)}
    if kind != "random_resized":
        red, green = crops[0][0].astype(int), crops[0][1].astype(int)
        inside = (red < 255) & (crops[0][2] == 0)  # bars are white
        assert (np.diff(red, axis=1)[inside[:, 1:] & inside[:, :-1]] >= -2).all()
        assert (np.diff(green, axis=0)[inside[1:] & inside[:-1]] >= -2).all()


def test_padding_keeps_the_whole_image(tmp_path: Path) -> None:
    gradient(40, 40).save(tmp_path / "image.png")
    with quiet_pillow():
        (crop,) = crop_image((tmp_path / "image.png").read_bytes(), data([16, 24], type="pad")).crops
    bars = (crop == 255).all(0).all(0)
    assert bars.sum() == 8 and crop[0][:, ~bars].min() < 12 and crop[0][:, ~bars].max() > 243


def test_multiple_crops_are_cut_along_the_longer_side(tmp_path: Path) -> None:
    for size, expected in (((48, 16), 2), ((24, 48), 3), ((24, 16), 1)):
        gradient(*size).save(tmp_path / "image.png")
        with quiet_pillow():
            crops = crop_image((tmp_path / "image.png").read_bytes(), data([16, 24], type="multi")).crops
        assert len(crops) == expected


def test_position_embeddings_depend_on_row_and_column_only() -> None:
    square, wide = grid_positions(16, 5).view(5, 5, 16), grid_positions(16, (2, 5)).view(2, 5, 16)
    assert torch.equal(square[:2], wide)
    cpu = torch.device("cpu")
    turned, tall = rotary_angles(8, 5, cpu).view(5, 5, 4), rotary_angles(8, (5, 2), cpu).view(5, 2, 4)
    assert torch.equal(turned[:, :2], tall)


def test_every_image_network_accepts_rectangles() -> None:
    x, t = torch.randn(2, 3, *SIZE), torch.rand(2)
    dit = DiTConfig(depth=1, width=16, num_heads=2, patch=4, rope=True).build(SPEC)
    rin = RinConfig(
        depth=1, width=16, latent_width=16, num_latents=4, latent_depth=1, num_heads=2, head_width=8, patch=4
    )
    unet = UNetConfig(channels=32, multipliers=(1, 1), num_res_blocks=1, attention_resolutions=(8,), num_heads=2)
    for network in (dit, rin.build(SPEC), unet.build(SPEC)):
        assert network.eval()(x, t).shape == x.shape
    dvae = DVAEConfig(num_tokens=8, codebook_dim=4, num_layers=2, num_resnet_blocks=0, hidden_dim=8)
    assert dvae.build(SPEC).indices(x).shape == (2, *dvae.logits_shape(SPEC)[1:]) == (2, 4, 6)
    sizes = AutoencoderConfig(block_channels=(8, 8), layers_per_block=1, latent_channels=2, norm_groups=4)
    sizes.check(SPEC)
    assert sizes.latent_shape(SPEC) == (2, 8, 12) and latent_spec(SPEC, 2, 2).resolution == (8, 12)
    tokens = TokenTransformerConfig(depth=1, width=16, num_heads=2).build(DataSpec(channels=8, resolution=(4, 6)))
    assert tokens(torch.zeros(2, 24, dtype=torch.int64)).shape == (2, 24, 8)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: DiTConfig(depth=1, width=16, num_heads=2, patch=16).build(SPEC), "16 x 24 pixels.*divisor of 8"),
        (lambda: UNetConfig(channels=32, multipliers=(1, 1, 1, 1, 1)).build(SPEC), "16 x 24 pixels cannot be halved"),
        (lambda: ImageCondition(**{"from": "self", "shrink": 3}).spec(SPEC, None), "shrink 3 does not divide"),
        (lambda: DVAEConfig(num_layers=4).build(SPEC), "multiples"),
        (lambda: latent_spec(SPEC, 4, 16), r"data.resolution is \[16, 24\], .* multiple of 16 for each side"),
        (lambda: Augment(transpose=True).check("crops", 3, SIZE), "rectangles, 16 x 24"),
    ],
)  # fmt: skip
def test_incompatible_rectangles_are_rejected(build: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()


def test_a_turned_rectangle_is_not_sheared() -> None:
    rows, columns = torch.meshgrid(torch.arange(32.0) - 15.5, torch.arange(48.0) - 23.5, indexing="ij")
    disc = torch.exp(-(rows**2 + columns**2) / 50)[None, None]
    zero = torch.zeros(1, dtype=torch.float64)
    for angle in (0.5, 1.0, torch.pi / 2):
        turn = Affine(zero, zero + angle, zero, zero, zero, zero)
        near = (rows**2 + columns**2 < 196)[None, None]  # beyond that mirrored edges are visible
        torch.testing.assert_close(warp(disc, turn)[near], disc[near], rtol=0, atol=1e-2)
    noise = torch.rand(1, 3, 32, 48) * 2 - 1
    half = Affine(zero, zero + torch.pi, zero, zero, zero, zero)
    torch.testing.assert_close(warp(noise, half), noise.flip(2, 3), rtol=0, atol=1e-4)


def test_shifts_are_mirrored_at_the_edges_of_a_rectangle() -> None:
    image = torch.arange(6).view(1, 1, 2, 3)
    assert shifted(image, torch.tensor([[0], [1]]))[0, 0].tolist() == [[1, 0, 1], [4, 3, 4]]
    assert shifted(image, torch.tensor([[1], [0]]))[0, 0].tolist() == [[3, 4, 5], [0, 1, 2]]


def test_tiles_of_rectangles_are_joined() -> None:
    assert Tiles(rows=2, columns=3, overlap=0.5).shape((4, 6)) == (6, 12)


def test_positions_are_interpolated_in_both_directions() -> None:
    table = grid_positions(16, (8, 8))[None]
    wide = _interpolated(table, (32, 32), 32, (16, 32)).view(4, 8, 16)
    column = slice(0, 8)  # the first half of the channels encodes the column
    torch.testing.assert_close(wide[1, :, column], table.view(8, 8, 16)[3, :, column], rtol=0, atol=1e-4)
    assert not torch.allclose(wide[1, :, 8:], table.view(8, 8, 16)[1, :, 8:], atol=0.05)


@pytest.mark.parametrize("size", [(16, 48), (48, 16), (48, 48)])
def test_image_tower_follows_the_longer_side_and_older_wide_towers_are_rebuilt(
    size: tuple[int, int], tmp_path: Path
) -> None:
    source, splits = PaintedDigits(num_images=40), Splits(train=0.5, validation=0.25, test=0.25)
    config = {"name": "x", "source": source, "resolution": size, "num_shards": 1, "validation_fraction": 0.1}
    crop_dataset(DataConfig.model_validate(config), tmp_path / "crops")
    crops = CaptionedCrops(tmp_path / "crops", BesideCaptions(), source)
    training = ContrastiveTraining(epochs=0.1, batch_size=4)

    def trained() -> dict[str, Any]:
        images, _ = trained_towers(crops, splits, training, 0, tmp_path, torch.device("cpu"))
        assert images._network.resolution == 64
        return dict(read_json(tmp_path / "towers.json"))

    towers = trained()
    pairs = _CaptionedImages.from_crops(crops, splits).digest
    before = digest({"format": FORMAT, "pairs": pairs, "training": dump(training)})
    assert (towers["made_from"] == before) == (size[1] <= size[0])
    write_json(tmp_path / "towers.json", towers | {"made_from": before, "kept": True})
    assert ("kept" in trained()) == (size[1] <= size[0])


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (256, 512), (64, 32), (40, 72)])
def test_grey_thumbnail_covers_the_whole_crop(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1, *shape), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(pixels[0]).resize((32, 32), Image.Resampling.BOX))
    assert grey(pixels).shape == (32, 32)
    assert np.abs(grey(pixels).astype(int) - expected).max() <= 1
