"""A trained KL autoencoder for diffusers."""

from __future__ import annotations

from pathlib import Path

from image_diffusion.core.files import atomic_folder
from image_diffusion.networks.autoencoder import Autoencoder
from image_diffusion.systems.given import CardUse, Model


def write_vae(model: Model, folder: Path) -> CardUse:
    """Write a folder that `AutoencoderKL.from_pretrained` loads, whole or not at all."""
    assert isinstance(model.network, Autoencoder)
    with atomic_folder(folder) as written:
        model.network.vae.save_pretrained(written)
    return CardUse("image-to-image", "AutoencoderKL", 'vae = AutoencoderKL.from_pretrained(".")')
