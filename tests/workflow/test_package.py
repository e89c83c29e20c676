"""The package, built as a distributor builds it and installed without its clone, is complete and creates a project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from projects import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the package, installed from a source distribution of the files tracked by git, without a clone. The
    tag is v1.2.3."""
    folder = tmp_path_factory.mktemp("package")
    known = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, known.split("\0")):
        (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / "clone" / name)
    someone = ["-c", "user.name=someone", "-c", "user.email=someone@localhost"]
    for command in (["init"], ["add", "."], [*someone, "commit", "--message", "all"], ["tag", "v1.2.3"]):
        subprocess.run(["git", *command], cwd=folder / "clone", check=True, capture_output=True)
    build = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    subprocess.run([sys.executable, "-c", build], cwd=folder / "clone", check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder / "unpacked")
    (source,) = (folder / "unpacked").iterdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", folder / "installed", source], check=True, capture_output=True)
    return folder / "installed"


def run(installed: Path, command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed), "PATH": f"{installed / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_init_creates_project_that_snakemake_plans(installed: Path, tmp_path: Path) -> None:
    done = run(installed, ["image-diffusion", "init", "mine"], tmp_path)
    assert done.returncode == 0 and "cd mine && snakemake." in done.stdout, done.stderr
    again = run(installed, ["image-diffusion", "init", "mine"], tmp_path)
    assert (again.returncode, again.stderr) == (
        1,
        "error: mine exists and is not an empty folder. Name a new folder.\n",
    )
    planned = run(installed, [sys.executable, "-m", "snakemake", "--dry-run", "--printshellcmds"], tmp_path / "mine")
    assert planned.returncode == 0, planned.stderr
    for stage in ("crop", "train", "sample", "evaluate", "track"):
        assert f"image_diffusion {stage}" in planned.stdout
    assert (tmp_path / "mine" / "slurm" / "profile.v9+.yaml").is_file(), "for --profile slurm"
    # A stage imports the package next to the rules; both are the installed ones.
    images = ["results/datasets/digits-32/crops/manifest.json"]
    made = run(installed, [sys.executable, "-m", "snakemake", *images], tmp_path / "mine")
    assert made.returncode == 0, made.stderr
    where = (
        "import image_diffusion, image_diffusion.tools.init as i; print(image_diffusion.__file__, i.workflow_folder())"
    )
    logged = installed / "image_diffusion/project/workflow/scripts/logged"
    found = run(installed, [str(logged), "log", sys.executable, "-c", where], tmp_path)
    assert found.stdout.split() == [
        f"{installed}/image_diffusion/__init__.py",
        f"{installed}/image_diffusion/project/workflow",
    ]


def test_version_is_that_of_git_tag(installed: Path, tmp_path: Path) -> None:
    told = "import image_diffusion; print(image_diffusion.__version__)"
    assert run(installed, [sys.executable, "-c", told], tmp_path).stdout == "1.2.3\n"


def test_commands_are_listed_and_unknown_ones_rejected(installed: Path, tmp_path: Path) -> None:
    listed = run(installed, ["image-diffusion"], tmp_path).stdout
    assert "  train      Train a model on shards. It can be killed at any moment; the same command resumes.\n" in listed
    assert "usage: image-diffusion sample" in run(installed, ["image-diffusion", "sample", "-h"], tmp_path).stdout
    wrong = run(installed, ["image-diffusion", "sampel"], tmp_path)
    assert (wrong.returncode, wrong.stderr) == (1, "error: unknown command 'sampel'. Did you mean 'sample'?\n")


def test_package_contains_types_and_workflow_files(installed: Path) -> None:
    package = installed / "image_diffusion"
    assert (package / "py.typed").is_file()
    compiler = shutil.which(sysconfig.get_config_var("CC").split()[0])
    for compiled in ("core/random/philox.compiled", "data/crop/resize.compiled", "data/sources/entries.compiled"):
        assert (package / compiled).is_file() == bool(compiler)
    shipped = {
        str(path.relative_to(package / "project")) for path in (package / "project").rglob("*") if path.is_file()
    }
    for folder in ("workflow", "envs", "config"):
        tracked = subprocess.run(["git", "ls-files", folder], cwd=ROOT, check=True, capture_output=True, text=True)
        assert set(tracked.stdout.split()) <= shipped
