"""Near duplicates: which changed copies of pictures are found, which pairs of a set, and what a large set costs.

    OMP_NUM_THREADS=1 python tests/bench/bench_duplicates.py --images cifar10-20k.tar --side 32 --mixtures 1281167

The changed copies of the first pictures are compared with all of those and with each other; then all pictures are, as
they are. `--mixtures` compares so many means of two of them: stand-ins for a larger set, alike by chance as often as
pictures are. Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import io
import resource
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from image_diffusion.core.process import command
from image_diffusion.data.crop.centre_crop import centre_crop
from image_diffusion.data.quality.duplicates import grey, image_views, near_duplicates

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from photographs import CHANGES, views


def read(path: Path) -> list[Image.Image]:
    with tarfile.open(path) as tar:
        files = [tar.extractfile(member) for member in tar if member.isfile() and not member.name.endswith(".cls")]
        return [Image.open(io.BytesIO(file.read())).convert("RGB") for file in files if file]


def cropped(image: Image.Image, side: int) -> NDArray[np.uint8]:
    return np.ascontiguousarray(np.asarray(centre_crop(image, side)).transpose(2, 0, 1))


def copies(pictures: list[Image.Image], side: int) -> None:
    originals = [cropped(picture, side) for picture in pictures]
    texts = [views(crop) for crop in originals]
    print(f"| {len(pictures):,} pictures at {side} | Copies found | Other pairs of one picture |\n| --- | --: | --: |")
    for name, change in CHANGES.items():
        crops = [*originals, *(cropped(change(picture), side) for picture in pictures)]
        pairs = near_duplicates([*texts, *map(views, crops[len(originals) :])], crops.__getitem__)
        assert pairs is not None
        found = sum(second - first == len(pictures) for first, second, _ in pairs)
        print(f"| {name} | {found / len(pictures):.1%} | {len(pairs) - found} |", flush=True)


def many(greys: NDArray[np.uint8], count: int) -> None:
    draw = np.random.default_rng(0)
    parents = draw.integers(len(greys), size=(count, 2), dtype=np.int32)

    def mixture(places: NDArray[np.int32]) -> NDArray[np.uint8]:
        return (greys[places].astype(np.uint16).sum(-3) // 2).astype(np.uint8)

    texts = [
        text for start in range(0, count, 10_000) for text in image_views(mixture(parents[start : start + 10_000]))
    ]
    compare(f"{count:,} mixtures", texts, lambda place: mixture(parents[place])[None])


def compare(title: str, texts: list[str], crop: Callable[[int], NDArray[np.uint8]]) -> None:
    began = time.process_time()
    pairs = near_duplicates(texts, crop)
    took, most = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    told = "too alike to tell" if pairs is None else f"{len(pairs):,}"
    print(f"| {title} | {told} | {took:,.0f} | {most:.1f} GiB |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="a tar of pictures")
    parser.add_argument("--side", type=int, required=True, help="of the crops, in pixels")
    parser.add_argument("--copied", type=int, default=500, help="pictures of which changed copies are made (500)")
    parser.add_argument("--mixtures", type=int, action="append", default=[], help="as many; may be given several times")
    arguments = parser.parse_args()
    pictures = read(arguments.images)
    copies(pictures[: arguments.copied], arguments.side)
    crops = [cropped(picture, arguments.side) for picture in pictures]
    print("\n| Compared | Pairs | CPU s | Most memory |\n| --- | --: | --: | --: |")
    compare(f"{len(crops):,} pictures", [views(crop) for crop in crops], crops.__getitem__)
    greys = np.stack([grey(crop) for crop in crops])
    for count in arguments.mixtures:
        many(greys, count)


if __name__ == "__main__":
    command.run(main)
