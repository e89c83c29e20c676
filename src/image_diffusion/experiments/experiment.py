"""An experiment: one section per stage. Each YAML file under config/experiments is an experiment.

The system determines the sections: `experiment_of` returns the class of the experiments of one system.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field, SerializeAsAny, create_model, field_validator, model_validator
from pydantic.json_schema import models_json_schema

from image_diffusion.codecs import CodecConfig
from image_diffusion.codecs.base import Codec, Tokens
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import (
    BASE,
    Config,
    Sparse,
    changed,
    dump,
    origin,
    parse,
    read_inherited,
    read_yaml,
)
from image_diffusion.data.config import DataConfig
from image_diffusion.data.encoded.latents import EncodeConfig
from image_diffusion.data.sources import Source
from image_diffusion.export import export_of
from image_diffusion.metrics import DetectorConfig
from image_diffusion.synthesis.config import SynthesizeConfig
from image_diffusion.systems import SYSTEMS, AnySystem
from image_diffusion.systems.base import System, name_of
from image_diffusion.systems.interface import Section
from image_diffusion.systems.pairs.config import PairsConfig, SeveralPairs
from image_diffusion.systems.pairs.inputs import sets_of
from image_diffusion.systems.sampling import SampleSettings
from image_diffusion.training.config import TrainConfig


class ExportConfig(Config):
    """Export of the trained model for other programs."""

    format: str = "none"
    """diffusers: a folder with classes that diffusers provides (a DiTPipeline or an AutoencoderKL). pipeline: a folder
    with a pipeline.py and its own code, which diffusers loads without this package; for every network. none: no
    export."""


class ResourcesConfig(Config):
    """Machines that training runs on. They affect its result only by the order of floating-point sums."""

    nodes: int = Field(1, ge=1)
    """Number of machines that train together."""
    processes_per_node: int = Field(1, ge=1)
    """Processes on each machine: one for each GPU, or any number on CPUs."""
    gpus_per_node: int | None = Field(None, ge=0)
    """GPUs to request on each machine of a cluster; 0 on CPUs. Empty: one for each process on a cluster; without a
    queue, none is reserved and all GPUs of the machine are visible."""
    cpus_per_process: int = Field(2, ge=1)
    """CPU cores to request for each process."""
    memory_mb: int = Field(8000, ge=1)
    """Memory to request on each machine, in MB."""
    runtime_min: int = Field(60, ge=1)
    """Time to request for one job, in minutes; longer training resumes in the next job."""
    hang_s: int = Field(600, ge=1)
    """Seconds that a training process waits for another before all processes exit; the next job resumes from the last
    checkpoint."""
    stage_to: str = ""
    """Folder on a node's local disk, such as $TMPDIR, that training copies its data to and reads it from: for a network
    file system that is slower than the GPUs. Empty: the data is read in place."""
    one_job: bool = False
    """Run all stages of the experiment in one cluster job, and all stages of its data set in another: for an experiment
    that takes minutes on CPUs."""

    @model_validator(mode="after")
    def _one_job_is_small(self) -> ResourcesConfig:
        if self.one_job and (self.nodes > 1 or self.gpus_per_node != 0):
            raise ValueError(
                "one_job puts stages that need a GPU and others into one job, and is for one node of CPUs. Set nodes: "
                "1 and gpus_per_node: 0, or leave out one_job."
            )
        return self


class Experiment(Config):
    """Configuration from images to a report. A section that the system does not have is empty, or has the default
    below."""

    data: DataConfig
    """Images of the data set, and their cropping."""
    codec: CodecConfig = Rgb()
    """The space the network works in."""
    encode: EncodeConfig | None = None
    """Encoding of images as latents, or tokens."""
    pairs: SeveralPairs | None = None
    """Source of the pairs of image and text embeddings."""
    system: AnySystem
    """The network, the process and the objective."""
    train: TrainConfig
    """Training of the system."""
    preview: Any = None
    """Images sampled at intervals during training (train.grid_every_steps)."""
    sample: Any = None
    """Images to sample from the trained weights."""
    evaluate: Any = None
    """Evaluation of the trained model, or of its images."""
    prediction: Any = None
    """Prediction of image embeddings, by which a prior is evaluated."""
    sweep: Any = None
    """Curves of the metrics against one varied setting each."""
    export: ExportConfig = ExportConfig()
    """Format of the model for other programs."""
    synthesize: SynthesizeConfig | None = None
    """Data set of images generated by the model, with a scorecard; unset: none."""
    resources: ResourcesConfig = ResourcesConfig()
    """Machines that training runs on."""

    def section(self, name: str) -> Any:
        """Return a section that the system has, by name."""
        return getattr(self, name)

    @property
    def pair_sets(self) -> tuple[PairsConfig, ...]:
        """Return the sets of the section `pairs`."""
        return sets_of(self.pairs)

    @property
    def samples(self) -> SampleSettings | None:
        """Settings of sampling, if the system makes images."""
        settings: SampleSettings | None = self.sample
        return settings

    @model_validator(mode="before")
    @classmethod
    def _sections_are_its_own(cls, data: Any) -> Any:
        kind = cls.model_fields["system"].annotation
        if isinstance(data, dict) and isinstance(kind, type) and issubclass(kind, System):
            others = {name for system in SYSTEMS for name in system.sections} - set(kind.sections)
            if unused := sorted(others & data.keys()):
                raise ValueError(_no_use(unused, kind))
            for name, section in kind.sections.items():
                if section.default is None and not section.optional and name not in data:
                    raise ValueError(
                        f"{name} is missing, and a system of type {name_of(kind)} needs it. Add a section, such as "
                        f"{name}: {section.example}."
                    )
        return data

    @model_validator(mode="after")
    def _keys_do_something(self) -> Experiment:
        for name, section in self.system.sections.items():
            written = getattr(self, name)
            for key in sorted(written.model_fields_set - section.keys) if section.keys is not None else ():
                if getattr(written, key) is not None:
                    raise ValueError(_no_use([f"{name}.{key}"], type(self.system)))
        if self.export.format != "none":
            export_of(self.system, self.export.format)
        return self


def _no_use(keys: list[str], kind: type[System]) -> str:
    are, them = ("is", "it") if len(keys) == 1 else ("are", "them")
    return (
        f"{' and '.join(keys)} {are} set, but a system of type {name_of(kind)} has no use for {them}. Leave {them} out."
    )


@cache
def experiment_of(system: type[System]) -> type[Experiment]:
    """Return the class of the experiments of one kind of system, with that system's sections and defaults."""
    fields: dict[str, Any] = {"system": (system, ...), "train": (train_of(system), ...)}
    for name, section in system.sections.items():
        about = None if name in Experiment.model_fields else section.kind.__doc__
        if section.optional:
            fields[name] = (section.kind | None, Field(None, description=about))
            continue
        fields[name] = (section.kind, Field(... if section.default is None else section.default, description=about))
    return create_model(f"Experiment of {name_of(system)}", __base__=Experiment, **fields)


