"""The straight path of flow matching: x_t = (1 - t) x0 + t eps, t from 0 (clean) to 1 (noise).

Lipman et al. 2023, "Flow matching for generative modeling"; Liu et al. 2023, "Flow straight and fast" (rectified flow);
Ma et al. 2024, "SiT". Its velocity dx_t/dt is eps - x0. Time shift: Esser et al. 2024, "Scaling rectified flow
transformers for high-resolution image synthesis", equation 23.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.process.base import Grid, NoiseProcess, Respacing, count_steps, evenly


class UniformTimes(Config):
    """Times uniform in [0, 1)."""

    type: Literal["uniform"] = "uniform"

    def draw(self, streams: Streams, purpose: str = "timestep") -> Tensor:
        """Float64 [B]."""
        return streams.uniform(purpose).double()


class LogitNormalTimes(Config):
    """Times whose logit is normal: times in the middle are more frequent (Esser et al. 2024, equation 19)."""

    type: Literal["logit_normal"] = "logit_normal"
    mean: float = 0.0
    """Mean of the logit; positive: more noise."""
    std: float = Field(1.0, gt=0)
    """Standard deviation of the logit."""

    def draw(self, streams: Streams, purpose: str = "timestep") -> Tensor:
        """Float64 [B]."""
        return torch.sigmoid(self.mean + self.std * streams.normal(purpose).double())


class Flow(Config):
    """The straight path between data and noise."""

    type: Literal["flow"] = "flow"
    times: Annotated[UniformTimes | LogitNormalTimes, Field(discriminator="type")] = UniformTimes()
    """Distribution from which training draws times."""
    time_scale: float = Field(1.0, gt=0, le=1e6)
    """Factor of the time input of the network: 1 in SiT, 1000 in Stable Diffusion 3."""

    shift: float = Field(1.0, ge=1e-6, le=1e3)
    """Shift s of times towards noise, in training and sampling: t becomes s t / (1 + (s - 1) t). An image of m pixels
    at s = sqrt(m / n) is as uncertain as one of n pixels at s = 1. A sampler's own `shift` takes precedence."""

    def build(self) -> FlowProcess:
        """Build the process."""
        return FlowProcess(self)


class FlowProcess(NoiseProcess):
    """The straight path; t is float64 [B] in [0, 1]."""

    def __init__(self, config: Flow) -> None:
        self._config, self._times, self._time_scale = config, config.times, config.time_scale

    def draw(self, streams: Streams, purpose: str = "timestep") -> Tensor:
        """Draw a time for each sample. Float64 [B]. purpose: name of the draw; other names give other times."""
        return shifted(self._times.draw(streams, purpose), self._config.shift)

    def uniform(self) -> FlowProcess:
        return FlowProcess(self._config.model_copy(update={"times": UniformTimes(), "shift": 1.0}))

    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha = 1 - t and sigma = t at times [B]. Float64 [B] each."""
        t = t.double()
        return 1 - t, t

    def network_time(self, t: Tensor) -> Tensor:
        return (t.double() * self._time_scale).float()

    def time_at(self, noise: float) -> float:
        """Return the time before the shift at which sigma / (alpha + sigma) is `noise`, in (0, 1]."""
        return noise / (self._config.shift - (self._config.shift - 1) * noise)

    def grid(self, num_steps: Respacing, last_step: float | None = None) -> Grid:
        """Return times evenly spaced from 1 to 0, then shifted. last_step: size of the last step; None: as the others.
        Raises ValueError for anything but a number of steps."""
        times = evenly(count_steps(num_steps, "flow"), last_step)
        alpha, sigma = self.levels(shifted(times, self._config.shift))
        return Grid(time=sigma[:-1] * self._time_scale, alpha=alpha, sigma=sigma)


def shifted(t: Tensor, shift: float) -> Tensor:
    """Shift times t in [0, 1], towards 1 if shift is above 1; 0 and 1 do not change."""
    return t if shift == 1 else shift * t / (1 + (shift - 1) * t)
