"""A network as a sampler sees it: x_t at a point of the grid -> what it says of the clean sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from image_diffusion.core.types import Network
from image_diffusion.process.grid import Denoised, Grid
from image_diffusion.process.noise_process import NoiseProcess
from image_diffusion.process.parameterization import Prediction, Variance, read_output


class NetworkDenoiser:
    """Calls a network at the points of a grid and reads its output.

    grid: one of the process. prediction, variance: what the network was trained to return. cond: what it is
    conditioned on, by name. restrict: what is done to each predicted x0 (`read_output`).
    """

    def __init__(
        self,
        network: Network,
        process: NoiseProcess,
        grid: Grid,
        prediction: Prediction,
        variance: Variance = "fixed_small",
        cond: Mapping[str, Tensor] | None = None,
        restrict: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._network, self._process = process.preconditioned(network), process
        self._cond = dict(cond or {})
        self._prediction, self._variance, self._restrict = prediction, variance, restrict
        self._times, self._steps = grid.time.tolist(), grid.steps
        self._intervals = None if grid.interval is None else grid.interval.tolist()

    def __call__(self, x_t: Tensor, i: int) -> Denoised:
        """What the network says of x_t [B, C, …] at point i. Raises ValueError where its channels do not fit."""
        dtype = torch.promote_types(x_t.dtype, torch.float32)  # half precision cannot tell timestep 999 from 1000
        time = torch.full((len(x_t),), self._times[i], dtype=dtype, device=x_t.device)
        told = {} if self._intervals is None else {"interval": torch.full_like(time, self._intervals[i])}
        output = self._network(self._process.network_input(x_t), time, **self._cond, **told)
        return read_output(output, x_t, self._steps.at(i, x_t), self._prediction, self._variance, self._restrict)
