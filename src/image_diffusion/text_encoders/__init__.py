"""Captions -> numbers. One text encoder, one file; its name in `TextEncoderConfig`."""

from typing import Annotated

from pydantic import Field

from image_diffusion.text_encoders.hashing import HashedText
from image_diffusion.text_encoders.pretrained import AutoText, ClipText, SiglipText, T5Text

TextEncoderConfig = Annotated[HashedText | ClipText | SiglipText | T5Text | AutoText, Field(discriminator="type")]
