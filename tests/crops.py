"""Crops for tests: this package's next to guided-diffusion's formula, and a small data set of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.image import crop_image, quiet_pillow
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.reader import open_shards


def original(image: Image.Image, size: int, mode: str = "RGB") -> np.ndarray:
    """Crop as guided-diffusion does: resize the whole image once, then cut out the centre."""
    image = image.convert(mode)
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), resample=Image.Resampling.BOX)
    scale = size / min(image.size)
    new_size = (round(image.width * scale), round(image.height * scale))
    pixels = np.asarray(image.resize(new_size, resample=Image.Resampling.BICUBIC))
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size]


def crop(data: bytes, resolution: int) -> np.ndarray:
    """Return this package's crop as [H, W, C]."""
    config = DataConfig(name="x", source={"type": "digits"}, resolution=resolution)  # type: ignore[arg-type]
    with quiet_pillow():
        return crop_image(data, config).crops[0].transpose(1, 2, 0)


def crops_of_twelve(tmp_path: Path, num_shards: int = 1) -> Path:
    """Return a folder with crops of twelve images of three classes, 16 x 16."""
    generator = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / f"in/{'abc'[number % 3]}/{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    source: Any = {"type": "folder", "path": str(tmp_path / "in")}
    crop_dataset(DataConfig(name="x", source=source, resolution=16, num_shards=num_shards), tmp_path / "crops")
    return tmp_path / "crops"


def crops_of(output: Path, source: dict[str, Any], processes: int = 1) -> dict[bytes, str | None]:
    """Write the crops of a source, 6 x 6, into `output`. Return them and the class of each."""
    config = DataConfig.model_validate({"name": "x", "source": source, "resolution": 6, "num_shards": 2})
    crop_dataset(config, output, processes=processes)
    found = open_shards(output, "all")
    pixels = found.gather(np.arange(found.num_samples)).permute(0, 2, 3, 1).numpy()
    names = [found.classes[label] if found.classes else None for label in found.labels]
    return {row.tobytes(): name for row, name in zip(pixels, names, strict=True)}
