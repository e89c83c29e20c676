"""Properties of a diffusion system that sampling depends on: its noise, and the meaning of its network's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import Network
from image_diffusion.process import Process
from image_diffusion.process.base import Denoiser, Grid
from image_diffusion.process.denoiser import NetworkDenoiser, Prediction, SelfConditionedDenoiser, Variance, clamp


class Reading(Config):
    """Properties of a system that `Generator` needs. An exported model contains them instead of the system."""

    process: Process
    """Process by which noise was added."""
    prediction: Prediction
    """Prediction of the network."""
    variance: Variance
    """Parametrization of the variance."""
    drops_labels: bool
    """True if labels were dropped in training, so that guidance is possible."""
    drops_alone: tuple[str, ...] = ()
    """Parts of the condition that were dropped alone, so that guidance can have a scale for each."""
    estimates: Literal["none", "clamped", "free"] = "none"
    """Self-conditioning on the network's own earlier x0: none, clamped to [-1, 1], or unchanged."""

    def denoiser(
        self,
        network: Network,
        grid: Grid,
        cond: Mapping[str, Tensor],
        guide: Callable[[Network], Network] = lambda network: network,
    ) -> Denoiser:
        """Return the denoiser for a sampler on `grid`, for one batch of images. guide: maps a network to the guided
        one."""
        process = self.process.build()
        if self.estimates == "none":
            return NetworkDenoiser(guide(network), process, grid, self.prediction, self.variance, cond)
        restrict: Callable[[Tensor], Tensor] = clamp if self.estimates == "clamped" else lambda x0: x0
        return SelfConditionedDenoiser(network, process, grid, self.prediction, cond, restrict, guide)
