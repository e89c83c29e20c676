"""A real Slurm on this machine for the session, with its own port and folder."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))

from cluster import Cluster, slurm_project
from projects import Project

from image_diffusion.core.devices import REQUESTED

# A shell that runs the tests in the background may ignore interrupts, and each child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes of four cores and two simulated GPUs each."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        Path(folder).chmod(0o755)  # munge requires readable parent folders
        started = Cluster(Path(folder) / "cluster", port=10000 + 8 * (os.getpid() % 1000))
        try:
            started.script("up")
            os.environ.update(started.environment() | {REQUESTED: ""})  # the CPU replaces the GPUs
            yield started
        finally:
            started.script("down")


@pytest.fixture
def project(cluster: Cluster, tmp_path: Path) -> Iterator[Project]:
    """A new project. None of its jobs is in the queue when the test ends."""
    yield slurm_project(tmp_path / "project")
    cluster.cancel_all()
