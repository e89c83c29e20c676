"""Facts about each experiment that Snakemake has to know, as `configure` writes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypedDict

from image_diffusion.core.files.atomic import read_json
from image_diffusion.workflow.studies import StudyPlan, read_studies

STAGES = ("crop", "encode", "embed", "train", "sample", "evaluate", "export")
"""Stages of an experiment, in this order; an experiment that has no use for a stage leaves it out."""


CHOSEN = "chosen"
"""Name among the steps of a curve of the one that is chosen there."""


class Wildcards(Protocol):
    """Values of the wildcards of a job: Snakemake's own object, or a dict."""

    def __getitem__(self, name: str, /) -> str: ...

    def keys(self) -> Collection[str]: ...


def has(wildcards: Wildcards, name: str) -> bool:
    """Return True if a job has a wildcard."""
    return name in wildcards.keys()  # noqa: SIM118 - Snakemake's wildcards are a list with names


class PairPlan(TypedDict):
    """One set of the section pairs of an experiment."""

    of_images: bool
    """True if it is made from crops."""
    of_source: bool
    """True if files of the data's source are read for it."""
    of_detector: bool
    """True if the detector of the data set looks at it."""
    files: str | None
    """The table or the folder that captions, numbers or images are read from."""
    weights: str | None
    """The name, file or folder of the weights of its encoder."""


@dataclass(frozen=True)
class Plan:
    """One experiment, resolved. Paths are as the rules name them."""

    experiment: str
    """Name of the experiment."""
    system: str
    """The type of its system."""
    dataset: str
    """The folder of its data set under results/datasets."""
    source: dict[str, Any]
    """Source of its images, as its section data.source."""
    data_digest: str
    """Digest of its section data."""
    has_images: bool
    """True if its source holds images, False for latents that others have encoded."""
    num_shards: int
    """Shards that its data set is cut into."""
    codec: str | None
    """The folder of its latents beside the crops; none for pixels."""
    codec_experiment: str | None
    """The experiment that trains its codec."""
    codec_files: list[str]
    """The files that its codec is read from, where others have trained it."""
    decoder_files: list[str]
    """Files of the decoder that its samples are decoded by, if that is another one."""
    weaker_files: list[str]
    """Files of the weaker network that its samples are guided by, where one is set."""
    start_files: list[str]
    """Files of the weights that it starts from, where those are a folder and not an experiment."""
    detector_files: dict[str, list[str]]
    """Files of the weights of detectors that are not fetched, by the folder of their reference features."""
    small_images: str | None
    """Images that samples are conditioned on: `validation` or a file."""
    small_images_experiment: str | None
    """The experiment whose samples those are."""
    embeddings: str | None
    """Embeddings that images are made of: `validation` for those of held-out images, or a folder."""
    embeddings_experiment: str | None
    """The experiment that makes its embeddings."""
    against: str | None
    """A file of images that samples are compared with, in place of real ones."""
    against_experiment: str | None
    """The experiment whose samples those are."""
    start_experiment: str | None
    """The experiment whose weights it starts from."""
    tokens: str | None
    """The folder of the tokens that its own codec encodes the data set to."""
    judged_on_encoded: bool
    """True if `evaluate` also looks at what its codec encodes the data set to."""
    judged_on_pairs: bool
    """True if `evaluate` also looks at the pairs beside its images."""
    pairs: dict[str, PairPlan]
    """The sets of its pairs, by folder, in the order in which they are read."""
    pairs_beside: bool
    """True if its pairs are read beside its data, False if in place of them."""
    prompts: str | None
    """The file that prompts or rows of numbers are read from."""
    pictures: list[str]
    """The files of images and masks that samples are made of."""
    makes_samples: bool
    """True if `sample` makes images."""
    keeps_samples: bool
    """True if it stores all samples, False if `evaluate` makes them as it looks at them."""
    makes_embeddings: bool
    """True if `sample` makes embeddings."""
    sample_jobs: int
    """Number of jobs that share the samples or embeddings."""
    sample_batches: int
    """Batches that the samples or embeddings are made in; a job makes whole ones."""
    synthesize_jobs: int
    """Number of jobs that share the images of the data set that is made of its images; 0: it makes none."""
    synthesize_table: str | None
    """The table that says which images that data set has."""
    global_batch: int
    """Examples of one step of training."""
    detectors: list[str]
    """Detectors that its metrics look at images with."""
    references: dict[str, str]
    """Configuration of each detector that looks at the data set, by the folder of its reference features."""
    headline: str
    """The metric it is ranked by."""
    sweep: dict[str, dict[str, str]]
    """The configuration of each point of each curve, by what is varied and by value."""
    choose: str
    """The rule that chooses the step of its training whose weights all later stages use; empty for the last."""
    export: str
    """The format it is exported to, or `none`."""
    resources: dict[str, int | str | None]
    """Resources that it asks a machine for: its section resources."""
    configs: dict[str, str]
    """The resolved configuration of each stage it goes through; of `embed` one for each set of pairs, embed-FOLDER."""
    beyond_defaults: list[str]
    """The dotted keys in which it differs from what its system does by itself, for its page."""

    @property
    def weights(self) -> str:
        """The folder, within its results, of the weights that all stages after the training use."""
        return _weights_folder(self.choose)

    @property
    def synthesizes(self) -> bool:
        """True if a data set is made of its images."""
        return "synthesize" in self.configs

    @property
    def most_sample_jobs(self) -> int:
        """Jobs that could share its samples at most."""
        return self.sample_batches if self.keeps_samples else 1

    @property
    def learns_from_pairs(self) -> str | None:
        """The folder of its pairs, where it learns from those alone."""
        return None if self.pairs_beside else next(iter(self.pairs), None)

    @property
    def builds_on(self) -> list[str]:
        """The experiments that are made before it."""
        named = (self.codec_experiment, self.small_images_experiment, self.embeddings_experiment)
        return [name for name in (*named, self.against_experiment, self.start_experiment) if name]

    def of_tokens(self) -> Plan:
        """Return the plan by which the data set of a discrete VAE is encoded to its tokens: it is its own codec."""
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
    """Return the folder of the weights that all stages after the training use. experiment: its folder of results."""
    path = plan_file(experiment.parent, experiment.name)
    return experiment / _weights_folder(read_json(path).get("choose", "") if path.is_file() else "")


