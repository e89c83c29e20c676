"""A model of tokens for diffusers, with the code that diffusers does not have."""

from __future__ import annotations

from pathlib import Path

from image_diffusion.codecs.base import Codec
from image_diffusion.core.config.base import dump
from image_diffusion.export.bundle.token_image_model import ExportedTokenModel
from image_diffusion.export.image_models import ImageModel, write_image_model
from image_diffusion.export.model_card import CardUse
from image_diffusion.systems.base import Model
from image_diffusion.systems.tokens.generator import TokenSampleConfig, fitted
from image_diffusion.systems.tokens.tokens import TokensSystem


def write_token_model(model: Model, codec: Codec, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    system = model.system
    assert isinstance(system, TokensSystem)
    exported = ImageModel(
        ExportedTokenModel,
        system.network,
        system.build_options,
        dump(system.reading),
        fitted(TokenSampleConfig(), system.objective.causal),
    )
    return write_image_model(exported, model, codec, folder)
