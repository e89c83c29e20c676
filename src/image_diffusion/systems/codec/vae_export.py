"""A trained KL autoencoder for diffusers."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from image_diffusion.core.exhausted import writing
from image_diffusion.networks.autoencoder import Autoencoder
from image_diffusion.systems.given import CardUse, Model


def write_vae(model: Model, folder: Path) -> CardUse:
    """Write a folder that `AutoencoderKL.from_pretrained` loads, whole or not at all."""
    assert isinstance(model.network, Autoencoder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        written = Path(temporary) / folder.name
        with writing(folder):
            model.network.vae.save_pretrained(written)
        if folder.exists():
            shutil.rmtree(folder)
        written.rename(folder)
    return CardUse("image-to-image", "AutoencoderKL", 'vae = AutoencoderKL.from_pretrained(".")')
