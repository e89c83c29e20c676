"""Objectives of codecs. KL autoencoder: reconstruct, with a posterior close to a standard normal (Kingma & Welling
2014, equation 10). Discrete VAE: reconstruct from tokens sampled at a falling temperature (Ramesh et al. 2021, section
2.1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import Batch, Losses, Objective


class AutoencodingConfig(Config):
    """Weights of the loss."""

    kl_weight: float = Field(1e-3, ge=0)
    """Weight of the KL divergence (mean over the latent's elements) relative to the mean squared error of the
    pixels."""


class Autoencoding(Objective):
    """Mean squared error plus weighted divergence, both per example and independent of the image's size. latent_shape:
    [c, h, w]."""

    def __init__(self, kl_weight: float, latent_shape: tuple[int, int, int]) -> None:
        self._kl_weight, self._latent_shape = kl_weight, latent_shape

    def __call__(self, network: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], batch: Batch) -> Losses:
        noise = batch.streams.normal("posterior", self._latent_shape)
        reconstruction, mean, log_variance = network(batch.x, noise)
        mse = (reconstruction - batch.x).square().flatten(1).mean(1)
        mean, log_variance = mean.float(), log_variance.float()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).flatten(1).mean(1)
        return Losses(loss=mse + self._kl_weight * kl, parts={"mse": mse.detach(), "kl": kl.detach()})


Reconstruction = Literal["mse", "smooth_l1"]


class TemperatureConfig(Config):
    """The temperature as a function of the step: max(start exp(-rate step), final)."""

    start: float = Field(1.0, gt=0, le=1e6)
    """Temperature at step 0."""
    rate: float = Field(1e-6, ge=0)
    """Rate of the exponential decay: in 1/rate steps the temperature falls to 1/e of its value."""
    final: float = Field(0.5, gt=0)
    """Lowest temperature."""

    @model_validator(mode="after")
    def _falls(self) -> TemperatureConfig:
        if self.final > self.start:
            raise ValueError(f"final is {self.final}, above start = {self.start}. The temperature only falls.")
        return self

    def at(self, step: int) -> float:
        """Return the temperature of update number `step`."""
        return max(self.start * math.exp(-self.rate * step), self.final)


class DiscreteAutoencodingConfig(Config):
    """Loss of a reconstruction, and the sampling of tokens."""

    reconstruction: Reconstruction = "mse"
    """Error of the normalised pixels: squared, or squared below 1 and linear above (Girshick 2015, equation 3)."""
    kl_weight: float = Field(0.0, ge=0)
    """Weight of the KL divergence of the tokens' distribution from the uniform one, in nats, a mean over positions."""
    kl_summed_over_batch: int | None = Field(None, ge=1)
    """Batch size for which kl_weight has the same effect as in DALLE-pytorch, which sums the divergence over batch and
    positions. Unset: the divergence is a mean."""
    temperature: TemperatureConfig = TemperatureConfig()
    """Temperature of the sampling of tokens, as a function of the step."""
    commitment_weight: float = Field(0.25, ge=0)
    """Weight of the commitment loss of vector quantisation, the mean squared distance of encodings from their codes:
    beta of van den Oord et al. 2017, equation 3."""

    def build(self, logits_shape: tuple[int, int, int]) -> DiscreteAutoencoding:
        """Return the objective for logits [N, h, w]."""
        return DiscreteAutoencoding(self, logits_shape)

    def check(self, deterministic_key: str | None) -> None:
        """Raise ValueError for a setting without effect. deterministic_key: the network's key that makes tokens
        deterministic; None: tokens are sampled."""
        if deterministic_key is not None:
            for name in ("kl_weight", "kl_summed_over_batch", "temperature"):
                if self._is_set(name):
                    raise ValueError(
                        f"system.objective.{name} is set, but system.network.{deterministic_key} draws no token: it "
                        f"has no distribution and no temperature. Leave it out."
                    )
        if deterministic_key != "vector_quantiser" and self._is_set("commitment_weight"):
            raise ValueError(
                "system.objective.commitment_weight is set, but no encoding has a nearest code to stay near to. Set "
                "system.network.vector_quantiser, or leave it out."
            )

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)


