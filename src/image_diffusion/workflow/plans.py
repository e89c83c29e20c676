"""What Snakemake has to know of each experiment, as `configure` writes it down."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from image_diffusion.core.files import read_json
from image_diffusion.workflow.ledgers import LedgerPlan, read_ledgers

STAGES = ("crop", "encode", "embed", "train", "sample", "evaluate", "export")
"""What an experiment goes through, in this order; an experiment that has no use for a stage leaves it out."""


class Wildcards(Protocol):
    """What the wildcards of a job stand for: Snakemake's own object, or a dict."""

    def __getitem__(self, name: str, /) -> str: ...

    def keys(self) -> Collection[str]: ...


@dataclass(frozen=True)
class Plan:
    """One experiment, resolved. Paths are as the rules name them."""

    experiment: str
    """Its name."""
    system: str
    """The type of its system."""
    dataset: str
    """The folder of its data set under results/datasets."""
    source: dict[str, Any]
    """Where its images come from, as its section data.source."""
    has_images: bool
    """Whether those are images, or latents that others have encoded."""
    num_shards: int
    """Shards that its data set is cut into."""
    codec: str | None
    """The folder of its latents beside the crops; none for pixels."""
    codec_experiment: str | None
    """The experiment that trains its codec."""
    codec_files: list[str]
    """The files that its codec is read from, where others have trained it."""
    decoder_files: list[str]
    """Those of the decoder that its samples are decoded by, where that is another one."""
    small_images: str | None
    """What is enlarged: `validation` or a file."""
    small_images_experiment: str | None
    """The experiment whose samples are enlarged."""
    embeddings: str | None
    """What images are made of: `validation` for the embeddings of held-out ones, or a folder."""
    embeddings_experiment: str | None
    """The experiment that makes those."""
    against: str | None
    """A file of images that samples are compared with, in place of real ones."""
    against_experiment: str | None
    """The experiment whose samples those are."""
    start_experiment: str | None
    """The experiment whose weights it starts from."""
    tokens: str | None
    """The folder of the tokens that its own codec encodes the data set to."""
    judged_on_encoded: bool
    """Whether `evaluate` also looks at what its codec encodes the data set to."""
    pairs: str | None
    """The folder of its pairs of embeddings."""
    pairs_beside: bool
    """Whether those are read beside its data, in place of them otherwise."""
    pairs_of_images: bool
    """Whether those are made from crops."""
    pairs_of_source: bool
    """Whether files of the data's source are read for those."""
    pairs_of_detector: bool
    """Whether the detector of the data set looks at those."""
    captions: str | None
    """The table that captions are read from."""
    prompts: str | None
    """The file that prompts are read from."""
    makes_samples: bool
    """Whether `sample` makes images."""
    keeps_samples: bool
    """Whether it stores them all, or `evaluate` makes them as it looks at them."""
    makes_embeddings: bool
    """Whether `sample` makes embeddings."""
    sample_jobs: int
    """Jobs that share those."""
    sample_batches: int
    """Batches that those are made in; a job makes whole ones."""
    global_batch: int
    """Examples of one step of training."""
    seeds: str | None
    """The ledger of its seeds, where it is trained with several."""
    detectors: list[str]
    """What its metrics look at images with."""
    references: dict[str, str]
    """The configuration of each of those that looks at the data set, by the folder of what it saw."""
    headline: str
    """The metric it is ranked by."""
    sweep: dict[str, dict[str, str]]
    """The configuration of each point of each curve, by what is varied and by value."""
    export: str
    """The format it is exported to, or `none`."""
    resources: dict[str, int | str | None]
    """What it asks a machine for: its section resources."""
    configs: dict[str, str]
    """The resolved configuration of each stage it goes through."""
    beyond_defaults: list[str]
    """The dotted keys in which it differs from what its system does by itself, for its page."""

    @property
    def most_sample_jobs(self) -> int:
        """Jobs that could share its samples at most."""
        return self.sample_batches if self.keeps_samples else 1

    @property
    def learns_from_pairs(self) -> str | None:
        """The folder of its pairs, where it learns from those alone."""
        return None if self.pairs_beside else self.pairs

    @property
    def builds_on(self) -> list[str]:
        """The experiments that are made before it."""
        named = (self.codec_experiment, self.small_images_experiment, self.embeddings_experiment)
        return [name for name in (*named, self.against_experiment, self.start_experiment) if name]

    def of_tokens(self) -> Plan:
        """By which the data set of a discrete VAE is encoded to its tokens: it is its own codec."""
        configs = {"crop": self.configs["crop"], "encode": self.configs["tokens"]}
        return replace(self, codec=self.tokens, codec_experiment=self.experiment, codec_files=[], configs=configs)


