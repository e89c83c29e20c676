"""Contact sheets and grids show the right images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image_diffusion.core.pictures import grid_columns, image_grid
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.quality.contact_sheets import reconstruction_sheet, write_sheets


def fill(folder: Path, classes: int, mode: str = "L") -> None:
    """Write plain squares, three per class, of grey value 10 * class + number."""
    for label in range(classes):
        for number in range(3):
            path = folder / f"{label:02d}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 10 * label + number).convert(mode).save(path)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_a_contact_sheet_has_a_row_a_class(tmp_path: Path, channels: int) -> None:
    fill(tmp_path / "in", 3, "LA" if channels in (2, 4) else "L")
    source = {"type": "folder", "path": str(tmp_path / "in")}
    data = {"name": "x", "source": source, "resolution": 8, "num_shards": 2, "channels": channels}
    done = crop_dataset(DataConfig.model_validate(data), tmp_path / "out")
    sheet, histograms = write_sheets(tmp_path / "out", done.manifest, done.records)
    pixels = np.asarray(Image.open(sheet))
    row = 96 + 2 + 14  # a tile, the gap and the line of text above
    assert pixels.shape == (3 * row, 3 * 98, 3)
    for label in range(3):
        shown = {int(pixels[label * row + 60, column * 98 + 48, 0]) for column in range(3)}
        assert shown == {10 * label, 10 * label + 1, 10 * label + 2}
    before = sheet.read_bytes(), histograms.read_bytes()
    write_sheets(tmp_path / "out", done.manifest, done.records)
    assert (sheet.read_bytes(), histograms.read_bytes()) == before


def test_contact_sheet_limits_rows_of_classes_and_wraps_unlabelled_images(tmp_path: Path) -> None:
    fill(tmp_path / "in", 25)
    source = {"type": "folder", "path": str(tmp_path / "in")}
    for classes, rows, line in (("folders", 20, 14), ("none", 7, 0)):
        data = {"name": "x", "source": {**source, "classes": classes}, "resolution": 8, "num_shards": 2}
        done = crop_dataset(DataConfig.model_validate(data), tmp_path / classes)
        sheet = Image.open(write_sheets(tmp_path / classes, done.manifest, done.records)[0])
        assert sheet.height == rows * (98 + line)


def test_a_reconstruction_sheet_shows_image_decoded_and_difference(tmp_path: Path) -> None:
    images = np.full((2, 3, 8, 8), 100, dtype=np.uint8)
    decoded = images.copy()
    decoded[1] = 90
    reconstruction_sheet(images, decoded, tmp_path / "sheet.png")
    pixels = np.asarray(Image.open(tmp_path / "sheet.png"))
    rows = [pixels[14 + i * (128 + 2 + 14) + 64] for i in range(3)]
    assert [int(row[64, 0]) for row in rows] == [100, 100, 0]
    assert [int(row[130 + 64, 0]) for row in rows] == [100, 90, 40]


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(("count", "columns"), [(7, 3), (12, 4), (6, 6), (5, 1)])
def test_grid_equals_torchvision_make_grid(channels: int, count: int, columns: int) -> None:
    from torchvision.utils import make_grid

    images = torch.randint(0, 256, (count, channels, 20, 30), dtype=torch.uint8)
    enlarged = images.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    theirs = make_grid(enlarged, nrow=columns, padding=2, pad_value=128)[:channels, 2:, 2:].permute(1, 2, 0)
    assert (np.asarray(image_grid(images, columns)) == theirs.squeeze(2).numpy()).all()


@pytest.mark.parametrize(
    ("images", "classes", "columns"), [(100, 10, 10), (100, 2, 10), (24, 3, 6), (12, 12, 12), (50, 40, 8), (9, 0, 3)]
)
def test_grid_is_nearly_square_with_one_class_per_column(images: int, classes: int, columns: int) -> None:
    assert grid_columns(images, classes) == columns


def test_pictures_show_letters_of_other_languages() -> None:
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    first, second = (image_grid(images, 1, titles=[text]).tobytes() for text in ("B\u00e4ume", "B\u20acume"))
    assert first != second  # a font without these letters draws the same box for both
