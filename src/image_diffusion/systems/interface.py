"""Records shared by systems, sampling and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import DataSpec, WeightsOf
from image_diffusion.data.augment import Augment


@dataclass(frozen=True)
class Section:
    """A section of a system's experiments. kind: the type of the section, a Config or an annotated union of Configs.
    default: its value if omitted; None: the section is absent if it is optional, and required otherwise; `example`
    shows a value. keys: those that have an effect with this system; None: all.
    """

    kind: Any
    default: Config | None
    keys: frozenset[str] | None = None
    example: str = "{}"
    optional: bool = False


def all_but(kind: type[Config], *left_out: str) -> frozenset[str]:
    """Return the keys of a section except those left out."""
    assert set(left_out) <= set(kind.model_fields), left_out
    return frozenset(kind.model_fields) - set(left_out)


class TrainSettings(Protocol):
    """Settings of the section `train` that systems read.

    flip_probability: share of examples that are mirrored. augment: augmentation of the images, whose parameters are a
    condition of the network; None: none. grid_every_steps: steps between previews; None: no previews. init_from:
    initial weights; None: random. layer_decay: factor of the learning rate from a block to the one before; None: one
    rate for all. patience: share of the steps without improvement after which training stops early; None: it never
    does.
    """

    @property
    def flip_probability(self) -> float: ...

    @property
    def augment(self) -> Augment | None: ...

    @property
    def grid_every_steps(self) -> int | None: ...

    @property
    def init_from(self) -> WeightsOf | str | None: ...

    @property
    def layer_decay(self) -> float | None: ...

    @property
    def patience(self) -> float | None: ...

    def keeps(self, step: int) -> bool:
        """True if the weights of a step are available after the training."""
        ...

    def check_pairs(self, processes: int = 1) -> None:
        """Raise ValueError if adjacent samples of a global batch would be computed separately."""
        ...

    def check_average(self, number: float | Literal["raw"]) -> None:
        """Raise ValueError unless the average with a rate or width, or the raw weights, are available at the end of
        training."""
        ...


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network, with the contents of its weights folder other than the system.

    network: in evaluation mode, on the CPU. spec: of the data it was trained on. classes: their names by number. codec:
    {"config", "identity", "scale"}. step, examples_seen: of the weights. sha256: of the weights. num_steps: of the
    whole training. fingerprint: of its run, empty for weights from elsewhere. pairs: the manifest's description of the
    pairs that it was trained on, or of each set next to its training data, by kind. folder: the weights folder; None if
    the model was not loaded from one. untrained: names of classes without a training image.
    """

    network: nn.Module
    spec: DataSpec
    codec: dict[str, Any]
    classes: list[str]
    step: int
    examples_seen: int
    sha256: str
    num_steps: int
    fingerprint: str
    pairs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    folder: Path | None = None
    untrained: tuple[str, ...] = ()
