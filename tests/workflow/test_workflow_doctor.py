"""The rule `doctor` forecasts an experiment on request, before any training."""

from __future__ import annotations

import json

import pytest
import torch
from projects import Project

from image_diffusion.core.devices import REQUESTED
from image_diffusion.core.texts import duration

pytestmark = pytest.mark.slow


def test_doctor_refuses_too_large_experiment_and_forecasts_fitting_one(
    fresh: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.edit(lambda experiment: experiment.setdefault("resources", {}).update(memory_mb=1))
    refused = fresh.snakemake("results/micro/doctor.json")
    assert refused.returncode != 0
    assert "GiB of memory, but 0.00 GiB may be used. Make train.microbatch smaller" in refused.stdout

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # PyTorch here has neither
    fresh.edit(lambda experiment: experiment["resources"].update(memory_mb=8000, gpus_per_node=1))
    if not torch.cuda.is_available():
        without = fresh.snakemake("results/micro/doctor.json")
        assert without.returncode != 0 and "1 GPU requested (resources.gpus_per_node)" in without.stdout
    monkeypatch.setenv(REQUESTED, "")  # the CPU stands in
    told = fresh.run("results/micro/doctor.json")
    forecast = json.loads((fresh / "results" / "micro" / "doctor.json").read_text())
    assert "images/s" in told and f"{forecast['parameters']:,} parameters" in told
    assert 0 < forecast["memory_gib"] < forecast["memory_limit_gib"]
    assert forecast["sample_s"] > 0
    assert f"samples {duration(forecast['sample_s'] / 2)} by 2 jobs side by side" in told
    assert 0 < forecast["save_s"] < 90 and " of 1.5 min when time is up" in told
    assert not (fresh / "results" / "micro" / "train").exists()
    assert "doctor" not in fresh.planned()
