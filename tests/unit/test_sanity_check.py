"""Self-test of metrics: a detector that cannot distinguish degraded images from real ones gives no headline."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from image_diffusion.core.files.atomic import write_json
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.evaluate_samples import RealImages, evaluate_samples
from image_diffusion.metrics.features.base import Detected
from image_diffusion.metrics.samples import Samples
from image_diffusion.metrics.sanity_check import degraded, degraded_half, halves, run_self_test
from image_diffusion.stages.evaluate import _tracked_metrics
from image_diffusion.workflow.terminal import _line

SETTINGS = EvaluateConfig(copies=False)


def stripes(count: int, seed: int) -> Samples:
    """Return noisy stripes: detail that blur and fading remove."""
    rng = np.random.default_rng(seed)
    pixels = rng.normal(128, 40, (count, 16, 16, 3)) + 40 * (np.arange(16) % 2 * 2 - 1)[:, None]
    labels = np.zeros(count, np.int64)
    return Samples(np.clip(pixels, 0, 255).astype(np.uint8), labels, ["all"], digest=f"set {seed}")


class Judge:
    """A detector of the mean and deviation of colours; a `blind` one returns constant features."""

    classes: list[str] = []  # noqa: RUF012
    doubt: str | None = None

    def __init__(self, name: str, blind: bool = False) -> None:
        self.identity: dict[str, Any] = {"name": name, "sha256": name}
        self._blind = blind

    def __call__(self, images: Tensor) -> Detected:
        if self._blind:  # independent of the image, so that a faded image is no farther away
            return Detected(torch.ones(len(images), 6))
        pixels = images.float().flatten(2) / 255
        return Detected(torch.cat([pixels.mean(2), pixels.std(2)], dim=1))

    def metric_name(self, metric: str) -> str:
        return f"{self.identity['name']}_{metric}"


@pytest.fixture(scope="module")
def data() -> RealImages:
    return RealImages(stripes(200, 0), stripes(60, 1))


def test_working_detector_passes_and_keeps_its_headline(data: RealImages):
    result = evaluate_samples(stripes(120, 2), data, [Judge("seeing")], SETTINGS)
    assert set(result["self_test"]) == {"seeing_fd", "seeing_kd"} and result["doubt"] is None
    for entry in result["self_test"].values():
        assert entry["n"] == 100 and entry["passed"] and entry["half"] < entry["degraded"]


def test_blind_detector_loses_its_headline_in_file_mlflow_and_page(data: RealImages, tmp_path: Path):
    result = evaluate_samples(stripes(120, 2), data, [Judge("blind", blind=True), Judge("seeing")], SETTINGS)
    assert not result["self_test"]["blind_fd"]["passed"] and result["self_test"]["seeing_fd"]["passed"]
    assert "the self-test of blind_fd failed: 100 real images" in result["doubt"]
    assert result["metrics"]["blind_fd"]["doubt"] == result["doubt"] == result["doubts"][0]
    assert result["metrics"]["seeing_fd"]["doubt"] != result["doubt"] and len(result["doubts"]) == 1
    tracked = dict(_tracked_metrics(result))
    assert "doubted/blind_fd" in tracked and "blind_fd" not in tracked
    write_json(tmp_path / "metrics.json", result)
    plan: Any = type("Plan", (), {"experiment": "mine", "headline": "blind_fd"})
    line = _line(plan, tmp_path)
    assert line is not None and line[2] == "not to rely on"


def test_self_test_gives_the_same_values_without_a_validation_split(data: RealImages):
    whole = evaluate_samples(stripes(120, 2), data, [Judge("seeing")], SETTINGS)["self_test"]
    found = run_self_test([Judge("seeing")], data.train)
    assert {name: entry["degraded"] for name, entry in found.items()} == pytest.approx(
        {name: entry["degraded"] for name, entry in whole.items()}
    )
    assert run_self_test([Judge("seeing")], stripes(39, 3)) == {}, "too few images to be halved"


def test_halves_are_disjoint_and_the_second_is_degraded(data: RealImages):
    first, second = halves(data.train.num_samples)
    assert len(first) == len(second) == 100 and not set(first) & set(second)
    assert [len(half) for half in halves(10_000)] == [2500, 2500] and [len(half) for half in halves(39)] == [0, 0]
    before = data.train.gather(second[:5])
    after = degraded_half(data.train).gather(np.arange(5))
    assert torch.equal(after, degraded(before)) and after.shape == before.shape and after.dtype == torch.uint8
    assert float(after.float().std()) < float(before.float().std()) / 2
    assert abs(float(after.float().mean()) - (63.75 + float(before.float().mean()) / 2)) < 0.5


def test_doubted_detector_keeps_its_own_reason(data: RealImages):
    judge = copy.copy(Judge("blind", blind=True))
    judge.doubt = "it guesses"
    assert evaluate_samples(stripes(120, 2), data, [judge], SETTINGS)["doubt"] == "it guesses"
