"""What a stage asks a machine for. Each answer is a function of a job's wildcards, as Snakemake's resources are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from image_diffusion.workflow.plans import Plans, Wildcards

ALL_CORES = 1024
"""Threads that no machine has: Snakemake gives a job that asks for them every core, and so runs it alone."""


@dataclass(frozen=True)
class Machine:
    """Machines as the section `resources` of an experiment asks for them; --config NAME=NUMBER goes before it."""

    plans: Plans
    config: Mapping[str, Any]
    """The workflow's configuration."""
    queued: bool
    """Whether jobs are sent to a queue."""
    remote: bool
    """Whether this is a job that was sent."""

    def _asked(self, name: str, wildcards: Wildcards) -> int:
        return int(self.config.get(name, self.plans.of(wildcards).resources[name]))

    # ---- One process

    def cpus(self, wildcards: Wildcards) -> int:
        """CPU cores of a process."""
        return self._asked("cpus_per_process", wildcards)

    def threads(self, wildcards: Wildcards) -> int:
        """The same on this machine, where stages that use its GPU run one at a time."""
        return ALL_CORES if self._alone(wildcards) else self.cpus(wildcards)

    def one_gpu(self, wildcards: Wildcards) -> str | None:
        """One GPU, where the experiment uses any."""
        return self._gpus(min(1, self._asked("gpus_per_node", wildcards)))

    def memory_mb(self, wildcards: Wildcards) -> int:
        """Memory, in MB."""
        return self._asked("memory_mb", wildcards)

    def runtime_min(self, wildcards: Wildcards) -> int:
        """Time for one job, in minutes."""
        return self._asked("runtime_min", wildcards)

    # ---- Training, on nodes of several processes

    def nodes(self, wildcards: Wildcards) -> int:
        """Machines that train together."""
        return self._asked("nodes", wildcards)

    def processes(self, wildcards: Wildcards) -> int:
        """Processes of each node."""
        return self._asked("processes_per_node", wildcards)

    def training_cpus(self, wildcards: Wildcards) -> int:
        """CPU cores of each node."""
        return self.processes(wildcards) * self.cpus(wildcards)

    def training_threads(self, wildcards: Wildcards) -> int:
        """The same on this machine, where stages that use its GPU run one at a time."""
        return ALL_CORES if self._alone(wildcards) else self.training_cpus(wildcards)

    def gpus(self, wildcards: Wildcards) -> str | None:
        """The GPUs of each node; none on CPUs."""
        return self._gpus(self._asked("gpus_per_node", wildcards))

    def tasks(self, wildcards: Wildcards) -> int | None:
        """Tasks of a job on several nodes, one on each; a job on one node has no such resource."""
        nodes = self.nodes(wildcards)
        return nodes if nodes > 1 else None

    def mpi(self, wildcards: Wildcards) -> str | None:
        """That a job on several nodes starts its tasks itself; a job on one node has no such resource."""
        return "srun" if self.nodes(wildcards) > 1 else None

    # ---- Attempts

    def attempts(self, number: int) -> int:
        """How often a job that a queue has lost is sent again. Inside the job, and on this machine, it is not."""
        return number if self.queued and not self.remote else 0

    def _alone(self, wildcards: Wildcards) -> bool:
        return self._asked("gpus_per_node", wildcards) > 0 and not self.remote

    def _gpus(self, number: int) -> str | None:
        """In Slurm's words: gpu:a100:8."""
        kind = (self.config.get("slurm") or {}).get("gpu_type")
        return ":".join(["gpu", *([kind] if kind else []), str(number)]) if number else None
