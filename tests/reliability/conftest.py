"""Modules beside the tests of this folder can be imported by their names; one server starts all their trainings."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from attempts import Attempts


@pytest.fixture(scope="session")
def attempts() -> Iterator[Attempts]:
    """Starts trainings and ends them at chosen instants."""
    with Attempts() as server:
        yield server
