"""Captions -> numbers. One text encoder, one file; its name in `TextEncoderConfig`."""

from typing import Annotated

from pydantic import Field

from image_diffusion.codecs.text.auto import AutoText
from image_diffusion.codecs.text.clip import ClipText
from image_diffusion.codecs.text.hashed import HashedText
from image_diffusion.codecs.text.siglip import SiglipText
from image_diffusion.codecs.text.t5 import T5Text

TextEncoderConfig = Annotated[HashedText | ClipText | SiglipText | T5Text | AutoText, Field(discriminator="type")]
