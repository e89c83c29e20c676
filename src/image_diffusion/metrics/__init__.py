"""Two sets of images or tensors -> numbers."""

from typing import Annotated

from pydantic import Field

from image_diffusion.metrics.detector import InPipe
from image_diffusion.metrics.dinov2 import Dinov2
from image_diffusion.metrics.encoders import Torchvision, Transformers
from image_diffusion.metrics.inception import Inception

DetectorConfig = Annotated[InPipe | Inception | Dinov2 | Torchvision | Transformers, Field(discriminator="type")]
