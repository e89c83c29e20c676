"""Makes the modules of this folder importable, and makes one finished project for all tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from projects import Project, made_once, make_project


@pytest.fixture
def fresh(tmp_path: Path) -> Project:
    """A new project without results."""
    return make_project(tmp_path / "project")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A finished project. Do not change it: `finished` is a copy."""
    return Project(made_once(tmp_path_factory, "made", lambda folder: make_project(folder).run()))


@pytest.fixture
def finished(made: Project, tmp_path: Path) -> Project:
    """A copy of the finished project, to be changed."""
    folder = tmp_path / "project"
    subprocess.run(["cp", "--archive", made.folder, folder], check=True)
    return Project(folder)


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the caller's environment variables for Snakemake and Slurm."""
    for name in list(os.environ):
        if name.startswith(("SNAKEMAKE_", "SLURM_", "SBATCH_")):
            monkeypatch.delenv(name)
