"""An unprivileged user, who is not Slurm's own, submits jobs; they run as that user, who owns their files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SLURM, Cluster, slurm_project
from projects import ROOT

NOBODY = 65534
WEIGHTS = "results/micro/train/weights.safetensors"


def as_nobody(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the project as nobody, with a system Python of this version and the packages of this one: other
    users cannot read the home folder of the tests' user."""
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    site = {"HOME": str(home), "PYTHONPATH": sysconfig.get_paths()["purelib"], "PYTHONDONTWRITEBYTECODE": "1"}
    environment = os.environ | site | {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [*drop, *command],
        cwd=home / "project",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


@pytest.fixture
def home(cluster: Cluster) -> Iterator[Path]:
    """A folder owned by nobody, with `python` and a project in it."""
    version = f"python3.{sys.version_info.minor}"
    python = shutil.which(version, path="/usr/local/bin:/usr/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip(f"Only root can become another user, and that one needs a {version} outside of root's home.")
    with tempfile.TemporaryDirectory(prefix="nobody-") as folder:
        home = Path(folder)
        home.chmod(0o755)
        (home / "bin").mkdir()
        (home / "bin/python").symlink_to(python)
        project = slurm_project(home / "project")
        for name in ("Snakefile", "workflow", "src", "envs"):
            (project / name).symlink_to(ROOT / name)
        for path in (home, *home.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        if as_nobody(home, "python", "-c", f"import snakemake, torch; open({str(ROOT / 'Snakefile')!r})").returncode:
            pytest.skip("Others may not read this clone or its environment.")
        yield home
        cluster.cancel_all()


def test_unprivileged_user_runs_and_owns_jobs(home: Path, tmp_path: Path) -> None:
    project = home / "project"
    done = as_nobody(home, "python", "-m", "snakemake", "--cores", "2", *SLURM)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    written = [path for path in (project / "results").rglob("*") if path.is_file()]
    assert written and {path.stat().st_uid for path in written} == {NOBODY}
    alone = slurm_project(tmp_path / "alone")
    alone.run(WEIGHTS)
    assert (project / WEIGHTS).read_bytes() == (alone / WEIGHTS).read_bytes()
