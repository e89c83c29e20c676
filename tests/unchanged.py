"""Compare the results of this tree with those of another commit, byte by byte: `make unchanged BASE=main`.

A refactoring changes no byte of weights, samples or metrics. The demonstrations of the six systems run in both trees,
with the same environment on the same machine, so that no hash depends on a processor. They are shortened; `--full` runs
them unchanged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ("demo", "iddpm_demo", "rin_demo", "dvae_demo", "prior_demo", "tokens_demo")
BEFORE_THEM = ("demo_codec",)  # trained because another experiment uses it
RESULTS = ("train/weights.safetensors", "samples/samples.npz", "metrics.json")
SHORT = {
    "steps": 40,
    "schedule": {"warmup_steps": 10},
    "validate_every_steps": 20,
    "grid_every_steps": 20,
    "checkpoint": {"every_steps": 20},
}
NUM_SAMPLES = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="commit to compare with")
    parser.add_argument("--full", action="store_true", help="run the demonstrations at full length")
    parser.add_argument("--cores", default="all", help="cores that Snakemake may use (%(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unchanged-") as folder:
        base = Path(folder, "base")
        _git("worktree", "add", "--detach", str(base), arguments.base)
        try:
            before, after = (
                run(tree, Path(folder, name), arguments.full, arguments.cores)
                for name, tree in (("before", base), ("after", ROOT))
            )
        finally:
            _git("worktree", "remove", "--force", str(base))
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        for name in sorted(before.keys() | after.keys()):
            print(f"{'CHANGED' if name in changed else 'same':8} {after.get(name, 'missing')[:16]:18} {name}")
            if name in changed and name in before and name in after and name.endswith(".json"):
                old, new = (_values(Path(folder, tree, "results", name)) for tree in ("before", "after"))
                for key in sorted(old.keys() | new.keys()):
                    if old.get(key) != new.get(key):
                        print(f"         {key}: {old.get(key, 'missing')} -> {new.get(key, 'missing')}")
    sys.exit(f"{len(changed)} of {len(before)} results differ from {arguments.base}." if changed else 0)


def run(tree: Path, project: Path, full: bool, cores: str) -> dict[str, str]:
    """Run the demonstrations with the code of a tree; return the sha256 of each result, by its path.

    Raises ChildProcessError if Snakemake fails.
    """
    shutil.copytree(tree / "config", project / "config")
    if not full:
        for name in (*EXPERIMENTS, *BEFORE_THEM):
            path = project / "config" / "experiments" / f"{name}.yaml"
            path.write_text(
                yaml.safe_dump(shortened(yaml.safe_load(path.read_text(encoding="utf-8"))), sort_keys=False)
            )
    targets = [f"results/{name}/metrics.json" for name in EXPERIMENTS]
    command = [sys.executable, "-m", "snakemake", "--snakefile", tree / "Snakefile", "--cores", cores, "--quiet", "all"]
    names = f"experiments=[{','.join(EXPERIMENTS)}]"
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    done = subprocess.run(
        [*command, "--config", names, "--", *targets],
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ChildProcessError(f"Snakemake failed in {tree}:\n{done.stdout[-4000:]}")
    results = project / "results"
    return {
        f"{name}/{result}": hashlib.sha256((results / name / result).read_bytes()).hexdigest()
        for name in EXPERIMENTS
        for result in RESULTS
        if (results / name / result).is_file()
    }


def _values(path: Path) -> dict[str, Any]:
    """Return the values of a JSON file, by their keys from the outermost to the innermost, joined by dots."""
    pending = [("", json.loads(path.read_text(encoding="utf-8")))]
    values = {}
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{key}.{name}" if key else name, inner) for name, inner in value.items()]
        else:
            values[key] = value
    return values


def shortened(experiment: dict[str, Any]) -> dict[str, Any]:
    """Shorten an experiment to seconds: fewer steps, fewer samples."""
    train = experiment["train"]
    for key, value in SHORT.items():
        if isinstance(value, dict):
            train[key] |= value
        elif train.get(key, value) is not None:
            train[key] = value
    if "sample" in experiment:
        experiment["sample"] |= {"num_samples": NUM_SAMPLES}
        experiment["sample"].pop("batch_size", None)
    return experiment


def _git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
