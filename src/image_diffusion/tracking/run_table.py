"""The table of runs with the columns that matter; MLflow's own has no column for a metric.

MLflow stores a view as JSON in a tag of its experiment, and a link refers to it.
"""

from __future__ import annotations

import json

TAG = "mlflow.sharedViewState.trainings"
"""Tag of the experiment that holds the view (MLflow 3.17; the user interface reads `selectedColumns`, and fills in the
rest)."""
LINK = "?viewStateShareKey=trainings&workflowType=machine_learning"
"""Suffix of the address of an experiment's runs. Without the last part MLflow opens its pages for language models."""

_LAST = "metrics.`validation/loss`"
EMPTY = json.dumps({"selectedColumns": ["tags.`data`", "params.`system.type`", "params.`train.steps`", _LAST]})
"""View before any metric of `evaluate` is known."""


def with_metric(view: str, metric: str) -> str | None:
    """Return the view with an added column for a metric of `evaluate`; None if it has one, or if a user saved a view of
    another form. view: the current tag.
    """
    column = f"metrics.`evaluate/{metric}`"
    try:
        columns = list(json.loads(view)["selectedColumns"])
    except (ValueError, KeyError, TypeError):
        return None
    if column in columns:
        return None
    place = columns.index(_LAST) if _LAST in columns else len(columns)
    return json.dumps({"selectedColumns": [*columns[:place], column, *columns[place:]]})
