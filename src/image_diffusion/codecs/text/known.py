"""The text encoder that captions were encoded by, rebuilt from what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from image_diffusion.codecs.text import TextEncoderConfig
from image_diffusion.codecs.text.encoder import TextEncoder
from image_diffusion.core.config import parse


def encoder_of(pairs: Mapping[str, Any], device: torch.device) -> TextEncoder:
    """The text encoder of captions, rebuilt. pairs: what their manifest says of it.

    Raises ValueError where what is loaded now is another one.
    """
    config = parse(TextEncoderConfig, pairs["encoder"], "model.json: pairs: encoder")
    encoder: TextEncoder = config.build(device, pairs["num_tokens"])
    if encoder.identity != pairs["text"]:
        raise ValueError(
            f"The captions were encoded by {pairs['text']}, but the text encoder is now {encoder.identity}. Restore "
            f"the one that encoded them, or train again."
        )
    return encoder
