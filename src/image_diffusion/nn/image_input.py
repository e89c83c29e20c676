"""The condition by which a network sees another image: more channels of its input (Nichol and Dhariwal 2021, section 6;
Saharia et al. 2021, "Image super-resolution via iterative refinement"; Palette: Saharia et al. 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.types import IMAGE, DataSpec


def input_channels(spec: DataSpec) -> int:
    """Return the number of channels that a network reads: those of x, and those of the image of its condition."""
    return spec.channels + (spec.conditions[IMAGE][0] if IMAGE in spec.conditions else 0)


def with_image(x: Tensor, image: Tensor | None) -> Tensor:
    """Return the input x [B, C, H, W] with the image [B, C', h, w] of the condition behind its channels, brought to
    H x W bilinearly: [B, C + C', H, W]; without an image, x."""
    if image is None:
        return x
    enlarged = F.interpolate(image, x.shape[2:], mode="bilinear")  # [B, C', H, W]
    return torch.cat([x, enlarged.to(x.dtype)], dim=1)
