"""System metrics: present and within their ranges."""

from __future__ import annotations

import psutil
import torch

from image_diffusion.training.monitor.reports import Machine


def test_readings_are_within_their_ranges() -> None:
    machine = Machine(torch.device("cpu"))
    kept = bytearray(b"x") * 2**26
    values = machine.readings()
    assert all(key.startswith("system/") for key in values)
    assert 0 <= values["system/cpu_utilization_percentage"] <= 100
    assert 0 < values["system/memory_usage_percentage"] <= 100
    assert len(kept) / 2**30 < values["system/process_memory_gib"] < psutil.virtual_memory().total / 2**30


def test_cpu_use_of_a_busy_process_is_measured() -> None:
    machine = Machine(torch.device("cpu"))
    started = psutil.Process().cpu_times().user
    while psutil.Process().cpu_times().user - started < 0.2:
        pass
    assert machine.readings()["system/process_cpu_percentage"] > 5
