"""Conditioning of a network on another image by additional input channels (Nichol and Dhariwal 2021, section 6; Saharia
et al. 2021, "Image super-resolution via iterative refinement"; Palette: Saharia et al. 2022), also of latents (Rombach
et al. 2022, section 4.3.2, where downsampled semantic maps follow the channels of the latent).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.types import IMAGE, DataSpec


def input_channels(spec: DataSpec) -> int:
    """Return the number of input channels of a network: those of x, and those of its condition's image."""
    return spec.channels + (spec.conditions[IMAGE][0] if IMAGE in spec.conditions else 0)


def with_image(x: Tensor, image: Tensor | None) -> Tensor:
    """Return the input x [B, C, H, W] concatenated with the image [B, C', h, w] of the condition, resized to H x W: [B,
    C + C', H, W]; without an image, x. A smaller image is enlarged bilinearly. A larger image is averaged over areas,
    so that a label's mask becomes its share of each area."""
    if image is None:
        return x
    mode = "area" if image.shape[2] > x.shape[2] or image.shape[3] > x.shape[3] else "bilinear"
    scaled = F.interpolate(image, x.shape[2:], mode=mode)  # [B, C', H, W]
    return torch.cat([x, scaled.to(x.dtype)], dim=1)
