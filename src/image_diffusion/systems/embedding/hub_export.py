"""A prior for diffusers, with the code that diffusers does not have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from image_diffusion.core.config import dump
from image_diffusion.systems.embedding.exported import ExportedPrior
from image_diffusion.systems.given import CardUse, Model
from image_diffusion.systems.hub.folder import trained, write_hub_folder

if TYPE_CHECKING:
    from image_diffusion.systems.prior import PriorSystem

_CODE = (
    "# pip install diffusers pydantic\n"
    'pipeline = DiffusionPipeline.from_pretrained(".", custom_pipeline=".", trust_remote_code=True)\n'
    "image_embeds = pipeline(text_embed)  # float [N, dim] -> [N, dim]"
)


def write_prior(system: PriorSystem, model: Model, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    from image_diffusion.systems.hub import embedding_pipeline

    networks = trained(model.network, system.network, model.spec, {})
    described = {"reading": dump(system.reading(system.scale(model.spec)))}
    write_hub_folder(folder, ExportedPrior, embedding_pipeline, networks, described)
    return CardUse("feature-extraction", "DiffusionPipeline", _CODE)
