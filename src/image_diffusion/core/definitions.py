"""What each metric means, which direction is better, and where it comes from: for pages and ledgers.

The table is definitions.csv; docs/metrics.md shows it.
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
    """Metrics of one meaning. names: those of metrics.json, without a detector's, a space between two. better:
    "higher", "lower", "nearer to …", "not above …", or nothing where it is no merit. source: paper and equation."""

    judged: str
    names: str
    meaning: str
    better: str
    source: str

    @property
    def is_share(self) -> bool:
        """Whether it is a share of something, from 0 to 1."""
        return self.meaning.startswith("Share ")


@cache
def definitions() -> tuple[Definition, ...]:
    """All of them, in the order in which one reads them."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return tuple(Definition(**line) for line in csv.DictReader(file))


def definition_of(metric: str) -> Definition | None:
    """The definition of a metric by its full name, "inpipe_class_fd" or "fid"; None for one that has none."""
    by_name = {name: each for each in reversed(definitions()) for name in each.names.split()}
    bare = _ON_INCEPTION.get(_DECODED.sub("", metric), metric)
    within = [name for name in by_name if f"_{name}_" in f"_{bare}_"]
    return by_name[max(within, key=len)] if within else None
