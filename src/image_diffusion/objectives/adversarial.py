"""An adversarial term: a discriminator learns to tell reconstructions from images, and the codec to make it fail.

Hinge losses (Lim and Ye 2017, "Geometric GAN", arXiv:1705.02894) of a PatchGAN, as in VQGAN (Esser et al. 2021,
arXiv:2012.09841). Both learn in one step by one optimizer: the codec's term is computed with weights of
the discriminator that pass no gradient, the discriminator's with reconstructions that pass none, so that the gradient
of their sum is that of two steps taken side by side. VQGAN's adaptive weight is a ratio of two gradients
of the whole batch; here every example has its own loss, and the weight is fixed.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from image_diffusion.core.config import Config
from image_diffusion.core.types import Batch, DataSpec, Losses, Objective
from image_diffusion.networks.patch_discriminator import PatchDiscriminator
from image_diffusion.objectives.reconstructing import Watched

DISCRIMINATOR = "discriminator"
"""The name of the discriminator in the network that is trained. What is written does without it."""


class Adversarial(Config):
    """A discriminator that learns beside the codec."""

    weight: float = Field(0.1, gt=0)
    """What the codec's term is multiplied with before it is added to its loss."""
    start_step: int = Field(0, ge=0)
    """The last step that does without: a codec should reconstruct before it is told how real that looks."""
    width: int = Field(64, gt=0, multiple_of=16)
    """Channels of the discriminator's first layer; they double with each of the next three."""
    num_layers: int = Field(3, ge=1)
    """Layers of the discriminator that halve the resolution. An output of 3 sees 70 x 70 pixels, of 1 16 x 16."""

    def check(self, resolution: int) -> None:
        """Raise ValueError for images that are too small for the layers."""
        if resolution < 2 ** (self.num_layers + 2):
            raise ValueError(
                f"system.adversarial.num_layers is {self.num_layers}, too many for images of {resolution} pixels, of "
                f"which nothing would be left. Use {max(1, resolution.bit_length() - 3)}, or larger images."
            )


class Discriminated:
    """A codec's objective and the two adversarial terms. Validation does without them.

    Parts: "adversarial", the codec's term before its weight; "discriminator", that of the discriminator; both from the
    step on that they begin with.
    """

    def __init__(self, config: Adversarial, objective: Objective, spec: DataSpec) -> None:
        self._config, self._objective, self._channels = config, objective, spec.channels

    def add_layers(self, network: nn.Module) -> None:
        """Give the network the discriminator, freshly initialised from torch's global generator."""
        config = self._config
        network.add_module(DISCRIMINATOR, PatchDiscriminator(self._channels, config.width, config.num_layers))

    def __call__(self, network: Any, batch: Batch) -> Losses:
        """network: of a codec, with the layers of `add_layers`."""
        if batch.step <= self._config.start_step:
            return self._objective(network, batch)
        watched = Watched(network)
        losses = self._objective(watched, batch)
        made, discriminator = watched.reconstruction, network.get_submodule(DISCRIMINATOR)
        still = {name: weight.detach() for name, weight in discriminator.named_parameters()}
        fooled = -_mean(functional_call(discriminator, still, (made,)))
        real, fake = discriminator(batch.x), discriminator(made.detach())
        told = (_mean(F.relu(1 - real)) + _mean(F.relu(1 + fake))) / 2
        parts = losses.parts | {"adversarial": fooled.detach(), "discriminator": told.detach()}
        return Losses(losses.loss + self._config.weight * fooled + told, parts, losses.time, losses.seen)

    def uniform(self) -> Objective:
        """The objective without the adversarial terms."""
        return self._objective


def _mean(patches: Tensor) -> Tensor:
    """[B, 1, h, w] -> [B]."""
    return patches.float().flatten(1).mean(1)
