"""Inputs of image networks: checks, conversion between images and sequences of square patches, flattened as (row,
column, channel), and conditioning on another image by additional input channels (Nichol and Dhariwal 2021, section 6;
Saharia et al. 2021, "Image super-resolution via iterative refinement"; Palette: Saharia et al. 2022), also of latents
(Rombach et al. 2022, section 4.3.2, where downsampled semantic maps follow the channels of the latent)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.resolution import Size, divided, size_text
from image_diffusion.core.types import IMAGE, DataSpec


def check_inputs(spec: DataSpec, x: Tensor, label: Tensor | None, **conditions: Tensor | None) -> None:
    """Raise ValueError if x [B, C, H, W], its label or another condition does not fit a network. spec: the network's
    data; a network without classes takes no label, one with classes requires it. A condition of None is absent.
    """
    image_shape = (spec.channels, *spec.size)
    if tuple(x.shape[1:]) != image_shape:
        raise ValueError(
            f"x has {size_of(x.shape[1:])} (channels x height x width) but the network was built for "
            f"{size_of(image_shape)}. Use data of the codec and resolution it was trained with."
        )
    if (label is None) != (spec.num_classes == 0):
        raise ValueError(
            f"The network was built for {spec.num_classes} classes but was called "
            f"{'without' if label is None else 'with'} labels. "
            f"{'Pass label, int64 [B].' if label is None else 'Leave them out.'}"
        )
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in conditions.items() if tensor is not None}
    if shapes != dict(spec.conditions):
        raise ValueError(
            f"The network was built for the conditions {_shapes_in_words(spec.conditions)}, but was called with "
            f"{_shapes_in_words(shapes)}. Use those it was trained with."
        )


def _shapes_in_words(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return " and ".join(f"{name} of {size_of(shape)}" for name, shape in sorted(shapes.items())) or "none"


def size_of(shape: tuple[int, ...]) -> str:
    """Return a shape as text: 3 x 32 x 32."""
    return " x ".join(str(number) for number in shape)


def grid_of(spec: DataSpec, patch: int) -> Size:
    """Return the numbers of rows and columns of patches of x. Raises ValueError if the patch does not divide its
    sides."""
    grid = divided(spec.resolution, patch)
    if grid is None:
        raise ValueError(
            f"x of {size_text(spec.resolution)} pixels cannot be cut into patches of {patch} x {patch}. Set "
            f"network.patch to a divisor of {math.gcd(*spec.size)}, or change the resolution of the data."
        )
    return grid


def patchify(x: Tensor, patch: int) -> Tensor:
    """[B, C, H, W] -> [B, N, patch · patch · C], the N = (H / patch)(W / patch) patches row by row."""
    B, C, H, W = x.shape
    x = x.reshape(B, C, H // patch, patch, W // patch, patch)
    x = x.permute(0, 2, 4, 3, 5, 1)  # [B, H/p, W/p, p, p, C]
    return x.reshape(B, (H // patch) * (W // patch), patch * patch * C)


def unpatchify(tokens: Tensor, patch: int, height: int, width: int) -> Tensor:
    """[B, N, patch · patch · C] -> [B, C, height, width]: the inverse of `patchify`."""
    B = tokens.shape[0]
    x = tokens.reshape(B, height // patch, width // patch, patch, patch, -1)
    x = x.permute(0, 5, 1, 3, 2, 4)  # [B, C, H/p, p, W/p, p]
    return x.reshape(B, -1, height, width)


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
