"""Environment of the processes of the workflow: Python, `logged`, and the package that lies beside the rules."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SHIPPED = Path("image_diffusion", "project")
"""Folder of the workflow in an installed package, beside the package."""


def package_beside(root: Path) -> Path:
    """Return the folder that holds the package of a workflow. root: the folder of the workflow, as cloned or as
    installed."""
    return root.parents[1] if root.parts[-2:] == SHIPPED.parts else root / "src"


def refuse_storage(provider: str | None) -> None:
    """End Snakemake with one line if it is to keep files by a storage provider.

    Shards, checkpoints and journals are not declared by any rule, so a provider would leave them behind.
    """
    if provider:
        raise SystemExit(
            f"error: --default-storage-provider {provider} stores only what rules declare: shards, checkpoints and "
            "journals would be lost. Use a file system that all jobs share, or one machine with --config mirror=… "
            "(docs/cloud.md)."
        )


def search_path(root: Path, path: str) -> str:
    """PATH with what stages look for in front: the Python that runs Snakemake, and `logged`.

    root: the folder of the workflow. path: PATH as it is. An activated conda environment still goes before both.
    """
    ours = [str(Path(sys.executable).parent), str(root / "workflow" / "scripts")]
    return os.pathsep.join([*ours, *(folder for folder in path.split(os.pathsep) if folder not in ours)])


def with_package(source: Path) -> dict[str, str]:
    """Return this process's environment, in which Python takes the package from `source`; `logged` does so for the
    stages of a clone."""
    path = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
