"""Quality of a codec's reconstructions: PSNR, SSIM, the reconstruction Fréchet distance, codebook usage, and LPIPS.

LPIPS, version 0.1 on AlexNet, is how different two images look (Zhang et al. 2018, equation 1). The features of five
layers are scaled to length 1 over the channels; their squared differences are weighted by channel, averaged over
positions and added up. torchmetrics' version downloads AlexNet; here the configuration names both weight files, and the
result contains their digests.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.files.atomic import sha256_file
from image_diffusion.core.files.weights import without_wrappers
from image_diffusion.core.resolution import size_text
from image_diffusion.core.types import DataSpec
from image_diffusion.metrics.distances.jackknife import Estimate, jackknife, share_estimate, too_few
from image_diffusion.metrics.distances.set_distances import frechet_between
from image_diffusion.metrics.features.base import Detected

_WINDOW, _SIGMA = 11, 1.5
_RANGE = 255.0
_MOST_DB = 100.0


def psnr(original: Tensor, decoded: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each image in dB, float64 [B]; 100 for an exact copy. Both: [B, C,
    H, W], uint8 or float32 from 0 to 255."""
    _check(original, decoded)
    error = (original.to(torch.float64) - decoded.to(torch.float64)).square().mean(dim=(1, 2, 3))
    return (10 * torch.log10(_RANGE**2 / error)).clamp(max=_MOST_DB)


def ssim(original: Tensor, decoded: Tensor) -> Tensor:
    """Return the structural similarity of each image, float64 [B] (Wang et al. 2004, eq. 13). Both: [B, C, H, W], uint8
    or float32 from 0 to 255. Raises ValueError for images under 11 pixels.

    Gaussian window of 11 pixels, sigma 1.5, K = (0.01, 0.03), data range 255, over the windows inside the image.
    """
    _check(original, decoded)
    if min(original.shape[2:]) < _WINDOW:
        raise ValueError(f"SSIM needs images of at least {_WINDOW} pixels; got {list(original.shape[2:])}.")
    x, y = original.to(torch.float64), decoded.to(torch.float64)
    c1, c2 = (0.01 * _RANGE) ** 2, (0.03 * _RANGE) ** 2
    mean_x, mean_y = _window_mean(x), _window_mean(y)
    variance_x, variance_y = _window_mean(x * x) - mean_x**2, _window_mean(y * y) - mean_y**2
    covariance = _window_mean(x * y) - mean_x * mean_y
    numerator = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    denominator = (mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2)
    return (numerator / denominator).mean(dim=(1, 2, 3))


def reconstruction_estimates(original: Detected, decoded: Detected) -> dict[str, Estimate]:
    """Return "reconstruction_fd" and, with logits, "same_class": the share of images recognised as the same class after
    decoding.

    original, decoded: features of the same N images, in the same order.
    """
    estimates = {"reconstruction_fd": frechet_between(decoded.features, original.features)}
    if original.logits is not None and decoded.logits is not None:
        same = original.logits.argmax(dim=1) == decoded.logits.argmax(dim=1)
        estimates["same_class"] = share_estimate(same)
    return estimates


def codebook_use(counts: Tensor) -> dict[str, float]:
    """Return the usage of a codebook. counts: [K], occurrences of each code.

    "codebook_usage": the share of codes in use. "codebook_perplexity": exp of the entropy, from 1 to K. "dead_codes":
    the number of codes that were never used.
    """
    shares = counts.to(torch.float64) / counts.sum()
    entropy = -float(torch.special.xlogy(shares, shares).sum())
    used = int((counts > 0).sum())
    return {
        "codebook_usage": used / len(counts),
        "codebook_perplexity": math.exp(entropy),
        "dead_codes": float(len(counts) - used),
    }


def codebook_estimates(counts: Tensor, n: int) -> dict[str, Estimate]:
    """Return `codebook_use` with intervals. counts: [blocks, K], for each block of the n images
    (`moments.block_of_each`).

    The number of codes in use only grows with the number of images, so its interval is centred on the value itself.
    """
    total = counts.sum(dim=0)
    values = codebook_use(total)
    if few := too_few(n):
        return {name: Estimate(value, n, note=few) for name, value in values.items()}
    left_out = [codebook_use(total - block) for block in counts]
    limits = {"codebook_usage": (0, 1), "codebook_perplexity": (1, len(total)), "dead_codes": (0, len(total))}
    return {
        name: jackknife(
            value,
            [statistics[name] for statistics in left_out],
            n,
            *limits[name],
            centre="debiased" if name == "codebook_perplexity" else "value",
        )
        for name, value in values.items()
    }


def _window_mean(x: Tensor) -> Tensor:
    channels = x.shape[1]
    offsets = torch.arange(_WINDOW, dtype=torch.float64, device=x.device) - _WINDOW // 2
    window = torch.exp(-offsets.square() / (2 * _SIGMA**2))
    window = (window / window.sum()).expand(channels, 1, _WINDOW)
    return F.conv2d(F.conv2d(x, window.unsqueeze(2), groups=channels), window.unsqueeze(3), groups=channels)