def train_of(system: type[System]) -> type[TrainConfig]:
    """Return the section `train` with the defaults of one kind of system."""
    own = TrainConfig.model_validate({"steps": 1} | dict(system.recipe))
    fields: dict[str, Any] = {}
    for name in system.recipe:
        field = copy(TrainConfig.model_fields[name])
        field.default = getattr(own, name)
        fields[name] = (field.annotation, field)
    return create_model(f"TrainConfig of {name_of(system)}", __base__=TrainConfig, **fields)


class EncodeStage(Config):
    """Configuration of the stage `encode`. data: only if its source holds latents, which are imported instead of
    encoded."""

    codec: CodecConfig
    encode: EncodeConfig
    data: DataConfig | None = None

    def build(self, weights: Path | None, device: torch.device) -> Codec | Tokens:
        """Return the codec that images are encoded with.

        weights: the folder of the experiment that trained the codec, if any. Raises ValueError if tokens are requested
        from a codec without tokens.
        """
        codec: Codec | Tokens
        if self.encode.tokens:
            codec = self.codec.tokens(weights, device, self.encode.compute_dtype)
        else:
            codec = self.codec.build(weights, None, device, self.encode.compute_dtype)
        return codec


class EmbedStage(Sparse):
    """Configuration of the stage `embed`. source: location of the files that pairs or captions are read from, if any.
    max_bad_fraction: as in the section data. data: the section data, if images are cropped by it."""

    if_set: ClassVar[frozenset[str]] = frozenset({"data"})

    name: str
    num_shards: int
    pairs: PairsConfig
    source: Source | None
    max_bad_fraction: float = 0.1
    data: DataConfig | None = None


class ReferenceStage(Config):
    """Configuration of the stage `reference`."""

    detector: DetectorConfig


