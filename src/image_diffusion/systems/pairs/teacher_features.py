"""Features of a teacher for a set of crops, computed once, for aligning another network with them in training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from image_diffusion.core.config.base import dump
from image_diffusion.data.encoded.pairs import PairSet
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.records import Quarantined, Sample, read_record
from image_diffusion.metrics.features.classifier import InPipe
from image_diffusion.metrics.features.pretrained import Dinov2, Transformers
from image_diffusion.systems.pairs.inputs import JoinedPairs, PairInputs


class FeaturePairs(JoinedPairs):
    """A teacher's features of the images, computed once and stored next to the latents or the crops."""

    kind: ClassVar[str] = "features"
    type: Literal["features"] = "features"
    """Features of a teacher for the crops; for system.alignment."""
    teacher: Annotated[InPipe | Dinov2 | Transformers, Field(discriminator="type")] = InPipe()
    """Teacher: the classifier that `detect` trains on the data set's own classes, which needs no download; DINOv2; or a
    vision transformer of the package transformers, by its last hidden states."""
    dtype: Literal["float16", "float32"] = "float16"
    """Data type of the stored features."""

    @property
    def name(self) -> str:
        match self.teacher:
            case InPipe():
                return "features-inpipe"
            case Dinov2(model=name) | Transformers(name=name):
                return f"features-{name}"

    @property
    def needs_detector(self) -> bool:
        return isinstance(self.teacher, InPipe)

    @property
    def encoder_weights(self) -> str | None:
        weights = getattr(self.teacher, "weights", None)
        return None if weights is None else str(weights)

    @property
    def encoded_by(self) -> dict[str, Any]:
        return dump(self.teacher)

    def build(self, inputs: PairInputs) -> PairSet:
        if inputs.crops is None:
            raise ValueError("Features are those of crops: give --data.")
        teacher = self.teacher.build(inputs.detector, str(inputs.device))
        return TeacherFeatures(inputs.crops, teacher, {"encoder": self.encoded_by})


class Teacher(Protocol):
    """Teacher: images -> spatial features."""

    @property
    def identity(self) -> dict[str, Any]:
        """Return plain data that determines the features."""
        ...

    def maps(self, images: Tensor) -> Tensor:
        """Return the features of uint8 [B, C, H, W] -> float32 [B, D, h, w], on the CPU."""
        ...


class TeacherFeatures(PairSet):
    """Features [D, h, w] of each crop, and of its mirror image. described: further entries of the manifest."""

    kind: ClassVar = "features"
    members: ClassVar = ("npy", "flip.npy")
    made_from_pixels: ClassVar = True

    def __init__(self, crops: Path, teacher: Teacher, described: dict[str, Any]) -> None:
        self._folder, self._teacher = crops, teacher
        self._crops = open_shards(crops, "all", renders=True)
        counts = [shard["num_samples"] for shard in self._crops.manifest["shards"]]
        self._first = np.cumsum([0, *counts]).tolist()
        self.num_shards, self.num_rows = len(counts), sum(counts)
        self.shape = tuple(teacher.maps(torch.zeros(1, *self._crops.shape, dtype=torch.uint8)).shape[1:])
        self.identity = {"teacher": teacher.identity, **described}

    def samples(self, shard: int) -> list[Sample]:
        """Return all crops: their ids are the hashes of the images."""
        return read_record(self._folder, shard).samples

    def missing(self, shard: int) -> list[Quarantined]:
        """Return no missing samples: every crop has features."""
        return []

    def made_from(self, shard: int) -> str:
        """Return the digest of the crops."""
        return self._crops.manifest["shards"][shard]["sha256"]

    def rows(self, shard: int, start: int, stop: int) -> NDArray[np.float32]:
        images = self._crops.gather(np.arange(start, stop) + self._first[shard])
        features = torch.stack([self._teacher.maps(images), self._teacher.maps(images.flip(-1))], 1)
        return features.float().numpy()
