"""Interface of the discrete, the continuous, the flow and the edm process, for objectives and samplers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Network
from image_diffusion.process.grid import Grid

Respacing = str | int | Sequence[int]
"""Timesteps to keep: their number, 250 or "250"; numbers in equal sections, [10, 15, 20] or "10,15,20"; "ddim50" with
DDIM's integer stride; "" for all."""


class NoiseProcess(ABC):
    """x_t = alpha_t x0 + sigma_t eps. The times of a batch are one tensor t [B], integers or reals."""

    @abstractmethod
    def draw(self, streams: Streams) -> Tensor:
        """Draw a time for each sample, as in training. [B]."""

    def uniform(self) -> NoiseProcess:
        """Return the process with times drawn uniformly."""
        return self

    @abstractmethod
    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and sigma at times [B]. Float64 [B] each."""

    @abstractmethod
    def network_time(self, t: Tensor) -> Tensor:
        """Return the time input of the network for times [B]. Float32 [B]."""

    def network_input(self, x_t: Tensor) -> Tensor:
        """Return the input of the network for x_t [B, …]."""
        return x_t

    def preconditioned(self, network: Network) -> Network:
        """Wrap a network whose input and output are not x_t and a prediction of this process."""
        return network

    def fraction(self, t: Tensor) -> Tensor:
        """Return the position of times [B] on the noise scale, by default the times. Float64 [B] in [0, 1)."""
        return t.double().clamp(max=1 - 2**-24)

    @abstractmethod
    def grid(self, num_steps: Respacing) -> Grid:
        """Return the points to sample at. Raises ValueError for steps that the process does not support."""


def broadcast(levels: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha and sigma [B] in the shape and type that multiply x [B, …]."""
    alpha, sigma = (level.view(-1, *[1] * (x.ndim - 1)).to(x.dtype) for level in levels)
    return alpha, sigma


def count_steps(num_steps: Respacing, process: str) -> int:
    """Return the number of steps. Raises ValueError for anything else: a real time has no respacing."""
    text = str(num_steps)
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"The {process} process takes a number of steps, at least 1; got {num_steps!r}. Use 50, say.")
    return int(text)


def evenly(num_steps: int, last_step: float | None = None) -> Tensor:
    """Return times from 1 to 0, float64 [num_steps + 1]. last_step: size of the last step; None: as the others."""
    if last_step is None:
        return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return torch.cat([torch.linspace(1, last_step, num_steps, dtype=torch.float64), torch.zeros(1).double()])


def karras_sigmas(first: float, last: float, num_steps: int) -> Tensor:
    """Return noise levels sigma / alpha from `first` to `last`, evenly spaced in their seventh root. Float64
    [num_steps].

    Karras et al. 2022, "Elucidating the design space of diffusion-based generative models": steps become shorter
    towards the data; section 3 finds a rho of 5 to 10 best for images.
    """
    rho = 7.0
    return torch.linspace(first ** (1 / rho), last ** (1 / rho), num_steps, dtype=torch.float64) ** rho
