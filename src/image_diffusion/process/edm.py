"""EDM: x_t = x0 + sigma eps, and a preconditioned network whose input and output have unit variance.

Karras et al. 2022, "Elucidating the design space of diffusion-based generative models", table 1, last column. The time
t of this process is sigma itself. One difference: the initial noise has variance sigma_max^2 + 1, as for every process
here (in the paper sigma_max^2).
"""

from __future__ import annotations

import math
from copy import copy
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Network
from image_diffusion.process.base import Grid, NoiseProcess, Respacing, count_steps, karras_sigmas


class Edm(Config):
    """Noise of growing variance, added to unscaled images."""

    type: Literal["edm"] = "edm"
    sigma_data: float = Field(0.5, gt=0, le=1e6)
    """Standard deviation of the data."""
    p_mean: float = -1.2
    """Mean of the logarithm of the sigmas that training draws."""
    p_std: float = Field(1.2, gt=0)
    """Standard deviation of the logarithm of the sigmas that training draws."""
    sigma_min: float = Field(0.002, ge=1e-30)
    """Smallest sigma at which a sampler calls the network."""
    sigma_max: float = Field(80.0, gt=0, le=1e6)
    """Sigma at which sampling starts."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.sigma_min >= self.sigma_max:
            raise ValueError(
                f"sigma_min must be below sigma_max; got sigma_min {self.sigma_min} and sigma_max {self.sigma_max}."
            )
        return self

    def build(self) -> EdmProcess:
        """Build the process."""
        return EdmProcess(self)


class EdmProcess(NoiseProcess):
    """x0 + sigma eps; t is sigma, float64 [B]."""

    def __init__(self, config: Edm) -> None:
        self.sigma_data = config.sigma_data
        self._config, self._uniform = config, False

    def draw(self, streams: Streams) -> Tensor:
        """Draw a sigma for each sample, log-normal. Float64 [B]."""
        if self._uniform:
            low, high = self._ends()
            return (low + (high - low) * streams.uniform("timestep").double()).exp()
        return (self._config.p_mean + self._config.p_std * streams.normal("timestep").double()).exp()

    def uniform(self) -> EdmProcess:
        """Return the process with the logarithm of sigma drawn uniformly from sigma_min to sigma_max."""
        same = copy(self)
        same._uniform = True
        return same

    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 and sigma at times [B]. Float64 [B] each."""
        return torch.ones_like(t, dtype=torch.float64), t.double()

    def network_time(self, t: Tensor) -> Tensor:
        """Return c_noise, the time input of the network, for sigmas [B]. Float32 [B]."""
        return (t.double().log() / 4).float()

    def preconditioned(self, network: Network) -> Network:
        """Return D of a network F. D predicts x0: D(x; sigma) = c_skip x + c_out F(c_in x; c_noise)."""

        def denoise(x: Tensor, c_noise: Tensor, /, **cond: Tensor) -> Tensor:
            sigma = (4 * c_noise).exp().view(-1, *[1] * (x.ndim - 1)).to(x.dtype)
            total = self.sigma_data**2 + sigma**2
            c_skip = self.sigma_data**2 / total
            c_out = sigma * self.sigma_data / total.sqrt()
            said: Tensor = network(x / total.sqrt(), c_noise, **cond).to(x.dtype)
            return c_skip * x + c_out * said

        return denoise

    def loss_weight(self, t: Tensor) -> Tensor:
        """Return lambda, the weight of a squared error in x0: 1 / c_out^2. Float64 [B]."""
        sigma = t.double()
        return (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2

    def fraction(self, t: Tensor) -> Tensor:
        """Return the position of the logarithm of sigmas [B] from sigma_min to sigma_max. Float64 [B] in [0, 1)."""
        low, high = self._ends()
        return ((t.double().log() - low) / (high - low)).clamp(0, 1 - 2**-24)

    def grid(self, num_steps: Respacing) -> Grid:
        """Return points in Karras's spacing, sigma_max to sigma_min. Raises ValueError for anything but a number."""
        first, last = self._config.sigma_max, self._config.sigma_min
        return self.grid_of(karras_sigmas(first, last, count_steps(num_steps, "edm")))

    def grid_of(self, sigma: Tensor) -> Grid:
        """Return the points at these sigmas [N], and the clean end."""
        sigma = torch.cat([sigma, sigma.new_zeros(1)])
        return Grid(time=sigma[:-1].log() / 4, alpha=torch.ones_like(sigma), sigma=sigma)

    def _ends(self) -> tuple[float, float]:
        return math.log(self._config.sigma_min), math.log(self._config.sigma_max)
