"""Unreliable metrics: where they are reported, and where they are left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from image_diffusion.core.files.atomic import write_json
from image_diffusion.core.journal.reader import read_journal, read_journals
from image_diffusion.metrics.compute import floor_doubt
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.distances.jackknife import Estimate
from image_diffusion.metrics.evaluate_samples import RealImages, evaluate_samples
from image_diffusion.metrics.features.classifier import judge_doubt, load_detector
from image_diffusion.metrics.features.classifier_training import DetectorTraining, train_detector
from image_diffusion.metrics.samples import Samples
from image_diffusion.stages import evaluate

SCRIPTS = Path(__file__).parents[2] / "workflow" / "scripts"


@pytest.mark.parametrize(
    ("accuracy", "n", "chance", "labels", "believed"),
    [
        (5 / 33, 33, 1 / 12, "classes", False),  # an observed case: mosaics scored better than photographs
        (5 / 33, 33_000, 1 / 12, "classes", False),  # significantly better than a guess, but useless
        (0.677, 2000, 0.1, "classes", True),
        (0.9, 1000, 0.9, "classes", False),  # one class is nine tenths of the images
        (0.3, 100, 0.25, "rotation", False),
        (0.6, 100, 0.25, "rotation", True),
        (1.0, 4, 0.1, "classes", True),
        (0.5, 4, 0.25, "classes", False),
    ],
)
def test_classifier_near_chance_is_doubted(accuracy: float, n: int, chance: float, labels: str, believed: bool):
    doubt = judge_doubt({"accuracy": accuracy, "num_held_out": n, "chance": chance, "labels": labels})
    assert (doubt is None) is believed
    if doubt is not None:
        assert f"right for {accuracy:.0%} of {n:,} held-out images, and a guess for {chance:.0%}" in doubt


@pytest.mark.parametrize(
    ("name", "made", "real", "believed"),
    [
        ("fd", Estimate(3.87, 33), Estimate(8.77, 33), False),
        ("fd", Estimate(9.1, 33), Estimate(8.77, 33), True),
        ("fd", Estimate(9.0, 200, 1.2, (1.0, 1.4)), Estimate(8.0, 200, 1.0, (0.7, 1.3)), False),
        ("fd", Estimate(9.0, 200, 1.4, (1.2, 1.6)), Estimate(8.0, 200, 1.0, (0.7, 1.3)), True),
        ("agreement", Estimate(0.9, 200), Estimate(0.95, 200), True),  # not a distance
    ],
)
def test_distances_within_the_floor_are_doubted(name: str, made: Estimate, real: Estimate, believed: bool):
    assert (floor_doubt(name, made, real) is None) is believed


def noise(count: int, seed: int) -> Samples:
    """Return images that are independent of their class."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
    return Samples(pixels, np.arange(count) % 12, [f"class {number}" for number in range(12)], digest=f"set {seed}")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("detector")
    data = RealImages(noise(300, 0), noise(33, 1))
    train_detector(data.train, data.validation, DetectorTraining(least_examples=300, epochs=1), folder)
    detector = load_detector(folder)
    return evaluate_samples(noise(64, 2), data, [detector], EvaluateConfig())


def test_floor_and_samples_are_compared_at_equal_counts(result: dict[str, Any]):
    found = result["metrics"]["inpipe_fd"]
    assert found["n"] == 64 and found["floor_n"] == 33
    assert found["ratio"] == pytest.approx(found["at_floor_n"] / found["floor"])
    assert found["at_floor_n"] > found["value"]  # the distance of fewer images is larger


def test_doubted_metric_is_not_a_headline(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert result["doubt"].startswith("this data set is too small to judge by its own classes: the classifier is right")
    assert result["metrics"]["inpipe_fd"]["doubt"] == result["doubt"] and result["metrics"]["copies"]["doubt"] is None

    written = tmp_path / "results" / "mine"
    monkeypatch.setattr(evaluate, "measure", lambda *_: result)
    monkeypatch.setattr(evaluate, "evaluation_settings", lambda *_: EvaluateConfig())
    monkeypatch.setattr(evaluate, "open_shards", lambda *_, **__: noise(1, 0))
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "evaluate",
            *f"--config - --data {tmp_path} --journal {written}/journal --output {written}/metrics.json".split(),
        ],
    )
    evaluate.main()
    printed = capsys.readouterr().out
    assert f"Do not rely on these numbers: {result['doubt']}." in printed
    names = printed.partition(f"{result['doubt']}. These are ")[2].partition(".\n")[0].split(", ")
    assert "inpipe_fd" in names and "copies" not in names
    history = read_journal(written / "journal" / "evaluate")
    assert history is not None
    keys = {point.key for point in history.points}
    assert "doubted/inpipe_fd" in keys and "inpipe_fd" not in keys  # MLflow ranks runs by the second
    assert history.params["doubt"] == result["doubt"]

    write_json(written / "config" / "plan.json", {"headline": "inpipe_fd", "system": "dit", "dataset": "a-16"})
    write_json(written / "train" / "model.json", {"step": 300})
    page = tmp_path / "summary.html"
    command = [sys.executable, SCRIPTS / "summary.py", "--results", tmp_path / "results", "--experiments", "mine"]
    told = subprocess.run([*command, "--output", page], check=True, capture_output=True, text=True).stdout
    for shown in (told, page.read_text()):
        assert "no headline: this data set is too small" in shown
        assert f"{result['metrics']['inpipe_fd']['value']:.4g}" not in shown


def test_an_evaluation_of_other_samples_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "measure", killed)
    monkeypatch.setattr(evaluate, "evaluation_settings", lambda *_: EvaluateConfig())
    monkeypatch.setattr(evaluate, "open_shards", lambda *_, **__: noise(1, 0))
    files = f"--config - --data {tmp_path} --samples {tmp_path}/samples.npz --output {tmp_path}/metrics.json"
    monkeypatch.setattr(sys, "argv", ["evaluate", *files.split(), "--journal", str(tmp_path / "journal")])
    for sampler in ("ddim", "ddim", "heun"):
        write_json(tmp_path / "samples.json", {"settings": {"sampler": sampler}})
        with pytest.raises(KeyboardInterrupt):
            evaluate.main()
    runs = read_journals(tmp_path / "journal" / "evaluate")
    assert [len(run.starts) for run in runs] == [2, 1]