def _weights_folder(choose: str) -> str:
    return f"sweep/checkpoint/{CHOSEN}/weights" if choose else "train"


@dataclass(frozen=True)
class Plans:
    """Experiments that Snakemake is to make and those that they build on, by name; and by what they share."""

    by_name: dict[str, Plan]
    requested: tuple[str, ...] = ()
    """Experiments that do not exist for others alone, or for a study."""
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

    def with_others(self, results: str | Path) -> Plans:
        """Return these and every other plan under the results, before them: for a data set that several use, these are
        asked first. Plans that cannot be read are left out."""
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
        plans = [*self.by_name.values(), *(plan.of_tokens() for plan in self.by_name.values() if plan.tokens)]
        return {(plan.dataset, plan.codec): plan for plan in plans if plan.codec}

    @cached_property
    def pairs(self) -> dict[tuple[str, str], Plan]:
        """A plan that reads a set of pairs, by data set and name of the set."""
        return {(plan.dataset, name): plan for plan in self.by_name.values() for name in plan.pairs}

    @cached_property
    def references(self) -> dict[tuple[str, str], str]:
        """The configuration of each detector that looks at a data set, by data set and folder."""
        return {
            (plan.dataset, name): config for plan in self.by_name.values() for name, config in plan.references.items()
        }

    def plan_for(self, wildcards: Wildcards) -> Plan:
        """Return the plan that a job belongs to; for a data set, that of an experiment which uses it."""
        if has(wildcards, "experiment"):
            return self.by_name[wildcards["experiment"]]
        dataset = wildcards["dataset"]
        if has(wildcards, "codec"):
            return self.latents[dataset, wildcards["codec"]]
        if has(wildcards, "pairs"):
            return self.pairs[dataset, wildcards["pairs"]]
        return self.datasets[dataset]

    def pattern(self, wildcard: str) -> str:
        """Return the regular expression of the existing values of a wildcard, and nothing else."""
        values: dict[str, Iterable[str]] = {
            "experiment": self.by_name,
            "dataset": self.datasets,
            "codec": sorted({codec for _, codec in self.latents}),
            "pairs": sorted({pairs for _, pairs in self.pairs}),
            "judge": sorted({judge for _, judge in self.references}),
            "study": self.studies,
        }
        return "|".join(map(re.escape, values[wildcard])) or "none"
