"""Self-conditioning: the network also receives its own earlier estimate of x0 (Chen et al. 2023, "Analog bits", section
3.2) or of its latents (Jabri et al. 2023, section 3.2). In training this is an estimate from the same x_t, computed
without gradient. Difference from the code of RIN: whether a sample receives its estimate is drawn for each sample, so
that the result does not depend on the batch or the number of processes; the original draws once for a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import Batch, DataSpec, Losses
from image_diffusion.objectives.denoising import Denoising, DenoisingObjective
from image_diffusion.objectives.timestep_sampling import AtTimes
from image_diffusion.process.base import NoiseProcess, broadcast
from image_diffusion.process.denoiser import clamp, to_x0_and_eps


class SelfConditioning(Config):
    """Settings for conditioning a network on its own earlier estimate."""

    probability: float = Field(0.9, ge=0, le=1)
    """Share of the training samples with an estimate; 0: training and sampling use no estimates."""
    clamp: bool = True
    """Clip the estimated x0 to [-1, 1] before the network receives it. Set false for latents."""

    def check_latents(self) -> None:
        """Raise ValueError if estimates of latents would be clipped to the range of pixels."""
        if self.clamp and self.probability > 0:
            raise ValueError(
                "self_conditioning.clamp holds the estimate to [-1, 1], the range of pixels, but the network works on "
                "latents, which go beyond it. Set system.self_conditioning.clamp to false."
            )


class SelfConditionedObjective(AtTimes):
    """Denoising with two passes of the network, the first without gradient; one loss per sample.

    network: called as network(x, t, **cond, return_latents=True) -> (prediction, latents, norm [B]), where cond may
    hold "self_cond" like x and "latents" as returned; rows of zeros stand for none. The loss is its part "mse"; the
    norm is reported as "latent_norm".
    """

    def __init__(self, config: SelfConditioning, denoising: Denoising, process: NoiseProcess, spec: DataSpec) -> None:
        super().__init__(denoising, process, spec)
        self._config, self._prediction = config, denoising.prediction
        self._denoising = DenoisingObjective(denoising, process, spec)

    def at_times(self, network: Any, batch: Batch, t: Tensor) -> Losses:
        """Draw noise for each sample, choose the samples that receive an estimate, and drop labels."""
        noise = batch.streams.normal("noise", tuple(batch.x.shape[1:]))
        self_conditioned = batch.streams.event("self_conditioning", self._config.probability)
        return self.losses_at(network, batch.x, t, noise, self_conditioned, self._drop_labels(batch, network))

    def losses_at(
        self, network: Any, x: Tensor, t: Tensor, noise: Tensor, self_conditioned: Tensor, cond: dict[str, Tensor]
    ) -> Losses:
        """Return the losses of x [B, C, …] at times t [B] with noise like x; self_conditioned: bool [B],
        the samples with an estimate."""
        if self._config.probability > 0:
            cond = cond | self.estimate(network, x, t, noise, self_conditioned, cond)
        norms = {}

        def tracked(x_t: Tensor, time: Tensor, /, **cond: Tensor) -> Tensor:
            output: Tensor
            output, _, norm = network(x_t, time, **cond, return_latents=True)
            norms["latent_norm"] = norm.detach()
            return output

        losses = self._denoising.losses_at(tracked, x, t, noise, cond)
        return Losses(losses.loss, losses.parts | norms, losses.time)

    @torch.no_grad()
    def estimate(
        self, network: Any, x: Tensor, t: Tensor, noise: Tensor, self_conditioned: Tensor, cond: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return "self_cond" and "latents" of a first pass, zero in rows without an estimate."""
        alpha, sigma = broadcast(self._process.levels(t), x)
        x_t = alpha * x + sigma * noise
        time = self._process.network_time(t)
        output, latents, _ = network(self._process.network_input(x_t), time, **cond, return_latents=True)
        x0, _ = to_x0_and_eps(self._prediction, output.to(x.dtype), x_t, alpha, sigma)
        x0 = clamp(x0) if self._config.clamp else x0
        return {
            "self_cond": torch.where(self_conditioned[:, None, None, None], x0, 0),
            "latents": torch.where(self_conditioned[:, None, None], latents, 0),
        }
