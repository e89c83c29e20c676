"""CPU seconds of `snakemake --dry-run` and of all its child processes.

    python tests/bench/bench_dry_run.py
    python tests/bench/bench_dry_run.py --against ../another-checkout

The first dry run of the demo in an empty folder, which checks and resolves its experiments; one after an edit; one
where nothing has changed; the same with ten experiments and with a hundred; and Snakemake's own start, of which every
line is a part.
Python compiles into a folder of its own, filled before anything is measured, as after `make .venv/.ready`; with
--uncompiled nothing is ever compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MANY = [f"demo_{number}" for number in range(100)]


def cpu_seconds(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Return user and system time of a command and its child processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def fresh(folder: Path, checkout: Path) -> None:
    """Create a folder with the demo, and with a hundred experiments like it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkout / "config", folder / "config")
    for name in MANY:
        shutil.copy(folder / "config/experiments/demo.yaml", folder / f"config/experiments/{name}.yaml")


def edited(folder: Path) -> None:
    """Change the number of samples of the demo."""
    path = folder / "config/experiments/demo.yaml"
    text = path.read_text()
    other = "num_samples: 300" if "num_samples: 299" in text else "num_samples: 299"
    path.write_text(text.replace("num_samples: 300", other).replace("num_samples: 299", other))


def measured(checkout: Path, folder: Path, compiled: Path | None) -> dict[str, Callable[[], float]]:
    """Return the CPU seconds of one checkout, by name, in the required order."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    bytecode = {"PYTHONPYCACHEPREFIX": str(compiled)} if compiled else {"PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**kept, **bytecode, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    dry = [sys.executable, "-m", "snakemake", "--snakefile", str(checkout / "Snakefile"), "--dry-run"]
    ten, hundred = ([*dry, "--config", f"experiments=[{','.join(MANY[:number])}]"] for number in (10, 100))

    def run(*command: str) -> float:
        return cpu_seconds(list(command), folder, environment)

    return {
        "snakemake's own start": lambda: (fresh(folder, checkout), run(sys.executable, "-c", "import snakemake.cli"))[
            1
        ],
        "first": lambda: run(*dry),
        "nothing changed": lambda: run(*dry),
        "a section edited": lambda: (edited(folder), run(*dry))[1],
        "ten experiments, first": lambda: run(*ten),
        "ten experiments, nothing changed": lambda: run(*ten),
        "a hundred experiments, first": lambda: run(*hundred),
        "a hundred experiments, nothing changed": lambda: run(*hundred),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of everything (5)")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--uncompiled", action="store_true", help="as where Python may write no bytecode")
    given = parser.parse_args()
    checkouts = [ROOT, *([given.against.resolve()] if given.against else [])]
    with tempfile.TemporaryDirectory() as temporary:
        compiled = None if given.uncompiled else Path(temporary, "compiled")
        variants = [measured(each, Path(temporary, str(i)), compiled) for i, each in enumerate(checkouts)]
        found: list[dict[str, list[float]]] = [{name: [] for name in variant} for variant in variants]
        for number in range(given.rounds + (compiled is not None)):
            for name in variants[0]:
                for variant, seconds in zip(variants, found, strict=True):
                    seconds[name].append(variant[name]())
            if number == 0 and compiled is not None:  # this round compiles
                for each in found:
                    for values in each.values():
                        values.clear()
    for name in variants[0]:
        line = {"dry run": name, "cpu_s": round(statistics.median(found[0][name]), 2)}
        if given.against:
            line["against_cpu_s"] = round(statistics.median(found[1][name]), 2)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
