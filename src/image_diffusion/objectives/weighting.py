"""Weights of the squared error, one for each sample, as functions of its noise level.

SNR = alpha^2 / sigma^2. The weight of an x0 error determines that of the same error in eps or v, which is the weight
times 1 / SNR or 1 / (SNR + 1). Levels with sigma or alpha 0 give finite weights.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.process.denoiser import Prediction


class UniformWeighting(Config):
    """Weight 1 for every prediction."""

    type: Literal["uniform"] = "uniform"

    def weight(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        """[B] from alpha and sigma [B]."""
        return torch.ones_like(alpha)


class SnrWeighting(Config):
    """Weight that converts the error of a prediction to that in eps: 1 for eps, SNR for x0, SNR / (SNR + 1) for v."""

    type: Literal["snr"] = "snr"

    def weight(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        """[B] from alpha and sigma [B]."""
        match prediction:
            case "eps":
                return torch.ones_like(alpha)
            case "x0":
                return _snr(alpha, sigma)
            case "v":
                return alpha**2 / (alpha**2 + sigma**2)
            case _:
                raise AssertionError(f"no weight for {prediction}")


class MinSnrWeighting(Config):
    """Min-SNR weighting: min(SNR, gamma) for SNR in the weight of x0 (Hang et al. 2023, section 3.4)."""

    type: Literal["min_snr"] = "min_snr"
    gamma: float = Field(5.0, gt=0)
    """The largest weight of an x0 error."""

    def weight(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        """[B] from alpha and sigma [B]."""
        truncation = (self.gamma / _snr(alpha, sigma)).clamp(max=1)
        return SnrWeighting().weight(prediction, alpha, sigma) * truncation


class P2Weighting(Config):
    """Weight (k + SNR)^-gamma for every prediction (Choi et al. 2022, "Perception prioritized training")."""

    type: Literal["p2"] = "p2"
    gamma: float = Field(1.0, ge=0)
    """Exponent: larger values reduce the weight of the least noisy times; 0: every weight is 1."""
    k: float = Field(1.0, gt=0)
    """Constant that limits the weight of the noisiest times."""

    def weight(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        """[B] from alpha and sigma [B]."""
        return (self.k + _snr(alpha, sigma)) ** -self.gamma


Weighting = Annotated[UniformWeighting | SnrWeighting | MinSnrWeighting | P2Weighting, Field(discriminator="type")]


def _snr(alpha: Tensor, sigma: Tensor) -> Tensor:
    """Return the SNR, between 1e-20 and 1e9 for levels of unit variance, so that no weight is infinite or NaN."""
    return alpha.square().clamp(min=1e-20) / sigma.square().clamp(min=1e-9)
