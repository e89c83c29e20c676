"""Interface of a system, a kind of model. Commands use only this interface, so they do not depend on particular
systems. Each module of a system lists its parts; code that a family of systems shares is in the family's folder
(`diffusion`, `codec`, `prior`, `tokens`). A system returns two objects that define its sampling and its evaluation
(`sampling.py`, `evaluation.py`). `docs/extending.md` shows how to add a system.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, get_args

from torch import Tensor, nn

from image_diffusion.codecs import CodecConfig
from image_diffusion.codecs.base import Codec, LatentShape
from image_diffusion.core.devices import best_device, shapes_only
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.resolution import resolution_of
from image_diffusion.core.types import Batch, DataSpec, Objective
from image_diffusion.data.config import DataConfig
from image_diffusion.data.shards.reader import Shards
from image_diffusion.systems.evaluation import Evaluation
from image_diffusion.systems.interface import Section, TrainedNetwork, TrainSettings
from image_diffusion.systems.pairs.inputs import sets_of
from image_diffusion.systems.pairs.numbers import NumberPairs
from image_diffusion.systems.sampling import Sampling
from image_diffusion.systems.warm_start import Adaptable, Trained, fitted


class Sections(Protocol):
    """Settings of an experiment that systems read."""

    @property
    def data(self) -> DataConfig: ...

    @property
    def system(self) -> System: ...

    @property
    def codec(self) -> CodecConfig: ...

    @property
    def train(self) -> TrainSettings: ...

    def section(self, name: str) -> Any:
        """Return a section of the system by name."""
        ...


@dataclass(frozen=True)
class Others:
    """Experiments that an experiment depends on. codec: trains its codec. small_images: samples the images that its
    samples are conditioned on. against: samples the images that its samples are compared with. start: trains its
    initial weights; start_codec: trains the codec of that experiment. embeddings: samples the embeddings that it
    decodes."""

    codec: Sections | None = None
    small_images: Sections | None = None
    against: Sections | None = None
    start: Sections | None = None
    start_codec: Sections | None = None
    embeddings: Sections | None = None


class System(Adaptable, ABC):
    """Base class of a system: the model that an experiment trains. To add a system, derive a class from this one in a
    new module and add it to `AnySystem`."""

    sections: ClassVar[Mapping[str, Section]]
    """Sections of the system's experiments, in addition to the common ones. Any other section is an error."""
    recipe: ClassVar[Mapping[str, Any]] = {}
    """Defaults of the section `train` that differ from those of all systems."""
    reads: ClassVar[tuple[Literal["crops", "latents", "pairs", "tokens"], ...]] = ("crops", "latents")
    """Kinds of shards that the system is trained on."""
    takes_augmentation: ClassVar[bool] = False
    """True if the parameters of the augmentation can be a condition of the network."""

    def check(self, experiment: Sections, others: Others) -> None:
        """Raise ValueError for sections that do not go together. The network is built without weights, to run its own
        checks.
        """
        if experiment.codec.stores not in self.reads:
            raise ValueError(
                f"codec.type is {experiment.codec.type}, but a system of type {self.type} learns from "
                f"{' or '.join(self.reads)}, not from {experiment.codec.stores}. Name another codec."
            )
        spec = spec_of(experiment, others.codec)
        self.check_network(spec)
        if others.start is not None:
            _check_start(experiment, spec, others.start, others.start_codec)

    def check_network(self, spec: DataSpec) -> None:
        """Raise ValueError where the network does not fit the data."""
        with shapes_only():
            self.build_network(spec)

    @property
    def joined_kinds(self) -> tuple[str, ...]:
        """Return the kinds of shards of the section `pairs` that training reads in addition to its data; none if the
        pairs are its data."""
        return ()

    @property
    def latents(self) -> LatentShape | None:
        """Return the shape of the latents if the trained network is a codec of other experiments; None otherwise."""
        return None

    def spec(self, data: Shards) -> DataSpec:
        """Return the shapes that the stored samples fix for a network: crops are [C, H, W], latents [2, c, h, w]."""
        channels, *size = data.shape[-3:]
        return DataSpec(
            channels=channels, resolution=resolution_of(*size), num_classes=data.num_classes, levels=data.levels
        )

    @abstractmethod
    def build_network(self, spec: DataSpec) -> nn.Module:
        """Build the randomly initialised network. Raises ValueError when it does not fit the data."""

    @abstractmethod
    def build_objective(self, spec: DataSpec) -> Objective:
        """Build the objective. Raises ValueError where it does not fit the data."""

    def batch(
        self,
        stored: Tensor,
        label: Tensor,
        streams: Streams,
        spec: DataSpec,
        codec: Codec,
        joined_sets: Mapping[str, Tensor] | None = None,
    ) -> Batch:
        """Return the objective's input for stored samples [B, …] with labels, int64 [B], and random numbers.
        joined_sets: the entries of the shards of `joined_kinds` for the same samples, [B, …], by kind."""
        return Batch(codec.draw(stored, streams), {}, streams)

    def sampling(self) -> Sampling:
        """Return the sampling of trained networks."""
        return Sampling()

    @abstractmethod
    def evaluation(self) -> Evaluation:
        """Return the evaluation of trained networks."""


