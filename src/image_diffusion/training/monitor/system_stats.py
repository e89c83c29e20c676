"""Load of the machine of a training, for the journal. A reading between two steps takes microseconds."""

from __future__ import annotations

import contextlib

import psutil
import torch


class Machine:
    """The machine of the first process, and this process's GPU. Shares of the CPUs are means since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self._process = psutil.Process()
        self._device = device
        self.readings()  # from here on the first means are taken

    def readings(self) -> dict[str, float]:
        """Return the readings under the names that MLflow groups as system metrics."""
        memory = psutil.virtual_memory()
        values = {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/process_cpu_percentage": self._process.cpu_percent(),
            "system/memory_usage_percentage": memory.percent,
            "system/process_memory_gib": self._process.memory_info().rss / 2**30,
        }
        if self._device.type == "cuda":
            values["system/gpu_memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
            with contextlib.suppress(Exception):  # the driver does not tell everywhere, and training goes on
                values["system/gpu_utilization_percentage"] = float(torch.cuda.utilization(self._device))
                values["system/gpu_power_usage_watts"] = torch.cuda.power_draw(self._device) / 1000
        return values
