"""Codecs: pixels <-> the space a network works in. Each codec has its own file and an entry in `CodecConfig`."""

from typing import Annotated

from pydantic import Field

from image_diffusion.codecs.diffusers import Diffusers, StabilityVae
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.codecs.tokens import TokensOf
from image_diffusion.codecs.trained import Trained

CodecConfig = Annotated[Rgb | StabilityVae | Diffusers | Trained | TokensOf, Field(discriminator="type")]
