"""A discrete VAE for diffusers, with the code that diffusers does not have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from image_diffusion.systems.codec.exported import ExportedTokens
from image_diffusion.systems.given import CardUse, Model
from image_diffusion.systems.hub.folder import trained, write_hub_folder

if TYPE_CHECKING:
    from image_diffusion.systems.dvae import DVAESystem

_CODE = (
    "# pip install diffusers pydantic\n"
    'pipeline = DiffusionPipeline.from_pretrained(".", custom_pipeline=".", trust_remote_code=True)\n'
    "tokens = pipeline.encode([image])  # PIL -> int64 [1, h, w]\n"
    "image = pipeline.decode(tokens)[0]"
)


def write_tokens(system: DVAESystem, model: Model, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    from image_diffusion.systems.hub import token_pipeline

    write_hub_folder(folder, ExportedTokens, token_pipeline, trained(model.network, system.network, model.spec, {}), {})
    return CardUse("image-to-image", "DiffusionPipeline", _CODE)
