"""The golden numbers of the original codes, opened by the name of their file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from image_diffusion.nn import inputs

FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Golden:
    """One file of golden numbers: what each case was made with, and its arrays as torch tensors.

    cases: the manifest's entry of each case by its id: "params", "tolerance", "note", ….
    """

    cases: dict[str, dict[str, Any]]
    arrays: dict[str, np.ndarray]

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return the array `<case>/<name>`."""
        return torch.from_numpy(self.arrays[key].copy())

    def __contains__(self, key: str) -> bool:
        return key in self.arrays

    def params(self, case: str) -> dict[str, Any]:
        """Return the parameters of a case."""
        return dict(self.cases[case]["params"])

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return every array whose key starts with `<prefix>/`, by the rest of its key: a state dict, for example."""
        return {key.removeprefix(f"{prefix}/"): self[key] for key in self.arrays if key.startswith(f"{prefix}/")}

    def __iter__(self) -> Iterator[str]:
        return iter(self.cases)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """Opens a golden file: `golden("m01_dit.npz")`."""
    manifest = json.loads((FOLDER / "MANIFEST.json").read_text(encoding="utf-8"))
    entries = {entry["file"]: entry for entry in manifest["files"]}

    def open_file(name: str) -> Golden:
        with np.load(FOLDER / name, allow_pickle=False) as arrays:
            return Golden({case["id"]: case for case in entries[name]["cases"]}, dict(arrays))

    return open_file


@pytest.fixture
def golden_sinusoids(golden: Callable[[str], Golden], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Give DiT the original's sinusoids of the times of m01 and m06: this processor's exp, cos and sin differ in last
    bits. Returns the times."""
    file = golden("m07_sinusoids.npz")
    times, rows = file["dit/t"], file["dit/out"]

    def look_up(t: torch.Tensor, dim: int, endpoint: bool) -> torch.Tensor:
        places = torch.searchsorted(times, t.long())
        assert torch.equal(times[places], t.double()) and dim == rows.shape[1] and not endpoint
        return rows[places]

    monkeypatch.setattr(inputs, "sinusoid", look_up)
    return times


@pytest.fixture(scope="session")
def golden_names() -> Callable[[str], dict[str, Any]]:
    """Opens parameter names, shapes and counts of published networks: `golden_names("names_dit.json.gz")`."""

    def open_file(name: str) -> dict[str, Any]:
        with gzip.open(FOLDER / name) as file:
            content: dict[str, Any] = json.load(file)
        return content

    return open_file
