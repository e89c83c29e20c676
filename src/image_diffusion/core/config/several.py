"""Keys of a configuration that hold one value or a list of values."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Discriminator, Tag

T = TypeVar("T")


def _form(value: Any) -> str:
    """Return the tag of a value: "(several)" of a list, "(one)" of anything else."""
    return "(several)" if isinstance(value, list | tuple) else "(one)"


OneOrSeveral = Annotated[Annotated[T, Tag("(one)")] | Annotated[tuple[T, ...], Tag("(several)")], Discriminator(_form)]
"""A value, or a list of values."""


def single_value(example: str) -> BeforeValidator:
    """Return a validator that replaces a list of one value by the value, and rejects an empty list. example: a value
    for the message."""

    def validated(value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) < 2:
            if not value:
                raise ValueError(f"the list is empty. Name {example}, or leave the key out.")
            return value[0]
        return value

    return BeforeValidator(validated)
