"""Plans of studies, written by `configure` for Snakemake, and the pages of studies with failed runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_diffusion.core.files.atomic import read_json
from image_diffusion.workflow.environment import with_package

FOLDER = "studies"
"""Folder of the files of studies, under results."""
PAGE = "index.html"


def study_file(results: str | Path, name: str) -> Path:
    """Return the file of the plan of a study."""
    return Path(results, FOLDER, name, "plan.json")


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
