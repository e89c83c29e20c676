"""A study: variants of one experiment, each trained with several seeds and compared with the base.

A file of config/studies expands to ordinary experiments, one for each variant and seed. Their names are derived from
their changes, so that variants and studies share identical runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from image_diffusion.codecs.diffusers import KlCodec
from image_diffusion.core.config.base import Config, differing_keys, dump, load, merged, merged_over, read_inherited
from image_diffusion.core.config.errors import suggestion
from image_diffusion.core.files.atomic import digest
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.experiments.experiment import Experiment, load_experiment, parse_experiment
from image_diffusion.metrics.choice import check_metric, lacks_detector, one_of
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.systems.base import makes, spec_of
from image_diffusion.training.flops import operations_per_example
from image_diffusion.training.trainer import Task

BASE = "base"
"""The name of the first variant: the experiment that the others are compared with."""
RunName = Annotated[str, Field(pattern=r"^[^|\n]+$", max_length=80)]


class Budget(Config):
    """Length of the training of every run."""

    steps: int | None = Field(None, gt=0)
    """Steps of every run."""
    operations: float | None = Field(None, gt=0)
    """Floating-point operations of the training of every run: a variant with more expensive steps takes fewer steps."""

    @model_validator(mode="after")
    def _is_one(self) -> Budget:
        if self.steps is not None and self.operations is not None:
            raise ValueError("steps and operations are both set, but they are two ways to say one thing. Keep one.")
        return self


class Variant(Config):
    """One change to the base of a study."""

    name: RunName
    """Name of the variant."""
    changes: dict[str, Any] = Field({})
    """Changes to the base, as in `--set` or in a file: {system.network.qk_norm: true}, or nested."""
    experiment: str | None = None
    """Another experiment instead of changes to the base: a file in config/experiments, without .yaml."""
    source: str | None = None
    """Source of the change, in one line."""

    @model_validator(mode="after")
    def _is_something_else(self) -> Variant:
        if bool(self.changes) == (self.experiment is not None):
            raise ValueError(f"The variant {self.name} needs either changes of the base or another experiment.")
        return self


class Study(Config):
    """A file of config/studies."""

    base: str
    """The experiment that the variants change: the name of a file in config/experiments, without .yaml."""
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...] = Field((0, 1, 2), min_length=1)
    """Seeds: each variant is trained and sampled once per seed."""
    budget: Budget = Budget()
    """Length of the training of each run; unset: the length set in the base."""
    changes: dict[str, Any] = Field({})
    """Changes to all variants and to the base: more samples to evaluate, for example."""
    variants: tuple[Variant, ...] = ()
    """Variants, in the order in which they are shown. Empty: the base alone, with its interval over seeds."""
    metrics: tuple[str, ...] = ()
    """Metrics to compare; unset: the label agreement, if measured, and the headline of the base, or all metrics if
    there are no variants."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_rows(cls, data: Any) -> Any:
        if isinstance(data, dict) and "rows" in data:
            raise ValueError("rows is called variants now. Rename it.")
        return data

    @field_validator("metrics")
    @classmethod
    def _are_metrics(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            check_metric(name)
        return value

    @model_validator(mode="after")
    def _has_no_duplicates(self) -> Study:
        names = [variant.name for variant in self.with_base]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"Two variants are called {name}. Give each a name of its own.")
        by_change: dict[str, str] = {}
        for variant in self.variants:
            other = by_change.setdefault(digest([variant.experiment, _nested(variant.changes)]), variant.name)
            if other != variant.name:
                raise ValueError(f"The variants {other} and {variant.name} change the same. Leave one of them out.")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are {list(self.seeds)}, one of them twice. A seed twice is the same run.")
        return self

    @property
    def with_base(self) -> list[Variant]:
        """The base, followed by the variants."""
        return [Variant.model_construct(name=BASE), *self.variants]


@dataclass(frozen=True)
class Run:
    """One variant with one seed: an experiment. where: its place in the study, for messages."""

    name: str
    variant: str
    seed: int
    where: str
    experiment: Experiment


