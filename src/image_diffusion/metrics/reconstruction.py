"""How much of an image a codec keeps: PSNR, SSIM, the reconstruction Fréchet distance, and use of the codebook."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.metrics.features import Detected
from image_diffusion.metrics.frechet import frechet_estimate
from image_diffusion.metrics.intervals import Estimate, mean_estimate
from image_diffusion.metrics.moments import BlockMoments, Moments, block_of_each

_WINDOW, _SIGMA = 11, 1.5
_RANGE = 255.0
_MOST_DB = 100.0


def psnr(original: Tensor, decoded: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB, float64 [B]; 100 for an exact copy. Both: uint8 [B, C, H, W]."""
    _check(original, decoded)
    error = (original.to(torch.float64) - decoded.to(torch.float64)).square().mean(dim=(1, 2, 3))
    return (10 * torch.log10(_RANGE**2 / error)).clamp(max=_MOST_DB)


def ssim(original: Tensor, decoded: Tensor) -> Tensor:
    """Structural similarity of each image, float64 [B] (Wang et al. 2004, eq. 13). Both: uint8 [B, C, H, W].

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


def reconstruction_estimates(
    psnr_of_each: Tensor, ssim_of_each: Tensor, original: Detected, decoded: Detected
) -> dict[str, Estimate]:
    """The means with intervals, "reconstruction_fd" and, with logits, "agreement": the class before is the class after.

    psnr_of_each, ssim_of_each: [N]. original, decoded: what a detector sees in the same N images, in the same order.
    """
    n, block = len(decoded), block_of_each(len(decoded))
    moments = BlockMoments(decoded.features.shape[1], n)
    moments.update(decoded.features, torch.arange(n))
    found = {
        "psnr": mean_estimate(psnr_of_each, block, 0),
        "ssim": mean_estimate(ssim_of_each, block, -1, 1),
        "reconstruction_fd": frechet_estimate(moments.finish(), Moments.of(original.features).gaussian),
    }
    if original.logits is not None and decoded.logits is not None:
        same = original.logits.argmax(dim=1) == decoded.logits.argmax(dim=1)
        found["agreement"] = mean_estimate(same.to(torch.float64), block, 0, 1)
    return found


def codebook_use(counts: Tensor) -> dict[str, float]:
    """How a codebook is used. counts: [K], how often each code was. Returns "usage", the share of codes used at all,
    and "perplexity", exp of the entropy: between 1 and K."""
    shares = counts.to(torch.float64) / counts.sum()
    entropy = -float(torch.special.xlogy(shares, shares).sum())
    return {"usage": float((counts > 0).to(torch.float64).mean()), "perplexity": math.exp(entropy)}


def _window_mean(x: Tensor) -> Tensor:
    channels = x.shape[1]
    offsets = torch.arange(_WINDOW, dtype=torch.float64, device=x.device) - _WINDOW // 2
    window = torch.exp(-offsets.square() / (2 * _SIGMA**2))
    window = (window / window.sum()).expand(channels, 1, _WINDOW)
    return F.conv2d(F.conv2d(x, window.unsqueeze(2), groups=channels), window.unsqueeze(3), groups=channels)


def _check(original: Tensor, decoded: Tensor) -> None:
    if original.shape != decoded.shape or original.dtype != torch.uint8 or decoded.dtype != torch.uint8:
        raise ValueError(
            f"Reconstructions are compared as uint8 images of one shape; got {original.dtype} {list(original.shape)} "
            f"and {decoded.dtype} {list(decoded.shape)}."
        )
