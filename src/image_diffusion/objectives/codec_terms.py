"""Optional terms of the objective of a codec. Perceptual: the difference between an image and its reconstruction in the
features of a fixed network. Adversarial: a discriminator is trained to distinguish reconstructions from images, and the
codec to deceive it.

Hinge losses (Lim and Ye 2017, "Geometric GAN", arXiv:1705.02894) of a PatchGAN (Isola et al. 2017, "Image-to-image
translation with conditional adversarial networks", arXiv:1611.07004), as in VQGAN (Esser et al. 2021,
arXiv:2012.09841). Both are updated in one step by one optimizer: the term of the codec is computed with detached
weights of the discriminator, and the term of the discriminator with detached reconstructions, so that the gradient of
their sum is that of two simultaneous steps. The adaptive weight of VQGAN is a ratio of two gradients of the whole
batch; here each example has its own loss, and the weight is fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import Batch, DataSpec, Losses, Objective


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
