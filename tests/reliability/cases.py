"""Cases of tests that run for several systems."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

_ONE_OF_EACH_NETWORK = {"mlp", "dit", "rin", "iddpm", "vector_dvae", "prior", "tokens", "aligned", "adversarial"}


def each_system(systems: Iterable[str]) -> list[Any]:
    """Return the systems as parameters of a test. Those whose network another one has are long."""
    return [pytest.param(name, marks=() if name in _ONE_OF_EACH_NETWORK else pytest.mark.long) for name in systems]
