"""Differences between variants of a study: their intervals have the stated coverage."""

from __future__ import annotations

import csv
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from image_diffusion.core.files.atomic import write_json
from image_diffusion.metrics.study_statistics import (
    Measured,
    differences,
    is_ratio,
    level,
    moderated,
)


def runs(*values: float, deviation: float | None = None) -> list[Measured]:
    return [Measured(value, deviation) for value in values]


@pytest.mark.parametrize("metric", ["fid", "sfid", "fid_infinity", "fd_dinov2", "inpipe_class_fd", "rfid"])
def test_distances_are_compared_as_ratios(metric: str) -> None:
    assert is_ratio(metric)


@pytest.mark.parametrize(
    ("rows", "seeds", "unlike", "of_seeds"),
    [(1, 3, 0.0, 1.0), (4, 3, 0.5, 0.2), (13, 3, 0.0, 1.0), (13, 3, 1.0, 1.0), (13, 5, 0.5, 3.0)],
)
def test_intervals_cover_the_truth_in_19_of_20_cases(rows: int, seeds: int, unlike: float, of_seeds: float) -> None:
    """Sampling noise has variance 1; the seed noise of each row has a log-normal scale of width `unlike`."""
    draw = np.random.default_rng(1)
    hits = []
    for _ in range(800 // rows + 40):
        truth = draw.normal(size=rows + 1)
        noise = of_seeds * np.exp(unlike * draw.normal(size=rows + 1))
        values = truth[:, None] + noise[:, None] * draw.normal(size=(rows + 1, seeds))
        values += draw.normal(size=(rows + 1, seeds))
        found = differences("agreement", runs(*values[0]), {str(i): runs(*values[i]) for i in range(1, rows + 1)})
        for name, each in found.items():
            assert each.interval is not None
            hits.append(each.interval[0] <= truth[int(name)] - truth[0] <= each.interval[1])
    assert 0.90 <= np.mean(hits) <= 0.98


def test_lower_distance_ratio_is_better() -> None:
    rows = {"half": runs(50.0, 51, 49), "same": runs(100.0, 101, 98), "twice": runs(200.0, 202, 196)}
    found = differences("inpipe_fd", runs(100.0, 102, 98), rows)
    assert found["half"].value == pytest.approx(-0.5, abs=0.01)
    assert [each.verdict for each in found.values()] == ["better", "within noise", "worse"]
    interval = found["twice"].interval
    assert interval is not None and interval[0] < found["twice"].value < interval[1]
    assert differences("inpipe_agreement", runs(0.5, 0.51), {"a": runs(0.9, 0.91)})["a"].verdict == "better"


def test_metrics_without_a_better_direction_have_no_verdict() -> None:
    base, rows = runs(0.5, 0.505, 0.495), {"less": runs(0.4, 0.405, 0.395), "same": runs(0.5, 0.506, 0.495)}
    for metric in ("inpipe_c2st", "copies", "psnr_bicubic", "unknown"):
        found = differences(metric, base, rows)
        assert [each.verdict for each in found.values()] == [None, "within noise"] and found["less"].interval


def test_variant_at_or_below_zero_does_not_affect_ratios_of_others() -> None:
    base, rows = runs(12.0, 11, 12.5), {"below": runs(-0.1, 0.2, 0.3), "less": runs(9.0, 8, 8.5)}
    found = differences("fd_infinity", base, rows)
    assert [*found] == ["below", "less"]
    assert found["less"] == differences("fd_infinity", base, {"less": rows["less"]})["less"]
    assert (found["less"].is_ratio, found["below"].is_ratio) == (True, False)
    assert found["below"].value == pytest.approx(0.4 / 3 - 35.5 / 3)


def test_difference_of_one_seed_has_an_interval_over_samples_only() -> None:
    found = differences("agreement", runs(0.8, deviation=0.03), {"a": runs(0.9, deviation=0.04)})["a"]
    assert found.over == "samples only" and found.verdict == "better"
    assert found.interval == pytest.approx((0.1 - 1.96 * 0.05, 0.1 + 1.96 * 0.05))
    unknown = differences("agreement", runs(0.8), {"a": runs(0.9)})["a"]
    assert (unknown.interval, unknown.verdict, unknown.over) == (None, None, None)


def test_rows_without_runs_or_base_are_left_out() -> None:
    assert set(differences("agreement", runs(0.8, 0.9), {"a": [], "b": runs(0.7, 0.8)})) == {"b"}
    assert differences("agreement", [], {"b": runs(0.7, 0.8)}) == {}


def test_variances_are_moderated_as_far_as_they_agree() -> None:
    alike = moderated([1.0, 1.1, 0.9, 1.05], [2, 2, 2, 2])
    assert all(variance == pytest.approx(1.0125) and freedom == 8 for variance, freedom in alike)
    unlike = moderated([1e-4, 1.0, 1e4, 1e8], [2, 2, 2, 2])
    assert [variance for variance, _ in unlike] == sorted(variance for variance, _ in unlike)
    assert all(2 < freedom < 3 for _, freedom in unlike)
    assert moderated([0.0, 0.0], [2, 2]) == [(0.0, 2.0), (0.0, 2.0)]
    assert not math.isnan(moderated([0.0, 1.0], [1, 1])[0][0])


@pytest.mark.parametrize(("rows", "seeds", "unlike"), [(1, 3, 0.0), (1, 2, 0.0), (13, 3, 0.0), (13, 3, 1.0)])
@pytest.mark.parametrize("metric", ["agreement", "inpipe_fd"])
def test_at_most_1_in_20_null_changes_is_called_better(metric: str, rows: int, seeds: int, unlike: float) -> None:
    """One row compares two experiments. The noise of a distance grows with its value."""
    draw = np.random.default_rng(2)
    verdicts = []
    for _ in range(1600 // rows + 40):
        noise = 0.05 * np.exp(unlike * draw.normal(size=rows + 1))
        values = 1 + noise[:, None] * draw.normal(size=(rows + 1, seeds))
        values = np.exp(values) if metric == "inpipe_fd" else values
        found = differences(metric, runs(*values[0]), {str(i): runs(*values[i]) for i in range(1, rows + 1)})
        verdicts += [each.verdict for each in found.values()]
    assert verdicts.count("better") / len(verdicts) <= 0.05
    assert verdicts.count("worse") / len(verdicts) <= 0.05


@pytest.mark.parametrize(("metric", "seeds"), [("agreement", 3), ("agreement", 5), ("inpipe_fd", 3)])
def test_intervals_of_levels_cover_the_true_means(metric: str, seeds: int) -> None:
    draw = np.random.default_rng(3)
    hits_seeds, hits_samples = [], []
    for _ in range(1000):
        trained = 0.5 + 0.1 * draw.normal(size=seeds)  # true value of each training
        values = trained + 0.05 * draw.normal(size=seeds)  # values measured on its images
        log = metric == "inpipe_fd"
        each = [Measured(math.exp(v), 0.05 * math.exp(v)) if log else Measured(float(v), 0.05) for v in values]
        found = level(metric, each)
        assert found.over_seeds is not None and found.over_samples is not None
        truth, of_these = (math.exp(x) if log else x for x in (0.5, float(trained.mean())))
        hits_seeds.append(found.over_seeds[0] <= truth <= found.over_seeds[1])
        hits_samples.append(found.over_samples[0] <= of_these <= found.over_samples[1])
    assert 0.90 <= np.mean(hits_seeds) <= 0.98 and 0.90 <= np.mean(hits_samples) <= 0.98


def test_one_seed_gives_no_interval_over_seeds() -> None:
    found = level("agreement", runs(0.8, deviation=0.03))
    assert found.over_seeds is None and found.over_samples == pytest.approx((0.8 - 1.96 * 0.03, 0.8 + 1.96 * 0.03))
    assert level("agreement", runs(0.8, 0.9)).over_samples is None


def test_intervals_of_shares_stay_between_0_and_1() -> None:
    seeds = level("inpipe_recall", runs(0.01, 0.99)).over_seeds
    assert seeds == (0.0, 1.0)
    density = level("inpipe_density", runs(0.01, 0.99)).over_seeds
    assert density is not None and density[0] < 0 and density[1] > 1


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module workflow/scripts/study.py."""
    scripts = Path(__file__).parents[2] / "workflow" / "scripts"
    monkeypatch.syspath_prepend(str(scripts))
    spec = importlib.util.spec_from_file_location("study_page", scripts / "study.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "study_page", module)
    spec.loader.exec_module(module)
    return module


def test_only_metrics_of_an_unreliable_detector_are_left_out(study: ModuleType, tmp_path: Path) -> None:
    unreliable, near = "the judge guesses", "this many do not tell the samples from real images"
    metrics = {
        name: {"value": 0.5, "interval": None, "doubt": doubt}
        for name, doubt in (("inpipe_fd", near), ("inpipe_kd", unreliable), ("copies", None))
    }
    write_json(tmp_path / "one/metrics.json", {"metrics": metrics, "doubt": unreliable, "doubts": [unreliable]})
    write_json(tmp_path / "one/train/model.json", {"step": 8, "examples_seen": 64})
    run = study.read_run("one", 0, tmp_path, tmp_path)
    assert set(run.metrics) == {"inpipe_fd", "copies"}
    other = study.Run("two", 1, {"copies": Measured(0.5)})
    lines = study.compared([study.Variant("base", None, {}, [run, other])], ["inpipe_fd"])
    assert "inpipe_fd of base is over 1 of 2 runs" in study.method(lines, [0, 1])


def test_page_and_tables_show_each_number_with_both_intervals(study: ModuleType) -> None:
    def variant(name: str, *values: float) -> Any:
        runs = [study.Run(name, seed, {"inpipe_kd": Measured(value, 0.01)}) for seed, value in enumerate(values)]
        return study.Variant(name, None, {}, runs)

    plan = {"study": "seeds", "base": "one", "seeds": [0, 1, 2], "budget": {"steps": None, "operations": None}}
    base = variant("base", 0.5, 0.52, 0.48)
    lines = study.compared([base], ["inpipe_kd"])
    assert lines[0].cells() == ["inpipe_kd", "base", "0.5", "0.4503 to 0.5497", "0.4887 to 0.5113", "", ""]
    page, table = study.page(plan, [base], lines, Path("results")), study.markdown(plan, [base], lines)
    assert "one; seeds 0, 1, 2" in page and "0.4503 to 0.5497" in page and "against the base" not in page + table
    assert "0.4887 to 0.5113" in table
    [row] = csv.DictReader(study.as_csv(lines, [0, 1, 2]).splitlines())
    assert (row["seed_1"], row["difference"]) == ("0.52", "") and float(row["seeds_low"]) == pytest.approx(0.4503, 1e-3)

    both = [base, variant("other", 0.1, 0.12, 0.11)]
    lines = study.compared(both, ["inpipe_kd"])
    page, table = study.page(plan, both, lines, Path("results")), study.markdown(plan, both, lines)
    assert "Welch" in page and 'class="tight better"' in page and "| better |" in table
    assert lines[0].difference is None and lines[1].difference.verdict == "better"
    assert "2 runs, as long as the base says." in page and "where a run has no interval" not in page
    for each, steps in zip(both, (800, 1600), strict=True):
        for run in each.runs:
            run.steps, run.metrics["inpipe_kd"] = steps, Measured(0.5, None)
    lines = study.compared(both, ["inpipe_kd"])
    assert "2 runs, of 800 to 1,600 steps." in study.summary(plan, both)
    assert "1 runs, 800 steps each." in study.summary(plan, [base])
    assert "where a run has no interval" in study.method(lines, [0, 1, 2])


def test_equal_runs_keep_the_noise_of_their_samples() -> None:
    base, variant = [Measured(1.0, 0.013)] * 3, [Measured(0.99, 0.0117)] * 3
    difference = differences("inpipe_agreement", base, {"v": variant})["v"]
    assert difference.interval is not None and difference.interval[1] - difference.interval[0] > 0.02
    assert difference.verdict == "within noise"
    interval = level("inpipe_agreement", variant).over_seeds
    assert interval is not None and interval[1] - interval[0] > 0.02
