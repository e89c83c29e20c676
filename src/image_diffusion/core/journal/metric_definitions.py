"""Metric definitions for pages and studies: the meaning of each metric, its better direction, and its source.

The table is metric_definitions.csv; docs/metrics.md shows it.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ON_INCEPTION = {
    "fid": "fd",
    "fid_infinity": "fd_infinity",
    "sfid": "spatial_fd",
    "kid": "kd",
    "rfid": "reconstruction_fd",
}
_DECODED = re.compile(r"_(mean|soft|hard)$")


@dataclass(frozen=True)
class Definition:
    """Metrics with one meaning. names: names in metrics.json without the detector's prefix, separated by spaces.
    better: "higher", "lower", "nearer to …", "not above …", or empty if no direction is better. source: paper and
    equation. title: description in words."""

    judged: str
    names: str
    meaning: str
    better: str
    source: str
    title: str

    @property
    def is_share(self) -> bool:
        """Return True if the metric is a share, from 0 to 1."""
        return self.meaning.startswith("Share ")


@cache
def definitions() -> tuple[Definition, ...]:
    """Return all definitions, in the order of the table."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return tuple(Definition(**line) for line in csv.DictReader(file))


def definition_of(metric: str) -> Definition | None:
    """Return the definition of a metric by its full name, "inpipe_class_fd" or "fid"; None for a metric without one."""
    by_name = {name: definition for definition in reversed(definitions()) for name in definition.names.split()}
    bare = _ON_INCEPTION.get(_DECODED.sub("", metric), metric)
    within = [name for name in by_name if f"_{name}_" in f"_{bare}_"]
    return by_name[max(within, key=len)] if within else None
