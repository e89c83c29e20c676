"""Plans of experiments and studies: the facts that Snakemake needs, written by `configure`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypedDict

from image_diffusion.core.files.atomic import read_json
from image_diffusion.workflow.environment import with_package

STAGES = ("crop", "encode", "embed", "train", "sample", "evaluate", "export")
"""Stages of an experiment, in this order; an experiment skips the stages that it does not need."""

CHOSEN = "chosen"
"""Folder name of the chosen step, among the folders of the steps of a curve."""

STUDIES_FOLDER = "studies"
"""Folder of the files of studies, under results."""
STUDY_PAGE = "index.html"


class Wildcards(Protocol):
    """Values of the wildcards of a job: Snakemake's own object, or a dict."""

    def __getitem__(self, name: str, /) -> str: ...

    def keys(self) -> Collection[str]: ...


def has(wildcards: Wildcards, name: str) -> bool:
    """Return True if a job has a wildcard."""
    return name in wildcards.keys()  # noqa: SIM118 - Snakemake's wildcards are a list with names


class PairPlan(TypedDict):
    """One set of pairs, from the section `pairs` of an experiment."""

    of_images: bool
    """True if the set is made from crops."""
    of_source: bool
    """True if files of the data source are read."""
    of_detector: bool
    """True if the detector of the data set is needed to make the set."""
    files: str | None
    """The table or the folder that captions, numbers or images are read from."""
    weights: str | None
    """Name, file or folder of the encoder's weights."""


@dataclass(frozen=True)
class Plan:
    """One resolved experiment. Paths are spelled as in the rules."""

    experiment: str
    """Name of the experiment."""
    system: str
    """Type of the system."""
    dataset: str
    """Folder of the data set under results/datasets."""
    source: dict[str, Any]
    """Source of the images: the section data.source."""
    data_digest: str
    """Digest of the section data."""
    has_images: bool
    """True if the source holds images, False if it holds imported latents."""
    num_shards: int
    """Number of shards of the data set."""
    codec: str | None
    """Folder of the latents, next to the crops; None for pixels."""
    codec_experiment: str | None
    """Experiment that trains the codec."""
    codec_files: list[str]
    """Files of an external codec."""
    decoder_files: list[str]
    """Files of the decoder of the samples, if it is not the codec's own."""
    weaker_files: list[str]
    """Files of the weaker network that guides sampling, if one is set."""
    start_files: list[str]
    """Files of the initial weights, if these are a folder and not an experiment."""
    detector_files: dict[str, list[str]]
    """Files of the local weights of detectors, by the folder of their reference features."""
    small_images: str | None
    """Small images that samples are conditioned on: `validation` or a file."""
    small_images_experiment: str | None
    """The experiment whose samples those are."""
    embeddings: str | None
    """Embeddings that images are sampled from: `validation` for those of held-out images, or a folder."""
    embeddings_experiment: str | None
    """Experiment that makes the embeddings."""
    against: str | None
    """File of images that samples are compared with instead of real images."""
    against_experiment: str | None
    """The experiment whose samples those are."""
    start_experiment: str | None
    """Experiment whose weights training starts from."""
    tokens: str | None
    """Folder of the tokens of the data set, if the experiment trains a discrete VAE."""
    judged_on_encoded: bool
    """True if `evaluate` also reads the encoded data set."""
    judged_on_pairs: bool
    """True if `evaluate` also reads the pairs."""
    pairs: dict[str, PairPlan]
    """Sets of pairs, by folder, in the order in which they are read."""
    pairs_beside: bool
    """True if pairs are read in addition to the data, False if they replace it."""
    prompts: str | None
    """File of prompts or rows of numbers."""
    pictures: list[str]
    """Files of images and masks that samples are made from."""
    makes_samples: bool
    """True if `sample` makes images."""
    keeps_samples: bool
    """True if all samples are stored, False if `evaluate` generates them as it reads them."""
    makes_embeddings: bool
    """True if `sample` makes embeddings."""
    sample_jobs: int
    """Number of jobs that share the samples or embeddings."""
    sample_batches: int
    """Number of batches of samples or embeddings; a job makes whole batches."""
    synthesize_jobs: int
    """Number of jobs that generate the synthetic data set; 0: the experiment makes none."""
    synthesize_table: str | None
    """Table that specifies the images of the synthetic data set."""
    global_batch: int
    """Number of examples in a training step."""
    detectors: list[str]
    """Detectors of the metrics."""
    references: dict[str, str]
    """Configuration of each detector of the data set, by the folder of its reference features."""
    headline: str
    """Metric that experiments are ranked by."""
    sweep: dict[str, dict[str, str]]
    """Configuration of each point of each curve, by the varied setting and by value."""
    choose: str
    """Rule that chooses the training step whose weights all later stages use; empty for the last step."""
    export: str
    """Export format, or `none`."""
    resources: dict[str, int | str | None]
    """Resources to request: the section resources."""
    configs: dict[str, str]
    """Resolved configuration of each stage; `embed` has one for each set of pairs, embed-STUDIES_FOLDER."""
    beyond_defaults: list[str]
    """Dotted keys that differ from the defaults of the system, for the page of the experiment."""

    @property
    def weights(self) -> str:
        """Folder, below the results of the experiment, of the weights that all stages after training use."""
        return _weights_folder(self.choose)

    @property
    def synthesizes(self) -> bool:
        """True if the experiment makes a synthetic data set."""
        return "synthesize" in self.configs

    @property
    def most_sample_jobs(self) -> int:
        """Maximum number of jobs that can share the samples."""
        return self.sample_batches if self.keeps_samples else 1

    @property
    def learns_from_pairs(self) -> str | None:
        """Folder of the pairs, if training reads pairs only."""
        return None if self.pairs_beside else next(iter(self.pairs), None)

    @property
    def builds_on(self) -> list[str]:
        """Experiments that must be made before this one."""
        named = (self.codec_experiment, self.small_images_experiment, self.embeddings_experiment)
        return [name for name in (*named, self.against_experiment, self.start_experiment) if name]

    def token_plan(self) -> Plan:
        """Return the plan for encoding the data set to tokens with the discrete VAE that this experiment trains."""
        configs = {"crop": self.configs["crop"], "encode": self.configs["tokens"]}
        return replace(self, codec=self.tokens, codec_experiment=self.experiment, codec_files=[], configs=configs)


