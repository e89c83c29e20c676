"""Parts of a data set or of samples that several jobs make, resources of cropping, and changes of the files of a data
set: checked whenever Snakemake starts, and recorded in a file that `crop` reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_diffusion.core.config.base import parse
from image_diffusion.core.files.atomic import read_json
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.changes import refresh
from image_diffusion.data.sources.folder import reads_below
from image_diffusion.workflow.inputs import option_of
from image_diffusion.workflow.plans import Plan, Plans, Wildcards, has


def look_at_sources(plans: Plans, results: Path, trust_ctime: bool) -> None:
    """Record which data sets' files have changed. trust_ctime: see `refresh`. Raises ValueError for a data set that is
    missing, empty, or too small, and for a folder of images that holds the results."""
    for plan in plans.by_name.values():
        _refuse_results_inside(plan, results)
    for dataset, plan in plans.datasets.items():
        refresh(parse(Source, plan.source, dataset), source_file(results, dataset), trust_ctime)
    for name, plan in plans.by_name.items():
        files = read_json(source_file(results, plan.dataset))["files"]
        if plan.source["type"] == "folder" and files < plan.global_batch:
            raise ValueError(
                f"config/experiments/{name}.yaml: {plan.source['path']} holds {files} files, fewer than one batch of "
                f"train.global_batch = {plan.global_batch}. Add images, or make the batch smaller."
            )


def _refuse_results_inside(plan: Plan, results: Path) -> None:
    """Raise ValueError for an experiment that would read its own results as images or pairs."""
    folders = [("pairs.path", pairs["files"]) for pairs in plan.pairs.values()]
    if plan.source["type"] == "folder":
        folders.append(("data.source.path", plan.source["path"]))
    for key, folder in folders:
        if folder is not None and reads_below(folder, results):
            raise ValueError(
                f"{plan.dataset}: {key}: {folder} contains the folder of results {results}, whose pictures would "
                "become images. Move the images into a folder of their own, or set `results` in config/config.yaml to "
                "a folder outside of it."
            )


def source_file(results: Path, dataset: str) -> Path:
    """Return the file that records the state of a data set's files."""
    return results / "datasets" / dataset / "source.json"


IMAGES_A_CROP_JOB = 2_000_000
"""Images of a crop job, which takes about half an hour."""
IMAGE_BYTES = 100_000
"""Estimated bytes per image in files with many images."""
IMAGES_A_MB = 500
"""Images per MB of memory in a crop job, which holds a measured 1.6 KB for each."""
IMAGES_A_MINUTE = 10_000
"""Images that a slow machine crops, or reads for a datasheet, in a minute."""
_SHORTEST_MIN, _LONGEST_MIN = 15, 240
_MOST_JOBS = 64
"""Maximum number of jobs that share a data set."""


