"""Photographs that are not in a checkout: `make test-photographs DATA=folder`. Missing ones are an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def photographs() -> Callable[[str], Path]:
    """Return a tar of IMAGE_DIFFUSION_DATA by its name."""

    def find(name: str) -> Path:
        path = Path(os.environ.get("IMAGE_DIFFUSION_DATA", "data")) / name
        if not path.is_file():
            pytest.fail(f"{path} is not there. Name the folder that holds {name} in IMAGE_DIFFUSION_DATA.")
        return path

    return find
