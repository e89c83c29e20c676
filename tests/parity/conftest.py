"""Golden numbers of the original codes, where a checkout has them: the tests that need them are skipped elsewhere."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


@dataclass(frozen=True)
class Golden:
    """One file of golden numbers: what each case was made with, and its arrays as torch tensors.

    cases: the manifest's entry of each case by its id: "params", "tolerance", "note", ….
    """

    cases: dict[str, dict[str, Any]]
    arrays: dict[str, np.ndarray]

    def __getitem__(self, key: str) -> torch.Tensor:
        """The array `<case>/<name>`."""
        return torch.from_numpy(self.arrays[key].copy())

    def __contains__(self, key: str) -> bool:
        return key in self.arrays

    def params(self, case: str) -> dict[str, Any]:
        """What a case was made with."""
        return dict(self.cases[case]["params"])

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Every array whose key starts with `<prefix>/`, by the rest of its key: a state dict, for example."""
        return {key.removeprefix(f"{prefix}/"): self[key] for key in self.arrays if key.startswith(f"{prefix}/")}

    def __iter__(self) -> Iterator[str]:
        return iter(self.cases)


def _folder() -> Path:
    default = Path(__file__).resolve().parents[3] / "shared" / "reference" / "golden"
    return Path(os.environ.get("IMAGE_DIFFUSION_GOLDEN", default))


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """Open a golden file by name: `golden("m01_dit.npz")`. Set IMAGE_DIFFUSION_GOLDEN to the folder that holds them."""
    if not (_folder() / "MANIFEST.json").is_file():
        pytest.skip(f"golden numbers are not at {_folder()}; set IMAGE_DIFFUSION_GOLDEN to their folder")
    manifest = json.loads((_folder() / "MANIFEST.json").read_text())

    def open_file(name: str) -> Golden:
        entry = next(each for each in manifest["files"] if each["file"] == name)
        with np.load(_folder() / name, allow_pickle=False) as arrays:
            return Golden({case["id"]: case for case in entry["cases"]}, dict(arrays))

    return open_file


@pytest.fixture(scope="session")
def golden_names() -> Callable[[str], dict[str, Any]]:
    """Parameter names, shapes and counts of published networks: `golden_names("names_dit.json.gz")`."""
    if not (_folder() / "MANIFEST.json").is_file():
        pytest.skip(f"golden numbers are not at {_folder()}; set IMAGE_DIFFUSION_GOLDEN to their folder")

    def open_file(name: str) -> dict[str, Any]:
        with gzip.open(_folder() / name) as file:
            content: dict[str, Any] = json.load(file)
        return content

    return open_file
