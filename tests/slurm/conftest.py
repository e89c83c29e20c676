"""A real Slurm on this machine for the session, with a port and a folder of its own."""

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

# Whoever runs the tests in the background may have had interrupts ignored, and each child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes of four cores and two fake GPUs each."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        Path(folder).chmod(0o755)  # munge wants its folders open to all
        started = Cluster(Path(folder) / "cluster", port=10000 + 8 * (os.getpid() % 1000))
        try:
            started.script("up")
            os.environ.update(started.environment() | {REQUESTED: ""})  # the CPU stands in for the GPUs
            yield started
        finally:
            started.script("down")


@pytest.fixture
def project(cluster: Cluster, tmp_path: Path) -> Iterator[Project]:
    """A fresh project; nothing of it is in the queue when the test ends."""
    yield slurm_project(tmp_path / "project")
    cluster.cancel_all()
