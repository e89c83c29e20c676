"""Read the images of a source: one by one, or tar by tar."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, runtime_checkable

from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import Item

Image = tuple[Item, Callable[[], bytes]]
"""An image, and the function that reads its bytes or raises OSError."""


@runtime_checkable
class InTars(Protocol):
    """Source whose items are tars: the content of a tar is known when it has been fetched."""

    def images(self, item: Item) -> Iterator[Image]:
        """Yield the images of a tar, to be read one after another. Raises ValueError when it cannot be fetched."""
        ...

    def state(self, item: Item) -> str:
        """Return a text that changes with the images, as far as is known before the tar is fetched."""
        ...


def images_of(source: Source, item: Item) -> Iterator[Image]:
    """Yield the images of an item of a source: itself, or those of a tar. Raises ValueError for a tar that cannot be
    fetched."""
    if isinstance(source, InTars):
        yield from source.images(item)
    else:
        yield item, partial(source.read, item)


def state_of(source: Source, item: Item) -> str:
    """Return the sha256 of an image, empty when it cannot be read; for a tar, its known state."""
    if isinstance(source, InTars):
        return source.state(item)
    try:
        return hashlib.sha256(source.read(item)).hexdigest()
    except OSError:
        return ""
