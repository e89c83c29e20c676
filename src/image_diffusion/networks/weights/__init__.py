"""Conversions between this package's parameter names and those of published weights, and the comparison of the tensors
of a file with those of a network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

_NAMES_SHOWN = 8


def check_fit(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path, network: str) -> None:
    """Raise ValueError naming missing, unexpected and wrongly shaped tensors, unless all fit a state dict."""
    if details := misfits(expected, tensors):
        raise ValueError(
            f"{path} does not fit the {network} described. {details}. Use weights of this network, "
            f"from a complete file."
        )


def misfits(expected: Mapping[str, Tensor | None], tensors: Mapping[str, Tensor]) -> str:
    """Return missing, unexpected and wrongly shaped tensors as text, empty if all fit. expected: of a state dict; None:
    of any shape."""
    problems = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": [name for name in tensors if name not in expected],
        "of another shape": [
            f"{name} {list(tensors[name].shape)} instead of {list(tensor.shape)}"
            for name, tensor in expected.items()
            if tensor is not None and name in tensors and tensors[name].shape != tensor.shape
        ],
    }
    return "; ".join(f"{problem}: {listed(names)}" for problem, names in problems.items() if names)


def num_blocks(names: Iterable[str], prefix: str) -> int:
    """Return the number of blocks under a prefix, whose names continue with a number and a dot. Blocks are counted,
    since a file may contain any number."""
    return len({name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)})


def listed(names: Iterable[str]) -> str:
    """Return the first names of tensors as text, and how many more there are."""
    names = [str(name) for name in names]
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
