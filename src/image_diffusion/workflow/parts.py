"""Parts of a data set or of samples that several jobs make, what a job that crops needs, and whether the files of a
data set have changed: checked whenever Snakemake starts, and noted where `crop` reads it."""

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
    """Note which data sets' files have changed. trust_ctime: see `refresh`. Raises ValueError for a data set that is
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
    """Raise ValueError for an experiment that would read its own results as images, or as images beside those."""
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
    """Return the file in which the state of a data set's files is noted."""
    return results / "datasets" / dataset / "source.json"


IMAGES_A_CROP_JOB = 2_000_000
"""Images that are cropped in half an hour or so."""
IMAGE_BYTES = 100_000
"""Bytes of an image file, where many lie in one."""
IMAGES_A_MB = 500
"""Images of which a job that crops holds a note in memory: 1.6 KB each, as measured."""
IMAGES_A_MINUTE = 10_000
"""Images that a job crops, or that a datasheet looks at, in a minute on a slow machine."""
_SHORTEST_MIN, _LONGEST_MIN = 15, 240
_MOST_JOBS = 64
"""Jobs that share a data set."""


@dataclass(frozen=True)
class Parts:
    """The inputs and options of the rules that make and join parts, as functions of a job's wildcards."""

    results: str
    """The folder of all results."""
    plans: Plans
    jobs_at_once: Callable[[Plan], int] = lambda plan: 1
    """Jobs of an experiment that work at once on this machine, each on a GPU of its own."""

    def cropped_parts(self, wildcards: Wildcards) -> list[str]:
        """Return the notes of the jobs that share the images of a very large data set; one alone leaves none."""
        plan = self.plans.plan_for(wildcards)
        return _unless_part(wildcards, [f"{self._dataset(plan)}/crops/{part}.json" for part in self._crop_parts(plan)])

    def encoded_parts(self, wildcards: Wildcards) -> list[str]:
        """Return the marks of the jobs that share the shards of a large data set; one alone leaves none."""
        plan = self.plans.plan_for(wildcards)
        folder = f"{self._dataset(plan)}/{plan.codec}"
        return _unless_part(wildcards, [f"{folder}/{part}.done" for part in self._parts(plan)])

    def reference_parts(self, wildcards: Wildcards) -> list[str]:
        """Return the parts seen by the jobs that share the images of a large data set; one job alone leaves none."""
        plan = self.plans.plan_for(wildcards)
        folder = f"{self._dataset(plan)}/references/{wildcards['judge']}/parts"
        return _unless_part(wildcards, [f"{folder}/{part}.npz" for part in self._parts(plan)])

    def sampled_parts(self, wildcards: Wildcards) -> list[str]:
        """Return the parts made by the jobs that share the images of a large set; one job alone leaves none."""
        plan = self.plans.plan_for(wildcards)
        parts = _named_parts(self._shared(plan, plan.sample_jobs, plan.most_sample_jobs))
        return _unless_part(wildcards, [f"{self.results}/{plan.experiment}/samples/{part}.npz" for part in parts])

    def synthesized_parts(self, wildcards: Wildcards) -> list[str]:
        """Return the parts drawn by the jobs that share a data set of synthetic images; one job alone leaves none."""
        plan = self.plans.plan_for(wildcards)
        folder = f"{self.results}/{plan.experiment}/synthetic_parts"
        return _unless_part(wildcards, [f"{folder}/{part}.npz" for part in _named_parts(plan.synthesize_jobs)])

    def made_option(self, wildcards: Wildcards, input: Any) -> list[str]:
        """Return the option of a stage that names its parts. A function of the input does not belong to the parameters
        for which Snakemake makes results again: those of any number of parts are the same."""
        return option_of("--made", list(input.parts))

    def part_option(self, wildcards: Wildcards) -> list[str]:
        """Return the option that names the part which a job makes, where it makes one: 0/2 is the first of two."""
        return ["--part", f"{wildcards['part']}/{wildcards['parts']}"] if has(wildcards, "parts") else []

    def journal_option(self, wildcards: Wildcards) -> list[str]:
        """Return the option of the journal of an experiment or a data set; jobs that make a part write none."""
        plan = self.plans.plan_for(wildcards)
        of_one = has(wildcards, "experiment")
        folder = f"{self.results}/{plan.experiment}" if of_one else self._dataset(plan)
        return _unless_part(wildcards, ["--journal", f"{folder}/journal"])

    def options(self) -> dict[str, Callable[..., Any]]:
        """Return the params of a rule that makes or joins the parts of an experiment: its options, and the output that
        its command writes, the first one."""
        options: dict[str, Callable[..., Any]] = {"written": lambda wildcards, output: output[0]}
        return options | {"parts": self.made_option, "part": self.part_option, "journal": self.journal_option}

    def crop_whole_option(self, wildcards: Wildcards) -> list[str]:
        """Return the options of a job that crops a whole data set: its source, the parts of other jobs, its journal."""
        source = ["--source", f"{self._dataset(self.plans.plan_for(wildcards))}/source.json"]
        parts = option_of("--made", self.cropped_parts(wildcards))
        return _unless_part(wildcards, [*source, *parts, *self.journal_option(wildcards)])

    def crop_resources(self, **other: Any) -> dict[str, Any]:
        """Return the resources of a job that crops. other: resources in place of these."""
        return {"cpus_per_task": 4, "mem_mb": self.crop_memory_mb, "runtime": self.crop_runtime_min} | other

    def crop_memory_mb(self, wildcards: Wildcards) -> int:
        """Memory of a job that crops, in MB: each lists all images, and the last one holds what is known of each."""
        return max(8000, self._num_images(self.plans.plan_for(wildcards)) // IMAGES_A_MB)

    def crop_runtime_min(self, wildcards: Wildcards) -> int:
        """Return the time for a job that crops, or that looks at crops, in minutes: the next job resumes its work."""
        plan = self.plans.plan_for(wildcards)
        images = self._num_images(plan) // max(1, len(self._crop_parts(plan)))
        return min(_LONGEST_MIN, _SHORTEST_MIN + images // IMAGES_A_MINUTE) if images else _LONGEST_MIN

    def _crop_parts(self, plan: Plan) -> list[str]:
        """Return the names of the parts that jobs crop a data set in, with a fixed number of images each."""
        # Not by the cores of this machine: another number of parts would make all of them again.
        return _named_parts(min(_MOST_JOBS, plan.num_shards, self._num_images(plan) // IMAGES_A_CROP_JOB))

    def _num_images(self, plan: Plan) -> int:
        """Return the number of images of a data set by the number or the size of its files, as they were found when
        Snakemake started; 0 if no stage looks for files, or none exist on this machine."""
        try:
            source = read_json(source_file(Path(self.results), plan.dataset))
            return int(max(source["files"], source["bytes"] // IMAGE_BYTES))
        except (ValueError, KeyError, TypeError):
            return 0

    def _parts(self, plan: Plan) -> list[str]:
        """Return the names of the parts that jobs share a large data set in, 16 shards or more each, or fewer where
        several GPUs work at once; none for one job alone."""
        return _named_parts(min(_MOST_JOBS, self._shared(plan, max(1, plan.num_shards // 16), plan.num_shards)))

    def _shared(self, plan: Plan, jobs: int, most: int) -> int:
        """Return the number of jobs, raised if those that work at once would not all have an equal share."""
        at_once = self.jobs_at_once(plan)
        return min(most, -(-jobs // at_once) * at_once)

    def _dataset(self, plan: Plan) -> str:
        return f"{self.results}/datasets/{plan.dataset}"


def _unless_part(wildcards: Wildcards, words: list[str]) -> list[str]:
    """Return nothing for a job that makes a part."""
    return [] if has(wildcards, "parts") else words


def _named_parts(parts: int) -> list[str]:
    return [f"part-{part}-of-{parts}" for part in range(parts)] if parts > 1 else []


def remove_left_parts(plans: Plans, results: Path) -> None:
    """Remove parts of samples, of synthetic images and of references, and marks of those of latents, that a killed
    command left, and that no stage joins: the experiment was changed back, or fewer GPUs resumed the work. Only once
    everything of these experiments is made."""
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
