"""Tests that need a GPU. Without one they end with one line. `make test` does not collect them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from image_diffusion.nn.precision import tf32

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "reliability")]

from attempts import Attempts  # noqa: E402 - beside the tests of reliability


def pytest_sessionstart() -> None:
    if not torch.cuda.is_available():
        pytest.exit("tests/gpu needs a GPU that PyTorch can use; there is none here.", returncode=1)


@pytest.fixture(scope="session")
def attempts() -> Iterator[Attempts]:
    """Server that starts trainings, each in a new process, and ends them at chosen instants."""
    with Attempts() as server:
        yield server


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Restore the process-wide settings that a training changes."""
    with tf32(False):
        yield
    torch.cuda.set_sync_debug_mode("default")
    torch.compiler.reset()
