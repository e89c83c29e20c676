"""Quality of a codec's reconstructions: PSNR, SSIM, the reconstruction Fréchet distance, and codebook usage."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.metrics.distances.frechet import frechet_between
from image_diffusion.metrics.distances.jackknife import Estimate, jackknife, share_estimate, too_few
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
