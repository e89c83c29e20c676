"""Properties of a prior that sampling depends on: its noise, the meaning of the output of its network, and the inputs
of the network, from stored pairs of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.devices import to_device
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, Network
from image_diffusion.data.encoded.pairs import IMAGE, TEXT, TOKENS
from image_diffusion.process.denoiser import NetworkDenoiser
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.grid import Denoised, Denoiser, Grid


class ImageStatistics(Config):
    """Statistics that image embeddings are normalised by: x = (embedding - mean) / std."""

    mean: tuple[float, ...]
    """Mean of each dimension."""
    std: tuple[Annotated[float, Field(gt=0)], ...]
    """Standard deviation of each dimension."""

    @model_validator(mode="after")
    def _of_one_dimension(self) -> ImageStatistics:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} numbers, but std {len(self.std)}. Give one a dimension.")
        return self


@dataclass(frozen=True)
class Scaling:
    """Conversion of image embeddings to the network's scale, and back. norm: the factor of the embeddings. statistics:
    mean and standard deviation that normalise the embeddings in place of the factor."""

    norm: float
    statistics: ImageStatistics | None = None

    def x(self, embeddings: Tensor) -> Tensor:
        """Return image embeddings [..., dim] in the network's scale."""
        if self.statistics is None:
            return embeddings * self.norm
        mean, std = self.moments(embeddings)
        return (embeddings - mean) / std

    def stored(self, x: Tensor) -> Tensor:
        """Return the embeddings of x [..., dim], in the scale of the stored ones."""
        if self.statistics is None:
            return x / self.norm
        mean, std = self.moments(x)
        return x * std + mean

    def moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation [dim], for embeddings of a tensor's dimension, on its device. Raises
        ValueError for statistics of another dimension."""
        dim = like.shape[-1]
        if self.statistics is None:
            return like.new_zeros(dim), like.new_full((dim,), 1 / self.norm)
        if len(self.statistics.mean) != dim:
            raise ValueError(
                f"system.image_statistics has {len(self.statistics.mean)} dimensions, but embeddings have {dim}. Give "
                f"those of the same embeddings."
            )
        moments = torch.tensor([self.statistics.mean, self.statistics.std], dtype=like.dtype)
        mean, std = to_device(moments, like.device)
        return mean, std


class EmbeddingReading(Config):
    """Properties of a system that `EmbeddingGenerator` needs. An exported model contains them instead of the system."""

    process: Discrete
    """Process by which noise was added."""
    prediction: Literal["x0", "eps", "v"]
    """Prediction of the network."""
    drops_conditions: bool
    """True if conditions were dropped in training, so that guidance is possible."""
    self_cond: bool
    """True if the network is conditioned on its own earlier x0."""
    norm: float
    """Factor by which image embeddings are multiplied; for normalised embeddings, their approximate norm."""
    statistics: ImageStatistics | None = None
    """Statistics that normalise image embeddings in place of the factor."""

    @property
    def scaling(self) -> Scaling:
        """Return the conversion of image embeddings to x, and back."""
        return Scaling(self.norm, self.statistics)

    def denoiser(
        self,
        network: Network,
        grid: Grid,
        cond: Mapping[str, Tensor],
        guide: Callable[[Network], Network] = lambda network: network,
        restrict: Callable[[Tensor], Tensor] | None = None,
    ) -> Denoiser:
        """Return the denoiser for a sampler on `grid`, for one batch. guide: maps a network to the guided one.
        restrict: the function applied to each predicted x0 before eps is computed from it."""
        process, prediction = self.process.build(), self.prediction
        guided = guide(network)
        if not self.self_cond:
            return NetworkDenoiser(guided, process, grid, prediction, cond=cond, restrict=restrict)
        return _Carrying(
            guided, lambda plain: NetworkDenoiser(plain, process, grid, prediction, cond=cond, restrict=restrict)
        )


class _Carrying:
    """Denoiser whose network receives the x0 of the previous call; a call at the first point resets it."""

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


def caption_inputs(pairs: Tensor, token_encodings: bool) -> dict[str, Tensor]:
    """Return the conditions of the network from stored pairs [B, 2 + L, dim]: "text_embed" [B, dim], and
    "text_encodings" [B, L, dim] if `token_encodings` is true and the pairs contain them."""
    cond = {"text_embed": pairs[:, TEXT].float()}
    if token_encodings and pairs.shape[1] > TOKENS:
        cond["text_encodings"] = pairs[:, TOKENS:].float()
    return cond


def pair_batch(pairs: Tensor, streams: Streams, scaling: Scaling, token_encodings: bool) -> Batch:
    """Return the batch of stored pairs [B, 2 + L, dim]. Raises ValueError for another shape."""
    if pairs.ndim != 3 or pairs.shape[1] < TOKENS:
        raise ValueError(
            f"The prior learns from pairs of embeddings, [B, 2 or more, dim], but the data set holds "
            f"{list(pairs.shape[1:])}. Train on what embed wrote."
        )
    return Batch(scaling.x(pairs[:, IMAGE].float()), caption_inputs(pairs, token_encodings), streams)
