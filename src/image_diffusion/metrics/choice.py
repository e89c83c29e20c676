"""Conditions on measured numbers, such as `copies.upper < 0.05 and utility.gain.lower > 0`, and the choice of a point
of a curve by a rule with a condition, such as `distance where copies.upper < 0.03`. Neither text is executed."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from image_diffusion.core.config.errors import suggestion
from image_diffusion.core.journal.metric_definitions import Definition, definition_of, definitions
from image_diffusion.metrics import DetectorConfig

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


DISTANCE = "distance"
"""Name, in a rule, of the metric that the experiment is ranked by."""
_EXAMPLE = "distance where copies.upper < 0.03"
_OF_DETECTORS = "Samples beside real images"
"""Group of the metrics that each detector measures; of these, only `copies` is also measured without a detector."""
_OF_NO_POINT = ("Likelihood", "Codecs", "Priors")
"""Groups of the metrics that compare no samples with real images."""


@dataclass(frozen=True)
class Rule:
    """Rule that chooses a point. text: the rule as written. metric: the metric to optimize among the points that fulfil
    the conditions."""

    text: str
    metric: str
    conditions: tuple[Condition, ...]

    @property
    def metrics(self) -> dict[str, Definition]:
        """Return the definitions of the metrics that the rule compares, by full name, except for `distance`."""
        names = (self.metric, *(condition.name for condition in self.conditions))
        return {name: definition for name in names if (definition := definition_of(name)) is not None}


def parse_rule(text: str) -> Rule:
    """Parse a rule: a metric, optionally followed by `where` and conditions joined by `and`.

    Raises ValueError for a metric that is unknown or has no better direction, and for an invalid condition.
    """
    metric, *where = re.split(r"\s+where(?:\s+|$)", text.strip(), maxsplit=1)
    _check_name(metric)
    if metric != DISTANCE and _better(metric) not in ("lower", "higher"):
        raise ValueError(f"{metric} has no better direction, so that no point is best by it. Name another metric.")
    conditions = parse_conditions("".join(where), "metric", _check_name, _EXAMPLE)
    if where and not conditions:
        raise ValueError(f"{text!r} has no condition after where. Write for instance {_EXAMPLE}.")
    return Rule(text, metric, tuple(conditions))


def check_measured(rule: Rule, detectors: Sequence[DetectorConfig]) -> None:
    """Raise ValueError, before any work, if a rule uses a metric that is not measured at the points of a curve.

    detectors: the detectors of the evaluation of the points.
    """
    for name, definition in rule.metrics.items():
        if definition.judged in _OF_NO_POINT or lacks_detector(name, detectors):
            raise ValueError(
                f"sweep.choose compares {name}, which no point of sweep.checkpoint has. Name a metric of the samples, "
                f"of {one_of(detectors)}."
            )


def lacks_detector(metric: str, detectors: Sequence[DetectorConfig]) -> bool:
    """Return True if a metric of samples is measured only by a detector that is not among `detectors`."""
    definition = definition_of(metric)
    if definition is None or definition.judged != _OF_DETECTORS or metric == "copies":
        return False
    return metric not in {detector.metric_name(bare) for detector in detectors for bare in definition.names.split()}


def one_of(detectors: Sequence[DetectorConfig]) -> str:
    """Return "one of evaluate.detectors" with the Fréchet distance of each detector, for messages."""
    return f"one of evaluate.detectors ({', '.join(detector.metric_name('fd') for detector in detectors)}, …)"


def choose(rule: Rule, points: Sequence[Mapping[str, Any]], headline: str) -> dict[str, Any]:
    """Choose among points {"value": a step, "metrics": entries of metrics.json}, and return plain data.

    Returns {"rule", "metric", "step", "fulfilled", "reason", "points"}. The point with the best metric is chosen among
    those that fulfil all conditions; ties go to the earliest. If no point does, `fulfilled` is False, and the point
    that misses the fewest conditions is chosen; ties go to the point whose numbers are nearest to the bounds. reason: a
    sentence for people.

    headline: the metric that `distance` stands for. Raises ValueError if the metric is missing at any point, or a
    number of a condition at all points.
    """
    metric = headline if rule.metric == DISTANCE else rule.metric
    of_condition = {c.name: headline if c.name == DISTANCE else c.name for c in rule.conditions}
    points = sorted(points, key=lambda point: int(point["value"]))
    entries = [_entry(point, metric) for point in points]
    if missing := [point["value"] for point, entry in zip(points, entries, strict=True) if entry["value"] is None]:
        raise ValueError(f"sweep.choose compares {metric}, which was not measured at step {missing[0]}.")
    scores = [{name: _score(point, measured) for name, measured in of_condition.items()} for point in points]
    for condition in rule.conditions:
        measured = [score[condition.name][condition.field] for score in scores]
        if all(number is None for number in measured):
            violation = condition.violation(scores[0])
            raise ValueError(
                f"sweep.choose asks for {condition.text}, but {violation}. Measure it, or change the rule."
            )
    readings = reading(entries)
    sign = -1 if _better(metric) == "higher" else 1
    misses = [
        [violation for condition in rule.conditions if (violation := condition.violation(score)) is not None]
        for score in scores
    ]
    excess = [sum(_excess(condition, score) for condition in rule.conditions) for score in scores]
    best = min(range(len(points)), key=lambda i: (len(misses[i]), excess[i], sign * readings[i]))

    def number(i: int) -> str:
        interval = entries[i]["interval"]
        return f"{readings[i]:.4g}{f' [{interval[0]:.4g}, {interval[1]:.4g}]' if interval else ''}"

    step, last = points[best]["value"], len(points) - 1
    fulfil = sum(not missed for missed in misses)
    where = " and ".join(condition.text for condition in rule.conditions)
    better = "highest" if sign < 0 else "lowest"
    if misses[best]:
        reason = f"No step fulfils {where}. Step {step} comes closest ({'; '.join(misses[best])}) and is used: its "
        reason += f"{metric} is {number(best)}."
    else:
        among = f"of the {fulfil} of {len(points)} steps at which {where}, " if where else ""
        reason = f"Step {step} is used: {among}it has the {better} {metric}, {number(best)}."
    if best == last:
        reason += " It is the last one."
    else:
        but = f", but {'; '.join(misses[last])}" if misses[last] else ""
        reason += f" The last, step {points[last]['value']}, has {number(last)}{but}."
    rows = [
        {"step": int(point["value"]), metric: value, "missed": missed}
        for point, value, missed in zip(points, readings, misses, strict=True)
    ]
    about = {"rule": rule.text, "metric": metric, "step": int(step)}
    return {**about, "fulfilled": not misses[best], "reason": reason, "points": rows}


def reading(entries: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the value of each entry to compare: the debiased values if all entries have one, else those of the
    literature."""
    debiased = all(entry["debiased"] is not None for entry in entries)
    return [float(entry["debiased" if debiased else "value"]) for entry in entries]


