"""How the images of a source are read: one by one, or tar by tar."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, runtime_checkable

from image_diffusion.data.sources import Source
from image_diffusion.data.sources.listing import Item

Image = tuple[Item, Callable[[], bytes]]
"""An image, and what reads its bytes or raises OSError."""


@runtime_checkable
class InTars(Protocol):
    """A source whose items are tars: what one holds is known when it has been fetched."""

    def images(self, item: Item) -> Iterator[Image]:
        """The images of a tar, to be read one after another. Raises ValueError when it cannot be had."""
        ...

    def state(self, item: Item) -> str:
        """What decides its images, as far as it is known before it is fetched."""
        ...


def images_of(source: Source, item: Item) -> Iterator[Image]:
    """The images of an item of a source: itself, or those of a tar. Raises ValueError for a tar that cannot be had."""
    if isinstance(source, InTars):
        yield from source.images(item)
    else:
        yield item, partial(source.read, item)


def state_of(source: Source, item: Item) -> str:
    """The sha256 of an image, empty when it cannot be read; of a tar what is known of it."""
    if isinstance(source, InTars):
        return source.state(item)
    try:
        return hashlib.sha256(source.read(item)).hexdigest()
    except OSError:
        return ""
