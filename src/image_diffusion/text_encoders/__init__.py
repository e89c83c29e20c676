"""Text encoders of captions. Each text encoder has its own file and an entry in `TextEncoderConfig`."""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field

from image_diffusion.core.config.base import parse
from image_diffusion.text_encoders.base import TextEncoder
from image_diffusion.text_encoders.hashing import HashedText
from image_diffusion.text_encoders.pretrained import AutoText, ClipText, SiglipText, T5Text

TextEncoderConfig = Annotated[HashedText | ClipText | SiglipText | T5Text | AutoText, Field(discriminator="type")]


def encoder_of(pairs: Mapping[str, Any], device: torch.device) -> TextEncoder:
    """Rebuild the text encoder that encoded the captions. pairs: from their manifest.

    Raises ValueError if the loaded encoder has another identity.
    """
    config = parse(TextEncoderConfig, pairs["encoder"], "model.json: pairs: encoder")
    encoder: TextEncoder = config.build(device, pairs["num_tokens"])
    if encoder.identity != pairs["text"]:
        raise ValueError(
            f"The captions were encoded by {pairs['text']}, but the text encoder is now {encoder.identity}. Restore "
            f"the one that encoded them, or train again."
        )
    return encoder
