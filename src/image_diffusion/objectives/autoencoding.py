"""Objectives of codecs, and their optional terms.

KL autoencoder: reconstruct, with a posterior close to a standard normal (Kingma & Welling 2014, equation 10). Discrete
VAE: reconstruct from tokens sampled at a falling temperature (Ramesh et al. 2021, section 2.1).

Perceptual term: the difference between an image and its reconstruction in the features of a fixed network. Adversarial
term: a discriminator is trained to distinguish reconstructions from images, and the codec to deceive it. Hinge losses
(Lim and Ye 2017, "Geometric GAN", arXiv:1705.02894) of a PatchGAN (Isola et al. 2017, "Image-to-image translation with
conditional adversarial networks", arXiv:1611.07004), as in VQGAN (Esser et al. 2021, arXiv:2012.09841). Both are
updated in one step by one optimizer: the term of the codec is computed with detached weights of the discriminator, and
the term of the discriminator with detached reconstructions, so that the gradient of their sum is that of two
simultaneous steps. The adaptive weight of VQGAN is a ratio of two gradients of the whole batch; here each example has
its own loss, and the weight is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import Batch, DataSpec, Losses, Objective


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


class RecordingNetwork:
    """Codec's network that stores its last reconstruction, the first output converted by its `images`: [B, C, H, W],
    nominally in [-1, 1]."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self.reconstruction: Tensor

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self._network(*inputs)
        self.reconstruction = self._network.images(outputs[0])
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


class Perceptual(Objective):
    """A codec's objective plus `weight` times a perceptual distance of images, as in VQGAN (Esser et al. 2021,
    arXiv:2012.09841). Part "perceptual": the unweighted distance.

    distance: two sets of images [B, C, H, W] in [-1, 1] -> [B].
    """

    def __init__(self, objective: Objective, distance: Callable[[Tensor, Tensor], Tensor], weight: float) -> None:
        self._objective, self._distance, self._weight = objective, distance, weight

    def __call__(self, network: Any, batch: Batch) -> Losses:
        watched = RecordingNetwork(network)
        losses = self._objective(watched, batch)
        distance = self._distance(watched.reconstruction, batch.x).to(losses.loss.dtype)
        parts = losses.parts | {"perceptual": distance.detach()}
        return Losses(losses.loss + self._weight * distance, parts, losses.time, losses.seen)


DISCRIMINATOR = "discriminator"
"""Name of the discriminator in the network during training. Saved weights do not contain it."""


class Adversarial(Config):
    """Discriminator that is trained with the codec."""

    weight: float = Field(0.1, gt=0)
    """Factor by which the codec's term is multiplied before it is added to its loss."""
    start_step: int = Field(0, ge=0)
    """Last step without the adversarial terms, so that the codec first learns to reconstruct."""
    width: int = Field(64, gt=0, multiple_of=16)
    """Channels of the discriminator's first layer; each of the next three layers doubles them."""
    num_layers: int = Field(3, ge=1)
    """Layers of the discriminator that halve the resolution. With 3, the receptive field is 70 x 70 pixels; with 1, 16
    x 16."""

    def check(self, resolution: int) -> None:
        """Raise ValueError for images that are too small for the layers. resolution: the shorter side."""
        if resolution < 2 ** (self.num_layers + 2):
            raise ValueError(
                f"system.adversarial.num_layers is {self.num_layers}, too many for images of {resolution} pixels. "
                f"Use {max(1, resolution.bit_length() - 3)}, or larger images."
            )


class Discriminated(Objective):
    """A codec's objective plus the two adversarial terms. Validation omits them. Parts, from the first adversarial step
    on: "adversarial", the unweighted term of the codec; "discriminator", the term of the discriminator.
    """

    def __init__(self, config: Adversarial, objective: Objective, spec: DataSpec) -> None:
        self._config, self._objective = config, objective
        self.layers = {DISCRIMINATOR: partial(PatchDiscriminator, spec.channels, config.width, config.num_layers)}

    def __call__(self, network: Any, batch: Batch) -> Losses:
        """Return the codec's losses with both terms. network: the codec's, with the discriminator."""
        if batch.step <= self._config.start_step:
            return self._objective(network, batch)
        watched = RecordingNetwork(network)
        losses = self._objective(watched, batch)
        reconstruction, discriminator = watched.reconstruction, network.get_submodule(DISCRIMINATOR)
        still = {name: weight.detach() for name, weight in discriminator.named_parameters()}
        fooled = -_mean(functional_call(discriminator, still, (reconstruction,)))
        real, fake = discriminator(batch.x), discriminator(reconstruction.detach())
        discriminator_loss = (_mean(F.relu(1 - real)) + _mean(F.relu(1 + fake))) / 2
        parts = losses.parts | {"adversarial": fooled.detach(), "discriminator": discriminator_loss.detach()}
        return Losses(losses.loss + self._config.weight * fooled + discriminator_loss, parts, losses.time, losses.seen)

    def uniform(self) -> Objective:
        """Return the objective without the adversarial terms."""
        return self._objective


def _mean(patches: Tensor) -> Tensor:
    """[B, 1, h, w] -> [B]."""
    return patches.float().flatten(1).mean(1)


_GROUPS, _WIDEST = 16, 8
_SLOPE = 0.2


class PatchDiscriminator(nn.Module):
    """Images [B, C, H, W] -> scores of their patches, [B, 1, h, w]. width: channels of the first layer, a multiple of
    16. num_layers: layers that halve the resolution. Normalisation is by group, so examples do not depend on others."""

    def __init__(self, channels: int, width: int, num_layers: int) -> None:
        super().__init__()
        widths = [width * min(2**layer, _WIDEST) for layer in range(num_layers + 1)]
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, stride=2, padding=1), nn.LeakyReLU(_SLOPE)]
        for layer, (c_in, c_out) in enumerate(pairwise(widths), 1):
            stride = 2 if layer < num_layers else 1
            layers += [
                nn.Conv2d(c_in, c_out, 4, stride=stride, padding=1, bias=False),
                nn.GroupNorm(_GROUPS, c_out),
                nn.LeakyReLU(_SLOPE),
            ]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
