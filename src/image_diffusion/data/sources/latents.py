"""What every source of latents shares: others have encoded the images, and none of those is here to be cropped."""

from __future__ import annotations

import hashlib
import io
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from image_diffusion.core.config import Config
from image_diffusion.data.sources.listing import Found, Item, Listing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

UNIT = "latent"
"""What an item of such a source is, in the singular."""


@dataclass(frozen=True)
class Encoded:
    """One image as others have encoded it, unscaled.

    arrays: of the image, and of its mirror image where there is one; each [k, c, h, w], mean and standard deviation, or
    with k = 1 the latent alone. sha256: of what was read.
    """

    arrays: Sequence[NDArray[np.generic]]
    sha256: str


class LatentSource(Config):
    """Latents in place of images. One layout, one file; its name in `Source`."""

    type: str
    """Its name."""
    path: str = Field(min_length=1)
    """Where the latents lie."""

    has_mirror_images: ClassVar[bool] = False
    """Whether the mirror image of each image has been encoded too."""
    num_moments: ClassVar[Literal[1, 2]] = 1
    """2: mean and standard deviation; 1: the latent alone."""
    pixels: ClassVar[Literal["signed", "unit"]] = "signed"
    """What the autoencoder was given: pixels in [-1, 1], or in [0, 1]."""

    @abstractmethod
    def listing(self) -> Listing:
        """Every encoded image, sorted by name, its class the number that the files give. Raises ValueError for files
        that are missing, cut short, or do not fit together."""

    @abstractmethod
    def found(self) -> Iterator[Found]:
        """The files the latents come from, group by group. Raises ValueError when there are none."""

    @abstractmethod
    def encoded(self, item: Item) -> Encoded:
        """One of them. Raises ValueError naming the file that cannot be read or holds something else."""

    def settings(self) -> dict[str, object]:
        """What else decides the numbers that `encoded` gives."""
        return {}

    def known_classes(self) -> list[str] | None:
        """None: they are known when the files have been read."""
        return None

    def read(self, item: Item) -> bytes:
        """There are no images. Raises OSError."""
        raise OSError(f"{item.name} is a latent, not an image")

    def captions_beside(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """There are no images. Raises ValueError."""
        raise ValueError("data.source holds latents: there are no images beside which captions could lie.")


def array_in(data: bytes, where: str) -> NDArray[np.generic]:
    """What a `.npy` file holds. where: it lies. Raises ValueError for anything else."""
    import numpy as np  # here: asking whether a source has changed loads none of it

    try:
        found: NDArray[np.generic] = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        told = " ".join(str(error).split())
        raise ValueError(f"{where} is damaged or cut short: {told}. Copy it again.") from None
    return found


def sha256_of(*parts: bytes) -> str:
    """Of bytes that stand one after another."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


def listed(labels: Mapping[str, int] | None, addresses: Mapping[str, tuple[str | int, ...]], where: str) -> Listing:
    """The items by name, where there are labels with those as their classes, which keep their numbers. where: they
    come from. Raises ValueError for a negative one, and where there are no items."""
    if not addresses:
        raise ValueError(f"data.source.path: {where} holds no latents. Give the folder or file that the tool wrote.")
    if labels is None:
        return Listing([Item(name, None, addresses[name]) for name in sorted(addresses)], [], [], 0, UNIT)
    if wrong := next((name for name in sorted(addresses) if labels[name] < 0), None):
        raise ValueError(f"{where}: the class of {wrong} is {labels[wrong]}. Classes are numbered from 0.")
    classes = [str(number) for number in range(max(labels[name] for name in addresses) + 1)]
    return Listing([Item(name, labels[name], addresses[name]) for name in sorted(addresses)], classes, [], 0, UNIT)
