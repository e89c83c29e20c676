"""Published figures: every full-sized recipe measures what it cites, and metrics.json compares the two."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from image_diffusion.core.config.base import load
from image_diffusion.core.files.atomic import write_json
from image_diffusion.experiments.experiment import load_experiment
from image_diffusion.metrics.config import EvaluateConfig, PublishedResult, compare_with_published
from image_diffusion.metrics.evaluate_samples import _protocol_settings
from image_diffusion.stages.export import Published
from recipes import FULL, ROOT

FIGURE = re.compile(r"\b(?:FID-50K|FID|bits/dim)\b")
FID = PublishedResult(metric="fid", value=2.27, source="a paper", differences=("Longer.",))


def head(path: Path) -> str:
    return " ".join(line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#"))


@pytest.mark.parametrize("path", FULL, ids=lambda path: path.stem)
def test_recipes_measure_the_metrics_they_cite(path: Path) -> None:
    experiment, text = load_experiment(path), head(path)
    cited = getattr(experiment.evaluate, "published", ())
    assert bool(cited) == bool(FIGURE.search(text)), "what the head cites stands in evaluate.published, and the reverse"
    for figure in cited:
        assert f"{figure.value:g}" in text and figure.source and figure.differences
        of_detectors = {
            each.metric_name(name) for each in experiment.evaluate.detectors for name in ("fd", "spatial_fd", "score")
        }
        measured = of_detectors | ({"bits_per_dim"} if experiment.evaluate.likelihood else set())
        assert figure.metric in measured, f"{figure.metric} is not measured: {sorted(measured)}"
    if cited:
        assert experiment.samples is not None and experiment.samples.num_samples == 50_000
        assert experiment.data.validation_fraction > 0, "a floor of real images takes some that are held out"


@pytest.mark.parametrize("path", sorted((ROOT / "config/published").glob("*.yaml")), ids=lambda path: path.stem)
def test_figures_cited_for_a_checkpoint_name_their_source(path: Path) -> None:
    for figure in load(Published, path).cited:
        assert figure.metric in ("fid", "bits_per_dim") and figure.value > 0
        assert re.search(r"arXiv:\d{4}\.\d{5}|https://github.com/", figure.source) and figure.differences


def entry(value: float, debiased: float | None, interval: list[float] | None, doubt: str | None = None) -> Any:
    return {"value": value, "debiased": debiased, "interval": interval, "n": 50_000, "doubt": doubt}


def test_interval_is_shifted_by_the_bias_of_published_numbers() -> None:
    """Published distances at 50,000 samples include their bias: 2.25 here, of which 0.4 is bias."""
    [found] = compare_with_published([FID], {"fid": entry(2.25, 1.85, [1.75, 1.95])})
    assert found["interval"] == pytest.approx([2.15, 2.35]) and found["inside"] is True and found["ours"] == 2.25
    [found] = compare_with_published([FID], {"fid": entry(2.5, 2.1, [2.0, 2.2])})
    assert found["inside"] is False and found["differences"] == ["Longer."]


@pytest.mark.parametrize("entries", [{}, {"fid": entry(2.3, 2.0, [1.9, 2.1], "it guesses")}])
def test_missing_or_doubted_metrics_are_not_compared(entries: Any) -> None:
    [found] = compare_with_published([FID], entries)
    assert found["ours"] is None and found["interval"] is None and found["inside"] is None and found["value"] == 2.27


def test_metric_without_interval_is_not_marked_inside() -> None:
    [found] = compare_with_published([FID], {"fid": entry(2.3, None, None)})
    assert found["ours"] == 2.3 and found["inside"] is None


def test_cited_figures_do_not_change_the_protocol() -> None:
    assert _protocol_settings(EvaluateConfig(published=(FID,))) == _protocol_settings(EvaluateConfig())


def test_report_page_shows_own_and_published_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "workflow/scripts"))
    monkeypatch.delitem(sys.modules, "report", raising=False)
    import report

    ours = entry(2.25, 1.85, [1.75, 1.95]) | {"n": 50, "note": None}
    judged = {"metrics": {"fid": ours}, "protocol": {}}
    for published, shown in ((compare_with_published([FID], {"fid": ours}), True), ([], False)):
        write_json(tmp_path / "x" / "metrics.json", judged | {"published": published})
        page = report.page(tmp_path / "x", tmp_path / "d" / "crops", tmp_path / "b")
        for part in ("What others published", "2.27", "2.15 to 2.35", "<td>yes</td>", "Longer. From: a paper."):
            assert (part in page) == shown
