"""Denoising of an embedding, conditioned on a caption (Ramesh et al. 2022, section 2.2).

Differences from DALLE2-pytorch: embeddings are not modified in place. Nothing is dropped in evaluation mode, so that
the validation loss is that of the conditional prediction. Self-conditioning is drawn for each sample, and the earlier
estimate is always an estimate of x0, as in sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import Batch, Losses, Network, Objective
from image_diffusion.process.base import NoiseProcess, broadcast
from image_diffusion.process.denoiser import target, to_x0_and_eps

_ERRORS: dict[str, Callable[..., Tensor]] = {"l2": F.mse_loss, "l1": F.l1_loss, "huber": F.smooth_l1_loss}


class EmbeddingDenoising(Config):
    """Predict an embedding, its noise, or v."""

    type: Literal["embedding_denoising"] = "embedding_denoising"
    prediction: Literal["x0", "eps", "v"] = "x0"
    """Quantity that the network predicts."""
    loss: Literal["l2", "l1", "huber"] = "l2"
    """Error of the prediction: squared, absolute, or half the square below 1 and linear above."""
    clamp_norm: bool = False
    """Normalise the predicted x0 to the norm of a scaled embedding before comparing it. Requires embeddings of norm 1
    before scaling."""
    text_drop_probability: float = Field(0.1, ge=0, le=1)
    """Probability that a caption is replaced by the learned null, for guidance."""
    image_drop_probability: float = Field(0.1, ge=0, le=1)
    """Probability that the noisy embedding is replaced by the learned null, for guidance."""
    self_conditioning_probability: float = Field(0.5, ge=0, le=1)
    """Share of the samples with an earlier estimate, if network.self_cond is true."""

    @model_validator(mode="after")
    def _clamps_what_has_a_norm(self) -> EmbeddingDenoising:
        if self.clamp_norm and self.prediction != "x0":
            raise ValueError(
                f"clamp_norm is of a predicted x0, but prediction is {self.prediction}. Set prediction to x0, or "
                f"clamp_norm to false."
            )
        return self

    @property
    def drops_conditions(self) -> bool:
        """True if the network is also trained without its conditions, which guidance needs."""
        return self.text_drop_probability > 0 and self.image_drop_probability > 0

    def build(self, process: NoiseProcess, norm: float, self_conditioned: bool) -> EmbeddingObjective:
        """Return the objective on a process. norm: norm of a scaled embedding. self_conditioned: True if the network
        takes an earlier estimate."""
        return EmbeddingObjective(self, process, norm, self_conditioned)


def with_norm(x: Tensor, norm: float) -> Tensor:
    """Return x [B, dim] with each row scaled to a norm."""
    return F.normalize(x, dim=-1) * norm


class EmbeddingObjective(Objective):
    """Objective with one loss per sample of a batch: the mean over the dimensions of the prediction's error.

    Parts: the loss by its name, and "similarity", the cosine of the predicted and the true x0. The network is called as
    network(x_t, t, text_embed=…, text_keep=…, image_keep=…, …); see `networks.prior`.
    """

    def __init__(self, config: EmbeddingDenoising, process: NoiseProcess, norm: float, self_conditioned: bool) -> None:
        self._config, self._process, self._norm, self._self_conditioned = config, process, norm, self_conditioned

    def __call__(self, network: Network, batch: Batch) -> Losses:
        """Draw time and noise of each sample, choose the conditions to drop and the samples with an estimate."""
        config, streams = self._config, batch.streams
        training = getattr(network, "training", True)
        cond = batch.cond | {
            "text_keep": ~streams.event("text_drop", config.text_drop_probability * training),
            "image_keep": ~streams.event("image_drop", config.image_drop_probability * training),
        }
        t, noise = self._process.draw(streams), streams.normal("noise", tuple(batch.x.shape[1:]))
        self_conditioned = None
        if self._self_conditioned:
            self_conditioned = streams.event("self_conditioning", config.self_conditioning_probability)
        return self.losses_at(network, batch.x, t, noise, cond, self_conditioned)

    def losses_at(
        self,
        network: Network,
        x: Tensor,
        t: Tensor,
        noise: Tensor,
        cond: dict[str, Tensor],
        self_conditioned: Tensor | None,
    ) -> Losses:
        """Return the losses of scaled embeddings x [B, dim] at times t [B] with noise like x. Draws no random numbers.

        self_conditioned: bool [B], the samples with an estimate; None: the network takes no estimate.
        """
        alpha, sigma = broadcast(self._process.levels(t), x)
        x_t, time = alpha * x + sigma * noise, self._process.network_time(t)
        prediction = self._config.prediction
        if self_conditioned is not None:
            with torch.no_grad():
                conditions = {name: value for name, value in cond.items() if name not in ("text_keep", "image_keep")}
                output = network(x_t, time, **conditions).to(x.dtype)
                estimate, _ = to_x0_and_eps(prediction, output, x_t, alpha, sigma)
            cond = cond | {"self_cond": torch.where(self_conditioned[:, None], estimate, 0)}
        output = network(x_t, time, **cond).to(x.dtype)
        if self._config.clamp_norm:
            output = with_norm(output, self._norm)
        error = _ERRORS[self._config.loss]
        loss = error(output, target(prediction, x, noise, alpha, sigma), reduction="none").mean(1)
        x0, _ = to_x0_and_eps(prediction, output.detach(), x_t, alpha, sigma)
        parts = {self._config.loss: loss.detach(), "similarity": F.cosine_similarity(x0, x, dim=1)}
        return Losses(loss, parts, self._process.fraction(t))
