"""Forecast of the time to save a checkpoint, and advice on the time limit's signal lead."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from image_diffusion.training import forecast
from image_diffusion.training.forecast import seconds_to_save, signal_lead_advice
from image_diffusion.workflow.resources import Machine
from plans import a_plan, plans_of


def test_save_time_scales_with_size_and_probe_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 0.0, 2.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(forecast, "_PROBE", 16 << 20)
    written: list[int] = []
    monkeypatch.setattr(forecast, "sha256_file", lambda path: written.append(path.stat().st_size))
    assert seconds_to_save(160 << 20, tmp_path / "not" / "there") == 20.0
    assert seconds_to_save(4 << 20, tmp_path) == 1.0, "two seconds for the eight that are written"
    assert written == [16 << 20, 8 << 20]
    assert not list(tmp_path.iterdir())


def test_following_the_signal_lead_advice_removes_it() -> None:
    assert signal_lead_advice(80.0, 90.0) is None
    said = signal_lead_advice(200.0, 90.0)
    assert said is not None
    slurm = yaml.safe_load(said.split("config.yaml: ")[1].rstrip("."))
    machine = Machine(plans_of(a_plan()), slurm, queued=True, remote=False)
    assert signal_lead_advice(200.0, machine.grace_s({"experiment": "one"})) is None
