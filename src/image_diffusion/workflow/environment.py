"""Environment of the processes of the workflow: Python, `logged`, and the package next to the rules."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SHIPPED = Path("image_diffusion", "project")
"""Folder of the workflow in an installation, below the folder that holds the package."""


def package_beside(root: Path) -> Path:
    """Return the folder that holds the package of a workflow. root: the folder of the workflow, cloned or installed."""
    return root.parents[1] if root.parts[-2:] == SHIPPED.parts else root / "src"


def search_path(root: Path, path: str) -> str:
    """Return PATH with the Python that runs Snakemake and `logged` in front, for stages.

    root: the folder of the workflow. path: the current PATH. An activated conda environment still precedes both.
    """
    ours = [str(Path(sys.executable).parent), str(root / "workflow" / "scripts")]
    return os.pathsep.join([*ours, *(folder for folder in path.split(os.pathsep) if folder not in ours)])


def with_package(source: Path) -> dict[str, str]:
    """Return this process's environment, with the package imported from `source`, as `logged` does for stages."""
    path = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