def plan_file(results: str | Path, name: str) -> Path:
    """Return the file of the plan of an experiment."""
    return Path(results, name, "config", "plan.json")


def read_plan(path: Path) -> Plan:
    """Return a plan from its file. Raises ValueError when the file is missing, damaged, or not of this version."""
    data = read_json(path)
    try:
        return Plan(**{field.name: data[field.name] for field in fields(Plan)})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a plan of this version: {error}. Delete it and start again.") from None


def used_weights(experiment: Path) -> Path:
    """Return the folder of the weights that all stages after training use. experiment: its folder of results."""
    path = plan_file(experiment.parent, experiment.name)
    return experiment / _weights_folder(read_json(path).get("choose", "") if path.is_file() else "")


def _weights_folder(choose: str) -> str:
    return f"sweep/checkpoint/{CHOSEN}/weights" if choose else "train"


def study_file(results: str | Path, name: str) -> Path:
    """Return the file of the plan of a study."""
    return Path(results, STUDIES_FOLDER, name, "plan.json")


@dataclass(frozen=True)
class StudyPlan:
    """One resolved study. variants: name, source, experiment, changes, and the run of each seed. seeds: in the order of
    the runs."""

    name: str
    variants: list[dict[str, Any]]
    seeds: list[int]

    @property
    def titles(self) -> dict[str, str]:
        """Return the variant and the seed of each run; for a shared run, the first variant."""
        return {
            run: f"{variant['name']}, seed {seed}"
            for variant in reversed(self.variants)
            for run, seed in zip(variant["runs"], self.seeds, strict=True)
        }

    @property
    def experiments(self) -> set[str]:
        """Return the experiments that the variants are based on."""
        return {variant["experiment"] for variant in self.variants}

    @property
    def runs(self) -> Iterator[str]:
        """Return the experiments of the study, variant by variant."""
        return (run for variant in self.variants for run in variant["runs"])


