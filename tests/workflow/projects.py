"""A project of a few images in a new folder, in which Snakemake runs with this repository's rules."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from warm import warm_python

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Project:
    """A user's folder with a configuration. Its experiment is called `micro`."""

    folder: Path
    snakefile: Path = ROOT / "Snakefile"
    cold: bool = False
    """Whether to start new processes, as for a user: for tests of processes, or of another copy of the package."""

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Snakemake on two cores. Its stdout includes stderr."""
        return subprocess.run(
            [*self.command(), *arguments],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def command(self) -> list[str]:
        python = sys.executable if self.cold else warm_python()
        return [python, "-m", "snakemake", "--snakefile", str(self.snakefile), "--cores", "2"]

    def run(self, *targets: str) -> str:
        """Run Snakemake; it must succeed."""
        done = self.snakemake(*targets)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def planned(self, *arguments: str) -> set[str]:
        """Return the rules that Snakemake would run now."""
        done = self.snakemake("--dry-run", *arguments)
        assert done.returncode == 0, done.stdout
        return set(re.findall(r"^(?:local)?rule (\w+):", done.stdout, re.MULTILINE)) - {"all"}

    def weights_after_resuming(self, *names: str) -> tuple[list[bytes], list[bytes]]:
        """Return the weights of experiments before and after resuming their trainings from the first checkpoints."""
        weights = [self / f"results/{name}/train/weights.safetensors" for name in names]
        before = [path.read_bytes() for path in weights]
        for path in weights:
            for checkpoint in sorted(path.parent.glob("state/*/step-*"))[1:]:
                shutil.rmtree(checkpoint)
            path.unlink()
        targets = [str(path.relative_to(self.folder)) for path in weights]
        self.run(*targets, "--config", f"experiments=[{','.join(names)}]")
        return before, [path.read_bytes() for path in weights]

    def edit(self, change: Callable[[dict[str, Any]], object], experiment: str = "micro") -> None:
        """Change an experiment's file by a function of its parsed YAML."""
        path = self.folder / "config" / "experiments" / f"{experiment}.yaml"
        data = yaml.safe_load(path.read_text())
        change(data)
        path.write_text(yaml.safe_dump(data))

    def __truediv__(self, path: str) -> Path:
        return self.folder / path


def make_project(folder: Path, images: int = 64) -> Project:
    """Create a project with a folder of images in two classes."""
    shutil.copytree(ROOT / "config", folder / "config", ignore=shutil.ignore_patterns("*.yaml"))
    settings = (ROOT / "config" / "config.yaml").read_text()
    settings = settings.replace("experiments: [demo]", "experiments: [micro]").replace("every_s: 10", "every_s:")
    (folder / "config" / "config.yaml").write_text(settings)
    shutil.copy(ROOT / "tests" / "workflow" / "micro.yaml", folder / "config" / "experiments")
    generator = np.random.default_rng(0)
    for number in range(images):
        path = folder / "images" / ("light" if number % 2 else "dark") / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = generator.integers(128 * (number % 2), 128 + 128 * (number % 2), size=(16, 16, 3), dtype=np.uint8)
        Image.fromarray(values).save(path)
    return Project(folder)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` has filled: once, by the first of the parallel test processes that needs it."""
    base = factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / f"{name}.made").exists():
            make(shared / name)
            (shared / f"{name}.made").touch()
    return shared / name
