"""One page per system: which parts it is made of. One system, one file; its name in `AnySystem`."""

from typing import Annotated, get_args

from pydantic import Field

from image_diffusion.systems.autoencoder import AutoencoderSystem
from image_diffusion.systems.dit import DiTSystem
from image_diffusion.systems.dvae import DVAESystem
from image_diffusion.systems.iddpm import IddpmSystem
from image_diffusion.systems.prior import PriorSystem
from image_diffusion.systems.rin import RinSystem
from image_diffusion.systems.system import System
from image_diffusion.systems.tokens import TokensSystem

AnySystem = Annotated[
    DiTSystem | IddpmSystem | RinSystem | AutoencoderSystem | DVAESystem | PriorSystem | TokensSystem,
    Field(discriminator="type"),
]

SYSTEMS: tuple[type[System], ...] = get_args(get_args(AnySystem)[0])
"""The same, to be gone through."""
