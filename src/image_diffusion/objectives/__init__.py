"""A batch -> one loss per example."""

from typing import Annotated

from pydantic import Field

from image_diffusion.objectives.denoising import Denoising
from image_diffusion.objectives.edm import EdmDenoising
from image_diffusion.objectives.flow_matching import FlowMatching
from image_diffusion.objectives.masked_tokens import MaskedTokens
from image_diffusion.objectives.mean_flow import MeanFlow
from image_diffusion.objectives.next_token import NextToken

Objective = Annotated[Denoising | FlowMatching | MeanFlow | EdmDenoising, Field(discriminator="type")]
"""What a system that predicts noise is trained to do on a `NoiseProcess`."""

TokenObjective = Annotated[MaskedTokens | NextToken, Field(discriminator="type")]
"""What a system that predicts tokens is trained to do."""
