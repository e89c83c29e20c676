"""Metrics: two sets of images or tensors -> numbers."""

from typing import Annotated

from pydantic import Field

from image_diffusion.metrics.features.classifier import InPipe
from image_diffusion.metrics.features.pretrained import Dinov2, Inception, Torchvision, Transformers

DetectorConfig = Annotated[InPipe | Inception | Dinov2 | Torchvision | Transformers, Field(discriminator="type")]
