"""What a system is asked with, and what it answers: the records of the contract in `system`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from PIL import Image
from torch import Tensor, nn

from image_diffusion.codecs import CodecConfig
from image_diffusion.codecs.codec import Codec
from image_diffusion.core.config import Config
from image_diffusion.core.types import DataSpec, SamplesOf, WeightsOf
from image_diffusion.data.config import DataConfig
from image_diffusion.data.shards import Shards
from image_diffusion.metrics.samples import Samples, read_samples

if TYPE_CHECKING:
    from image_diffusion.systems.system import System


@dataclass(frozen=True)
class Section:
    """A section of an experiment that a system has.

    kind: what its keys are, a Config or an annotated union of some. default: what holds where it is left out; None: it
    has to be written, for instance as `example`, unless it is optional: there is then nothing. keys: those of them that
    do something with this system; None: all.
    """

    kind: Any
    default: Config | None
    keys: frozenset[str] | None = None
    example: str = "{}"
    optional: bool = False


def all_but(kind: type[Config], *left_out: str) -> frozenset[str]:
    """The keys of a section but some."""
    assert set(left_out) <= set(kind.model_fields), left_out
    return frozenset(kind.model_fields) - set(left_out)


class TrainSettings(Protocol):
    """What systems ask of the section `train`."""

    @property
    def flip_probability(self) -> float:
        """How often an example is mirrored."""
        ...

    @property
    def grid_every_steps(self) -> int | None:
        """Steps from one preview to the next; None: there are none."""
        ...

    @property
    def init_from(self) -> WeightsOf | str | None:
        """Weights to start from; None: random ones."""
        ...

    def keeps(self, step: int) -> bool:
        """Whether the weights of a step can be had after the training."""
        ...

    def check_average(self, number: float | Literal["raw"]) -> None:
        """Raise ValueError unless the average of a rate or width, or the weights as trained, can be had of the end."""
        ...


class Sections(Protocol):
    """What systems ask of an experiment."""

    @property
    def data(self) -> DataConfig:
        """Which images."""
        ...

    @property
    def system(self) -> System:
        """The system itself."""
        ...

    @property
    def codec(self) -> CodecConfig:
        """The space the network works in."""
        ...

    @property
    def train(self) -> TrainSettings:
        """How it is trained."""
        ...

    def section(self, name: str) -> Any:
        """A section that the system has, by name."""
        ...


Described = Callable[[type["System"]], Sections | None]
"""The experiment that describes foreign weights, where one was named. Raises ValueError for another kind of system."""


@dataclass(frozen=True)
class Inputs:
    """What sampling and judging are given beside the data: the samples of another experiment, or a file.

    small_images: what is enlarged; "validation": the held-out crops made small. against: what samples are compared
    with. embeddings: what images are made of; "validation": those of held-out images.
    """

    small_images: SamplesOf | str | None = None
    against: SamplesOf | str | None = None
    embeddings: SamplesOf | str | None = None


@dataclass(frozen=True)
class Others:
    """The experiments that one builds on, where it does.

    codec: trains its codec. small_images: makes what it enlarges. against: makes what its samples are compared with.
    start: trains the weights that it starts from; start_codec: trains the codec of that. embeddings: makes those that
    its images are made of.
    """

    codec: Sections | None = None
    small_images: Sections | None = None
    against: Sections | None = None
    start: Sections | None = None
    start_codec: Sections | None = None
    embeddings: Sections | None = None


@dataclass(frozen=True)
class Model:
    """A trained model, as a weights folder holds it.

    network: in evaluation mode, on the CPU. spec: of the data it was trained on. classes: their names by number.
    codec: {"config", "identity", "scale"}. step, examples_seen: of the weights. sha256: of the weights. num_steps: of
    the whole training. fingerprint: of its run, empty for weights from elsewhere. pairs: what the manifest says of the
    pairs that it learnt from, or of what lay beside its training data; None where there was neither. folder: the
    weights folder; None for a model that was never in one.
    """

    network: nn.Module
    system: System
    spec: DataSpec
    codec: dict[str, Any]
    classes: list[str]
    step: int
    examples_seen: int
    sha256: str
    num_steps: int
    fingerprint: str
    pairs: dict[str, Any] | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class ToPreview:
    """What a system shows its progress with while it trains.

    spec: of the data. codec: builds the codec, on the device of the network. settings: the section `preview`. training,
    validation: the splits. num_samples: how many of those a validation looks at.
    """

    spec: DataSpec
    codec: Callable[[], Codec]
    settings: Any
    training: Shards
    validation: Shards
    num_samples: int

    @property
    def held_out(self) -> Shards:
        """The validation split, or the training split where nothing is held out."""
        return self.validation if self.validation.num_samples else self.training


Preview = Callable[[nn.Module, int, Path], Mapping[str, Path | float]]
"""The network, with averaged weights where there are any, the step, and a folder for what it writes -> pictures and
numbers by name."""


class SampleSettings(Protocol):
    """What the stage `sample` asks of the section `sample`, whatever else that holds."""

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        ...

    @property
    def batch_size(self) -> int:
        """Samples made at once. Does not change them."""
        ...

    @property
    def num_jobs(self) -> int:
        """How many jobs make the samples."""
        ...

    @property
    def num_stored(self) -> int:
        """How many of the samples are stored, the first ones."""
        ...

    @property
    def first_seed(self) -> int:
        """Seed of the first sample; sample number i has seed first_seed + i."""
        ...


@dataclass(frozen=True)
class ToSample:
    """What the stage `sample` gives a system. settings: the section `sample`. codec: on the device that samples.

    load: a weights folder -> its model. small_images: what is enlarged, where the command line names it. embeddings:
    what images are made of: the folder of some, or those of the pairs and of the crops of held-out images.
    """

    model: Model
    settings: Any
    codec: Codec
    load: Callable[[Path], Model]
    small_images: Path | None = None
    embeddings: Sequence[Path] = ()


class Maker(Protocol):
    """Makes the samples of the stage `sample`, each from its own seed.

    labels: of all images, int64 [N]; None without classes. titles: of all images, what is written under them in
    pictures; empty: nothing is. described: what samples.json tells of them, in place of the settings as they were
    written or beside them.
    """

    @property
    def labels(self) -> Tensor | None: ...

    @property
    def titles(self) -> list[str]: ...

    @property
    def described(self) -> dict[str, Any]: ...

    def __call__(self, rows: slice) -> Tensor:
        """Some of the samples, on the CPU: images uint8 [n, C, H, W], or embeddings [n, dim]."""
        ...

    def pictures(self) -> dict[str, Image.Image]:
        """Pictures of how images come about, by the name of their file; "steps" is one of them."""
        ...


@dataclass(frozen=True)
class ToWrite:
    """Samples that the stage `sample` is about to write.

    batches: the samples, in order; count: their number, below that of the settings where not all are stored. made: what
    makes them. settings: the section `sample`. model: what makes them. described: how they are made, for a JSON file
    beside them. output: where the command line wants them.
    """

    batches: Iterable[Tensor]
    made: Maker
    settings: Any
    model: Model
    described: dict[str, Any]
    output: Path
    count: int


class SampleFiles(Protocol):
    """What the samples of a system are, and how they are written.

    kind: of the samples. one: what one of them is called. file: that the command names as its output.
    """

    @property
    def kind(self) -> Literal["images", "embeddings"]: ...

    @property
    def one(self) -> str: ...

    @property
    def file(self) -> str: ...

    def shown(self, settings: Any) -> int:
        """How many of them a person looks at first."""
        ...

    def write(self, given: ToWrite) -> dict[str, Path]:
        """Write them, and what describes them; pictures of them, by name."""
        ...


@dataclass(frozen=True)
class ToJudge:
    """What the stage `evaluate` gives a system.

    model: None for samples from elsewhere. sections: those that `System.judged_by` names. data: the folder of crops, or
    of pairs. samples: the samples.npz or folder of pictures; detector: the folder that detect wrote; reference: what is
    compared with in place of a split; references: folders of what detectors have seen in the splits; previews: those
    that training kept, in a folder for each fingerprint of a run; report: a folder for pictures. encoded: the
    folder of what the codec makes of the crops, where `System.judged_on_encoded` says so. raw: loads the network
    with the weights that were not averaged, where they were kept. read: what `samples` names -> the images, with these
    classes.
    """

    model: Model | None
    sections: Mapping[str, Any]
    data: Path | str
    samples: Path | None = None
    detector: Path | None = None
    reference: Path | None = None
    references: Sequence[Path] = ()
    previews: Path | None = None
    report: Path | None = None
    encoded: Path | None = None
    raw: Callable[[], nn.Module | None] = lambda: None
    read: Callable[[Path, list[str]], Samples] = read_samples


@dataclass(frozen=True)
class Column:
    """A column of a table that a served model takes. required: whether it has to be given. example: what one may hold;
    none where the column is not part of the example."""

    kind: Literal["long", "string"]
    required: bool = False
    example: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class Served:
    """What a model takes and gives where it is served.

    columns: of a table, by name; or images: the shape of one that is taken, [H, W, C]. Either way it gives uint8 images
    [N, H, W, C].
    """

    columns: dict[str, Column] = field(default_factory=dict)
    images: tuple[int, int, int] | None = None


Embed = Callable[[Sequence[str], Tensor], Tensor]
"""Captions and the seed of each, int64 [N] -> image embeddings [N, dim], as the stage `sample` writes them."""


Predict = Callable[[Any], Any]
"""A table of the columns of `Served`, or images as an array -> uint8 images [N, H, W, C]."""


@dataclass(frozen=True)
class CardUse:
    """What a model card says of the exported folder. task: as the Hugging Face Hub calls it. code: Python that uses it,
    line by line. pipeline: the class of diffusers that this needs."""

    task: str
    pipeline: str
    code: str


@dataclass(frozen=True)
class Foreign:
    """Weights that were trained elsewhere. tensors: by the network's own names. codec: of what they were trained on.
    told: what they were taken for. unread: what else the file holds, by name."""

    tensors: Mapping[str, Tensor]
    system: System
    spec: DataSpec
    codec: Config
    identity: dict[str, Any]
    told: str
    unread: tuple[str, ...] = ()
