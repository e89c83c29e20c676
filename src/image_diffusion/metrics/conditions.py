"""Conditions on measured numbers, such as `copies.upper < 0.05 and utility.gain.lower > 0`; they are never executed."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FIELDS = ("value", "lower", "upper")
"""Fields of a score or metric: the value and the ends of its interval."""
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_CONDITION = re.compile(r"(?P<number>[\w.]+)\s*(?P<sign><=|>=|<|>)\s*(?P<bound>\S+)")


@dataclass(frozen=True)
class Condition:
    """Comparison of a number with a bound. text: as written. name: of the score or metric. field: one of `FIELDS`."""

    text: str
    name: str
    field: str
    sign: str
    bound: float

    def violation(self, scores: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Return a description of the number if the condition does not hold; None if it holds. A missing number does
        not fulfil a condition.

        scores: {"value", "lower", "upper", "note"} by name.
        """
        score = scores[self.name]
        number = score[self.field]
        if number is None:
            return f"{self.name}.{self.field} was not measured ({score['note'] or 'no reason noted'})"
        if _COMPARISONS[self.sign](number, self.bound):
            return None
        return f"{self.name}.{self.field} is {number:.4g}"


def parse_conditions(text: str, kind: str, check_name: Callable[[str], None], example: str) -> list[Condition]:
    """Parse conditions joined by `and`; an empty text has none.

    kind: score or metric, for messages. check_name: raises ValueError for an unknown name. Raises ValueError for a
    condition that does not compare a known number with a bound.
    """
    parts = re.split(r"\s+and\s+", text.strip()) if text.strip() else []
    return [_parse_condition(part, kind, check_name, example) for part in parts]


def _parse_condition(text: str, kind: str, check_name: Callable[[str], None], example: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a comparison of a {kind} with a number. Write for instance {example}.")
    name, _, field = match["number"].rpartition(".")
    try:
        check_name(name)
    except ValueError:
        if field in FIELDS:
            raise
        name, field = match["number"], ""
        check_name(name)
    if not field:
        cure = f"{name}.value {match['sign']} {match['bound']}"
        raise ValueError(f"{text!r} needs .value, .lower or .upper after the name: {cure}.")
    if field not in FIELDS:
        raise ValueError(f"Unknown field {field!r} of {name}. Known: {', '.join(FIELDS)}.")
    try:
        bound = float(match["bound"])
    except ValueError:
        raise ValueError(f"{match['bound']!r} in {text!r} is not a number. Compare with one, such as 0.01.") from None
    return Condition(text, name, field, match["sign"], bound)
