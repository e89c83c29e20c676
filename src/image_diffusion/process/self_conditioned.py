"""A self-conditioned network as a sampler sees it: each call is given what the call before it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from image_diffusion.core.types import Network
from image_diffusion.process.denoiser import NetworkDenoiser
from image_diffusion.process.grid import Denoised, Grid
from image_diffusion.process.noise_process import NoiseProcess
from image_diffusion.process.parameterization import Prediction


class SelfConditionedDenoiser:
    """Calls a network at the points of a grid, and carries its estimate of x0 and its latents to the next call.

    A call at the first point of the grid starts anew, with neither. A sampler that calls twice a step, such as Heun's,
    has its second call carry to the next step. One denoiser serves one batch of images, one call at a time.

    network: called as network(x, t, **cond, return_latents=True) -> (prediction, latents, norm), where cond may hold
    "self_cond" and "latents". restrict: what is done to an x0 before it is given back. guide: makes the guided network
    of a plain one; the unconditional half of a guided batch carries latents of its own, and the guided x0.
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
        """What the network says of x_t [B, C, …] at point i."""
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
    """The first rows, or all of them over again: where guidance sets in the batch doubles, where it ends it halves."""
    return tensor.repeat(-(-count // len(tensor)), *[1] * (tensor.ndim - 1))[:count]
