"""Interface of a network to a sampler: a prediction of the clean sample for x_t at a point of the grid. A
self-conditioned network receives in each call the estimate of the call before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from image_diffusion.core.types import Network
from image_diffusion.process.base import NoiseProcess
from image_diffusion.process.grid import Denoised, Grid
from image_diffusion.process.parameterization import Prediction, Variance, read_output


class NetworkDenoiser:
    """Call a network at the points of a grid and convert its output. grid: of the process. prediction, variance: what
    the network predicts. cond: its conditions, by name. restrict: function applied to each predicted x0
    (`read_output`).
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
        """Return the prediction for x_t [B, C, …] at point i. Raises ValueError where its channels do not fit."""
        dtype = torch.promote_types(x_t.dtype, torch.float32)  # half precision cannot tell timestep 999 from 1000
        time = torch.full((len(x_t),), self._times[i], dtype=dtype, device=x_t.device)
        interval = {} if self._intervals is None else {"interval": torch.full_like(time, self._intervals[i])}
        output = self._network(self._process.network_input(x_t), time, **self._cond, **interval)
        return read_output(output, x_t, self._steps.at(i, x_t), self._prediction, self._variance, self._restrict)


class SelfConditionedDenoiser:
    """Call a network at the points of a grid, and carry its estimate of x0 and its latents to the next call.

    A call at the first point of the grid starts without either. With two calls per step, as in Heun's sampler, the
    second call carries to the next step. One denoiser serves one batch of images, one call at a time.

    network: called as network(x, t, **cond, return_latents=True) -> (prediction, latents, norm), where cond may hold
    "self_cond" and "latents". restrict: function applied to an x0 before the network receives it. guide: builds the
    guided network from a plain one; the unconditional half of a guided batch carries its own latents, and the guided
    x0.
    """

    def __init__(
        self,
        network: Any,
        process: NoiseProcess,
        grid: Grid,
        prediction: Prediction,
        cond: Mapping[str, Tensor],
        restrict: Callable[[Tensor], Tensor],
        guide: Callable[[Network], Network],
    ) -> None:
        self._network, self._restrict = network, restrict
        self._carried: dict[str, Tensor] = {}
        self._denoiser = NetworkDenoiser(guide(self._call), process, grid, prediction, cond=cond)

    def __call__(self, x_t: Tensor, i: int) -> Denoised:
        """Return the network's prediction for x_t [B, C, …] at point i."""
        if i == 0:
            self._carried = {}
        denoised = self._denoiser(x_t, i)
        self._carried["self_cond"] = self._restrict(denoised.x0)
        return denoised

    def _call(self, x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor:
        output: Tensor
        carried = {name: _rows(tensor, len(x)) for name, tensor in self._carried.items()}
        output, self._carried["latents"], _ = self._network(x, t, **cond, **carried, return_latents=True)
        return output


def _rows(tensor: Tensor, count: int) -> Tensor:
    """Return the first rows, or all rows repeated: the batch doubles where guidance starts and halves where it ends."""
    return tensor.repeat(-(-count // len(tensor)), *[1] * (tensor.ndim - 1))[:count]
