"""Weights trained by other projects, as systems: the readers for each type of system."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from image_diffusion.foreign.diffusion import read_dit, read_iddpm, read_rin
from image_diffusion.foreign.dvae import read_dvae
from image_diffusion.foreign.prior import read_dalle2_prior, read_prior_transformer
from image_diffusion.foreign.weights import Described, ForeignWeights, Reader
from image_diffusion.systems.base import System, name_of
from image_diffusion.systems.codec.dvae import DVAESystem
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.iddpm import IddpmSystem
from image_diffusion.systems.diffusion.rin import RinSystem
from image_diffusion.systems.prior.prior import PriorSystem

READERS: dict[type[System], tuple[Reader, ...]] = {
    DiTSystem: (read_dit,),
    IddpmSystem: (read_iddpm,),
    RinSystem: (read_rin,),
    DVAESystem: (read_dvae,),
    PriorSystem: (read_prior_transformer, read_dalle2_prior),
}
"""Readers by type of system, in the order in which they are tried. A type without an entry reads no foreign weights."""


def read_weights(content: Mapping[str, Any], path: Path, codec: str, described: Described) -> ForeignWeights | None:
    """Read foreign weights with the first `Reader` that recognises them; None if none does. Raises ValueError as the
    readers do, and for incomplete weights."""
    for system, readers in READERS.items():
        for read in readers:
            try:
                result = read(content, path, codec, described)
            except (KeyError, IndexError, AttributeError, TypeError) as error:
                what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                raise ValueError(
                    f"{path} looks like weights of a system of type {name_of(system)}, but is incomplete: {what}. "
                    f"Use a complete file."
                ) from None
            if result is not None:
                return result
    return None
