"""Methods that cut one or more crops from an image. Each method has its own file and an entry in `AnyCrop`."""

from typing import Annotated

from pydantic import Field

from image_diffusion.data.crop.adm import AdmCrop
from image_diffusion.data.crop.multi import MultiCrop
from image_diffusion.data.crop.pad import Pad
from image_diffusion.data.crop.random_resized import RandomResizedCrop
from image_diffusion.data.crop.resize import ResizeCrop

AnyCrop = Annotated[AdmCrop | ResizeCrop | Pad | MultiCrop | RandomResizedCrop, Field(discriminator="type")]
