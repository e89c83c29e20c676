"""Modules beside the tests of this folder can be imported by their names; one server starts all their trainings."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from attempts import Attempts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="kill trainings 500 times instead of 120")


@pytest.fixture(scope="session")
def attempts() -> Iterator[Attempts]:
    """Starts trainings and ends them at chosen instants."""
    with Attempts() as server:
        yield server


@pytest.fixture(scope="session")
def kills(request: pytest.FixtureRequest) -> int:
    """SIGKILLs of trainings in all."""
    return 500 if request.config.getoption("--soak") else 120
