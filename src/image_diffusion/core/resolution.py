"""Resolution of images: one number for squares, height and width for rectangles."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

LARGEST = 4096
"""Longest side in pixels."""
Size = tuple[int, int]
"""Height and width."""


def _checked(value: Any) -> Any:
    sides = value if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2 or not all(type(side) is int and 1 <= side <= LARGEST for side in sides):
        raise ValueError(
            f"got {value!r}; expected a side in pixels, or height and width, from 1 to {LARGEST:,}. Use 64 or [48, 96]."
        )
    return resolution_of(*sides)


Resolution = Annotated[int | Size, BeforeValidator(_checked)]
"""The side of a square, or (height, width). A square is always one number."""


def resolution_of(height: int, width: int) -> int | Size:
    """Return the resolution of an image."""
    return height if height == width else (height, width)


def height_width(resolution: int | Size) -> Size:
    """Return the height and the width."""
    return (resolution, resolution) if isinstance(resolution, int) else resolution


def size_text(resolution: int | Size) -> str:
    """Return a resolution as text: 48 x 96."""
    return "{} x {}".format(*height_width(resolution))


def written(resolution: int | Size) -> str:
    """Return a resolution in the form of the configuration: 48, or [48, 96]."""
    return str(resolution) if isinstance(resolution, int) else str(list(resolution))


def divided(resolution: int | Size, divisor: int) -> Size | None:
    """Return the height and the width divided by a divisor; None if it does not divide both."""
    height, width = height_width(resolution)
    return None if height % divisor or width % divisor else (height // divisor, width // divisor)
