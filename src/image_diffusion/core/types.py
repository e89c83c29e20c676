"""The records that travel between the stages of a training step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from torch import Tensor

from image_diffusion.core.config import Config
from image_diffusion.core.streams import Streams

TEXT = "text"
"""The name of a caption among what a network is told: its embedding and its tokens, [1 + L, dim]."""
EMBEDDING = "embedding"
"""The name of an image's embedding among what a network is told, [dim]."""


class SamplesOf(Config):
    """The samples of another experiment, which is made first."""

    experiment: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of its file in the same folder, without .yaml."""


class WeightsOf(Config):
    """The trained weights of another experiment, which is trained first."""

    experiment: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of its file in the same folder, without .yaml."""


class DataSpec(Config):
    """What the data fix about a network, apart from what its user chose."""

    channels: int
    """Channels of x: 3 for RGB, 4 for the SD VAE's latents; the dimension of an embedding; the size of a codebook."""
    resolution: int
    """Height and width of x, in its own pixels; 1 for embeddings."""
    num_classes: int = 0
    """Number of classes; 0 for unconditional data."""
    conditions: dict[str, tuple[int, ...]] = Field({})
    """Shapes of what a network is told of an image beside its class, by name. Zeros stand for nothing told."""
    features: tuple[int, int, int] | None = None
    """Shape [D, h, w] of what a teacher sees in an image, with which training is aligned; unset: there is none."""

    @model_serializer(mode="wrap")
    def _without_what_is_not(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        return {name: value for name, value in written.items() if name not in ("conditions", "features") or value}


@dataclass(frozen=True)
class Batch:
    """What an objective is given.

    x: float32 [B, C, H, W] in the space the network works in; of tokens int64 [B, N]. cond: what the network is
    conditioned on, by name: "label" int64 [B], "low_res" float32 [B, C, h, w], "text" float32 [B, 1 + L, dim],
    "embedding" float32 [B, dim], … . streams: the random numbers of these samples. step: the number of the update that
    the batch is for, from 1; of the last one done, in validation; 0 outside training. features: what a teacher saw in
    these images, [B, D, h, w]; None: there is no teacher.
    """

    x: Tensor
    cond: dict[str, Tensor]
    streams: Streams
    step: int = 0
    features: Tensor | None = None


@dataclass(frozen=True)
class Losses:
    """What an objective returns.

    loss: [B], what is averaged and differentiated. parts: detached [B] tensors to log by name, e.g. "mse", "vb".
    time: [B] in [0, 1), where on the noise scale each sample was drawn, for the loss by quartile; None: no meaning.
    seen: detached [B, ...], what a network that learns from more than its gradient is given of the whole global batch
    after the update, by name.
    """

    loss: Tensor
    parts: dict[str, Tensor]
    time: Tensor | None = None
    seen: dict[str, Tensor] = field(default_factory=dict)


class Network(Protocol):
    """A function of its inputs: network(x_t [B, C, H, W], t [B], **cond) -> [B, C', H, W]."""

    def __call__(self, x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor: ...


class Objective(Protocol):
    """A batch -> one loss per example. It is given the network, never imports one.

    network: a `Network` for the diffusion objectives; others say themselves how they call it.
    """

    def __call__(self, network: Any, batch: Batch) -> Losses: ...


@runtime_checkable
class ChoosesTimes(Protocol):
    """An objective that may train at some times more often than at others."""

    def uniform(self) -> Objective:
        """The same loss, unweighted, at times uniform over the noise scale: what runs and steps are compared by."""
        ...
