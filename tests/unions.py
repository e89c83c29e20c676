"""Names of the parts in a union, for messages that list them: a new part changes no test."""

from __future__ import annotations

from typing import Any, get_args


def types_in(union: Any) -> list[str]:
    """Return the values of the key `type` in a discriminated union, in its order."""
    return [name for part in get_args(get_args(union)[0]) for name in get_args(part.model_fields["type"].annotation)]


def known(union: Any) -> str:
    """Return the end of the message on an unknown part of a union."""
    return f"Known: {', '.join(types_in(union))}."
