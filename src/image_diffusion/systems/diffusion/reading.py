"""What sampling has to know of a diffusion system: its noise, and how the output of its network is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from image_diffusion.core.config import Config
from image_diffusion.core.types import Network
from image_diffusion.process import Process
from image_diffusion.process.denoiser import NetworkDenoiser
from image_diffusion.process.grid import Denoiser, Grid
from image_diffusion.process.parameterization import Prediction, Variance, clamp
from image_diffusion.process.self_conditioned import SelfConditionedDenoiser


class Reading(Config):
    """What `Generator` asks of a system. An exported model holds this in the system's place."""

    process: Process
    """How noise was added."""
    prediction: Prediction
    """What the network predicts."""
    variance: Variance
    """What it says of the variance."""
    drops_labels: bool
    """Whether it learnt to do without a label."""
    estimates: Literal["none", "clamped", "free"] = "none"
    """Whether it is given its own earlier x0, held to [-1, 1] or as it is."""

    def denoiser(
        self, network: Network, grid: Grid, cond: Mapping[str, Tensor], guide: Callable[[Network], Network]
    ) -> Denoiser:
        """The network as a sampler on `grid` sees it, for one batch of images. guide: a network -> the guided one."""
        process = self.process.build()
        if self.estimates == "none":
            return NetworkDenoiser(guide(network), process, grid, self.prediction, self.variance, cond)
        restrict = clamp if self.estimates == "clamped" else _as_it_is
        return SelfConditionedDenoiser(network, process, grid, self.prediction, cond, restrict, guide)


def _as_it_is(x0: Tensor) -> Tensor:
    return x0
