"""One page per system: which parts it is made of. One system, one file; its name in `System`."""

from typing import Annotated

from pydantic import Field

from image_diffusion.systems.autoencoder import AutoencoderSystem
from image_diffusion.systems.dit import DiTSystem
from image_diffusion.systems.dvae import DVAESystem
from image_diffusion.systems.iddpm import IddpmSystem
from image_diffusion.systems.prior import PriorSystem
from image_diffusion.systems.rin import RinSystem

System = Annotated[
    DiTSystem | IddpmSystem | RinSystem | AutoencoderSystem | DVAESystem | PriorSystem, Field(discriminator="type")
]

CodecSystem = AutoencoderSystem | DVAESystem
"""The systems that are trained on pixels to be the codec of others; they make no samples."""
