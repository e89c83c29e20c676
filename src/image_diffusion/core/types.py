"""Data structures that data, objectives, networks and the trainer exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from pydantic import Field
from torch import Tensor, nn

from image_diffusion.core.config.base import Config, Sparse
from image_diffusion.core.levels import Levels, rendered
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.resolution import Resolution, height_width

TEXT = "text"
"""Name of a caption among the conditions of a network: its embedding and its tokens, [1 + L, dim]."""
EMBEDDING = "embedding"
"""Name of an image's embedding among the conditions of a network, [dim]."""
IMAGE = "image"
"""Name of an image among the conditions of a network, [C', h, w] in [-1, 1]; zeros: none."""
NUMBERS = "numbers"
"""Name of an image's numbers among the conditions of a network, [columns, 2]: a value in [-1, 1], and 1; zeros if
missing."""


class SamplesOf(Config):
    """The samples of another experiment, which runs first."""

    experiment: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of its file in the same folder, without .yaml."""


class WeightsOf(Config):
    """The trained weights of another experiment, which runs first."""

    experiment: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of its file in the same folder, without .yaml."""


class DataSpec(Sparse):
    """Properties of a network that are determined by the data."""

    if_set: ClassVar[frozenset[str]] = frozenset({"conditions", "features", "levels"})

    channels: int
    """Channels of x: 3 for RGB, 4 for the SD VAE's latents; the dimension of an embedding; the size of a codebook."""
    resolution: Resolution
    """Side of x, or its height and width, in elements of x; 1 for embeddings."""
    num_classes: int = 0
    """Number of classes; 0 for unconditional data."""
    conditions: dict[str, tuple[int, ...]] = Field({})
    """Shapes of the conditions of an image other than its class, by name. Zeros represent an absent condition."""
    features: tuple[int, int, int] | None = None
    """Shape [D, h, w] of an image's features from a teacher, to which training aligns the network; unset: no
    teacher."""
    levels: Levels | None = None
    """Levels of images that are arrays; unset: 8-bit pictures."""

    @property
    def size(self) -> tuple[int, int]:
        """Return the height and the width of x."""
        return height_width(self.resolution)

    def shown(self, images: Tensor) -> Tensor:
        """Return images [N, C, H, W] as they are drawn: pictures, uint8, or arrays as float32 from 0 to 255."""
        return rendered(images, self.levels)


@dataclass(frozen=True)
class Batch:
    """Inputs of an objective.

    x: float32 [B, C, H, W] in the network's input space; tokens: int64 [B, N]. cond: conditions of the network, by
    name: "label" int64 [B], "image" float32 [B, C', h, w], "text" float32 [B, 1 + L, dim], "embedding" float32 [B,
    dim], "numbers" float32 [B, columns, 2], … . streams: the random numbers of these samples. step: number of the
    update, from 1; in validation, of the last update; 0 outside training. features: features of these images from a
    teacher, [B, D, h, w]; None without a teacher.
    """

    x: Tensor
    cond: dict[str, Tensor]
    streams: Streams
    step: int = 0
    features: Tensor | None = None


@dataclass(frozen=True)
class Losses:
    """Results of an objective.

    loss: [B], to be averaged and differentiated. parts: detached [B] tensors to log by name, e.g. "mse", "vb". time:
    [B] in [0, 1), position of each sample on the noise scale, for the loss by quartile; None: not applicable. seen:
    detached [B, ...] by name, passed for the whole global batch to a network that also learns without gradients, after
    the update.
    """

    loss: Tensor
    parts: dict[str, Tensor]
    time: Tensor | None = None
    seen: dict[str, Tensor] = field(default_factory=dict)


class Network(Protocol):
    """Interface of a network: network(x_t [B, C, H, W], t [B], **cond) -> [B, C', H, W]."""

    def __call__(self, x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor: ...


class LossMemory(Protocol):
    """Part of an objective that is updated with the losses of each step. Checkpoints contain its state."""

    def observe(self, losses: Losses) -> None:
        """Update with the losses of one step's whole global batch, in the order of the batch."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint needs."""
        ...

    def load_state_dict(self, state: dict[str, Tensor], /) -> None:
        """Load the result of `state_dict`. Raises ValueError if it does not fit."""
        ...


class FrozenCopy:
    """Frozen copy of the network at the start of training. The trainer sets `network`."""

    network: Network

    def __call__(self, x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor:
        """Call the copy of the network."""
        return self.network(x, t, **cond)


class Objective(ABC):
    """Base class of objectives: network and batch -> one loss per example. Objectives import no networks.

    network: a `Network` for diffusion objectives; other objectives document how they call it.
    """

    layers: Mapping[str, Callable[[], nn.Module]] = {}
    """Builders of the objective's own layers, by their names in the network. The layers are trained with the network,
    but are not part of its weights."""
    memory: LossMemory | None = None
    """The part that is updated with the losses of each step; None: no such part."""
    teacher: FrozenCopy | None = None
    """The teacher of the objective; None: no teacher."""
    pairs_samples: bool = False
    """True if the loss of a sample depends on its neighbour: rows 0 and 1 of a batch are a pair, 2 and 3, and so on."""

    @abstractmethod
    def __call__(self, network: Any, batch: Batch) -> Losses: ...

    def uniform(self) -> Objective:
        """Return the unweighted objective at times uniform over the noise scale, for comparison of runs and steps."""
        return self