def check_metric(name: str) -> None:
    """Raise ValueError for a name that is not a metric of metrics.json."""
    if definition_of(name) is None:
        names = [DISTANCE, *(bare for definition in definitions() for bare in definition.names.split())]
        otherwise = "metrics.json has the names, such as copies or inpipe_fd."
        raise ValueError(f"{name!r} is not a metric. {suggestion(name, names, otherwise)}")


def _check_name(name: str) -> None:
    if name != DISTANCE:
        check_metric(name)


def _better(metric: str) -> str:
    definition = definition_of(metric)
    return definition.better if definition is not None else ""


def _entry(point: Mapping[str, Any], metric: str) -> Mapping[str, Any]:
    entry: Mapping[str, Any] = point["metrics"].get(metric, {"value": None, "interval": None, "note": "not evaluated"})
    return entry


def _score(point: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the numbers of a metric, by the field names used in conditions."""
    entry = _entry(point, metric)
    lower, upper = entry["interval"] or (None, None)
    return {"value": entry["value"], "lower": lower, "upper": upper, "note": entry["note"]}


def _excess(condition: Condition, scores: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the amount by which a number misses the bound; 0 if the condition holds."""
    if condition.violation(scores) is None:
        return 0.0
    number = scores[condition.name][condition.field]
    return math.inf if number is None else abs(number - condition.bound)
