"""KL autoencoder: reconstruct, with a posterior close to a standard normal (Kingma & Welling 2014, equation 10)."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import Batch, Losses, Objective


class AutoencodingConfig(Config):
    """Weights of the loss."""

    kl_weight: float = Field(1e-3, ge=0)
    """Weight of the KL divergence (mean over the latent's elements) relative to the mean squared error of the
    pixels."""

    def build(self, latent_shape: tuple[int, int, int]) -> Autoencoding:
        """Return the objective for latents [c, h, w]."""
        return Autoencoding(self.kl_weight, latent_shape)


class Autoencoding(Objective):
    """Mean squared error plus weighted divergence, both per example and independent of the image's size."""

    def __init__(self, kl_weight: float, latent_shape: tuple[int, int, int]) -> None:
        self._kl_weight, self._latent_shape = kl_weight, latent_shape

    def __call__(self, network: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], batch: Batch) -> Losses:
        noise = batch.streams.normal("posterior", self._latent_shape)
        reconstruction, mean, log_variance = network(batch.x, noise)
        mse = (reconstruction - batch.x).square().flatten(1).mean(1)
        mean, log_variance = mean.float(), log_variance.float()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).flatten(1).mean(1)
        return Losses(loss=mse + self._kl_weight * kl, parts={"mse": mse.detach(), "kl": kl.detach()})
