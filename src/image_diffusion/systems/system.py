"""The contract of a system: what it answers, so that no verb has to know which one it is given.

A page of this folder is one system. It says which parts it is made of; what systems of one family share stands in the
family's folder (`diffusion`, `codec`, `embedding`). `docs/extending.md` shows a whole new kind of system.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from image_diffusion.codecs.codec import Codec, LatentShape
from image_diffusion.core.config import Config
from image_diffusion.core.devices import best_device
from image_diffusion.core.shapes import shapes_only
from image_diffusion.core.streams import Streams
from image_diffusion.core.types import Batch, DataSpec, Objective
from image_diffusion.data.shards import Shards
from image_diffusion.metrics import DetectorConfig
from image_diffusion.nn.precision import Precision
from image_diffusion.systems.given import (
    CardUse,
    Described,
    Embed,
    Foreign,
    Inputs,
    Maker,
    Model,
    Others,
    Predict,
    Preview,
    SampleFiles,
    Section,
    Sections,
    Served,
    ToJudge,
    ToPreview,
    ToSample,
)
from image_diffusion.systems.images import ImageFiles
from image_diffusion.systems.starting import Trained, fitted


class System(Config, ABC):
    """What an experiment trains, and everything that the verbs ask about it. A page that has this as its base, and its
    name in `AnySystem`, is a new kind of system."""

    type: str
    """Its name."""

    sections: ClassVar[Mapping[str, Section]]
    """The sections of an experiment that it has, beside those that all have. Any other is an error."""
    recipe: ClassVar[Mapping[str, Any]] = {}
    """What its section `train` says where a file does not, beyond the defaults that all systems share."""
    reads: ClassVar[tuple[Literal["crops", "latents", "pairs", "tokens"], ...]] = ("crops", "latents")
    """Kinds of shards that it learns from."""
    mirrors: ClassVar[bool] = True
    """Whether what it learns from has a mirror image."""
    judged_on_encoded: ClassVar[bool] = False
    """Whether the stage `evaluate` also looks at what it learned from, as the codec encodes it."""
    judged_by: ClassVar[tuple[str, ...]] = ("evaluate",)
    """Sections that the stage `evaluate` runs with."""
    exports: ClassVar[tuple[str, ...]] = ()
    """Formats that `export` knows for it."""
    class_rows: ClassVar[tuple[str, ...]] = ()
    """Tensors of its network with a row for each class, and perhaps one more for none: other classes get other rows
    when a training starts from its weights."""
    positions: ClassVar[tuple[str, ...]] = ()
    """Tensors [1, N, D] of its network with a row for each place of a square grid: interpolated for another one."""
    new_layers: ClassVar[tuple[str, ...]] = ()
    """How names of tensors begin that the weights need not have from which a training starts: they start as in a new
    network, in which they say nothing yet."""

    samples: ClassVar[SampleFiles] = ImageFiles()
    """What the stage `sample` makes with it, where it has a section `sample`."""
    scaled_by: ClassVar[tuple[str, ...]] = ()
    """Keys of it that say how what is stored becomes x: a training goes on from weights of the same ones alone."""

    # ---- Before any work

    def check(self, experiment: Sections, others: Others) -> None:
        """Raise ValueError for sections that do not go together.

        The network is built of shapes alone, so that its own checks speak.
        """
        if experiment.codec.stores not in self.reads:
            raise ValueError(
                f"codec.type is {experiment.codec.type}, but a system of type {self.type} learns from "
                f"{' or '.join(self.reads)}, not from {experiment.codec.stores}. Name another codec."
            )
        spec = spec_of(experiment, others.codec)
        self.check_network(spec)
        if others.start is not None:
            self.check_start(spec, others.start, others.start_codec)

    def check_network(self, spec: DataSpec) -> None:
        """Raise ValueError where the network does not fit the data."""
        with shapes_only():
            self.build_network(spec)

    def check_start(self, spec: DataSpec, start: Sections, codec: Sections | None) -> None:
        """Raise ValueError where training cannot start from the weights of another experiment. codec: trains its
        codec."""
        if start.system.type != self.type:
            raise ValueError(
                f"train.init_from.experiment trains a {start.system.type}, but this is a {self.type}. Name an "
                f"experiment of the same system."
            )
        theirs = spec_of(start, codec)
        with shapes_only():
            ours, there = self.build_network(spec), start.system.build_network(theirs)
        try:
            fitted(ours, Trained(self, spec, None), there.state_dict(), Trained(start.system, theirs, None))
        except ValueError as error:
            raise ValueError(f"train.init_from.experiment: {error}") from None

    def check_flips(self, probability: float) -> None:
        """Raise ValueError for a share of examples that are to be mirrored (train.flip_probability) and cannot be."""
        if probability > 0 and not self.mirrors:
            raise ValueError(
                f"train.flip_probability is {probability:g}, but {' and '.join(self.reads)} have no mirror image. Set "
                f"it to 0."
            )

    def inputs(self, experiment: Sections) -> Inputs:
        """What sampling and judging are given beside the data."""
        return Inputs()

    @property
    def reads_beside(self) -> str | None:
        """The kind of shards of the section `pairs` that it reads beside what it learns from; None: it reads none, or
        learns from the pairs themselves."""
        return None

    @property
    def latents(self) -> LatentShape | None:
        """The shape of its latents, where the trained network is the codec of other experiments."""
        return None

    @abstractmethod
    def headline(self, experiment: Sections) -> str:
        """The metric by which the best of several models is chosen; lower is better."""

    def detectors(self, experiment: Sections) -> Sequence[DetectorConfig]:
        """What looks at the images that it is judged by; none where no image is looked at."""
        return ()

    def looks_at_splits(self, experiment: Sections) -> bool:
        """Whether those look at all images of the data set: the stage `reference` does, once for all experiments."""
        return False

    # ---- Training

    def spec(self, data: Shards) -> DataSpec:
        """What the stored samples fix about a network: crops are [C, H, W], latents [2, c, h, w]."""
        return DataSpec(channels=data.shape[-3], resolution=data.shape[-1], num_classes=data.num_classes)

    @abstractmethod
    def build_network(self, spec: DataSpec) -> nn.Module:
        """The network, randomly initialised. Raises ValueError when it does not fit the data."""

    @abstractmethod
    def build_objective(self, spec: DataSpec) -> Objective:
        """The objective. Raises ValueError where it does not fit the data."""

    def with_beside(self, batch: Batch, beside: Tensor) -> Batch:
        """The batch, and what the shards beside it (`reads_beside`) hold of the same samples, [B, …]."""
        raise AssertionError(f"A {self.type} reads nothing beside its batches.")

    def batch(self, stored: Tensor, label: Tensor, streams: Streams, spec: DataSpec, codec: Codec) -> Batch:
        """What the objective is given of stored samples [B, …], labels int64 [B] and their random numbers."""
        return Batch(codec.draw(stored, streams), {}, streams)

    def preview(self, given: ToPreview) -> Preview | None:
        """What shows the progress of a training now and then; None: nothing does."""
        return None

    # ---- What is made of the trained weights

    def maker(self, given: ToSample) -> Maker:
        """What makes the samples of the stage `sample`. Only of a system with a section `sample`.

        Raises ValueError for settings, weights or images that do not fit.
        """
        raise ValueError(f"A system of type {self.type} makes no samples. Sample an experiment with one that does.")

    def evaluations(self, settings: Any) -> int:
        """How often the network is called for one image of the section `sample`."""
        return 0

    def like_samples(self, spec: DataSpec, count: int) -> Tensor:
        """Anything in the form of what is decoded to `count` images, for timing it."""
        return torch.randn(count, spec.channels, spec.resolution, spec.resolution)

    def sampled_in(self, settings: Any) -> Precision:
        """What the network computes in while it makes the images of a section."""
        return "float32"

    @abstractmethod
    def judge(self, given: ToJudge) -> dict[str, Any]:
        """What metrics.json holds: {"metrics", "curve", "classes", "protocol"}, and perhaps "doubt".

        Raises ValueError for what is missing or does not fit, before any long computation.
        """

    def export(self, model: Model, codec: Codec, format_: str, folder: Path) -> CardUse:
        """Write the model as another program reads it. Raises ValueError for what that has no place for."""
        raise ValueError(no_export(self, format_))

    def served(self, spec: DataSpec, classes: list[str], embeds: bool = False) -> Served | None:
        """What the model takes and gives where it is served; None: seeds or images alone give nothing. embeds: whether
        a model that makes embeddings of captions is served with it."""
        return None

    def predictor(
        self,
        model: Model,
        settings: Any,
        codec: Callable[[], Codec],
        weaker: Model | None,
        embed: Embed | None = None,
    ) -> Predict:
        """What answers requests. settings: the section `sample`, where the system has it; weaker: the network that
        those name; embed: `embedder` of the model that makes the embeddings that those name. Only where `served` says
        what is taken."""
        raise ValueError(f"A system of type {self.type} makes nothing of seeds or images alone.")

    def embedder(self, model: Model, settings: Any) -> Embed:
        """What makes image embeddings of captions that are not known before. Only of a system whose samples are
        embeddings. settings: the section `sample`. Raises ValueError for what does not fit the model."""
        raise ValueError(f"A system of type {self.type} makes no embeddings. Name an experiment with a prior.")

    @classmethod
    def read_foreign(cls, content: Mapping[str, Any], path: Path, codec: str, described: Described) -> Foreign | None:
        """Weights that were trained elsewhere; None where they are of another kind of system.

        content: of the file at `path`, loaded; empty for a folder. codec: the autoencoder of the latents, where they
        are of any. described: the experiment that tells what the file does not, which has to be of this kind of
        system. Raises ValueError listing what is
        missing, unexpected or of another shape.
        """
        return None


def spec_of(experiment: Sections, codec: Sections | None) -> DataSpec:
    """What the data of an experiment fix about its network, as of one class. codec: the experiment that trains its
    codec. Raises ValueError when they do not fit."""
    images = DataSpec(channels=experiment.data.channels, resolution=experiment.data.resolution, num_classes=1)
    return experiment.codec.spec(images, codec.system.latents if codec is not None else None)


def makes(experiment: Sections, kind: str) -> bool:
    """Whether the stage `sample` of an experiment makes samples of a kind."""
    system = experiment.system
    return "sample" in system.sections and experiment.section("sample") is not None and system.samples.kind == kind


def name_of(system: type[System]) -> str:
    """The name of a kind of system, as `system.type` says it."""
    return str(get_args(system.model_fields["type"].annotation)[0])


def no_export(system: System, format_: str) -> str:
    """What is said when a system has no export of a format."""
    known = ", ".join([*system.exports, "none"])
    return f"export.format is {format_}, but a system of type {system.type} has no such export. Known for it: {known}."


def on_best_device(model: Model) -> nn.Module:
    """The network, where it computes fastest."""
    return model.network.to(best_device())
