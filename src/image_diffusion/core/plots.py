"""Plots as PNG. matplotlib is imported only to draw one, since its import takes longer than many stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from image_diffusion.core.files.atomic import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, 100 pixels an inch; the same figure gives the same bytes."""
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100, metadata={"Software": None})
