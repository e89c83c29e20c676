"""Tiny random autoencoders of diffusers, of every class that is a codec. Images are 3 x 32 x 32."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

_CONVOLUTIONS: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "mid_block_add_attention": False,
}
SHAPES = {"kl4": (4, 2), "kl16": (16, 2), "flux2": (16, 4), "dc": (8, 4), "rae": (64, 16), "vq": (4, 2), "tiny": (4, 4)}
"""Channels and downsampling of each."""


def write_autoencoder(name: str, folder: Path) -> Any:
    """Write one of `SHAPES` as diffusers does, and return it. Its scaling factors differ from all published ones."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    vae = _built(name).eval()
    vae.save_pretrained(folder)
    return vae


def _built(name: str) -> Any:
    if name == "kl4":
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        return AutoencoderKL(**_CONVOLUTIONS, latent_channels=4, scaling_factor=0.25)
    if name == "sd":  # the shape of Stable Diffusion 1's: one latent pixel for 8 pixels along an edge
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
        return AutoencoderKL(**_CONVOLUTIONS | blocks | {"block_out_channels": (4, 4, 4, 4)}, latent_channels=4)
    if name == "kl16":
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        return AutoencoderKL(
            **_CONVOLUTIONS, latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False,
            use_post_quant_conv=False,
        )  # fmt: skip
    if name == "flux2":
        from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2

        vae = AutoencoderKLFlux2(**_CONVOLUTIONS, latent_channels=4)
        vae.bn.running_mean.copy_(torch.randn(16))
        vae.bn.running_var.copy_(torch.rand(16) + 0.5)
        return vae
    if name == "dc":
        from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC

        return AutoencoderDC(
            latent_channels=8, attention_head_dim=4, encoder_block_out_channels=(8, 8, 16),
            decoder_block_out_channels=(8, 8, 16), encoder_layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1), encoder_qkv_multiscales=((), (), ()),
            decoder_qkv_multiscales=((), (), ()), scaling_factor=0.41407,
        )  # fmt: skip
    if name == "rae":
        from diffusers.models.autoencoders.autoencoder_rae import AutoencoderRAE  # see `without_transformers`

        return AutoencoderRAE(
            encoder_hidden_size=64, encoder_num_hidden_layers=1, encoder_input_size=28, decoder_hidden_size=16,
            decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32, patch_size=16,
        )  # fmt: skip
    if name == "vq":
        from diffusers.models.autoencoders.vq_model import VQModel

        return VQModel(**_CONVOLUTIONS, latent_channels=4, num_vq_embeddings=16, scaling_factor=1.0)
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

    return AutoencoderTiny(
        encoder_block_out_channels=(8, 8, 8), decoder_block_out_channels=(8, 8, 8), num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
    )  # fmt: skip


class _Tokens(nn.Module):
    """Replacement of transformers' DINOv2: five tokens that are dropped, and one for each patch."""

    def __init__(self, encoder_type: str, hidden_size: int, patch_size: int, num_hidden_layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden_size, patch_size, patch_size)

    def forward(self, images: Tensor, output_hidden_states: bool) -> SimpleNamespace:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return SimpleNamespace(last_hidden_state=nn.functional.pad(tokens, (0, 0, 5, 0)))


def without_transformers(patch: pytest.MonkeyPatch) -> None:
    """Let AutoencoderRAE be built if the package transformers, which has its encoders, is not installed."""
    from diffusers.models.autoencoders import autoencoder_rae

    from image_diffusion.codecs.diffusers_families import Rae

    patch.setattr(autoencoder_rae, "_build_encoder", _Tokens)
    patch.setattr(Rae, "network", staticmethod(lambda: autoencoder_rae.AutoencoderRAE))
