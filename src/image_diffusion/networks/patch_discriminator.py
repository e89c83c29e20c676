"""PatchGAN: a convolutional network that scores the realism of every patch of an image (Isola et al. 2017,
"Image-to-image translation with conditional adversarial networks", arXiv:1611.07004).

Group normalisation replaces batch normalisation, so that no example depends on another.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

_GROUPS, _WIDEST = 16, 8
_SLOPE = 0.2


class PatchDiscriminator(nn.Module):
    """Images [B, C, H, W] -> scores of their patches, [B, 1, h, w]. width: channels of the first layer, a multiple of
    16. num_layers: layers that halve the resolution."""

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
        logits: Tensor = self.layers(x)
        return logits