@dataclass(frozen=True)
class Expanded:
    """A study and all its runs. base: the file of its base."""

    name: str
    study: Study
    base: Path
    runs: list[Run]

    def plan(self) -> dict[str, Any]:
        """Return the plan for the page and the rules, as plain data."""
        study = self.study
        return {
            "study": self.name,
            "base": study.base,
            "seeds": list(study.seeds),
            "budget": study.budget.model_dump(),
            "metrics": list(study.metrics),
            "variants": [
                {
                    "name": variant.name,
                    "source": variant.source,
                    "experiment": variant.experiment or study.base,
                    "changes": {"experiment": variant.experiment} if variant.experiment else _flat(variant.changes),
                    "runs": [run.name for run in self.runs if run.variant == variant.name],
                }
                for variant in study.with_base
            ],
        }


def expand(path: Path, experiments: Path) -> Expanded:
    """Return a study file and the experiments that it expands to. experiments: the folder of the base.

    A run that equals the experiment in a file is that experiment. Raises ValueError with one line for each mistake,
    which names its variant.
    """
    study: Study = load(Study, path)
    base = _file(study.base, experiments, f"{path}: base")
    runs: list[Run] = []
    for variant in study.with_base:
        where = f"{path}: variant {variant.name}"
        file = _file(variant.experiment or study.base, experiments, f"{where}: experiment")
        raw, unchanged = read_inherited(file)[0], dump(load_experiment(file))
        try:
            common = merged(_nested(study.changes), _nested(variant.changes))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        experiment = parse_experiment(merged_over(raw, common), where)
        if (steps := _steps(study.budget, experiment, where, base)) is not None:
            common = merged(common, {"train": {"steps": steps}})
        sample = experiment.system.sections.get("sample")
        seeded = ["train", *(["sample"] if sample is not None and "seed" in sample.kind.model_fields else [])]
        for seed in study.seeds:
            own = merged(common, {section: {"seed": seed} for section in seeded})
            experiment = parse_experiment(merged_over(raw, own), where)
            name = file.stem if dump(experiment) == unchanged else f"{file.stem}-{digest([file.stem, own])[:8]}"
            runs.append(Run(name, variant.name, seed, where, experiment))
        if variant.experiment is not None and _comparability_settings(experiment) != _comparability_settings(
            runs[0].experiment
        ):
            raise ValueError(
                f"{where}: {variant.experiment} is judged on other data, or otherwise, than {study.base}. "
                "Give both the same sections data and evaluate."
            )
        if keys := differing_keys(_evaluated(experiment), _evaluated(runs[0].experiment), "evaluate."):
            raise ValueError(
                f"{where} is evaluated otherwise than the base: {', '.join(keys)}. Set it in changes of the study, for "
                "all variants."
            )
    variants: dict[str, str] = {}
    counts = [getattr(run.experiment.sample, "num_samples", None) for run in runs]
    for run, count in zip(runs, counts, strict=True):
        if count != counts[0]:
            raise ValueError(
                f"{run.where}: sample.num_samples is {count}, but {counts[0]} for the base, and distances depend on "
                f"it. Set it in changes of the study, for all variants: {{sample.num_samples: {counts[0]}}}."
            )
        if (other := variants.setdefault(digest(dump(run.experiment)), run.variant)) != run.variant:
            raise ValueError(
                f"{run.where} is the same as variant {other}, with the budget and the changes of all variants."
            )
    _check_measured(study.metrics, runs[0].experiment, path)
    return Expanded(path.stem, study, base, runs)


def _check_measured(metrics: tuple[str, ...], base: Experiment, path: Path) -> None:
    """Raise ValueError for a metric of samples that no detector of the base, and so of any variant, measures."""
    evaluate = base.evaluate
    if not isinstance(evaluate, EvaluateConfig) or not makes(base, "images"):
        return
    if missing := [name for name in metrics if lacks_detector(name, evaluate.detectors)]:
        raise ValueError(
            f"{path}: metrics names {missing[0]}, which evaluate of the base does not measure. Name a metric of "
            f"{one_of(evaluate.detectors)}, or add its detector."
        )


