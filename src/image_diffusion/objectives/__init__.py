"""A batch -> one loss per example."""

from typing import Annotated

from pydantic import Field

from image_diffusion.objectives.denoising import Denoising
from image_diffusion.objectives.edm import EdmDenoising
from image_diffusion.objectives.flow_matching import FlowMatching
from image_diffusion.objectives.mean_flow import MeanFlow

Objective = Annotated[Denoising | FlowMatching | MeanFlow | EdmDenoising, Field(discriminator="type")]
"""What a system that predicts noise is trained to do on a `NoiseProcess`."""
