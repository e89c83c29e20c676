"""What a stage asks a machine for. Each answer is a function of a job's wildcards, as Snakemake's resources are."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_diffusion.core.files import read_json
from image_diffusion.workflow.plans import Plan, Plans, Wildcards

ALL_CORES = 1024
"""Threads that no machine has: Snakemake gives a job that asks for them every core, and so runs it alone."""

SIGNAL_LEAD_S = 120
"""Seconds before its time is up that training is told so, unless the site's slurm_extra has a --signal of its own."""

MORE_MEMORY = 1.5
"""How much more memory a job is sent with that ran out of it."""

_START_MIN = 10  # what a job has beside its work


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
    cores: int = 1
    """Cores of this machine that may be used."""
    devices: tuple[str, ...] = ()
    """The GPUs of this machine, where it has several and no queue gives them: each stage that uses one has its own."""
    limit: int | None = None
    """How many of those may be used at once, where --resources devices= says so."""
    _short: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def _asked(self, name: str, wildcards: Wildcards) -> int:
        return self._of(self.plans.of(wildcards), name)

    def _of(self, plan: Plan, name: str) -> int:
        asked = self.config.get(name, plan.resources[name])
        if asked is None:  # GPUs: on a cluster nobody gets one without asking for it
            return self._of(plan, "processes_per_node") if self.queued or self.remote else 0
        return int(asked)

    # ---- One process

    def cpus(self, wildcards: Wildcards) -> int:
        """CPU cores of a process."""
        return self._asked("cpus_per_process", wildcards)

    def threads(self, wildcards: Wildcards) -> int:
        """The same on this machine, where stages that use its only GPU run one at a time, and those that use one of
        several share its cores."""
        if self._alone(wildcards):
            return self._share() if self.devices else ALL_CORES
        return self.cpus(wildcards)

    def one_gpu(self, wildcards: Wildcards) -> str | None:
        """One GPU, where the experiment uses any."""
        return self._gpus(min(1, self._asked("gpus_per_node", wildcards)))

    def one_gpu_to_begin(self, wildcards: Wildcards, input: Any) -> str | None:
        """The same, unless several jobs have made the parts: joining them takes none."""
        return None if input.parts else self.one_gpu(wildcards)

    def one_device(self, wildcards: Wildcards) -> int | None:
        """One of several GPUs of this machine, where the experiment asks for any."""
        return 1 if self.devices and self._alone(wildcards) else None

    def one_device_to_begin(self, wildcards: Wildcards, input: Any) -> int | None:
        """The same, unless several jobs have made the parts."""
        return None if input.parts else self.one_device(wildcards)

    def devices_option(self, wildcards: Wildcards, resources: Any) -> list[str]:
        """How `logged` is told of how many. A function of the resources is none of the parameters that Snakemake makes
        results again for."""
        number = resources.get("devices")
        return ["--devices", str(number)] if number else []

    def memory_mb(self, wildcards: Wildcards, attempt: int = 1) -> int:
        """Memory in MB: a process's share of what the experiment trains with on each machine."""
        return -(-self.training_memory_mb(wildcards, attempt) // self.processes(wildcards))

    def runtime_min(self, wildcards: Wildcards) -> int:
        """Time for one job, in minutes."""
        return self._asked("runtime_min", wildcards)

    def sampling_min(self, wildcards: Wildcards) -> int:
        """Time for one of the jobs that make the samples, in minutes: what `doctor` has measured, with half as much in
        reserve, where it was asked; never more than for others."""
        longest, plan = self.runtime_min(wildcards), self.plans.of(wildcards)
        try:
            told = read_json(Path(self.config.get("results", "results"), plan.experiment, "doctor.json"))
            return int(min(longest, _START_MIN + math.ceil(1.5 * told["sample_s"] / plan.sample_jobs / 60)))
        except (ValueError, KeyError, TypeError):
            return longest

    def sampling_jobs(self, wildcards: Wildcards) -> int:
        """Jobs that make the samples at the same time: all of them where a queue has room, here one for each GPU."""
        plan = self.plans.of(wildcards)
        if self.queued or self.remote:
            return max(1, plan.sample_jobs)
        return max(1, min(self.jobs_at_once(plan), plan.most_sample_jobs))

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
        """The same on this machine (see `threads`)."""
        if self._alone(wildcards):
            return self._share() * self._processes_here(wildcards) if self.devices else ALL_CORES
        return self.training_cpus(wildcards)

    def training_devices(self, wildcards: Wildcards) -> int | None:
        """Those of several GPUs of this machine that the processes on it need, where they use any."""
        return self._processes_here(wildcards) if self.devices and self._alone(wildcards) else None

    def training_memory_mb(self, wildcards: Wildcards, attempt: int = 1) -> int:
        """Memory of each node, in MB: half as much more after each attempt that ran out of it."""
        short = self._short[_named(wildcards)] if attempt > 1 else 0
        return round(self._asked("memory_mb", wildcards) * MORE_MEMORY**short)

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

    def hang_s(self, wildcards: Wildcards) -> int:
        """Seconds that a process waits for another."""
        return self._asked("hang_s", wildcards)

    def stage_to(self, wildcards: Wildcards) -> str:
        """The folder of a node's own disk that its data are copied to; empty for none."""
        return str(self.plans.of(wildcards).resources["stage_to"])

    def grace_s(self, wildcards: Wildcards) -> int:
        """Seconds that training has to save and end: what lies between Slurm's signal and the end of the job's time,
        less half a minute for the way there and back."""
        site = self.config.get("slurm") or {}
        every, stages = site.get("every_stage") or {}, site.get("stages") or {}
        extra = {**every, **(stages.get("train") or {})}.get("slurm_extra") or ""
        given = re.search(r"--signal[= ]\S*@(\d+)", extra)
        return max(1, (int(given[1]) if given else SIGNAL_LEAD_S) - 30)

    # ---- Jobs that stages share

    def shared_job(self, wildcards: Wildcards) -> str | None:
        """What the job is called that a stage shares with others, where it does: those of an experiment, with the
        latents of its codec; and those of a data set, where every experiment on it wants that. A site that asks for
        something else for one stage has a job for each."""
        if not (self.queued or self.remote) or (self.config.get("slurm") or {}).get("stages"):
            return None
        keys = wildcards.keys()
        codec = self.plans.of(wildcards).codec_experiment if "codec" in keys else None
        experiment = wildcards["experiment"] if "experiment" in keys else codec
        if experiment:
            return experiment if self._is_small(self.plans.by_name[experiment]) else None
        dataset = wildcards["dataset"]
        users = (plan for plan in self.plans.by_name.values() if plan.dataset == dataset)
        return f"data_{dataset}" if all(map(self._is_small, users)) else None

    def _is_small(self, plan: Plan) -> bool:
        return bool(plan.resources["one_job"]) and self._of(plan, "nodes") == 1 and not self._of(plan, "gpus_per_node")

    # ---- Several GPUs of this machine

    @property
    def uses_gpus(self) -> bool:
        """Whether an experiment asks for GPUs, and no queue gives them."""
        wanted = any(self._of(plan, "gpus_per_node") > 0 for plan in self.plans.by_name.values())
        return wanted and not (self.queued or self.remote)

    @property
    def at_once(self) -> int:
        """How many are used at once: 0 where they are not told apart."""
        return len(self.devices) if self.limit is None else min(self.limit, len(self.devices))

    def jobs_at_once(self, plan: Plan) -> int:
        """Jobs of an experiment that use one each."""
        return max(1, self.at_once) if self._of(plan, "gpus_per_node") > 0 else 1

    def too_few_devices(self, trainings: Iterable[Wildcards]) -> str | None:
        """What to say where one of these trainings needs more than there are."""
        for wildcards in trainings:
            needed = self.training_devices(wildcards) or 0
            if needed > self.at_once:
                return (
                    f"{wildcards['experiment']} trains with {needed} processes, each of which needs a GPU of its own, "
                    f"and this machine has {self.at_once} to use at once. Set resources.processes_per_node to "
                    f"{self.at_once} (--config nodes=1 processes_per_node={self.at_once}), or use a larger one."
                )
        return None

    def _share(self) -> int:
        return max(1, self.cores // max(1, self.at_once))

    def _processes_here(self, wildcards: Wildcards) -> int:
        """Processes of a training that compute on this machine: all of them, unless Slurm has given it several."""
        nodes = 1 if "SLURM_JOB_ID" in os.environ else self.nodes(wildcards)
        return nodes * self.processes(wildcards)

    # ---- Attempts

    def attempts(self, number: int) -> int:
        """How often a job that a queue has lost is sent again. Inside the job, and on this machine, it is not."""
        return number if self.queued and not self.remote else 0

    def ran_out_of_memory(self, wildcards: Wildcards) -> int:
        """Have the next attempt ask for more; how often it has been so for these wildcards."""
        self._short[_named(wildcards)] += 1
        return self._short[_named(wildcards)]

    def _alone(self, wildcards: Wildcards) -> bool:
        return self._asked("gpus_per_node", wildcards) > 0 and not self.remote

    def _gpus(self, number: int) -> str | None:
        """In Slurm's words: gpu:a100:8."""
        kind = (self.config.get("slurm") or {}).get("gpu_type")
        return ":".join(["gpu", *([kind] if kind else []), str(number)]) if number else None


def _named(wildcards: Wildcards) -> tuple[str, ...]:
    return tuple(f"{key}={wildcards[key]}" for key in sorted(wildcards.keys()))
