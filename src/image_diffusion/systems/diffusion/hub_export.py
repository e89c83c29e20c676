"""A model that makes images for diffusers, with the code that diffusers does not have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from image_diffusion.codecs.codec import Codec
from image_diffusion.core.config import dump
from image_diffusion.core.types import EMBEDDING, TEXT, DataSpec
from image_diffusion.systems.diffusion.exported import CODEC, ExportedDiffusion
from image_diffusion.systems.given import CardUse, Model
from image_diffusion.systems.hub.folder import Network, place_of, trained, write_hub_folder

if TYPE_CHECKING:
    from image_diffusion.systems.diffusion.family import DiffusionSystem
    from image_diffusion.systems.diffusion.sampling import SampleConfig
    from image_diffusion.systems.tokens import TokensSystem


def write_images(
    system: DiffusionSystem | TokensSystem,
    model: Model,
    codec: Codec,
    usual: SampleConfig,
    exported: type[ExportedDiffusion],
    folder: Path,
) -> CardUse:
    """Write a folder with its own pipeline.py. usual: how its images are made where a call does not say. exported: what
    makes them."""
    from image_diffusion.systems.hub import image_pipeline

    packed, vae = codec.packed(), None
    config: Any = getattr(system, "network")  # noqa: B009 - each page has one of its own type
    networks = trained(model.network, config, model.spec, system.build_options)
    if packed.network is not None and hasattr(packed.network, "save_pretrained"):
        vae = packed.network
    elif packed.network is not None:
        of_codec: Any = packed.network
        networks[CODEC] = Network(packed.network, of_codec.config, of_codec.spec, {})
    described = {
        "reading": dump(system.reading),
        "codec": {"class": place_of(type(codec)), "settings": packed.settings},
        "classes": model.classes,
        "low_resolution": system.low_resolution,
        "pairs": model.pairs,
        "sample": dump(usual),
    }
    write_hub_folder(folder, exported, image_pipeline, networks, described, (type(codec),), vae)
    return CardUse("unconditional-image-generation", "DiffusionPipeline", _code(system, model.spec))


_TOLD = {TEXT: ', prompt="a photo of a dog"', EMBEDDING: ", image_embeds=embeddings"}


def _code(system: DiffusionSystem | TokensSystem, spec: DataSpec) -> str:
    words = "".join(_TOLD[name] for name in spec.conditions)
    told = words or (", class_labels=[0]" if spec.num_classes else "")
    more = ", image=small_images" if system.low_resolution else ""
    return (
        "# pip install diffusers pydantic\n"
        'pipeline = DiffusionPipeline.from_pretrained(".", custom_pipeline=".", trust_remote_code=True)\n'
        f"image = pipeline(seeds=[0]{told}{more}).images[0]"
    )
