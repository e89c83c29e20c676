"""Noise -> samples."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from image_diffusion.samplers.ancestral import Ddim, Ddpm
from image_diffusion.samplers.ode import DpmSolver, Euler, FlowMap, Heun, UniPc
from image_diffusion.samplers.sde import Sde
from image_diffusion.samplers.tokens import Autoregressive, Masked

Sampler = Annotated[Ddpm | Ddim | Euler | Heun | DpmSolver | UniPc | Sde | FlowMap, Field(discriminator="type")]

OfTokens = Annotated[Masked | Autoregressive, Field(discriminator="type")]
"""Nothing -> tokens."""
