"""Systems, one module each, which defines the parts of the system. `AnySystem` lists all systems."""

from typing import Annotated, get_args

from pydantic import Field

from image_diffusion.systems.base import System
from image_diffusion.systems.codec.autoencoder import AutoencoderSystem
from image_diffusion.systems.codec.dvae import DVAESystem
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.iddpm import IddpmSystem
from image_diffusion.systems.diffusion.rin import RinSystem
from image_diffusion.systems.prior.prior import PriorSystem
from image_diffusion.systems.tokens.tokens import TokensSystem

AnySystem = Annotated[
    DiTSystem | IddpmSystem | RinSystem | AutoencoderSystem | DVAESystem | PriorSystem | TokensSystem,
    Field(discriminator="type"),
]

SYSTEMS: tuple[type[System], ...] = get_args(get_args(AnySystem)[0])
"""All types of system, as a tuple to iterate over."""
