"""The mathematics of noise; no networks here."""

from typing import Annotated

from pydantic import Field

from image_diffusion.process.continuous import Continuous
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.edm import Edm
from image_diffusion.process.flow import Flow

Process = Annotated[Discrete | Continuous | Flow | Edm, Field(discriminator="type")]
"""A process; each builds a `NoiseProcess`."""
