"""Optimizers, which turn gradients into updates: a family a file, and their names."""

from typing import Annotated

from pydantic import Field

from image_diffusion.training.optim.adam import Adam, AdamW, AdamW8bit
from image_diffusion.training.optim.lion import Lion
from image_diffusion.training.optim.muon import Muon

Optimizer = Annotated[AdamW | AdamW8bit | Adam | Muon | Lion, Field(discriminator="type")]