def read_studies(results: str | Path, names: Collection[str]) -> dict[str, StudyPlan]:
    """Return studies by name. Raises ValueError if a file is missing, damaged, or not of this version."""
    studies = {}
    for name in names:
        path = study_file(results, name)
        try:
            plan = read_json(path)
            studies[name] = StudyPlan(name, plan["variants"], plan["seeds"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a study of this version: {error}. Delete it and start again.") from None
    return studies


def write_partial_pages(results: str, names: Collection[str], script: Path, source: Path) -> None:
    """Make the pages of studies with unfinished runs; failed runs are shown with their error message.

    These pages lack the table for documents, so that Snakemake makes them again even if the study is changed back to
    the state of its last complete page. script: makes the page. source: the folder that holds the package.
    """
    for name in names:
        command = [sys.executable, str(script), "--study", str(study_file(results, name).parent)]
        subprocess.run([*command, "--results", results, "--partial"], check=False, env=with_package(source))


@dataclass(frozen=True)
class Plans:
    """Plans of the experiments to make and of those they build on, by name and by shared data."""

    by_name: dict[str, Plan]
    requested: tuple[str, ...] = ()
    """Experiments that were requested themselves, not only as dependencies or runs of a study."""
    studies: dict[str, StudyPlan] = field(default_factory=dict)
    """The requested studies, by name."""

    @classmethod
    def read(cls, results: str | Path, names: Collection[str], studies: Collection[str] = ()) -> Plans:
        """Read the plans of experiments and of the runs of studies, each followed by those that it builds on. Raises
        ValueError (see `read_plan`)."""
        study_plans = read_studies(results, studies)
        plans: dict[str, Plan] = {}

        def add(name: str) -> None:
            if name not in plans:
                plans[name] = read_plan(plan_file(results, name))
                for other in plans[name].builds_on:
                    add(other)

        for name in (*names, *(run for study in study_plans.values() for run in study.runs)):
            add(name)
        return cls(plans, tuple(names), study_plans)

    def with_all_plans(self, results: str | Path) -> Plans:
        """Return all plans under the results, these last, so that they take precedence for a shared data set. Plans
        that cannot be read are left out."""
        others: dict[str, Plan] = {}
        for path in sorted(Path(results).glob(str(plan_file("", "*")))):
            name = path.parents[1].name
            if name not in self.by_name:
                with suppress(ValueError):
                    others[name] = read_plan(path)
        return replace(self, by_name=others | self.by_name)

    @cached_property
    def datasets(self) -> dict[str, Plan]:
        """A plan that uses a data set, by the data set."""
        return {plan.dataset: plan for plan in self.by_name.values()}

    @cached_property
    def latents(self) -> dict[tuple[str, str], Plan]:
        """A plan that uses latents or tokens, by data set and codec."""
        plans = [*self.by_name.values(), *(plan.token_plan() for plan in self.by_name.values() if plan.tokens)]
        return {(plan.dataset, plan.codec): plan for plan in plans if plan.codec}

    @cached_property
    def pairs(self) -> dict[tuple[str, str], Plan]:
        """A plan that reads a set of pairs, by data set and name of the set."""
        return {(plan.dataset, name): plan for plan in self.by_name.values() for name in plan.pairs}

    @cached_property
    def references(self) -> dict[tuple[str, str], str]:
        """The configuration of each detector of a data set, by data set and folder."""
        return {
            (plan.dataset, name): config for plan in self.by_name.values() for name, config in plan.references.items()
        }

    def plan_for(self, wildcards: Wildcards) -> Plan:
        """Return the plan of a job; for a job of a data set, the plan of an experiment that uses the data set."""
        if has(wildcards, "experiment"):
            return self.by_name[wildcards["experiment"]]
        dataset = wildcards["dataset"]
        if has(wildcards, "codec"):
            return self.latents[dataset, wildcards["codec"]]
        if has(wildcards, "pairs"):
            return self.pairs[dataset, wildcards["pairs"]]
        return self.datasets[dataset]

    def pattern(self, wildcard: str) -> str:
        """Return a regular expression that matches the existing values of a wildcard and nothing else."""
        values: dict[str, Iterable[str]] = {
            "experiment": self.by_name,
            "dataset": self.datasets,
            "codec": sorted({codec for _, codec in self.latents}),
            "pairs": sorted({pairs for _, pairs in self.pairs}),
            "judge": sorted({judge for _, judge in self.references}),
            "study": self.studies,
        }
        return "|".join(map(re.escape, values[wildcard])) or "none"
