"""What the diffusion systems share: a process, an objective, and how a trained network is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from image_diffusion.core.config import Config
from image_diffusion.core.types import DataSpec, Network
from image_diffusion.core.types import Objective as ObjectiveFunction
from image_diffusion.objectives import Objective
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process import Process
from image_diffusion.process.denoiser import NetworkDenoiser
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.grid import Denoiser, Grid
from image_diffusion.process.parameterization import LEARNED_VARIANCES


class DiffusionSystem(Config):
    """A system that learns to remove noise. A page of its own says which network it uses."""

    process: Process = Discrete()
    """How noise is added."""
    objective: Objective = Denoising()
    """What the network predicts, and how its error is weighed."""

    @property
    def is_conditional(self) -> bool:
        """Labels condition the network, where the data have any."""
        return True

    @property
    def learns_variance(self) -> bool:
        """Whether the network returns the variance of the reverse process beside its prediction."""
        return self.objective.variance in LEARNED_VARIANCES

    @property
    def drops_labels(self) -> bool:
        """Whether the network also learns to do without a label, which guidance needs."""
        return self.objective.label_drop_probability > 0

    @property
    def low_resolution(self) -> int | None:
        """Side of the small images that the network enlarges; None: it makes images from noise alone."""
        return None

    def build_objective(self, spec: DataSpec) -> ObjectiveFunction:
        """The objective. Raises ValueError where it does not fit the process or the data."""
        return self.objective.build(self.process.build(), spec)

    def denoiser(
        self,
        network: Network,
        grid: Grid,
        cond: Mapping[str, Tensor],
        guide: Callable[[Network], Network] = lambda network: network,
    ) -> Denoiser:
        """The network as a sampler on `grid` sees it, for one batch of images. guide: a network -> the guided one."""
        prediction, variance = self.objective.prediction, self.objective.variance
        return NetworkDenoiser(guide(network), self.process.build(), grid, prediction, variance, cond)
