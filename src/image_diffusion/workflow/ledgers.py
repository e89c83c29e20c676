"""What Snakemake has to know of ledgers, as `configure` writes it down; and their pages where a run has failed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_diffusion.core.files import read_json
from image_diffusion.workflow.environment import with_package

FOLDER = "ledgers"
"""Of what is made of ledgers, under results."""
PAGE = "index.html"


def ledger_file(results: str | Path, name: str) -> Path:
    """Where the plan of a ledger lies."""
    return Path(results, FOLDER, name, "plan.json")


def seeds_ledger(experiment: str) -> str:
    """What the ledger of an experiment's seeds is called."""
    return f"{experiment}-seeds"


@dataclass(frozen=True)
class LedgerPlan:
    """One ledger, resolved. base: an experiment. rows: name, source, experiment, changes, and the run of each seed."""

    name: str
    base: str
    seeds: list[int]
    rows: list[dict[str, Any]]

    @property
    def experiments(self) -> set[str]:
        """The experiments whose files its rows are written over."""
        return {row["experiment"] for row in self.rows}

    @property
    def runs(self) -> Iterator[str]:
        """The experiments that it is made of, row by row."""
        return (run for row in self.rows for run in row["runs"])


def read_ledgers(results: str | Path, names: Collection[str]) -> dict[str, LedgerPlan]:
    """Ledgers by name. Raises ValueError where a file is missing, damaged, or not of this version."""
    found = {}
    for name in names:
        path = ledger_file(results, name)
        data = read_json(path)
        try:
            found[name] = LedgerPlan(name, data["base"], data["seeds"], data["rows"])
        except (KeyError, TypeError) as error:
            told = f"{path} is no ledger of this version: {error}. Delete it, and start Snakemake again."
            raise ValueError(told) from None
    return found


def show_what_there_is(results: str, names: Collection[str], script: Path, source: Path) -> None:
    """Make the pages of ledgers whose runs have not all been made: what failed is shown with the line it failed with.

    script: makes the page. source: the folder that holds the package.
    """
    for name in names:
        command = [sys.executable, str(script), "--ledger", str(ledger_file(results, name).parent)]
        subprocess.run([*command, "--results", results], check=False, env=with_package(source))
