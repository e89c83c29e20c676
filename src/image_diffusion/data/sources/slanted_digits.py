"""Handwritten digits that are slanted and sized by numbers, which can be measured in the pixels again: data for a
condition on numbers, with nothing to download. A range of slants never occurs (`is_held_out`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from image_diffusion.data.sources.base import Item, Listing, RowSource, WithoutFiles
from image_diffusion.data.sources.scikit_digits import as_png, handwriting, image_names, lean, rewritten

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
