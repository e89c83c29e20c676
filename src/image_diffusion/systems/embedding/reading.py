"""What sampling has to know of a prior: its noise, and how the output of its network is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, cast

import torch
from torch import Tensor

from image_diffusion.core.config import Config
from image_diffusion.core.types import DataSpec, Network
from image_diffusion.process.denoiser import NetworkDenoiser
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.grid import Denoised, Denoiser, Grid


class EmbeddingReading(Config):
    """What `EmbeddingGenerator` asks of a system. An exported model holds this in the system's place."""

    process: Discrete
    """How noise was added."""
    prediction: Literal["x0", "eps", "v"]
    """What the network predicts."""
    learns_nulls: bool
    """Whether it learnt to do without its conditions."""
    self_cond: bool
    """Whether it is given its own earlier x0."""
    norm: float
    """What image embeddings are multiplied with."""

    def scale(self, spec: DataSpec) -> float:
        """What image embeddings are multiplied with."""
        return self.norm

    def denoiser(
        self,
        network: Network,
        grid: Grid,
        cond: Mapping[str, Tensor],
        guide: Callable[[Network], Network] = lambda network: network,
        restrict: Callable[[Tensor], Tensor] | None = None,
    ) -> Denoiser:
        """The network as a sampler on `grid` sees it, for one batch. guide: a network -> the guided one. restrict: what
        is done to each predicted x0, from which eps then follows."""
        process, prediction = self.process.build(), self.prediction
        guided = guide(network)
        if not self.self_cond:
            return NetworkDenoiser(guided, process, grid, prediction, cond=cond, restrict=restrict)
        return _Carrying(
            guided, lambda plain: NetworkDenoiser(plain, process, grid, prediction, cond=cond, restrict=restrict)
        )


class _Carrying:
    """A denoiser whose network is given the x0 of the call before; a call at the first point starts anew."""

    def __init__(self, network: Network, denoiser: Callable[[Network], Denoiser]) -> None:
        self._network, self._x0 = network, cast("Tensor | None", None)
        self._denoiser = denoiser(self._call)

    def __call__(self, x_t: Tensor, i: int) -> Denoised:
        if i == 0:
            self._x0 = None
        denoised = self._denoiser(x_t, i)
        self._x0 = denoised.x0
        return denoised

    def _call(self, x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor:
        earlier = torch.zeros_like(x) if self._x0 is None else self._x0
        return self._network(x, t, **cond, self_cond=earlier)
