"""The handwritten digits that come with scikit-learn, as they are, painted, or slanted by numbers: data with nothing to
download.

Painted ones vary in the colours of ink and ground, slant and size, and a caption names them all; a mask says where the
ink is. The attributes of an image can be measured from its pixels again (`measured`), and some combinations never
occur: each digit lacks the ink of one colour.

Slanted ones vary in the numbers slant and size, the data of a condition on numbers. These can be measured in the pixels
again, too (`measured_numbers`), and a range of slants never occurs (`is_held_out`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from image_diffusion.data.sources.base import Item, Listing, RowSource, WithoutFiles

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


class Digits(WithoutFiles):
    """1,797 handwritten digits of 8 x 8 pixels (Alpaydin and Kaynak 1998), enlarged to 32 x 32; ten classes."""

    type: Literal["digits"] = "digits"
    """The digits embedded in scikit-learn."""
    only: Annotated[list[Annotated[int, Field(ge=0, le=9)]], Field(min_length=1)] | None = None
    """Some of the digits; unset: all ten."""

    no_captions: ClassVar[str] = "The embedded digits have no captions. Set pairs.captions.type to classes or table."

    def listing(self) -> Listing:
        """Return every digit, labelled with itself."""
        classes = self.known_classes()
        items = [
            Item(f"{label}/{i:04d}.png", classes.index(str(label)), (i,))
            for i, label in enumerate(digits().target)
            if str(label) in classes
        ]
        return Listing(sorted(items, key=lambda item: item.name), classes, [])

    def known_classes(self) -> list[str]:
        return [str(digit) for digit in sorted(set(range(10) if self.only is None else self.only))]

    def read(self, item: Item) -> bytes:
        """Return one digit as a grey PNG of 32 x 32 pixels, scaled from 0 … 16 to 0 … 255 and enlarged bicubically."""
        from PIL import Image  # not for those who only ask whether the source has changed

        pixels = (digits().images[int(item.address[0])] * (255.0 / 16.0)).round().astype("uint8")
        return as_png(Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BICUBIC))


DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
INKS = {
    "black": (20, 20, 20),
    "red": (200, 30, 40),
    "green": (20, 140, 60),
    "blue": (30, 60, 200),
    "purple": (140, 40, 170),
}
GROUNDS = {"white": (250, 250, 250), "yellow": (250, 225, 110), "grey": (175, 175, 175)}
SLANTS = {"upright": 0.0, "slanted": 0.5}
"""Pixels by which a stroke leans to the right for each pixel that it rises."""
SIZES = {"small": 0.5, "large": 0.85}
"""Height of a digit, as a share of the image's."""
SIDE = 32
_BORDER = 2  # pixels along each edge that are ground
_INKED = 16  # pixels that are surely ink
_MIXED = 0.5  # how much ink a pixel of a digit has at least


@dataclass(frozen=True)
class Attributes:
    """Attributes that a caption names, by word; None where it does not."""

    digit: str | None
    ink: str | None
    ground: str | None
    slant: str | None
    size: str | None

    @property
    def is_held_out(self) -> bool:
        """True if this digit is never painted in this ink."""
        return self.digit is not None and self.ink == _missing_ink(DIGITS.index(self.digit))


