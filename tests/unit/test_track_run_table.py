"""The default table of runs in MLflow."""

from __future__ import annotations

import json

import pytest

from image_diffusion.tracking.connection import EMPTY_VIEW, view_with_metric


def test_metric_column_is_added_once_before_the_loss() -> None:
    view = view_with_metric(EMPTY_VIEW, "fid")
    assert view is not None
    assert json.loads(view)["selectedColumns"][-2:] == ["metrics.`evaluate/fid`", "metrics.`validation/loss`"]
    assert view_with_metric(view, "fid") is None
    both = view_with_metric(view, "inpipe_fd")
    assert both is not None and json.loads(both)["selectedColumns"][-3:-1] == [
        "metrics.`evaluate/fid`",
        "metrics.`evaluate/inpipe_fd`",
    ]


def test_columns_chosen_by_users_are_kept() -> None:
    view = view_with_metric(json.dumps({"selectedColumns": ["tags.`mine`"]}), "fid")
    assert view is not None and json.loads(view)["selectedColumns"] == ["tags.`mine`", "metrics.`evaluate/fid`"]


@pytest.mark.parametrize("view", ["deflate;abc", "[]", "{}", "null", '{"selectedColumns": null}'])
def test_a_view_in_another_form_stays(view: str) -> None:
    assert view_with_metric(view, "fid") is None
