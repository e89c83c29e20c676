"""Objective of EDM: the error of the preconditioned network in x0, weighted so that the initial loss is about 1 for
every sigma.

Karras et al. 2022, "Elucidating the design space of diffusion-based generative models", section 5 and table 1. The
target of the raw network is a mixture of image and noise of unit variance: mostly image for large sigma, mostly noise
for small sigma (`EdmProcess.preconditioned`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from image_diffusion.core.types import DataSpec, Losses, Network
from image_diffusion.objectives.label_dropout import DropsConditionParts
from image_diffusion.objectives.timestep_sampling import NoisedOnce
from image_diffusion.process.base import NoiseProcess, broadcast
from image_diffusion.process.denoiser import Prediction, Variance
from image_diffusion.process.edm import EdmProcess


class EdmDenoising(DropsConditionParts):
    """Denoise with the preconditioning of the edm process."""

    type: Literal["edm"] = "edm"
    label_drop_probability: float = Field(0.0, ge=0, le=1)
    """Probability that a label is replaced by the null label, for classifier-free guidance."""

    prediction: ClassVar[Prediction] = "x0"
    """Quantity that the preconditioned network predicts."""
    variance: ClassVar[Variance] = "fixed_small"
    """No variance is learned."""

    def build(self, process: NoiseProcess, spec: DataSpec) -> EdmObjective:
        """Return the objective for data on a process. Raises ValueError unless the process is edm."""
        if not isinstance(process, EdmProcess):
            raise ValueError(
                "Objective edm needs the edm process. Set process.type to edm, or objective.type to another."
            )
        return EdmObjective(self, process, spec)


class EdmObjective(NoisedOnce):
    """Objective that returns one loss per sample of a batch: the weighted squared error of x0."""

    _process: EdmProcess

    def losses_at(self, network: Network, x: Tensor, t: Tensor, noise: Tensor, cond: dict[str, Tensor]) -> Losses:
        """Return the losses of x [B, C, …] at sigmas t [B] with noise like x. Draws no random numbers."""
        _, sigma = broadcast(self._process.levels(t), x)
        denoise = self._process.preconditioned(network)
        x0 = denoise(x + sigma * noise, self._process.network_time(t), **cond)
        mse = (x - x0).square().flatten(1).mean(1) * self._process.loss_weight(t).to(x.dtype)
        return Losses(mse, {"mse": mse.detach()}, self._process.fraction(t))
