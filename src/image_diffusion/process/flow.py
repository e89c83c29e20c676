"""The straight path of flow matching: x_t = (1 - t) x0 + t eps, t from 0 (clean) to 1 (noise).

Lipman et al. 2023, "Flow matching for generative modeling"; Liu et al. 2023, "Flow straight and fast" (rectified flow);
Ma et al. 2024, "SiT". Its velocity dx_t/dt is eps - x0.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config import Config
from image_diffusion.core.streams import Streams
from image_diffusion.core.types import Network
from image_diffusion.process.grid import Grid
from image_diffusion.process.noise_process import count_steps
from image_diffusion.process.respacing import Respacing


class UniformTimes(Config):
    """Times uniform in [0, 1)."""

    type: Literal["uniform"] = "uniform"

    def draw(self, streams: Streams) -> Tensor:
        """Float64 [B]."""
        return streams.uniform("timestep").double()


class LogitNormalTimes(Config):
    """Times whose logit is normal: more of them in the middle (Esser et al. 2024, equation 19)."""

    type: Literal["logit_normal"] = "logit_normal"
    mean: float = 0.0
    """Mean of the logit; positive: more noise."""
    std: float = Field(1.0, gt=0)
    """Standard deviation of the logit."""

    def draw(self, streams: Streams) -> Tensor:
        """Float64 [B]."""
        return torch.sigmoid(self.mean + self.std * streams.normal("timestep").double())


class Flow(Config):
    """The straight path between data and noise."""

    type: Literal["flow"] = "flow"
    times: Annotated[UniformTimes | LogitNormalTimes, Field(discriminator="type")] = UniformTimes()
    """How training draws times."""
    time_scale: float = Field(1.0, gt=0)
    """What the network is given is the time multiplied by this: 1 in SiT, 1000 in Stable Diffusion 3."""

    def build(self) -> FlowProcess:
        """The process."""
        return FlowProcess(self)


class FlowProcess:
    """The straight path; t is float64 [B] in [0, 1]."""

    def __init__(self, config: Flow) -> None:
        self._config, self._times, self._time_scale = config, config.times, config.time_scale

    def draw(self, streams: Streams) -> Tensor:
        """A time for each sample. Float64 [B]."""
        return self._times.draw(streams)

    def uniform(self) -> FlowProcess:
        """The same path with times drawn uniformly."""
        return FlowProcess(self._config.model_copy(update={"times": UniformTimes()}))

    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha = 1 - t and sigma = t at times [B]. Float64 [B] each."""
        t = t.double()
        return 1 - t, t

    def network_time(self, t: Tensor) -> Tensor:
        """What the network is given for times [B]. Float32 [B]."""
        return (t.double() * self._time_scale).float()

    def network_input(self, x_t: Tensor) -> Tensor:
        """What the network is given for x_t: the same."""
        return x_t

    def preconditioned(self, network: Network) -> Network:
        """The network as it is."""
        return network

    def fraction(self, t: Tensor) -> Tensor:
        """Where on the noise scale times [B] lie. Float64 [B] in [0, 1)."""
        return t.double().clamp(max=1 - 2**-24)

    def grid(self, num_steps: Respacing) -> Grid:
        """Times evenly spaced from 1 to 0. Raises ValueError for anything but a number of steps."""
        times = torch.linspace(1, 0, count_steps(num_steps, "flow") + 1, dtype=torch.float64)
        alpha, sigma = self.levels(times)
        return Grid(time=times[:-1] * self._time_scale, alpha=alpha, sigma=sigma)
