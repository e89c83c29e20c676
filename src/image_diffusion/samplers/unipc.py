"""UniPC: a multistep predictor whose every step is corrected with the prediction made after it, at no further call.

Zhao et al. 2023, "UniPC: A unified predictor-corrector framework for fast sampling of diffusion models", in
its form that predicts x0, with B(h) = exp(h) - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.process.grid import Denoiser, Grid
from image_diffusion.samplers.base import NumSteps, SpacedByNoise, Step
from image_diffusion.samplers.diffusers_multistep import run_scheduler


class UniPc(SpacedByNoise):
    """One network call a step, order 2 and corrected: diffusers' UniPCMultistepScheduler on our noise levels."""

    type: Literal["unipc"] = "unipc"
    num_steps: NumSteps = 20

    def steps(self, denoiser: Denoiser, grid: Grid, x: Tensor, streams: Streams) -> Iterator[Step]:
        """The last step is of order 1."""
        from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

        scheduler = UniPCMultistepScheduler(prediction_type="sample", use_flow_sigmas=True, solver_order=2)
        return run_scheduler(scheduler, denoiser, grid, x)
