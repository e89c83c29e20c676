"""Small KL autoencoder: diffusers' `AutoencoderKL` in a configurable size."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor, nn

from image_diffusion.core.config.base import Config
from image_diffusion.core.resolution import divided, size_text
from image_diffusion.core.types import DataSpec


class AutoencoderConfig(Config):
    """Size of the autoencoder. Each block but the last halves the resolution."""

    block_channels: tuple[int, ...] = Field((16, 32, 64), min_length=1)
    """Channels of each block, from the finest resolution; multiples of norm_groups."""
    layers_per_block: int = Field(1, ge=1)
    """Residual layers in each block."""
    latent_channels: int = Field(4, ge=1)
    """Channels of the latent."""
    norm_groups: int = Field(16, ge=1)
    """Groups of each group normalisation."""

    def build(self, spec: DataSpec) -> Autoencoder:
        """Build the network for images of `spec`. Raises ValueError if the sizes do not fit."""
        self.check(spec)
        return Autoencoder(self, spec)

    def check(self, spec: DataSpec) -> None:
        """Raise ValueError if the sizes do not fit. Does not build the network, since importing diffusers takes
        seconds."""
        if any(channels % self.norm_groups for channels in self.block_channels):
            raise ValueError(
                f"block_channels {list(self.block_channels)} must be multiples of norm_groups {self.norm_groups}. "
                f"Change one of them."
            )
        if divided(spec.resolution, self.downsampling) is None:
            raise ValueError(
                f"The resolution is {size_text(spec.resolution)}, but {len(self.block_channels)} blocks divide each "
                f"edge by {self.downsampling}. Choose a multiple of {self.downsampling}, or fewer block_channels."
            )

    def latent_shape(self, spec: DataSpec) -> tuple[int, int, int]:
        """Return the shape [c, h, w] of the latent of an image of `spec`."""
        height, width = spec.size
        return self.latent_channels, height // self.downsampling, width // self.downsampling

    @property
    def downsampling(self) -> int:
        """Return the number of pixels along an edge of the image for each element along an edge of the latent."""
        return int(2 ** (len(self.block_channels) - 1))


class Autoencoder(nn.Module):
    """Autoencoder: images [B, C, H, W] in [-1, 1] -> their reconstruction from a sampled latent."""

    def __init__(self, config: AutoencoderConfig, spec: DataSpec) -> None:
        super().__init__()
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        num_blocks = len(config.block_channels)
        self.image_shape = (spec.channels, *spec.size)
        self.vae: Any = AutoencoderKL(
            in_channels=spec.channels,
            out_channels=spec.channels,
            down_block_types=("DownEncoderBlock2D",) * num_blocks,
            up_block_types=("UpDecoderBlock2D",) * num_blocks,
            block_out_channels=config.block_channels,
            layers_per_block=config.layers_per_block,
            latent_channels=config.latent_channels,
            norm_num_groups=config.norm_groups,
            sample_size=spec.resolution if isinstance(spec.resolution, int) else list(spec.resolution),
            scaling_factor=1.0,
        )

    def forward(self, x: Tensor, noise: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        """Return the reconstruction [B, C, H, W], mean and log variance of the posterior [B, c, h, w] each.

        noise: standard normal [B, c, h, w], which draws the latent from the posterior.
        """
        posterior = self.vae.encode(x).latent_dist
        latent = posterior.mean + posterior.std * noise
        return self.vae.decode(latent).sample, posterior.mean, posterior.logvar

    def images(self, reconstruction: Tensor) -> Tensor:
        """Return the output of the decoder unchanged: it is already images."""
        return reconstruction

    def reconstructions(self, x: Tensor) -> tuple[dict[str, Tensor], None]:
        """Reconstruct images [B, C, H, W] from the mean of their posterior. Returns the reconstructions by name, and
        None, since there are no tokens."""
        return {"mean": self.vae.decode(self.vae.encode(x).latent_dist.mean).sample}, None
