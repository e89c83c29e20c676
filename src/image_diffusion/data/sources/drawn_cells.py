"""Cells under a fluorescence microscope, drawn by code: images of five channels of 12 bits, with nothing to download.

Three phenotypes are the classes. The channels of an image belong together: nuclei lie inside their cells, the membrane
follows the outline of the cytoplasm, granules lie in the cytoplasm only, unless the cell is infected. Signals add up
over a dark level, with shot noise, as a 12-bit camera counts them.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from image_diffusion.data.sources.base import Item, Listing, WithoutFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHANNELS = ("nuclei", "cytoplasm", "membrane", "granules", "mitochondria")
CLASSES = ("dividing", "infected", "resting")
SIDE = 48
"""Pixels along an edge of an image."""
_DARK, _WHITE = 100, 4095  # counts of a camera of 12 bits without light, and at most


class DrawnCells(WithoutFiles):
    """Cells drawn by code: uint16 arrays of 5 x 48 x 48 with 12 bits, in three classes."""

    type: Literal["drawn_cells"] = "drawn_cells"
    """Cells of five channels of 12 bits, drawn by code."""
    num_images: int = Field(3000, ge=3, le=100_000)
    """Number of images."""
    no_captions: ClassVar[str] = "The drawn cells have no captions. Set pairs.captions.type to classes or table."

    def listing(self) -> Listing:
        """Return every image; the classes take turns."""
        items = [
            Item(f"{CLASSES[number % 3]}/{number:06d}.npy", number % 3, (number,)) for number in range(self.num_images)
        ]
        return Listing(sorted(items, key=lambda item: item.name), list(CLASSES), [])

    def known_classes(self) -> list[str]:
        return list(CLASSES)

    def read(self, item: Item) -> bytes:
        """Return one image as a `.npy`, uint16 [5, 48, 48]."""
        import numpy as np

        buffer = io.BytesIO()
        np.save(buffer, drawn(int(item.address[0])))
        return buffer.getvalue()


def drawn(number: int) -> NDArray[Any]:
    """Draw an image, uint16 [5, 48, 48]; its class is `number % 3`."""
    import numpy as np

    draw, phenotype = np.random.default_rng([20261126, number]), CLASSES[number % 3]
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float64)

    def ellipse(row: float, column: float, axes: tuple[float, float], angle: float) -> NDArray[Any]:
        """Return the distance from a centre in units of the ellipse's radius, [48, 48]."""
        along = (x - column) * np.cos(angle) + (y - row) * np.sin(angle)
        across = (y - row) * np.cos(angle) - (x - column) * np.sin(angle)
        distance: NDArray[Any] = np.hypot(along / axes[0], across / axes[1])
        return distance

    row, column = draw.uniform(20, 28, 2)
    angle, long = draw.uniform(0, np.pi), draw.uniform(14, 18)
    body = ellipse(row, column, (long, long * draw.uniform(0.75, 0.95)), angle)
    inside = 1 / (1 + np.exp((body - 1) * 12))
    shift = (long * 0.4 if phenotype == "dividing" else 0.0) * np.array([np.sin(angle), np.cos(angle)])
    radius = long * (0.26 if phenotype == "dividing" else 0.38)
    nuclei = np.zeros_like(body)
    for side in (-1, 1) if phenotype == "dividing" else (0,):
        distance = ellipse(row + side * shift[0], column + side * shift[1], (radius, radius * 0.85), angle)
        nuclei = np.maximum(nuclei, 1 / (1 + np.exp((distance - 1) * 10)))
    granules = np.zeros_like(body)
    for _ in range(26 if phenotype == "infected" else 7):
        at, turn = long * 0.85 * np.sqrt(draw.uniform()), draw.uniform(0, 2 * np.pi)
        away = np.hypot(y - row - at * np.sin(turn), x - column - at * np.cos(turn))
        granules = np.maximum(granules, np.exp(-((away / 1.2) ** 2)))
    granules *= inside * (1 if phenotype == "infected" else 1 - nuclei)
    membrane = np.exp(-(((body - 1) / 0.1) ** 2))
    mitochondria = (
        inside * (1 - nuclei) * np.exp(-(((body - 0.6) / 0.15) ** 2)) * (0.6 + 0.4 * np.cos(0.9 * x + 0.6 * y))
    )
    light = np.stack([nuclei, inside * (1 - 0.6 * nuclei), membrane, granules, mitochondria])
    gains = np.array([2600, 1200, 1800, 3300, 2200]) * draw.uniform(0.8, 1.1, 5)
    counts = _DARK + draw.poisson(np.clip(light, 0, 1) * gains[:, None, None]) + draw.normal(0, 4, light.shape)
    image: NDArray[Any] = counts.round().clip(0, _WHITE).astype(np.uint16)
    return image