@dataclass(frozen=True)
class Parts:
    """The inputs and options of the rules that make and join parts, as functions of a job's wildcards."""

    results: str
    """The folder of all results."""
    plans: Plans
    jobs_at_once: Callable[[Plan], int] = lambda plan: 1
    """Number of concurrent jobs of an experiment on this machine, each on its own GPU."""

    def cropped_parts(self, wildcards: Wildcards) -> list[str]:
        """Return the records of the jobs that share the images of a very large data set; empty for a single job."""
        plan = self.plans.plan_for(wildcards)
        return _unless_part(wildcards, [f"{self._dataset(plan)}/crops/{part}.json" for part in self._crop_parts(plan)])

    def encoded_parts(self, wildcards: Wildcards) -> list[str]:
        """Return the markers of the jobs that share the shards of a large data set; empty for a single job."""
        plan = self.plans.plan_for(wildcards)
        folder = f"{self._dataset(plan)}/{plan.codec}"
        return _unless_part(wildcards, [f"{folder}/{part}.done" for part in self._parts(plan)])

    def reference_parts(self, wildcards: Wildcards) -> list[str]:
        """Return the features from the jobs that share the images of a large data set; empty for a single job."""
        plan = self.plans.plan_for(wildcards)
        folder = f"{self._dataset(plan)}/references/{wildcards['judge']}/parts"
        return _unless_part(wildcards, [f"{folder}/{part}.npz" for part in self._parts(plan)])

    def sampled_parts(self, wildcards: Wildcards) -> list[str]:
        """Return the samples from the jobs that share a large set of samples; empty for a single job."""
        plan = self.plans.plan_for(wildcards)
        parts = _named_parts(self._shared(plan, plan.sample_jobs, plan.most_sample_jobs))
        return _unless_part(wildcards, [f"{self.results}/{plan.experiment}/samples/{part}.npz" for part in parts])

    def synthesized_parts(self, wildcards: Wildcards) -> list[str]:
        """Return the images from the jobs that share a synthetic data set; empty for a single job."""
        plan = self.plans.plan_for(wildcards)
        folder = f"{self.results}/{plan.experiment}/synthetic_parts"
        return _unless_part(wildcards, [f"{folder}/{part}.npz" for part in _named_parts(plan.synthesize_jobs)])

    def parts_option(self, wildcards: Wildcards, input: Any) -> list[str]:
        """Return the option for the parts of a stage. Snakemake ignores changes of params that are functions of the
        input, as it should here, since the result does not depend on the number of parts."""
        return option_of("--made", list(input.parts))

    def part_option(self, wildcards: Wildcards) -> list[str]:
        """Return the option for the part that a job makes, if any: 0/2 is the first of two."""
        return ["--part", f"{wildcards['part']}/{wildcards['parts']}"] if has(wildcards, "parts") else []

    def journal_option(self, wildcards: Wildcards) -> list[str]:
        """Return the option for the journal of an experiment or a data set; empty for a job that makes a part."""
        plan = self.plans.plan_for(wildcards)
        of_one = has(wildcards, "experiment")
        folder = f"{self.results}/{plan.experiment}" if of_one else self._dataset(plan)
        return _unless_part(wildcards, ["--journal", f"{folder}/journal"])

    def options(self) -> dict[str, Callable[..., Any]]:
        """Return the params of a rule that makes or joins the parts of an experiment: the options, and the first
        output, which the command writes."""
        options: dict[str, Callable[..., Any]] = {"written": lambda wildcards, output: output[0]}
        return options | {"parts": self.parts_option, "part": self.part_option, "journal": self.journal_option}

    def crop_whole_option(self, wildcards: Wildcards) -> list[str]:
        """Return the options of a job that crops a whole data set or joins its parts: source, parts, journal."""
        source = ["--source", f"{self._dataset(self.plans.plan_for(wildcards))}/source.json"]
        parts = option_of("--made", self.cropped_parts(wildcards))
        return _unless_part(wildcards, [*source, *parts, *self.journal_option(wildcards)])

    def crop_resources(self, **other: Any) -> dict[str, Any]:
        """Return the resources of a crop job. other: resources that replace these."""
        return {"cpus_per_task": 4, "mem_mb": self.crop_memory_mb, "runtime": self.crop_runtime_min} | other

    def crop_memory_mb(self, wildcards: Wildcards) -> int:
        """Return the MB of memory of a crop job: each job lists all images, and the last one has a record of each."""
        return max(8000, self._num_images(self.plans.plan_for(wildcards)) // IMAGES_A_MB)

    def crop_runtime_min(self, wildcards: Wildcards) -> int:
        """Return the time for a job that crops or reads crops, in minutes; the next job resumes its work."""
        plan = self.plans.plan_for(wildcards)
        images = self._num_images(plan) // max(1, len(self._crop_parts(plan)))
        return min(_LONGEST_MIN, _SHORTEST_MIN + images // IMAGES_A_MINUTE) if images else _LONGEST_MIN

    def _crop_parts(self, plan: Plan) -> list[str]:
        """Return the names of the parts for cropping, each with a fixed number of images."""
        # This number is independent of the machine, since a change of it would remake all parts.
        return _named_parts(min(_MOST_JOBS, plan.num_shards, self._num_images(plan) // IMAGES_A_CROP_JOB))

    def _num_images(self, plan: Plan) -> int:
        """Return an estimate of a data set's number of images, by the number or size of its files at the start of
        Snakemake; 0 if no stage searches for files, or none exist on this machine."""
        try:
            source = read_json(source_file(Path(self.results), plan.dataset))
            return int(max(source["files"], source["bytes"] // IMAGE_BYTES))
        except (ValueError, KeyError, TypeError):
            return 0

    def _parts(self, plan: Plan) -> list[str]:
        """Return the names of the parts of a large data set, of at least 16 shards each, or fewer if several GPUs work
        at once; empty for a single job."""
        return _named_parts(min(_MOST_JOBS, self._shared(plan, max(1, plan.num_shards // 16), plan.num_shards)))

    def _shared(self, plan: Plan, jobs: int, most: int) -> int:
        """Return the number of jobs, rounded up to a multiple of the concurrent jobs, at most `most`."""
        at_once = self.jobs_at_once(plan)
        return min(most, -(-jobs // at_once) * at_once)

    def _dataset(self, plan: Plan) -> str:
        return f"{self.results}/datasets/{plan.dataset}"


def _unless_part(wildcards: Wildcards, words: list[str]) -> list[str]:
    """Return the words, or nothing for a job that makes a part."""
    return [] if has(wildcards, "parts") else words


def _named_parts(parts: int) -> list[str]:
    return [f"part-{part}-of-{parts}" for part in range(parts)] if parts > 1 else []


def remove_left_parts(plans: Plans, results: Path) -> None:
    """Remove parts of samples, synthetic images and references, and markers of parts of latents, that a killed command
    left and that no stage joins, because the experiment was changed back or fewer GPUs resumed the work. Call it only
    once all results of these experiments are complete."""
    samples = [results / name / folder for name in plans.by_name for folder in ("samples", "synthetic_parts")]
    references = [
        folder for dataset in plans.datasets for folder in (results / "datasets" / dataset).glob("references/*/parts")
    ]
    for folder in (*samples, *references):
        for part in folder.glob("part-*-of-*.npz"):
            part.unlink(missing_ok=True)
        for halfway in folder.glob(".part-*-of-*.npz.halfway"):
            shutil.rmtree(halfway, ignore_errors=True)
    for dataset in plans.datasets:
        for mark in (results / "datasets" / dataset).glob("*/part-*-of-*.done"):
            mark.unlink(missing_ok=True)
