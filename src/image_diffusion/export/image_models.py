"""A model that makes images for diffusers, with the code that diffusers does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_diffusion.codecs.base import Codec
from image_diffusion.core.config.base import Config, dump
from image_diffusion.core.types import EMBEDDING, NUMBERS, TEXT, DataSpec
from image_diffusion.export.bundle.folder import Network, place_of, trained, write_hub_folder
from image_diffusion.export.bundle.image_model import CODEC, ExportedDiffusion
from image_diffusion.export.model_card import CardUse
from image_diffusion.systems.base import Model
from image_diffusion.systems.diffusion.base import DiffusionSystem
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.interface import TrainedNetwork


@dataclass(frozen=True)
class ImageModel:
    """Description of the export of a model that makes images.

    exported: the class that samples the images. network: its configuration, with `build_options`. reading: the denoiser
    spec as plain data. usual: the default sampling settings. low_resolution: side of the small images that the network
    enlarges; None: it makes images from noise alone.
    """

    exported: type[ExportedDiffusion]
    network: Config
    build_options: Mapping[str, Any]
    reading: dict[str, Any]
    usual: SampleConfig
    low_resolution: int | None = None


def write_images(model: Model, codec: Codec, folder: Path) -> CardUse:
    """Write a diffusion model as a folder with its own pipeline.py."""
    system = model.system
    assert isinstance(system, DiffusionSystem)
    usual = system.sections["sample"].default
    assert isinstance(usual, SampleConfig)
    network: Config = getattr(system, "network")  # noqa: B009 - each page has one of its own type
    exported = ImageModel(
        ExportedDiffusion, network, system.build_options, dump(system.reading), usual, system.low_resolution
    )
    return write_image_model(exported, model, codec, folder)


def write_image_model(exported: ImageModel, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    from image_diffusion.export.bundle import image_pipeline

    packed, vae = codec.packed(), None
    networks = trained(model.network, exported.network, model.spec, exported.build_options)
    if packed.network is not None and hasattr(packed.network, "save_pretrained"):
        vae = packed.network
    elif packed.network is not None:
        of_codec: Any = packed.network
        networks[CODEC] = Network(packed.network, of_codec.config, of_codec.spec, {})
    described = {
        "reading": exported.reading,
        "codec": {"class": place_of(type(codec)), "settings": packed.settings},
        "classes": model.classes,
        **({"untrained": list(model.untrained)} if model.untrained else {}),
        "low_resolution": exported.low_resolution,
        "pairs": model.pairs,
        "sample": dump(exported.usual),
    }
    write_hub_folder(folder, exported.exported, image_pipeline, networks, described, (type(codec),), vae)
    code = _code(model.spec, exported.low_resolution)
    return CardUse("unconditional-image-generation", "DiffusionPipeline", code)


_TOLD = {
    TEXT: ', prompt="a photo of a dog"',
    EMBEDDING: ", image_embeds=embeddings",
    NUMBERS: ", numbers=[{NAME: VALUE}]",
}


def _code(spec: DataSpec, low_resolution: int | None) -> str:
    words = "".join(_TOLD[name] for name in spec.conditions)
    condition = (", class_labels=[0]" if spec.num_classes else "") + words
    more = ", image=small_images" if low_resolution else ""
    return (
        "# pip install diffusers pydantic\n"
        'pipeline = DiffusionPipeline.from_pretrained(".", custom_pipeline=".", trust_remote_code=True)\n'
        f"image = pipeline(seeds=[0]{condition}{more}).images[0]"
    )