class PaintedDigits(WithoutFiles):
    """Handwritten digits (Alpaydin and Kaynak 1998) of 32 x 32 pixels in 5 inks on 3 grounds, upright or slanted, small
    or large. Each has two captions: "a large slanted seven in blue on white", and the same without its size."""

    type: Literal["painted_digits"] = "painted_digits"
    """The digits embedded in scikit-learn, in colours, with captions."""
    num_images: int = Field(6000, ge=1, le=99_999)
    """Number of images."""

    def listing(self) -> Listing:
        items = [Item(name, int(name[0]), (i,)) for i, name in enumerate(image_names(self.num_images))]
        return Listing(sorted(items, key=lambda item: item.name), list(DIGITS), [])

    def known_classes(self) -> list[str]:
        return list(DIGITS)

    def read(self, item: Item) -> bytes:
        number = int(item.address[0])
        return as_png(painted(number, attributes_of(number)))

    def read_captions(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """Return the two captions of each image, by its name."""
        return {name: captions_of(attributes_of(i)) for i, name in enumerate(image_names(self.num_images))}

    def images_beside(self) -> dict[str, Callable[[], bytes]]:
        """Return the function that makes the mask of each image as a PNG, by the name of the image: 1 where there is
        ink, 0 elsewhere."""
        return {name: partial(_mask, i) for i, name in enumerate(image_names(self.num_images))}


def _mask(number: int) -> bytes:
    return as_png((amount_of_ink(number, attributes_of(number)) > _MIXED).astype("uint8"))


def attributes_of(number: int) -> Attributes:
    """Return the attributes of image `number`: the digit of that number, the rest by a hash of it."""
    digit = int(digits().target[number % len(digits().target)])
    drawn = hashlib.sha256(f"painted/{number}".encode()).digest()
    inks = [ink for ink in INKS if ink != _missing_ink(digit)]

    def one_of(words: Any, byte: int) -> str:
        return str(list(words)[drawn[byte] % len(words)])

    return Attributes(DIGITS[digit], one_of(inks, 0), one_of(GROUNDS, 1), one_of(SLANTS, 2), one_of(SIZES, 3))


def captions_of(shown: Attributes) -> list[str]:
    """Return a caption that names everything, and one that leaves the size open."""
    rest = f"{shown.slant} {shown.digit} in {shown.ink} on {shown.ground}"
    return [f"a {shown.size} {rest}", f"a{'n' * (shown.slant == 'upright')} {rest}"]


def attributes_in(caption: str) -> Attributes:
    """Return the attributes that a caption names."""
    words = re.findall(r"[a-z]+", caption.lower())

    def named(known: Any) -> str | None:
        return next((word for word in words if word in known), None)

    return Attributes(named(DIGITS), named(INKS), named(GROUNDS), named(SLANTS), named(SIZES))


def painted(number: int, shown: Attributes) -> NDArray[np.uint8]:
    """Paint the handwriting of image `number` with these attributes, all of them named: uint8 [32, 32, 3]."""
    import numpy as np

    assert shown.ink and shown.ground
    amount = amount_of_ink(number, shown)[..., None]
    ink, ground = np.array(INKS[shown.ink], float), np.array(GROUNDS[shown.ground], float)
    colours: NDArray[np.uint8] = (ground + (ink - ground) * amount).round().astype(np.uint8)
    return colours


def amount_of_ink(number: int, shown: Attributes) -> NDArray[np.float64]:
    """Draw the handwriting of image `number` with this slant and size: the amount of ink from 0 to 1, [32, 32]."""
    import numpy as np

    assert shown.slant and shown.size
    whole = handwriting(number)
    own = lean(np.asarray(whole, dtype=np.float64) / 255)
    moved = rewritten(whole, SIZES[shown.size], SLANTS[shown.slant] - own)
    amount: NDArray[np.float64] = np.asarray(moved, dtype=np.float64) / 255
    return amount


def handwriting(number: int) -> Image:
    """Return the digit that image `number` is made from, [32, 32], white on black."""
    import numpy as np
    from PIL import Image

    pixels = (digits().images[number % len(digits().images)] * (255.0 / 16.0)).astype(np.uint8)
    return Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def rewritten(whole: Image, scale: float, skew: float) -> Image:
    """Scale handwriting [32, 32] and let its strokes lean by `skew` more pixels for each pixel that they rise."""
    from PIL import Image

    middle = (SIDE - 1) / 2
    # From a pixel of the result to one of the digit: undo the lean, then the scale, both about the middle.
    matrix = (1 / scale, skew / scale, middle - (1 + skew) * middle / scale, 0, 1 / scale, middle - middle / scale)
    return whole.transform((SIDE, SIDE), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)


def as_png(pixels: Image | NDArray[np.uint8]) -> bytes:
    """Return an image, or its pixels, as a PNG."""
    from PIL import Image  # not for those who only ask whether the source has changed

    buffer = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(buffer, "png", compress_level=1)
    return buffer.getvalue()


def image_names(count: int) -> list[str]:
    """Return the names of so many images, by the digit that each is made from."""
    labels = digits().target
    return [f"{labels[i % len(labels)]}/{i:05d}.png" for i in range(count)]


def measured(image: NDArray[np.uint8]) -> Attributes:
    """Measure the attributes of an image [32, 32, 3] from its pixels alone; they do not show which digit it is.

    Ground: the colour along the edges. Ink: that of the pixels furthest from it. Size: how high the digit stands.
    Slant: how far its ink leans, the covariance of column and height over the variance of height.
    """
    import numpy as np

    colours = image.astype(np.float64)
    edge = np.ones(colours.shape[:2], dtype=bool)
    edge[_BORDER:-_BORDER, _BORDER:-_BORDER] = False
    ground = np.median(colours[edge], axis=0)
    away = np.linalg.norm(colours - ground, axis=2)
    inked = np.argsort(away.ravel(), kind="stable")[-_INKED:]
    ink = np.median(colours.reshape(-1, 3)[inked], axis=0)
    direction = ink - ground
    amount = np.clip((colours - ground) @ direction / max(float(direction @ direction), 1.0), 0, 1)
    rows = np.flatnonzero((amount > _MIXED).any(axis=1))
    height = (rows[-1] - rows[0] + 1) / SIDE if len(rows) else 0.0
    between = (min(SIZES.values()) + max(SIZES.values())) / 2, (min(SLANTS.values()) + max(SLANTS.values())) / 2
    return Attributes(
        None,
        _nearest(ink, INKS),
        _nearest(ground, GROUNDS),
        "slanted" if lean(amount) > between[1] else "upright",
        "large" if height > between[0] else "small",
    )


def lean(amount: NDArray[np.float64]) -> float:
    """Measure the pixels to the right for each pixel up, of so much ink at each pixel [H, W]."""
    import numpy as np

    amount = np.where(amount > 0.2, amount, 0)
    total = max(float(amount.sum()), 1e-9)
    y, x = np.mgrid[: amount.shape[0], : amount.shape[1]]
    x, y = x - (amount * x).sum() / total, (amount * y).sum() / total - y
    return float((amount * x * y).sum() / max(float((amount * y * y).sum()), 1e-9))


def _nearest(colour: NDArray[np.float64], known: dict[str, tuple[int, int, int]]) -> str:
    return min(known, key=lambda name: sum((a - b) ** 2 for a, b in zip(colour.tolist(), known[name], strict=True)))


def _missing_ink(digit: int) -> str:
    return list(INKS)[digit % len(INKS)]


class Bitmaps(NamedTuple):
    """images: [1797, 8, 8] of 0 to 16. target: the digit of each, [1797]."""

    images: NDArray[np.float64]
    target: NDArray[np.int64]


@lru_cache(maxsize=1)
def digits() -> Bitmaps:
    """Return what `sklearn.datasets.load_digits` returns, without the import of scikit-learn and pandas: 2 CPU seconds
    in each process that crops."""
    import numpy as np

    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.submodule_search_locations
    table = np.loadtxt(Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"), delimiter=",")
    return Bitmaps(table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(int))


COLUMNS = ("slant", "size")
"""Names of the numbers of an image. slant: pixels by which a stroke leans to the right for each pixel that it rises.
size: height of the digit, as a share of the image's."""
RANGES = {"slant": (-0.5, 0.5), "size": (0.45, 0.75)}
HELD_OUT = (0.1, 0.3)
"""Slants that no image has."""
_FAINT = 0.1  # of the most ink in an image


class SlantedDigits(WithoutFiles, RowSource):
    """Handwritten digits (Alpaydin and Kaynak 1998) of 32 x 32 pixels, slanted and sized by numbers that differ from
    image to image: the columns slant and size."""

    type: Literal["slanted_digits"] = "slanted_digits"
    """The digits embedded in scikit-learn, slanted and sized by the numbers slant and size."""
    num_images: int = Field(6000, ge=1, le=99_999)
    """Number of images."""

    def listing(self) -> Listing:
        items = [Item(name, int(name[0]), (i,)) for i, name in enumerate(image_names(self.num_images))]
        return Listing(sorted(items, key=lambda item: item.name), self.known_classes(), [])

    def known_classes(self) -> list[str]:
        return [str(digit) for digit in range(10)]

    def read(self, item: Item) -> bytes:
        number = int(item.address[0])
        return as_png(drawn(number, **numbers_of(number)))

    def rows(self, columns: tuple[str, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield the name of each image and some of its numbers. Raises ValueError for other columns."""
        if unknown := next((name for name in columns if name not in COLUMNS), None):
            raise ValueError(f"The slanted digits have no column '{unknown}'. Known: {', '.join(COLUMNS)}.")
        for i, name in enumerate(image_names(self.num_images)):
            numbers = numbers_of(i)
            yield name, tuple(numbers[column] for column in columns)


def numbers_of(number: int) -> dict[str, float]:
    """Return the slant and the size of image `number`, by a hash of it; both are uniform, beside what is held out."""
    drawn_bytes = hashlib.sha256(f"slanted/{number}".encode()).digest()
    shares = [int.from_bytes(drawn_bytes[start : start + 4], "big") / 2**32 for start in (0, 4)]
    (left, right), gap = RANGES["slant"], HELD_OUT[1] - HELD_OUT[0]
    slant = left + shares[0] * (right - left - gap)
    low, high = RANGES["size"]
    return {
        "slant": round(slant if slant < HELD_OUT[0] else slant + gap, 4),
        "size": round(low + shares[1] * (high - low), 4),
    }


def is_held_out(slant: float) -> bool:
    """Return True for a slant that no image has."""
    return HELD_OUT[0] < slant < HELD_OUT[1]


def drawn(number: int, slant: float, size: float) -> NDArray[np.uint8]:
    """Draw the handwriting of image `number` with this slant and size: uint8 [32, 32], white on black."""
    import numpy as np

    whole = handwriting(number)
    own = measured_numbers(np.asarray(whole))
    return np.asarray(rewritten(whole, size / own["size"], slant - own["slant"]))


def measured_numbers(image: NDArray[np.uint8]) -> dict[str, float]:
    """Measure slant and size in the pixels of an image [H, W] or [H, W, C], white on black.

    Slant: how far the ink leans, the covariance of column and height over the variance of height. Size: the sum over
    the rows of the most ink in each, as a share of the height. Faint ink counts as none.
    """
    import numpy as np

    amount = image.astype(np.float64) / 255
    amount = amount if amount.ndim == 2 else amount.mean(axis=2)
    most = float(amount.max()) or 1.0
    inked = np.where(amount > _FAINT * most, amount / most, 0)
    return {"slant": lean(amount), "size": float(inked.max(axis=1).sum()) / len(amount)}