def _check(original: Tensor, decoded: Tensor) -> None:
    known = (torch.uint8, torch.float32)
    if original.shape != decoded.shape or original.dtype != decoded.dtype or original.dtype not in known:
        raise ValueError(
            f"Reconstructions are compared as float32 or uint8 images of one shape; got {original.dtype} "
            f"{list(original.shape)} and {decoded.dtype} {list(decoded.shape)}."
        )


SMALLEST = 32
"""Smallest side of an image in pixels, below which AlexNet's last layers would have no positions."""
_WIDTHS = (64, 192, 384, 256, 256)
_PLACES = (0, 3, 6, 8, 10)  # of the convolutions among torchvision's `features`
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # ImageNet's mean and deviation, of pixels in [-1, 1]


class LpipsConfig(Config):
    """Location of the weights, which are never downloaded."""

    backbone: Path
    """Path of AlexNet's weights as published by torchvision, alexnet-owt-7be5be79.pth."""
    heads: Path
    """Path of the channel weights, alex.pth of the package lpips (weights/v0.1) or of torchmetrics."""

    def check(self, spec: DataSpec, key: str) -> None:
        """Raise ValueError if a file is missing or the images do not fit. key: the key in the configuration."""
        if spec.channels not in (1, 3) or min(spec.size) < SMALLEST:
            raise ValueError(
                f"{key} is set, but LPIPS compares grey or RGB images of at least {SMALLEST} pixels; these have "
                f"{spec.channels} channels and {size_text(spec.resolution)} pixels. Leave it out."
            )
        for name, path in (("backbone", self.backbone), ("heads", self.heads)):
            _check_file(path, f"{key}.{name}")

    def build(self, device: torch.device, key: str = "evaluate.lpips") -> Lpips:
        """Build the metric. key: the key in the configuration. Raises ValueError if a file is missing or has other
        contents."""
        backbone, heads = (_read(self.backbone, f"{key}.backbone"), _read(self.heads, f"{key}.heads"))
        measure = Lpips()
        try:
            for place, layer in zip(_PLACES, measure.convolutions, strict=True):
                layer.weight.copy_(backbone[f"features.{place}.weight"])
                cast("nn.Parameter", layer.bias).copy_(backbone[f"features.{place}.bias"])
            for number, head in enumerate(measure.heads):
                head.copy_(heads[f"lin{number}.model.1.weight"].flatten())
        except (KeyError, RuntimeError) as error:
            raise ValueError(
                f"{key}: {self.backbone} and {self.heads} are not AlexNet and its LPIPS heads ({error}). "
                "Bring alexnet-owt-7be5be79.pth of torchvision and alex.pth of the package lpips."
            ) from None
        return measure.to(device)

    @property
    def identity(self) -> dict[str, Any]:
        """Return the identity of the metric; values are comparable only between equal identities."""
        return {"name": "LPIPS 0.1, AlexNet", "backbone": sha256_file(self.backbone), "heads": sha256_file(self.heads)}


class Lpips(nn.Module):
    """Two sets of uint8 images [B, C, H, W] -> distances, float64 [B]. C is 1 or 3, both edges at least 32."""

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(3, 64, 11, stride=4, padding=2)
        second = nn.Conv2d(64, 192, 5, padding=2)
        rest = [nn.Conv2d(c_in, c_out, 3, padding=1) for c_in, c_out in ((192, 384), (384, 256), (256, 256))]
        self.convolutions = cast("list[nn.Conv2d]", nn.ModuleList([first, second, *rest]))
        self.heads = nn.ParameterList(torch.zeros(width) for width in _WIDTHS)
        self.register_buffer("shift", torch.tensor(_SHIFT).view(3, 1, 1))
        self.register_buffer("scale", torch.tensor(_SCALE).view(3, 1, 1))
        self.requires_grad_(False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.distance(first.to(torch.float32) / 127.5 - 1, second.to(torch.float32) / 127.5 - 1)

    def distance(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the distance of float32 images in [-1, 1]."""
        total = torch.zeros(len(first), dtype=torch.float64, device=first.device)
        for weights, x, y in zip(self.heads, self._features(first), self._features(second), strict=True):
            difference = (_unit(x) - _unit(y)).square()  # [B, C, h, w]
            total = total + torch.einsum("bchw,c->bhw", difference, weights).mean(dim=(1, 2)).double()
        return total

    def _features(self, images: Tensor) -> list[Tensor]:
        if images.shape[1] not in (1, 3) or min(images.shape[2:]) < SMALLEST:
            raise ValueError(
                f"LPIPS compares grey or RGB images of at least {SMALLEST} pixels; got {list(images.shape[1:])}. Leave "
                "evaluate.lpips out."
            )
        x = (images.expand(-1, 3, -1, -1) - self.shift) / self.scale
        features = []
        for number, layer in enumerate(self.convolutions):
            x = F.relu(layer(F.max_pool2d(x, 3, 2) if number in (1, 2) else x))
            features.append(x)
        return features


def _unit(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True)  # whose gradient at 0 is 0
    return x / (length + 1e-10)


def _check_file(path: Path, key: str) -> None:
    if not path.is_file():
        raise ValueError(f"{key} is {path}, which does not exist. Bring the file, or leave it out.")


def _read(path: Path, key: str) -> dict[str, Tensor]:
    _check_file(path, key)
    try:
        tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        raise ValueError(f"{key}: {path} is not a file of plain tensors.") from None
    return without_wrappers(tensors, path)
