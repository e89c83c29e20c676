"""Records shared by systems, sampling and evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import DataSpec, WeightsOf
from image_diffusion.data.augment.operations import Augment


@dataclass(frozen=True)
class Section:
    """A section of a system's experiments. kind: the type of its keys, a Config or an annotated union of some. default:
    its value if omitted; None: an optional section is then absent, any other must be written, for instance as
    `example`. keys: those that have an effect with this system; None: all.
    """

    kind: Any
    default: Config | None
    keys: frozenset[str] | None = None
    example: str = "{}"
    optional: bool = False


def all_but(kind: type[Config], *left_out: str) -> frozenset[str]:
    """Return the keys of a section but some."""
    assert set(left_out) <= set(kind.model_fields), left_out
    return frozenset(kind.model_fields) - set(left_out)


class TrainSettings(Protocol):
    """Settings of the section `train` that systems read.

    flip_probability: share of examples that are mirrored. augment: augmentation of the images, whose parameters are a
    condition of the network; None: none. grid_every_steps: steps from one preview to the next; None: there are no
    previews. init_from: weights to start from; None: random ones. layer_decay: factor of the learning rate from a block
    to the one before; None: one rate for all. patience: share of the steps without improvement that ends a training;
    None: it ends at the last step.
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

    def check_pairs(self, shares: Sequence[int] = ()) -> None:
        """Raise ValueError if the neighbours of a global batch would be computed apart."""
        ...

    def check_average(self, number: float | Literal["raw"]) -> None:
        """Raise ValueError unless the average of a rate or width, or the weights as trained, can be had of the end."""
        ...


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network, with the contents of its weights folder other than the system.

    network: in evaluation mode, on the CPU. spec: of the data it was trained on. classes: their names by number.
    codec: {"config", "identity", "scale"}. step, examples_seen: of the weights. sha256: of the weights. num_steps: of
    the whole training. fingerprint: of its run, empty for weights from elsewhere. pairs: what the manifest says of the
    pairs that it learnt from, or of each set that lay beside its training data, by kind. folder: the weights folder;
    None for a model that was never in one. untrained: names of classes without a training image.
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
