"""What a teacher sees in a set of crops, encoded once: what the training of another network is aligned with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config import Config, dump
from image_diffusion.data.pairs import PairSet, Splits
from image_diffusion.data.records import Quarantined, Sample, read_record
from image_diffusion.data.shards import open_shards
from image_diffusion.metrics.detector import InPipe
from image_diffusion.metrics.dinov2 import Dinov2
from image_diffusion.metrics.encoders import Transformers
from image_diffusion.systems.embedding.given import Given


class FeaturePairs(Config):
    """Images and what a teacher sees in them, which is computed once; it is stored beside the latents or the crops."""

    kind: ClassVar[str] = "features"
    """Of the shards."""
    type: Literal["features"] = "features"
    """What a teacher sees in the crops; for system.alignment."""
    teacher: Annotated[InPipe | Dinov2 | Transformers, Field(discriminator="type")] = InPipe()
    """Who looks: the classifier that `detect` trains on the data set's own classes, which needs no download, DINOv2, or
    a vision transformer of the package transformers, of which the last hidden states of the patches are taken."""
    dtype: Literal["float16", "float32"] = "float16"
    """How features are stored."""

    @property
    def name(self) -> str:
        """The folder of the features."""
        match self.teacher:
            case InPipe():
                return "features-inpipe"
            case Dinov2(model=name) | Transformers(name=name):
                return f"features-{name}"

    @property
    def needs_source(self) -> bool:
        """Whether files of the data's source are read: only crops are."""
        return False

    @property
    def needs_detector(self) -> bool:
        """Whether the detector of the data set looks at the images."""
        return isinstance(self.teacher, InPipe)

    @property
    def encoded_by(self) -> dict[str, Any]:
        """The teacher, as the manifest of the features has it."""
        return dump(self.teacher)

    @property
    def splits(self) -> Splits:
        """All of them: the split is that of the image."""
        return Splits(train=1, validation=0, test=0)

    def build(self, given: Given) -> PairSet:
        """What makes the features. Raises ValueError for what is missing."""
        if given.crops is None:
            raise ValueError("Features are those of crops: give --data.")
        teacher = self.teacher.build(given.detector, str(given.device))
        return TeacherFeatures(given.crops, teacher, {"encoder": self.encoded_by})


class Teacher(Protocol):
    """Images -> what is seen where."""

    @property
    def identity(self) -> dict[str, Any]:
        """Plain data that decides every number."""
        ...

    def maps(self, images: Tensor) -> Tensor:
        """Uint8 [B, C, H, W] -> float32 [B, D, h, w], on the CPU."""
        ...


class TeacherFeatures:
    """[D, h, w] of each crop, and of its mirror image. described: what the manifest tells of them besides."""

    kind: ClassVar[Literal["features"]] = "features"
    members: ClassVar = ("npy", "flip.npy")
    parts: ClassVar = ()
    carried: ClassVar = ()

    def __init__(self, crops: Path, teacher: Teacher, described: dict[str, Any]) -> None:
        self._folder, self._crops, self._teacher = crops, open_shards(crops, "all"), teacher
        counts = [shard["num_samples"] for shard in self._crops.manifest["shards"]]
        self._first = np.cumsum([0, *counts]).tolist()
        self.num_shards, self.num_rows = len(counts), sum(counts)
        self.shape = tuple(teacher.maps(torch.zeros(1, *self._crops.shape, dtype=torch.uint8)).shape[1:])
        self.identity = {"teacher": teacher.identity, **described}

    def samples(self, shard: int) -> list[Sample]:
        """All crops: their ids are the hashes of the images."""
        return read_record(self._folder, shard).samples

    def missing(self, shard: int) -> list[Quarantined]:
        """Something is seen in every crop."""
        return []

    def made_from(self, shard: int) -> str:
        """The crops."""
        digest: str = self._crops.manifest["shards"][shard]["sha256"]
        return digest

    def rows(self, shard: int, start: int, stop: int) -> NDArray[np.float32]:
        images = self._crops.gather(np.arange(start, stop) + self._first[shard])
        seen = torch.stack([self._teacher.maps(images), self._teacher.maps(images.flip(-1))], 1)
        rows: NDArray[np.float32] = seen.float().numpy()
        return rows
