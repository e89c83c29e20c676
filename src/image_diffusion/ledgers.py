"""A ledger: what single changes of one experiment are worth. Each row changes a few keys, each seed trains it again.
An experiment with `train.seeds` is a ledger of one row.

A file of config/ledgers becomes ordinary experiments, one for each row and seed. They are named by what they change,
so that rows and ledgers that ask for the same run share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from image_diffusion.codecs.kl import KlCodec
from image_diffusion.core.config import Config, dump, load, merged
from image_diffusion.core.files import digest
from image_diffusion.core.inherited import read_inherited
from image_diffusion.core.mistakes import nearest
from image_diffusion.core.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.experiment import Experiment, load_experiment, parse_experiment
from image_diffusion.systems.system import spec_of
from image_diffusion.training.counted import counted
from image_diffusion.training.parts import Task
from image_diffusion.workflow.ledgers import seeds_ledger

BASE = "base"
"""The name of the first row: the experiment that the others are compared with."""
RunName = Annotated[str, Field(pattern=r"^[^|\n]+$", max_length=80)]


class Budget(Config):
    """How long each run trains."""

    steps: int | None = Field(None, gt=0)
    """Steps of every run."""
    operations: float | None = Field(None, gt=0)
    """Floating-point operations of the training of every run: a row whose step costs more takes fewer of them."""

    @model_validator(mode="after")
    def _is_one(self) -> Budget:
        if self.steps is not None and self.operations is not None:
            raise ValueError("steps and operations are both set, but they are two ways to say one thing. Keep one.")
        return self


class Row(Config):
    """One change."""

    name: RunName
    """What the row is called."""
    changes: dict[str, Any] = Field({})
    """What it changes of the base, as `--set` or a file would say it: {system.network.qk_norm: true}, or nested."""
    experiment: str | None = None
    """Another experiment, in place of changes of the base: the name of a file beside it, without .yaml."""
    source: str | None = None
    """Where the change comes from, in one line."""

    @model_validator(mode="after")
    def _is_something_else(self) -> Row:
        if bool(self.changes) == (self.experiment is not None):
            raise ValueError(f"The row {self.name} needs either changes of the base or another experiment.")
        return self


class Ledger(Config):
    """A file of config/ledgers."""

    base: str
    """The experiment that is changed: the name of a file in config/experiments, without .yaml."""
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...] = Field((0, 1, 2), min_length=1)
    """Each row is trained and sampled once with each."""
    budget: Budget = Budget()
    """How long each run trains; unset: as long as the base says."""
    changes: dict[str, Any] = Field({})
    """What all rows change of the base, the row of the base too: more samples to judge, say."""
    rows: tuple[Row, ...] = Field(min_length=1)
    """The changes, one row each, in the order in which they are shown."""
    metrics: tuple[str, ...] = ()
    """Metrics that are compared; unset: the agreement of labels, where there is one, and the headline of the base."""

    @model_validator(mode="after")
    def _tells_rows_apart(self) -> Ledger:
        names = [BASE, *(row.name for row in self.rows)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"Two rows are called {name}. Give each a name of its own.")
        seen: dict[str, str] = {}
        for row in self.rows:
            other = seen.setdefault(digest([row.experiment, _nested(row.changes)]), row.name)
            if other != row.name:
                raise ValueError(f"The rows {other} and {row.name} change the same. Leave one of them out.")
        check_seeds(self.seeds)
        return self


def check_seeds(seeds: Sequence[int]) -> None:
    """Raise ValueError for a seed that stands twice."""
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds are {list(seeds)}, one of them twice. A seed twice is the same run.")


@dataclass(frozen=True)
class Run:
    """One row with one seed: an experiment. told: where it stands, for the sentence on a mistake in it."""

    name: str
    row: str
    seed: int
    told: str
    experiment: Experiment


@dataclass(frozen=True)
class Expanded:
    """A ledger and all its runs. base: the file of its base."""

    name: str
    ledger: Ledger
    base: Path
    runs: list[Run]

    def plan(self) -> dict[str, Any]:
        """What the page and the rules have to know, as plain data."""
        of = self.ledger.base
        base: tuple[str, str | None, str, dict[str, Any]] = (BASE, None, of, {})
        rows = [base, *((row.name, row.source, row.experiment or of, _told(row)) for row in self.ledger.rows)]
        runs = {(run.row, run.seed): run.name for run in self.runs}
        return {
            "ledger": self.name,
            "base": self.ledger.base,
            "seeds": list(self.ledger.seeds),
            "budget": self.ledger.budget.model_dump(),
            "metrics": list(self.ledger.metrics),
            "rows": [
                {
                    "name": name,
                    "source": source,
                    "experiment": experiment,
                    "changes": changes,
                    "runs": [runs[name, seed] for seed in self.ledger.seeds],
                }
                for name, source, experiment, changes in rows
            ],
        }


def expand(path: Path, experiments: Path) -> Expanded:
    """A ledger file and the experiments that it stands for. experiments: the folder that its base lies in.

    Raises ValueError with one line for each mistake, with the row that it is in.
    """
    ledger: Ledger = load(Ledger, path)
    base = _file(ledger.base, experiments, f"{path}: base")
    unchanged: tuple[str, str, dict[str, Any]] = (BASE, ledger.base, {})
    runs: list[Run] = []
    for row, of, changes in (
        unchanged,
        *((row.name, row.experiment or ledger.base, row.changes) for row in ledger.rows),
    ):
        told = f"{path}: row {row}"
        raw = _raw(_file(of, experiments, f"{told}: experiment"))
        try:
            common = merged(_nested(ledger.changes), _nested(changes))
        except ValueError as error:
            raise ValueError(f"{told}: {error}") from None
        steps = _steps(ledger.budget, _with(raw, common), told, base)
        if steps is not None:
            common = merged(common, {"train": {"steps": steps}})
        for seed in ledger.seeds:
            runs.append(_run(of, raw, common, row, seed, told))
            if _judged(runs[-1].experiment, of != ledger.base) != _judged(runs[0].experiment, of != ledger.base):
                raise ValueError(
                    f"{told}: {of} is judged on other data, or otherwise, than {ledger.base}. "
                    "Give both the same sections data and evaluate."
                )
    rows: dict[str, str] = {}
    for run in runs:
        if (other := rows.setdefault(run.name, run.row)) != run.row:
            raise ValueError(f"{run.told} is the same as row {other}, with the budget and the changes of all rows.")
    return Expanded(path.stem, ledger, base, runs)


def seeds_of(path: Path, experiment: Experiment) -> Expanded | None:
    """The ledger of one row that an experiment with `train.seeds` is, from its file; None: it has none.

    The run with its own seed is the experiment itself. Raises ValueError with one line for each mistake.
    """
    seeds = experiment.train.seeds
    if not seeds:
        return None
    told = f"{path}: train.seeds"
    try:
        check_seeds(seeds)
    except ValueError as error:
        raise ValueError(f"{path}: train.{error}") from None
    if experiment.train.seed not in seeds:
        raise ValueError(
            f"{told} are {list(seeds)}, without train.seed {experiment.train.seed}. Set that to one of them."
        )
    raw, runs = _raw(path), []
    for seed in seeds:
        own = seed == experiment.train.seed
        runs.append(
            Run(path.stem, BASE, seed, str(path), experiment) if own else _run(path.stem, raw, {}, BASE, seed, told)
        )
    ledger = Ledger.model_construct(base=path.stem, seeds=seeds, rows=())
    return Expanded(seeds_ledger(path.stem), ledger, path, runs)


def _run(of: str, raw: Any, common: Mapping[str, Any], row: str, seed: int, told: str) -> Run:
    """An experiment with the changes of a row and a seed, named by both."""
    own = merged(common, {"train": {"seed": seed}})
    if _samples_have_a_seed(_with(raw, own), told):
        own = merged(own, {"sample": {"seed": seed}})
    return Run(f"{of}-{digest([of, own])[:8]}", row, seed, told, parse_experiment(_with(raw, own), told))


def _judged(experiment: Experiment, matters: bool) -> Any:
    """What numbers of two experiments must have in common; nothing where one is the other with a change."""
    if not matters:
        return None
    sections = {name: dump(experiment.section(name)) for name in experiment.system.judged_by}
    for section in sections.values():
        section.pop("published", None)
    return dump(experiment.data), sections


def _file(name: str, experiments: Path, told: str) -> Path:
    """The file of an experiment, once it is one: a mistake in it is not one of the rows."""
    path = experiments / f"{name}.yaml"
    if not path.is_file():
        there = sorted(each.stem for each in experiments.glob("*.yaml"))
        close = nearest(name, there)
        advice = f" Did you mean {close}?" if close else f" Known: {', '.join(there)}."
        raise ValueError(f"{told} is {name}, but {path} does not exist.{advice}")
    load_experiment(path)
    return path


def _raw(path: Path) -> dict[str, Any]:
    """An experiment as it is written, over its base, without seeds of its own."""
    raw: dict[str, Any] = read_inherited(path)[0]
    train = {key: value for key, value in raw["train"].items() if key != "seeds"}
    return raw | {"train": train}


def operations_of(experiment: Experiment, codec: Experiment | None = None) -> int:
    """Floating-point operations of the loss of one example and of its gradient, counted without any data.

    codec: the experiment that trains its codec, where one does.
    """
    is_pairs, is_tokens = ("pairs" in experiment.system.reads), ("tokens" in experiment.system.reads)
    images = spec_of(experiment, codec)
    spec = DataSpec(channels=768, resolution=1) if is_pairs else images.model_copy(update={"num_classes": 1000})
    if experiment.codec.trained_by is not None:
        coder: Any = KlCodec({}, _never, 1.0)
    else:
        coder = experiment.codec.build(None, None, torch.device("cpu"), torch.float32)
    grid = (spec.resolution, spec.resolution)
    moments = (2, spec.channels, *grid)
    system: Any = experiment.system

    class Stored:
        num_samples, labels, beside = 1, np.zeros(1, dtype=np.int64), None
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
    return counted(lambda: system.build_network(spec), task, one, 1).operations


def _never() -> Any:
    raise AssertionError("nothing is encoded or decoded while operations are counted")


def _steps(budget: Budget, raw: Any, told: str, base: Path) -> int | None:
    """How long a row trains; None: as long as it says itself."""
    if budget.operations is None:
        return budget.steps
    experiment = parse_experiment(raw, told)
    trained_by = experiment.codec.trained_by
    other = load_experiment(base.with_name(f"{trained_by}.yaml")) if trained_by is not None else None
    step = operations_of(experiment, other) * experiment.train.global_batch
    if budget.operations < step:
        raise ValueError(
            f"{told}: a step takes {step:.2g} operations, but budget.operations is {budget.operations:.2g}. Give the "
            f"ledger more."
        )
    return int(budget.operations // step)


def _samples_have_a_seed(raw: Any, told: str) -> bool:
    """Whether the images of an experiment depend on a seed of their own."""
    section = parse_experiment(raw, told).system.sections.get("sample")
    return section is not None and "seed" in section.kind.model_fields


def _with(raw: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A base with what a row changes. A section that it leaves empty is left out."""
    return {key: value for key, value in merged(raw, changes).items() if value is not None or key not in changes}


def _nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}. Raises ValueError for a key without a name, and for one that stands twice."""
    found: dict[str, Any] = {}
    for key, value in changes.items():
        names = key.split(".")
        if not all(names):
            raise ValueError(f"'{key}' names no key. Write system.network.qk_norm, say.")
        inner: Any = _nested(value) if isinstance(value, dict) else value
        for name in reversed(names):
            inner = {name: inner}
        found = merged(found, inner)
    return found


def _told(row: Row) -> dict[str, Any]:
    """What a row changes, a line each."""
    return _flat(row.changes) if row.experiment is None else {"experiment": row.experiment}


def _flat(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The same with dotted keys, a line each; a section that names its type stays whole."""
    found: dict[str, Any] = {}
    for key, value in changes.items():
        if isinstance(value, dict) and value and "type" not in value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def schema() -> dict[str, Any]:
    """The JSON schema of a ledger file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Ledger.model_json_schema()}
