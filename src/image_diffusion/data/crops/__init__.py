"""How an image becomes a square, or several. One way, one file; its name in `AnyCrop`."""

from typing import Annotated

from pydantic import Field

from image_diffusion.data.crops.adm import AdmCrop
from image_diffusion.data.crops.multi import MultiCrop
from image_diffusion.data.crops.pad import Pad
from image_diffusion.data.crops.random_resized import RandomResizedCrop
from image_diffusion.data.crops.resize import ResizeCrop

AnyCrop = Annotated[AdmCrop | ResizeCrop | Pad | MultiCrop | RandomResizedCrop, Field(discriminator="type")]
