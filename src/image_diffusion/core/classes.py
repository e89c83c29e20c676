"""References to a class of a data set: by name, by a number that is its name, or by position."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from image_diffusion.core.config.base import Config
from image_diffusion.core.process.errors import log_line_once


class Position(Config):
    """A class by its position in the order of the classes."""

    position: int = Field(ge=0)
    """Position of the class, counted from 0, as in the labels of samples.npz."""


ClassLabel = int | str | Position
"""Class in a configuration. A number is a name if a class has that name or if all names are numbers, otherwise a
position."""


def class_number(key: str, label: ClassLabel, classes: Sequence[str]) -> int:
    """Return the position of a class, and warn once if a number could mean two classes. key: the configuration key, for
    messages. classes: the names, in order. Raises ValueError for a class that does not exist.
    """
    if isinstance(label, Position):
        if label.position < len(classes):
            return label.position
    elif isinstance(label, int) and (named := _named(label, classes)) is not None:
        if named != label and 0 <= label < len(classes):
            log_line_once(
                f"{key}: {label} means the class named {classes[named]}. Write {{position: {label}}} for the class at "
                f"position {label}, {classes[label]}."
            )
        return named
    elif isinstance(label, str) and label in classes:
        return classes.index(label)
    elif isinstance(label, int) and 0 <= label < len(classes) and not _are_numbers(classes):
        return label
    shown = ", ".join(classes[:12]) + (", …" if len(classes) > 12 else "")
    description = f"the class at position {label.position}" if isinstance(label, Position) else f"the class {label!r}"
    raise ValueError(f"{key} names {description}, but the classes are 0 to {len(classes) - 1}: {shown}.")


def _named(label: int, classes: Sequence[str]) -> int | None:
    """Return the position of the class whose name is a number; None if no class, or more than one, has that name."""
    if str(label) in classes:
        return classes.index(str(label))
    if not _are_numbers(classes):
        return None
    places = [place for place, name in enumerate(classes) if int(name) == label]
    return places[0] if len(places) == 1 else None


def _are_numbers(classes: Sequence[str]) -> bool:
    return all(name.isdecimal() for name in classes)