def _comparability_settings(experiment: Experiment) -> Any:
    """Return the settings that must be equal for the metrics of two experiments to be compared."""
    return dump(experiment.data), _evaluated(experiment)


def _evaluated(experiment: Experiment) -> dict[str, Any]:
    """Return the settings of the evaluation of an experiment, without the published results that are shown with it."""
    evaluation = dump(experiment.section(experiment.system.evaluation().section))
    evaluation.pop("published", None)
    return evaluation


def _file(name: str, experiments: Path, where: str) -> Path:
    """Return the file of an experiment after validating it, so that its mistakes are not reported for the variants."""
    path = experiments / f"{name}.yaml"
    if not path.is_file():
        names = sorted(file.stem for file in experiments.glob("*.yaml"))
        raise ValueError(f"{where} is {name}, but {path} does not exist. {suggestion(name, names)}")
    load_experiment(path)
    return path


def operations_of(experiment: Experiment, codec: Experiment | None = None) -> int:
    """Return the floating-point operations of the loss of one example and its gradient, counted without data.

    codec: the experiment that trains the codec, if any.
    """
    is_pairs, is_tokens = ("pairs" in experiment.system.reads), ("tokens" in experiment.system.reads)
    images = spec_of(experiment, codec)
    spec = DataSpec(channels=768, resolution=1) if is_pairs else images.model_copy(update={"num_classes": 1000})
    if experiment.codec.trained_by is not None:
        coder: Any = KlCodec({}, _never, 1.0)
    else:
        coder = experiment.codec.build(None, None, torch.device("cpu"), torch.float32)
    grid = spec.size
    moments = (2, spec.channels, *grid)
    system: Any = experiment.system

    class Stored:
        num_samples, labels, joined_sets = 1, np.zeros(1, dtype=np.int64), dict[str, Any]()
        shape = (
            (2, 768)
            if is_pairs
            else grid
            if is_tokens
            else moments
            if experiment.codec.name is not None
            else moments[1:]
        )
        dtype = torch.int32 if is_tokens else torch.uint8 if shape == moments[1:] else torch.float16

    def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
        batch: Batch = system.batch(stored, label, streams, spec, coder)
        return batch

    def task(network: nn.Module) -> Task:
        return Task(network, system.build_objective(spec), prepare, Stored())  # type: ignore[arg-type]

    one = experiment.train.model_copy(update={"global_batch": 1, "microbatch": None, "weights": "raw"})
    return operations_per_example(lambda: system.build_network(spec), task, one)


def _never() -> Any:
    raise AssertionError("nothing is encoded or decoded while operations are counted")


def _steps(budget: Budget, experiment: Experiment, where: str, base: Path) -> int | None:
    """Return the number of training steps of a variant; None: the number in its own configuration."""
    if budget.operations is None:
        return budget.steps
    trained_by = experiment.codec.trained_by
    other = load_experiment(base.with_name(f"{trained_by}.yaml")) if trained_by is not None else None
    step = operations_of(experiment, other) * experiment.train.global_batch
    if budget.operations < step:
        raise ValueError(
            f"{where}: a step takes {step:.2g} operations, but budget.operations is {budget.operations:.2g}. Give the "
            f"study more."
        )
    return int(budget.operations // step)


def _nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}. Raises ValueError for a key with an empty part, and for a duplicate key."""
    nested: dict[str, Any] = {}
    for key, value in changes.items():
        names = key.split(".")
        if not all(names):
            raise ValueError(f"'{key}' names no key. Write system.network.qk_norm, say.")
        inner: Any = _nested(value) if isinstance(value, dict) else value
        for name in reversed(names):
            inner = {name: inner}
        nested = merged(nested, inner)
    return nested


def _flat(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return changes with dotted keys, a line each; a section that names its type is not split."""
    flat: dict[str, Any] = {}
    for key, value in changes.items():
        if isinstance(value, dict) and value and "type" not in value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def schema() -> dict[str, Any]:
    """Return the JSON schema of a study file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Study.model_json_schema()}
