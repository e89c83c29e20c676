"""Resources that a stage asks a machine for. Each is a function of a job's wildcards, as Snakemake's resources are."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from image_diffusion.core.files.atomic import read_json
from image_diffusion.workflow.gpu_requests import NAMES, gpu_request, number_of_gpus
from image_diffusion.workflow.jobs.slurm_queue import count_out_of_memory
from image_diffusion.workflow.plans import Plan, Plans, Wildcards, has

ALL_CORES = 1024
"""Threads that no machine has: Snakemake gives a job that asks for them every core, and so runs it alone."""

SIGNAL_LEAD_S = 120
"""Seconds before the end of its time at which training is signalled, unless the site's slurm_extra has a --signal of
its own."""

MORE_MEMORY = 1.5
"""Factor of the memory that a job asks for after an attempt that ran out of it."""
MOST_OUT_OF_MEMORY = 3
"""Largest number of times that it is applied."""

_START_MIN = 10  # what a job has beside its work


@dataclass(frozen=True)
class Machine:
    """Machines as the section `resources` of an experiment asks for them; --config NAME=NUMBER goes before it."""

    plans: Plans
    config: Mapping[str, Any]
    """The workflow's configuration."""
    queued: bool
    """True if jobs are sent to a queue."""
    remote: bool
    """True if this is a job that was sent."""
    cores: int = 1
    """Cores of this machine that may be used."""
    devices: tuple[str, ...] = ()
    """The GPUs of this machine, where it has several and no queue gives them: each stage that uses one has its own."""
    limit: int | None = None
    """Number of these GPUs that may be used at once, if --resources devices= says so."""
    executor: Callable[[], str] = lambda: "local"
    """Return the name of Snakemake's executor, which is known when jobs are planned."""
    since: float = field(default_factory=time.time)
    """When Snakemake started, in seconds since 1970."""

    def _requested(self, name: str, wildcards: Wildcards) -> int:
        return self._resources_of(self.plans.plan_for(wildcards), name)

    def _resources_of(self, plan: Plan, name: str) -> int:
        value = self.config.get(name, plan.resources[name])
        if value is None:  # GPUs: on a cluster nobody gets one without asking for it
            return self._resources_of(plan, "processes_per_node") if self.queued or self.remote else 0
        return int(value)

    # ---- One process

    def cpus(self, wildcards: Wildcards) -> int:
        """CPU cores of a process."""
        return self._requested("cpus_per_process", wildcards)

    def threads(self, wildcards: Wildcards) -> int:
        """Return the CPU cores of a process on this machine, where stages that use its only GPU run one at a time, and
        those that use one of several share its cores."""
        if self._alone(wildcards):
            return self._share() if self.devices else ALL_CORES
        return self.cpus(wildcards)

    def one_gpu(self, wildcards: Wildcards) -> int:
        """Return 1 if the experiment uses GPUs, 0 otherwise."""
        return min(1, self.gpus(wildcards))

    def one_device(self, wildcards: Wildcards) -> int | None:
        """Return one of several GPUs of this machine, if the experiment asks for any."""
        return 1 if self.devices and self._alone(wildcards) else None

    def one_device_to_begin(self, wildcards: Wildcards, input: Any) -> int | None:
        """Return one of several GPUs of this machine, unless several jobs have made the parts."""
        return None if input.parts else self.one_device(wildcards)

    def devices_option(self, wildcards: Wildcards, resources: Any) -> list[str]:
        """Return the options of `logged` that say how many GPUs a stage asks for, and how many of several are to be its
        own. A function of the resources does not belong to the parameters for which Snakemake makes results again."""
        gpus, devices = number_of_gpus(resources), resources.get("devices")
        return [
            *(["--gpus", str(gpus)] if gpus else []),
            *(["--devices", str(devices)] if devices else []),
        ]

    def memory_mb(self, wildcards: Wildcards, attempt: int = 1) -> int:
        """Memory in MB: a process's share of what the experiment trains with on each machine."""
        return -(-self.training_memory_mb(wildcards, attempt) // self.processes(wildcards))

    def runtime_min(self, wildcards: Wildcards) -> int:
        """Time for one job, in minutes."""
        return self._requested("runtime_min", wildcards)

    def one_process(self, **other: Any) -> dict[str, Any]:
        """Return the resources of a stage of one process. other: resources in place of these."""
        usual = {
            **self.gpu_resources(self.one_gpu),
            "devices": self.one_device,
            "cpus_per_task": self.cpus,
            "mem_mb": self.memory_mb,
            "runtime": self.runtime_min,
        }
        return usual | other

    def joining(self, **other: Any) -> dict[str, Any]:
        """Return the same of a stage that takes no GPU where several jobs have made its parts."""

        def request(name: str, wildcards: Wildcards, input: Any) -> str | int | None:
            return None if input.parts else self._gpu_request(name, self.one_gpu, wildcards)

        gpus = {name: partial(request, name) for name in NAMES}
        return self.one_process(**gpus, devices=self.one_device_to_begin, **other)

    def gpu_resources(self, number: Callable[[Wildcards], int]) -> dict[str, Callable[[Wildcards], str | int | None]]:
        """Return the resources that request GPUs, of which a job has those that its executor reads. number: of GPUs."""
        return {name: partial(self._gpu_request, name, number) for name in NAMES}

    def one_core(self) -> dict[str, Any]:
        """Return the resources of a stage that reads and writes weights."""
        return {"cpus_per_task": 1, "mem_mb": self.memory_mb, "runtime": 30}

    def sampling_min(self, wildcards: Wildcards) -> int:
        """Time for one of the jobs that make the samples, in minutes: what `doctor` has measured, with half as much in
        reserve, where it was asked; never more than for others."""
        longest, plan = self.runtime_min(wildcards), self.plans.plan_for(wildcards)
        try:
            forecast = read_json(Path(self.config.get("results", "results"), plan.experiment, "doctor.json"))
            return int(min(longest, _START_MIN + math.ceil(1.5 * forecast["sample_s"] / plan.sample_jobs / 60)))
        except (ValueError, KeyError, TypeError):
            return longest

    def sampling_jobs(self, wildcards: Wildcards) -> int:
        """Jobs that make the samples at the same time: all of them where a queue has room, here one for each GPU."""
        plan = self.plans.plan_for(wildcards)
        if self.queued or self.remote:
            return max(1, plan.sample_jobs)
        return max(1, min(self.jobs_at_once(plan), plan.most_sample_jobs))

    # ---- Training, on nodes of several processes

    def nodes(self, wildcards: Wildcards) -> int:
        """Machines that train together."""
        return self._requested("nodes", wildcards)

    def processes(self, wildcards: Wildcards) -> int:
        """Processes of each node."""
        return self._requested("processes_per_node", wildcards)

    def training_cpus(self, wildcards: Wildcards) -> int:
        """CPU cores of each node."""
        return self.processes(wildcards) * self.cpus(wildcards)

    def training_threads(self, wildcards: Wildcards) -> int:
        """Return the CPU cores of a training on this machine (see `threads`)."""
        if self._alone(wildcards):
            return self._share() * self._processes_here(wildcards) if self.devices else ALL_CORES
        return self.training_cpus(wildcards)

    def training_devices(self, wildcards: Wildcards) -> int | None:
        """Return the number of GPUs of this machine, if it has several, that the processes on it need; None if they use
        none."""
        return self._processes_here(wildcards) if self.devices and self._alone(wildcards) else None

    def training_memory_mb(self, wildcards: Wildcards, attempt: int = 1) -> int:
        """Memory of each node, in MB: half as much more after each attempt that ran out of it, at most three times.

        attempt: Snakemake's count, from 1. Attempts that ended otherwise, at a time limit for instance, add nothing.
        """
        short = 0
        if attempt > 1:
            of_one = has(wildcards, "experiment")
            logs = Path("logs", wildcards["experiment"]) if of_one else Path("logs", "datasets", wildcards["dataset"])
            short = min(attempt - 1, MOST_OUT_OF_MEMORY, count_out_of_memory(logs, self.since))
        return round(self._requested("memory_mb", wildcards) * MORE_MEMORY**short)

    def gpus(self, wildcards: Wildcards) -> int:
        """Return the number of GPUs of each node; 0 on CPUs."""
        return self._requested("gpus_per_node", wildcards)

    def tasks(self, wildcards: Wildcards) -> int | None:
        """Tasks of a job on several nodes, one on each; a job on one node has no such resource."""
        nodes = self.nodes(wildcards)
        return nodes if nodes > 1 else None

    def mpi(self, wildcards: Wildcards) -> str | None:
        """Return the resource that makes a job on several nodes start its tasks itself; a job on one node has no such
        resource."""
        return "srun" if self.nodes(wildcards) > 1 else None

    def hang_s(self, wildcards: Wildcards) -> int:
        """Return the seconds that a process waits for another."""
        return self._requested("hang_s", wildcards)

    def stage_to(self, wildcards: Wildcards) -> str:
        """Return the folder of a node's own disk that its data are copied to; empty for none."""
        return str(self.plans.plan_for(wildcards).resources["stage_to"])

    def grace_s(self, wildcards: Wildcards) -> int:
        """Return the seconds that training has to save and end: the time between Slurm's signal and the end of the
        job's time, less half a minute for the way to the processes and back."""
        site = self.config.get("slurm") or {}
        every, stages = site.get("every_stage") or {}, site.get("stages") or {}
        extra = (stages.get("train") or {}).get("slurm_extra") or every.get("slurm_extra") or ""
        match = re.search(r"--signal[= ]\S*@(\d+)", extra)
        return max(1, (int(match[1]) if match else SIGNAL_LEAD_S) - 30)

    # ---- Jobs that stages share

    def shared_job(self, wildcards: Wildcards) -> str | None:
        """Return the name of the job that a stage shares with others, if it does: those of an experiment, with the
        latents of its codec; and those of a data set, if every experiment on it wants that. A site that asks for
        something else for one stage has a job for each."""
        single = has(wildcards, "step")  # images of a checkpoint, beside the Snakemake that trains
        if single or not (self.queued or self.remote) or (self.config.get("slurm") or {}).get("stages"):
            return None
        codec = self.plans.plan_for(wildcards).codec_experiment if has(wildcards, "codec") else None
        experiment = wildcards["experiment"] if has(wildcards, "experiment") else codec
        if experiment:
            return experiment if self._is_small(self.plans.by_name[experiment]) else None
        dataset = wildcards["dataset"]
        users = (plan for plan in self.plans.by_name.values() if plan.dataset == dataset)
        return f"data_{dataset}" if all(map(self._is_small, users)) else None

    def _is_small(self, plan: Plan) -> bool:
        return (
            bool(plan.resources["one_job"])
            and self._resources_of(plan, "nodes") == 1
            and not self._resources_of(plan, "gpus_per_node")
        )

    # ---- Several GPUs of this machine

    @property
    def uses_gpus(self) -> bool:
        """True if an experiment asks for GPUs, and no queue gives them."""
        wanted = any(self._resources_of(plan, "gpus_per_node") > 0 for plan in self.plans.by_name.values())
        return wanted and not (self.queued or self.remote)

    @property
    def at_once(self) -> int:
        """Number of GPUs that are used at once: 0 if they are not distinguished."""
        return len(self.devices) if self.limit is None else min(self.limit, len(self.devices))

    def jobs_at_once(self, plan: Plan) -> int:
        """Jobs of an experiment that use one each."""
        return max(1, self.at_once) if self._resources_of(plan, "gpus_per_node") > 0 else 1

    def too_few_devices(self, trainings: Iterable[Wildcards]) -> str | None:
        """Return an error message if one of these trainings needs more devices than the machine has; None otherwise."""
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

    def _alone(self, wildcards: Wildcards) -> bool:
        """Return True for a stage on a GPU of this machine. In a queue, stages have the cores that they request."""
        return self._requested("gpus_per_node", wildcards) > 0 and not (self.queued or self.remote)

    def _gpu_request(self, name: str, number: Callable[[Wildcards], int], wildcards: Wildcards) -> str | int | None:
        kind = (self.config.get("slurm") or {}).get("gpu_type")
        return gpu_request(name, self.executor(), number(wildcards), kind)
