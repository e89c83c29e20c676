"""Trained codecs for diffusers: a KL autoencoder, and a discrete VAE with the code that diffusers does not have."""

from __future__ import annotations

from pathlib import Path

from image_diffusion.codecs.base import Codec
from image_diffusion.core.files.atomic import atomic_folder
from image_diffusion.export.bundle.codec_model import ExportedTokens
from image_diffusion.export.bundle.folder import trained, write_hub_folder
from image_diffusion.export.model_card import PIPELINE, CardUse
from image_diffusion.networks.autoencoder import Autoencoder
from image_diffusion.systems.codec.autoencoder import AutoencoderSystem
from image_diffusion.systems.codec.dvae import DVAESystem
from image_diffusion.systems.interface import TrainedNetwork

_CODE = f"{PIPELINE}tokens = pipeline.encode([image])  # PIL -> int64 [1, h, w]\nimage = pipeline.decode(tokens)[0]"


def write_dvae(system: DVAESystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    from image_diffusion.export.bundle import token_pipeline

    networks = trained(model.network, system.network, model.spec, {})
    write_hub_folder(folder, ExportedTokens, token_pipeline, networks, {})
    return CardUse("image-to-image", "DiffusionPipeline", _CODE)


def write_vae(system: AutoencoderSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Atomically write a folder that `AutoencoderKL.from_pretrained` loads."""
    assert isinstance(model.network, Autoencoder)
    with atomic_folder(folder) as written:
        model.network.vae.save_pretrained(written)
    return CardUse("image-to-image", "AutoencoderKL", 'vae = AutoencoderKL.from_pretrained(".")')