class DiscreteAutoencoding(Objective):
    """Error of the pixels plus weighted KL divergence, both per example and independent of the image's size.

    Parts: "mse" of the normalised pixels; "smooth_l1", where it is the loss; "kl", nats per position; "temperature",
    that of the batch's step, in validation too; "tokens" and "perplexity", of the image's most probable tokens: the
    number of different tokens, and exp of their entropy. `evaluate` computes both over a whole data set.
    """

    def __init__(self, config: DiscreteAutoencodingConfig, logits_shape: tuple[int, int, int]) -> None:
        self._config, self._logits_shape = config, logits_shape
        num_tokens, height, width = logits_shape
        self._log_num_tokens = math.log(num_tokens)
        times = height * width * (config.kl_summed_over_batch or 0)
        self._kl_weight = config.kl_weight * (times or 1)

    def __call__(
        self, network: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], batch: Batch
    ) -> Losses:
        gumbel = batch.streams.gumbel("gumbel", self._logits_shape)
        temperature = gumbel.new_full((), self._config.temperature.at(batch.step))
        reconstruction, target, logits = network(batch.x, gumbel, temperature)
        parts = _errors(self._config.reconstruction, reconstruction, target)
        error = parts[self._config.reconstruction]
        log_q = F.log_softmax(logits.float(), dim=1)  # [B, N, h, w]
        kl = self._log_num_tokens + (log_q.exp() * log_q).sum(1).flatten(1).mean(1)

        num_tokens, perplexity = token_use(logits.detach().argmax(1).flatten(1))
        parts |= {"kl": kl, "temperature": temperature.expand(len(kl)), "tokens": num_tokens, "perplexity": perplexity}
        return Losses(error + self._kl_weight * kl, {name: part.detach() for name, part in parts.items()})


class QuantisedAutoencoding(Objective):
    """Error of the pixels, per example, with deterministic tokens: rounded encodings (Mentzer et al. 2024), or nearest
    codes with a commitment loss (van den Oord et al. 2017, equation 3, in which the codebook's moving averages replace
    the second term).

    Parts: as of `DiscreteAutoencoding`, without "kl" and "temperature"; with a commitment loss also the
    unweighted "commitment". commitment_weight: None for fixed codes.
    """

    def __init__(self, reconstruction: Reconstruction, commitment_weight: float | None) -> None:
        self._reconstruction: Reconstruction = reconstruction
        self._commitment_weight = commitment_weight

    def __call__(self, network: Any, batch: Batch) -> Losses:
        """Return the losses of a batch. network: called like `QuantisedDVAE.forward`; with a commitment term it has a
        `codebook`."""
        reconstruction, target, tokens, encoded = network(batch.x)
        parts = _errors(self._reconstruction, reconstruction, target)
        loss, extras = parts[self._reconstruction], {}
        tokens = tokens.flatten(1)
        if self._commitment_weight is not None:
            encodings = encoded.flatten(2).movedim(1, 2)  # [B, P, D]
            codes = network.codebook(tokens).detach()
            parts["commitment"] = (encodings - codes).square().flatten(1).mean(1)
            loss = loss + self._commitment_weight * parts["commitment"]
            draws = batch.streams.uniform("revival", (tokens.shape[1],))
            extras = {"tokens": tokens, "encodings": encodings.detach(), "draws": draws}
        parts["tokens"], parts["perplexity"] = token_use(tokens)
        return Losses(loss, {name: part.detach() for name, part in parts.items()}, seen=extras)


def _errors(reconstruction: Reconstruction, output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return the squared error of normalised pixels [B, C, H, W] and, if it differs, the configured error, [B]."""
    output, target = output.float(), target.float()
    errors = {"mse": (output - target).square().flatten(1).mean(1)}
    if reconstruction == "smooth_l1":
        errors["smooth_l1"] = F.smooth_l1_loss(output, target, reduction="none").flatten(1).mean(1)
    return errors


def token_use(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of different tokens in each row of tokens [B, P], float32 [B], and exp of their entropy,
    [B]."""
    ordered = indices.sort(dim=1).values
    first = torch.searchsorted(ordered, ordered, side="left")
    count = torch.searchsorted(ordered, ordered, side="right") - first  # [B, P], count of each position's token
    num_positions = indices.shape[1]
    entropy = math.log(num_positions) - count.float().log().mean(1)
    return (1.0 / count).sum(1), entropy.exp()
