"""The handwritten digits that come with scikit-learn: data for a demo and for tests, with nothing to download."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field

from image_diffusion.core.files import Stamp
from image_diffusion.data.sources.listing import FewFiles, Item, Listing


class Digits(FewFiles):
    """1,797 handwritten digits of 8 x 8 pixels (Alpaydin and Kaynak 1998), enlarged to 32 x 32; ten classes."""

    type: Literal["digits"] = "digits"
    """The digits embedded in scikit-learn."""
    only: Annotated[list[Annotated[int, Field(ge=0, le=9)]], Field(min_length=1)] | None = None
    """Some of the digits; unset: all ten."""

    def listing(self) -> Listing:
        """Every digit, labelled with itself."""
        classes = self.known_classes()
        items = [
            Item(f"{label}/{i:04d}.png", classes.index(str(label)), (i,))
            for i, label in enumerate(_digits().target)
            if str(label) in classes
        ]
        return Listing(sorted(items, key=lambda item: item.name), classes, [], 0)

    def known_classes(self) -> list[str]:
        """The digits."""
        return [str(digit) for digit in sorted(set(range(10) if self.only is None else self.only))]

    def read(self, item: Item) -> bytes:
        """One digit as a grey PNG of 32 x 32 pixels, scaled from 0 … 16 to 0 … 255 and enlarged bicubically."""
        from PIL import Image  # not for those who only ask whether the source has changed

        pixels = (_digits().images[int(item.address[0])] * (255.0 / 16.0)).round().astype("uint8")
        buffer = io.BytesIO()
        Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC).save(buffer, "png", compress_level=1)
        return buffer.getvalue()

    def captions_beside(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """There are none. Raises ValueError."""
        raise ValueError("The embedded digits have no captions. Set pairs.captions.type to classes or table.")

    def files(self) -> dict[str, tuple[str, Stamp]]:
        """None: the digits are part of scikit-learn."""
        return {}


@lru_cache(maxsize=1)
def _digits() -> Any:
    from sklearn.datasets import load_digits  # half a second: not for those who bring their own images

    return load_digits()