class TrainStage(Config):
    """Configuration of the stage `train`. preview: only if the system has such a section. encoder: the encoder of
    captions or features that the system reads with its data, from `pairs.encoder` or `pairs.teacher`; by kind if it
    reads several sets."""

    experiment: str
    codec: CodecConfig
    system: AnySystem
    train: TrainConfig
    preview: SerializeAsAny[Config] | None = None
    encoder: dict[str, Any] | None = None

    @field_validator("preview", mode="before")
    @classmethod
    def _is_of_the_system(cls, value: Any, info: Any) -> Any:
        system: System | None = info.data.get("system")
        if not isinstance(value, dict) or system is None:
            return value
        return parse(system.sections["preview"].kind, value, "preview") if "preview" in system.sections else None


class ExportStage(Config):
    """Configuration of the stage `export`."""

    export: ExportConfig


def load_sections(
    path: Path | None, names: Iterable[str], sections: Mapping[str, Section], changes: Sequence[str] = ()
) -> dict[str, Any]:
    """Return sections by name, from the file of a stage; without a file, their defaults. A section with a default may
    be omitted. changes: see `changed`.

    Raises ValueError with one line for each mistake in it.
    """
    names, loaded = list(names), {}
    defaults = {name: sections[name].default for name in names}
    plain = {name: dump(default) for name, default in defaults.items() if default is not None}
    raw, where = changed(read_yaml(path) if path is not None else plain, changes), origin(path, changes)
    if not isinstance(raw, dict) or set(raw) - set(names):
        raise ValueError(f"{where} holds {sorted(raw) if isinstance(raw, dict) else raw}; expected {', '.join(names)}.")
    for name in names:
        section = sections[name]
        if name not in raw and section.default is None:
            raise ValueError(f"{where}: there is no section {name}. Add one, such as {name}: {section.example}.")
        loaded[name] = parse(section.kind, raw[name], f"{where}: {name}") if name in raw else section.default
        _check_keys(f"{where}: {name}", section, loaded[name])
    return loaded


def _check_keys(where: str, section: Section, settings: Any) -> None:
    """Raise ValueError for a setting that the system does not use and that is not its default."""
    if section.keys is None:
        return
    for key, field in type(settings).model_fields.items():
        defaults = (None, field.get_default(call_default_factory=True))
        if key not in section.keys and getattr(settings, key) not in defaults:
            raise ValueError(f"{where}.{key} has no effect on a system of this type. Leave it out.")


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file and its base, if it names one. Raises ValueError with one line for each mistake."""
    raw, files = read_inherited(path)
    return parse_experiment(raw, " over ".join(map(str, files)))


def parse_experiment(raw: Any, where: str) -> Experiment:
    """Return an experiment from plain data. Raises ValueError with one line for each mistake, each prefixed with
    `where`."""
    sections = raw if isinstance(raw, dict) else {}
    system, train = sections.get("system"), sections.get("train")
    if isinstance(train, dict) and "seeds" in train:
        raise ValueError(
            f"{where}: train.seeds is a study now. Leave it out, write config/studies/NAME.yaml with base and seeds: "
            f"{train['seeds']}, and start snakemake --config study=NAME."
        )
    wanted = system.get("type") if isinstance(system, dict) else None
    kind = next((experiment_of(kind) for kind in SYSTEMS if name_of(kind) == wanted), Experiment)
    experiment: Experiment = parse(kind, raw, where)
    return experiment


def schema() -> dict[str, Any]:
    """Return the JSON schema of an experiment file, from the configuration classes themselves."""
    kinds = {name_of(system): experiment_of(system) for system in SYSTEMS}
    schemas, definitions = models_json_schema([(kind, "validation") for kind in kinds.values()])

    base = "The name of a file beside this one, without .yaml, that this one is written over."

    def is_of(name: str) -> dict[str, Any]:
        return {"properties": {"system": {"properties": {"type": {"const": name}}}}}

    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Experiment",
        "description": "From images to a report. Which sections there are follows from system.type.",
        "type": "object",
        "properties": {"system": {"properties": {"type": {"enum": list(kinds)}}}},
        # The values that a file takes from its base are not known here.
        "if": {"required": [BASE]},
        "then": {"properties": {BASE: {"type": "string", "description": base}}},
        "else": {
            "required": ["data", "system", "train"],
            "properties": {"system": {"required": ["type"]}},
            "allOf": [{"if": is_of(name), "then": schemas[kind, "validation"]} for name, kind in kinds.items()],
        },
        **definitions,
    }
