"""A folder of odd images: which are read, which are refused and why, and where another reader sees other pixels.

    python tests/bench/bench_formats.py --images Pillow/Tests/images

The images are not part of the project; those of Pillow's own tests are a checkout away (Tests/images, 1,000 files). The
second reader is torchvision, for the formats that it decodes.
"""

from __future__ import annotations

import argparse
import io
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_image

from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.array_files import BadImage
from image_diffusion.data.crop.image import crop_image, quiet_pillow

RESOLUTION = 64
DIFFERENT = 2
"""Levels of 255 by which two readers may differ: they round differently."""


def second_reader(data: bytes) -> bytes | None:
    """Return an image as torchvision decodes it, on white, as PNG; None if it cannot decode it."""
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        pixels = decode_image(encoded, ImageReadMode.RGB_ALPHA, apply_exif_orientation=True)
    except RuntimeError:
        return None
    pixels = pixels if pixels.ndim == 3 else pixels[0]  # an animation: its first image
    pixels = pixels if pixels.dtype == torch.uint8 else (pixels.to(torch.int32) >> 8).to(torch.uint8)
    image = Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())).convert("RGBA")
    buffer = io.BytesIO()
    Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB").save(buffer, "png")
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="a folder; its folders are searched too")
    arguments = parser.parse_args()
    config = DataConfig(name="x", source={"type": "digits"}, resolution=RESOLUTION)  # type: ignore[arg-type]
    flags: Counter[str] = Counter()
    refused: dict[str, list[str]] = {}
    different: list[str] = []
    read = compared = 0
    paths = sorted(path for path in arguments.images.rglob("*") if path.is_file())
    for path in paths:
        name, data = str(path.relative_to(arguments.images)), path.read_bytes()
        with quiet_pillow():
            try:
                crop = crop_image(data, config)
            except (BadImage, ValueError) as error:
                refused.setdefault(str(error).split(":")[0].split(";")[0], []).append(name)
                continue
            read += 1
            flags.update(crop.flags)
            other = second_reader(data)
            if other is None:
                continue
            compared += 1
            change = np.abs(crop_image(other, config).crops[0].astype(int) - crop.crops[0])
            if change.max() > DIFFERENT:
                kind = f"{crop.format} {crop.mode} {' '.join(crop.flags)}".strip()
                different.append(f"{name} ({kind}): {change.max()} at most, {change.mean():.1f} in the mean")
    print(f"{len(paths):,} files: {read:,} read, {len(paths) - read:,} refused")
    print("flags: " + ", ".join(f"{flag} {count:,}" for flag, count in flags.most_common()))
    for reason, names in sorted(refused.items(), key=lambda each: -len(each[1])):
        print(f"  {len(names):>4} {reason}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")
    print(
        f"{compared:,} of those read are decoded by torchvision as well; {len(different):,} of them differ by more than"
    )
    print(f"{DIFFERENT} of 255 levels:")
    print("\n".join(f"  {line}" for line in different))


if __name__ == "__main__":
    main()
