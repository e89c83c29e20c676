"""What turns gradients into updates: an optimizer a file, and their names."""

from typing import Annotated

from pydantic import Field

from image_diffusion.training.optimizers.adam import Adam, AdamW
from image_diffusion.training.optimizers.lamb import Lamb
from image_diffusion.training.optimizers.lion import Lion
from image_diffusion.training.optimizers.muon import Muon

Optimizer = Annotated[AdamW | Adam | Muon | Lion | Lamb, Field(discriminator="type")]