def check_arrays(experiment: Sections) -> None:
    """Raise ValueError if the images are arrays and the system or codec supports only pictures."""
    system, codec = experiment.system, experiment.codec
    knows_pictures = {"system.type": (system, "pairs" in system.reads), "codec.type": (codec, not codec.takes_arrays)}
    for key, (value, is_alone) in knows_pictures.items():
        if experiment.data.dtype is not None and is_alone:
            raise ValueError(
                f"data.dtype is {experiment.data.dtype}, but {key} {value.type} takes pictures of 8 bits alone. "
                "Train dit, iddpm or rin on pixels, or on the latents of an autoencoder that is trained here."
            )


def check_flips(system: System, probability: float) -> None:
    """Raise ValueError if examples cannot be mirrored as train.flip_probability requires."""
    if probability > 0 and "pairs" in system.reads:  # embeddings, which have no mirror image
        raise ValueError(
            f"train.flip_probability is {probability:g}, but {' and '.join(system.reads)} have no mirror image. Set "
            f"it to 0."
        )


def check_augment(experiment: Sections) -> None:
    """Raise ValueError for an augmentation (train.augment) that the system or its data do not allow."""
    augment, system = experiment.train.augment, experiment.system
    if augment is None:
        return
    if not system.takes_augmentation:
        raise ValueError(
            f"train.augment is set, but the network of a system of type {system.type} does not take it as a condition. "
            "Leave it out."
        )
    augment.check(experiment.codec.stores, experiment.data.num_channels, experiment.data.size)


def _check_start(experiment: Sections, spec: DataSpec, start: Sections, codec: Sections | None) -> None:
    """Raise ValueError where training cannot start from the weights of another experiment. codec: trains its codec."""
    system = experiment.system
    if start.system.type != system.type:
        raise ValueError(
            f"train.init_from.experiment trains a {start.system.type}, but this is a {system.type}. Name an "
            f"experiment of the same system."
        )
    start_spec = spec_of(start, codec)
    with shapes_only():
        network, start_network = system.build_network(spec), start.system.build_network(start_spec)
    ours, theirs = (
        Trained(sections.system, shapes, None, {"numbers": {"columns": columns_of(sections)}})
        for sections, shapes in ((experiment, spec), (start, start_spec))
    )
    try:
        fitted(network, ours, start_network.state_dict(), theirs)
    except ValueError as error:
        raise ValueError(f"train.init_from.experiment: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Model(TrainedNetwork):
    """A trained model from a weights folder: the fields of `TrainedNetwork`, and its system."""

    system: System


def spec_of(experiment: Sections, codec: Sections | None) -> DataSpec:
    """Return the shapes that the data of an experiment fix for its network, assuming one class. codec: the experiment
    that trains its codec. Raises ValueError when they do not fit."""
    images = DataSpec(channels=experiment.data.num_channels, resolution=experiment.data.resolution, num_classes=1)
    spec = experiment.codec.spec(images, codec.system.latents if codec is not None else None)
    return spec.model_copy(update={"conditions": experiment.system.sampling().derived_conditions(spec)})


def columns_of(experiment: Sections) -> tuple[str, ...]:
    """Return the columns of numbers that an experiment has for its images; empty if it has none."""
    sets = sets_of(experiment.section("pairs"))
    return next((pairs.columns for pairs in sets if isinstance(pairs, NumberPairs)), ())


def makes(experiment: Sections, kind: str) -> bool:
    """True if the stage `sample` of an experiment makes samples of this kind."""
    system = experiment.system
    has_samples = "sample" in system.sections and experiment.section("sample") is not None
    return has_samples and system.sampling().files.kind == kind


def name_of(system: type[System]) -> str:
    """Return the name of a kind of system, the value of `system.type`."""
    return str(get_args(system.model_fields["type"].annotation)[0])


def on_best_device(model: TrainedNetwork) -> nn.Module:
    """Return the network on the fastest device available."""
    return model.network.to(best_device())
