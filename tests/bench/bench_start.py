"""CPU seconds of each command's start until its work begins, and of the parts of the demo.

    python tests/bench/bench_start.py
    python tests/bench/bench_start.py --demo

A command's start is Python and the imports of the command's module, without garbage collection, as commands start.
Most of it is PyTorch, which is measured alone in the same rounds. Everything is compiled before anything is measured,
as after `make .venv/.ready`. --demo also runs the demo in an empty folder: the seconds of Snakemake and all that it
starts, and those of each command with its children, of which the starts are a part.
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
from collections import defaultdict
from pathlib import Path

from image_diffusion.core.process.commands import COMMANDS, module_of

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {
    "OMP_NUM_THREADS": "1"
}
NOTES = """
import atexit, json, os, resource, sys

def note(stage, who):
    used = [resource.getrusage(one) for one in who]
    with open(os.environ["BENCH_NOTES"], "a") as file:
        file.write(json.dumps([stage, sum(one.ru_utime + one.ru_stime for one in used)]) + "\\n")

stage, own = os.environ.get("IMAGE_DIFFUSION_STAGE"), str(os.getpid())
if stage is None:
    atexit.register(note, "Snakemake" if "snakemake" in sys.orig_argv else "track --follow", [resource.RUSAGE_SELF])
elif os.environ.setdefault("BENCH_FIRST", own) == own:
    atexit.register(note, stage.rpartition("/")[2], [resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN])
"""
"""A `sitecustomize`: Snakemake and the processes that follow stages record their own usage, and the first process of a
stage records that of all its processes."""


def cpu_seconds(command: list[str], folder: Path = ROOT, **variables: str) -> float:
    """Return user and system time of a command and its child processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = ENVIRONMENT | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start_of(module: str) -> float:
    """Return CPU seconds of a process until a module is imported."""
    code = f"import gc, time; gc.disable(); import {module}; print(time.process_time())"
    line = [sys.executable, "-c", code]
    return float(subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout)


def starts(rounds: int) -> dict[str, float]:
    """Return the median start of each command, and of PyTorch, in CPU seconds."""
    modules = {name: module_of(name) for name in COMMANDS} | {"(torch alone)": "torch"}
    taken: dict[str, list[float]] = defaultdict(list)
    for number in range(1 + rounds):
        for name, module in modules.items():
            seconds = start_of(module)
            if number:  # before the first, some modules are not compiled
                taken[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def demo(begun: dict[str, float]) -> None:
    """Run the demo and print the usage of its commands. begun: the start of each."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, notes = Path(temporary) / "project", Path(temporary) / "notes"
        shutil.copytree(ROOT / "config", folder / "config")
        (Path(temporary) / "site").mkdir()
        (Path(temporary) / "site" / "sitecustomize.py").write_text(NOTES)
        line = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "all"]
        line += ["--config", "experiments=[demo]"]
        variables = {"PYTHONPATH": str(Path(temporary) / "site"), "BENCH_NOTES": str(notes)}
        total = cpu_seconds(line, folder, **variables)
        used: dict[str, list[float]] = defaultdict(list)
        for name, seconds in map(json.loads, notes.read_text().splitlines()):
            used[name.split("-")[0]].append(seconds)
    print(f"{'':<16}{'jobs':>6}{'CPU s':>9}{'starts':>9}")
    for name, seconds in sorted(used.items(), key=lambda row: -sum(row[1])):
        print(f"{name:<16}{len(seconds):>6}{sum(seconds):>9.1f}{len(seconds) * begun.get(name, 0):>9.1f}")
    print(f"{'the rest':<22}{total - sum(map(sum, used.values())):>9.1f}")
    jobs, of_starts = sum(map(len, used.values())), sum(begun.get(n, 0) * len(s) for n, s in used.items())
    print(f"{'all':<16}{jobs:>6}{total:>9.1f}{of_starts:>9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each command (5)")
    parser.add_argument("--demo", action="store_true", help="run the demo, too")
    arguments = parser.parse_args()
    begun = starts(arguments.rounds)
    for name, seconds in begun.items():
        print(f"{name:<16}{seconds:>6.2f}")
    if arguments.demo:
        demo(begun)


if __name__ == "__main__":
    main()
