"""Parse a requirement on a scorecard, such as `copies.upper < 0.05 and utility.gain.lower > 0`: it is not executed."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from image_diffusion.core.config.errors import nearest

FIELDS = ("value", "lower", "upper")
"""Numbers of a score: the value and the ends of its interval."""
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_CONDITION = re.compile(r"(?P<score>[\w.]+)\.(?P<field>\w+)\s*(?P<sign><=|>=|<|>)\s*(?P<bound>\S+)")
_EXAMPLE = "copies.upper < 0.05 and utility.gain.lower > 0"


@dataclass(frozen=True)
class Condition:
    """Comparison of a number of a score with a bound. text: as it was written."""

    text: str
    score: str
    field: str
    sign: str
    bound: float

    def fault(self, scores: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Return why the condition does not hold on a scorecard; None where it holds. A number that was not measured
        does not hold."""
        score = scores[self.score]
        number = score[self.field]
        if number is None:
            return f"{self.text}: {self.score}.{self.field} was not measured ({score['note'] or 'no reason noted'})"
        if _COMPARISONS[self.sign](number, self.bound):
            return None
        return f"{self.text}: {self.score}.{self.field} is {number:.4g}"


def parse_requirement(text: str, scores: Collection[str]) -> list[Condition]:
    """Return the conditions of a requirement, joined by `and`; none for an empty one. scores: the known names.

    Raises ValueError for what is not a comparison of a known number with a bound.
    """
    return [_parse_condition(part, scores) for part in re.split(r"\s+and\s+", text.strip())] if text.strip() else []


def _parse_condition(text: str, scores: Collection[str]) -> Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a comparison of a score with a number. Write for instance {_EXAMPLE}.")
    score, field = match["score"], match["field"]
    if score not in scores:
        close = nearest(score, list(scores))
        hint = f"Did you mean {close}?" if close else f"Known: {', '.join(scores)}."
        raise ValueError(f"Unknown score {score!r}. {hint}")
    if field not in FIELDS:
        raise ValueError(f"Unknown field {field!r} of {score}. Known: {', '.join(FIELDS)}.")
    try:
        bound = float(match["bound"])
    except ValueError:
        raise ValueError(f"{match['bound']!r} in {text!r} is not a number. Compare with one, such as 0.01.") from None
    return Condition(text, score, field, match["sign"], bound)
