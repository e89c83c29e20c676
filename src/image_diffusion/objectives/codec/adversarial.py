"""Adversarial term: a discriminator is trained to distinguish reconstructions from images, and the codec to deceive it.

Hinge losses (Lim and Ye 2017, "Geometric GAN", arXiv:1705.02894) of a PatchGAN, as in VQGAN (Esser et al. 2021,
arXiv:2012.09841). Both are updated in one step by one optimizer: the codec's term is computed with detached weights of
the discriminator, and the discriminator's term with detached reconstructions, so that the gradient of their sum is that
of two simultaneous steps. VQGAN's adaptive weight is a ratio of two gradients of the whole batch; here each example has
its own loss, and the weight is fixed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import Field
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import Batch, DataSpec, Losses, Objective
from image_diffusion.networks.patch_discriminator import PatchDiscriminator
from image_diffusion.objectives.codec.perceptual import RecordingNetwork

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