def plan_file(results: str | Path, name: str) -> Path:
    """Where the plan of an experiment lies."""
    return Path(results, name, "config", "plan.json")


def read_plan(path: Path) -> Plan:
    """A plan from its file. Raises ValueError when the file is missing, damaged, or not of this version."""
    data = read_json(path)
    try:
        return Plan(**{field.name: data[field.name] for field in fields(Plan)})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no plan of this version: {error}. Delete it, and start Snakemake again.") from None


@dataclass(frozen=True)
class Plans:
    """The experiments that Snakemake is to make and those that they build on, by name; and by what they share."""

    by_name: dict[str, Plan]
    asked: tuple[str, ...] = ()
    """Those that are not there for others alone, or for a ledger."""
    ledgers: dict[str, LedgerPlan] = field(default_factory=dict)
    """The ledgers that are asked for, and those of the seeds of experiments, by name."""

    @classmethod
    def read(cls, results: str | Path, names: Collection[str], ledgers: Collection[str] = ()) -> Plans:
        """The plans of experiments and of the runs of ledgers, each followed by those that it builds on. Raises
        ValueError (see `read_plan`)."""
        of_ledgers = read_ledgers(results, ledgers)
        found: dict[str, Plan] = {}

        def add(name: str) -> None:
            if name not in found:
                found[name] = read_plan(plan_file(results, name))
                for other in found[name].builds_on:
                    add(other)

        for name in names:
            add(name)
        of_ledgers |= read_ledgers(results, [seeds for name in names if (seeds := found[name].seeds)])
        for ledger in of_ledgers.values():
            for run in ledger.runs:
                add(run)
        return cls(found, tuple(names), of_ledgers)

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
        """A plan that learns from pairs of embeddings, by data set and name of the pairs."""
        return {(plan.dataset, plan.pairs): plan for plan in self.by_name.values() if plan.pairs}

    @cached_property
    def references(self) -> dict[tuple[str, str], str]:
        """The configuration of each detector that looks at a data set, by data set and folder."""
        return {
            (plan.dataset, name): config for plan in self.by_name.values() for name, config in plan.references.items()
        }

    def of(self, wildcards: Wildcards) -> Plan:
        """The plan that a job belongs to; for a data set, that of an experiment which uses it."""
        if "experiment" in wildcards.keys():  # noqa: SIM118 - Snakemake's wildcards are a list with names
            return self.by_name[wildcards["experiment"]]
        dataset = wildcards["dataset"]
        if "codec" in wildcards.keys():  # noqa: SIM118
            return self.latents[dataset, wildcards["codec"]]
        if "pairs" in wildcards.keys():  # noqa: SIM118
            return self.pairs[dataset, wildcards["pairs"]]
        return self.datasets[dataset]

    def pattern(self, wildcard: str) -> str:
        """The regular expression of what a wildcard may stand for: what there is, and nothing else."""
        known: dict[str, Iterable[str]] = {
            "experiment": self.by_name,
            "dataset": self.datasets,
            "codec": sorted({codec for _, codec in self.latents}),
            "pairs": sorted({pairs for _, pairs in self.pairs}),
            "judge": sorted({judge for _, judge in self.references}),
            "ledger": self.ledgers,
        }
        return "|".join(map(re.escape, known[wildcard])) or "none"
