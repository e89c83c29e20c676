"""Evaluation of trained models: the interface of a kind of system to the stage `evaluate`.

`System.evaluation` returns it. It contains the values that the evaluation depends on, and does not depend on the
system.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from image_diffusion.core.levels import Levels
from image_diffusion.core.types import SamplesOf
from image_diffusion.data.shards.reader import Shards, Split
from image_diffusion.metrics import DetectorConfig
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.samples import Samples, read_samples
from image_diffusion.systems.interface import TrainedNetwork


@dataclass(frozen=True)
class EvaluationInputs:
    """Inputs of the stage `evaluate`.

    model: None for samples from elsewhere. settings: the section that `Evaluation.section` names. data: the folder of
    crops, or of pairs; splits: its splits that `Evaluation.splits` names, with array crops as metrics see them.
    samples: the samples.npz or folder of pictures; detector: the folder that detect wrote; reference: samples or a file
    to compare with in place of a split; references: folders of the detectors' features of the splits; previews: of the
    training, in a folder for each fingerprint of a run; report: a folder for pictures. encoded: the folder of the
    encoded crops, if `Evaluation.reads_encoded`. pairs: the folders of the sets of pairs, if `Evaluation.reads_pairs`.
    raw: loads the network with the raw weights, before averaging, if they were kept. read: reads the images of
    `samples`, with these classes and levels.
    """

    model: TrainedNetwork | None
    settings: Any
    data: Path | str
    splits: Mapping[Split, Shards] = field(default_factory=dict)
    samples: Path | None = None
    detector: Path | None = None
    reference: Path | None = None
    references: Sequence[Path] = ()
    previews: Path | None = None
    report: Path | None = None
    encoded: Path | None = None
    pairs: Sequence[Path] = ()
    raw: Callable[[], nn.Module | None] = lambda: None
    read: Callable[[Path, list[str], Levels | None], Samples] = read_samples


class Evaluation(ABC):
    """Evaluation of the models of a kind of system. `settings` is its section of an experiment."""

    section: ClassVar[str] = "evaluate"
    """Name of the section."""
    splits: ClassVar[tuple[Split, ...]] = ("train", "validation")
    """Splits of the data that are read."""
    reads_encoded: ClassVar[bool] = False
    """True if the encoded training data are read, too."""

    @property
    def reads_pairs(self) -> bool:
        """True if samples are also compared with the pairs of the images."""
        return False

    @abstractmethod
    def headline(self, settings: Any) -> str:
        """Return the metric by which the best of several models is chosen; lower is better."""

    @abstractmethod
    def evaluate(self, inputs: EvaluationInputs) -> dict[str, Any]:
        """Return the content of metrics.json: {"metrics", "curve", "classes", "protocol"}, and optionally "doubt".

        Raises ValueError for missing or unsuitable inputs, before any long computation.
        """

    def detectors(self, settings: Any) -> Sequence[DetectorConfig]:
        """Return the detectors; none if no images are evaluated."""
        return ()

    def against(self, settings: Any) -> SamplesOf | str | None:
        """Return the samples or the file to compare with in place of the data; None: the data."""
        return None

    def reads_splits(self, settings: Any) -> bool:
        """True if the detectors need the features of the whole data set, which the stage `reference` computes once for
        all experiments."""
        return False


class ImageEvaluation(Evaluation):
    """Evaluation of images by detectors."""

    def headline(self, settings: EvaluateConfig) -> str:
        return settings.detectors[0].metric_name("fd")

    def detectors(self, settings: EvaluateConfig) -> Sequence[DetectorConfig]:
        return settings.detectors

    def against(self, settings: EvaluateConfig) -> SamplesOf | str | None:
        return settings.against

    def reads_splits(self, settings: EvaluateConfig) -> bool:
        return settings.against is None
