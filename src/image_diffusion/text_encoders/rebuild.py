"""Text encoder that captions were encoded by, rebuilt from its description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from image_diffusion.core.config.base import parse
from image_diffusion.text_encoders import TextEncoderConfig
from image_diffusion.text_encoders.base import TextEncoder


def encoder_of(pairs: Mapping[str, Any], device: torch.device) -> TextEncoder:
    """Rebuild the text encoder of captions. pairs: the content of their manifest.

    Raises ValueError if the encoder loaded now is another one.
    """
    config = parse(TextEncoderConfig, pairs["encoder"], "model.json: pairs: encoder")
    encoder: TextEncoder = config.build(device, pairs["num_tokens"])
    if encoder.identity != pairs["text"]:
        raise ValueError(
            f"The captions were encoded by {pairs['text']}, but the text encoder is now {encoder.identity}. Restore "
            f"the one that encoded them, or train again."
        )
    return encoder
