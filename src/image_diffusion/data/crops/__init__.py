"""How an image becomes a square. One way, one file; its name in `AnyCrop`."""

from typing import Annotated

from pydantic import Field

from image_diffusion.data.crops.adm import AdmCrop
from image_diffusion.data.crops.pad import Pad
from image_diffusion.data.crops.resize import ResizeCrop

AnyCrop = Annotated[AdmCrop | ResizeCrop | Pad, Field(discriminator="type")]
