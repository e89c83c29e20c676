"""Training objectives: functions of a batch that return one loss per example."""

from typing import Annotated

from pydantic import Field

from image_diffusion.objectives.denoising import Denoising, EdmDenoising
from image_diffusion.objectives.flow_matching import FlowMatching, MeanFlow
from image_diffusion.objectives.tokens import MaskedTokens, NextToken

Objective = Annotated[Denoising | FlowMatching | MeanFlow | EdmDenoising, Field(discriminator="type")]
"""Training objective of a system that predicts noise, on a `NoiseProcess`."""

TokenObjective = Annotated[MaskedTokens | NextToken, Field(discriminator="type")]
"""Training objective of a system that predicts tokens."""
