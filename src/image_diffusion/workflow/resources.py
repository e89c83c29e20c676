"""Resources to request for each stage, as functions of a job's wildcards; GPUs in the form that each Snakemake executor
reads.

| Executor     | Resource                           | Read by                                                       |
| ------------ | ---------------------------------- | ------------------------------------------------------------- |
| slurm, local | `gres=gpu:a100:2`                  | snakemake-executor-plugin-slurm 2.8, `set_gres_string`        |
| kubernetes   | `gpu`, `gpu_manufacturer`, `scale` | snakemake-executor-plugin-kubernetes 0.5, `run_job`           |
| aws-batch    | `_gpus`                            | snakemake-executor-plugin-aws-batch 0.2, `BatchJobBuilder`    |
| googlebatch  | `nvidia_gpu`                       | snakemake-executor-plugin-googlebatch 0.5, `get_accelerators` |

On Kubernetes, `scale=0` makes the plugin write limits in addition to requests. A pod that requests a GPU without a
limit is refused (Kubernetes' documentation, "Schedule GPUs").

An executor that is not in the table gets `gpu`, Snakemake's common name, and `gres`; `doubt_about` warns about it.
"""

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
from image_diffusion.workflow.jobs.slurm_queue import count_out_of_memory
from image_diffusion.workflow.plans import Plan, Plans, Wildcards, has

ALL_CORES = 1024
"""More threads than any machine has: Snakemake gives such a job every core, and so runs it alone."""

SIGNAL_LEAD_S = 120
"""Seconds between the signal to a training and the end of its job, unless the site's slurm_extra sets --signal."""

MORE_MEMORY = 1.5
"""Factor of the requested memory after each attempt that ran out of memory."""
MOST_OUT_OF_MEMORY = 3
"""Maximum number of times that the factor is applied."""

_START_MIN = 10  # of a job, in addition to its work

_BY_EXECUTOR = {
    "kubernetes": ("gpu", "gpu_manufacturer", "scale"),
    "aws-batch": ("_gpus",),
    "googlebatch": ("nvidia_gpu",),
}
_READS_GRES = ("slurm", "slurm-jobstep", "local", "dryrun", "touch")
"""Executors that read `gres` or start no jobs on other machines."""
_NUMBERS = ("gres", "gpu", "_gpus", "nvidia_gpu")
_FIXED: dict[str, str | int] = {"gpu_manufacturer": "nvidia", "scale": 0}
_NAMES = (*_NUMBERS, *_FIXED)
"""All resources that a rule may set."""


@dataclass(frozen=True)
class Machine:
    """Resources from the section `resources` of an experiment, which --config NAME=NUMBER overrides."""

    plans: Plans
    config: Mapping[str, Any]
    """The workflow's configuration."""
    queued: bool
    """True if jobs are sent to a queue."""
    remote: bool
    """True in a job that was submitted."""
    cores: int = 1
    """Number of usable cores of this machine."""
    devices: tuple[str, ...] = ()
    """GPUs of this machine if it has several and there is no queue: each stage that uses one reserves its own."""
    limit: int | None = None
    """Maximum number of these GPUs in use at once, from --resources devices=."""
    executor: Callable[[], str] = lambda: "local"
    """Return the name of Snakemake's executor, which is available once jobs are planned."""
    since: float = field(default_factory=time.time)
    """Start time of Snakemake, in seconds since 1970."""

    def _requested(self, name: str, wildcards: Wildcards) -> int:
        return self._resources_of(self.plans.plan_for(wildcards), name)

    def _resources_of(self, plan: Plan, name: str) -> int:
        value = self.config.get(name, plan.resources[name])
        if value is None:  # GPUs: a cluster gives none without a request
            return self._resources_of(plan, "processes_per_node") if self.queued or self.remote else 0
        return int(value)

    # ---- One process

    def cpus(self, wildcards: Wildcards) -> int:
        """CPU cores of a process."""
        return self._requested("cpus_per_process", wildcards)

    def threads(self, wildcards: Wildcards) -> int:
        """Return the CPU cores of a process on this machine: all for a stage on its only GPU, so that such stages run
        one at a time; an equal share for a stage on one of several GPUs."""
        if self._uses_local_gpu(wildcards):
            return self._share() if self.devices else ALL_CORES
        return self.cpus(wildcards)

    def one_gpu(self, wildcards: Wildcards) -> int:
        """Return 1 if the experiment uses GPUs, 0 otherwise."""
        return min(1, self.gpus(wildcards))

    def one_device(self, wildcards: Wildcards) -> int | None:
        """Return 1 if the machine has several GPUs and the experiment requests any; else None."""
        return 1 if self.devices and self._uses_local_gpu(wildcards) else None

    def one_device_to_begin(self, wildcards: Wildcards, input: Any) -> int | None:
        """Return `one_device`, or None if several jobs have made the parts."""
        return None if input.parts else self.one_device(wildcards)

    def devices_option(self, wildcards: Wildcards, resources: Any) -> list[str]:
        """Return the options of `logged` for the numbers of GPUs that a stage requests and reserves on this machine.
        Snakemake ignores changes of params that are functions of the resources."""
        numbers = {"--gpus": number_of_gpus(resources), "--devices": resources.get("devices")}
        return [word for option, number in numbers.items() if number for word in (option, str(number))]

    def memory_mb(self, wildcards: Wildcards, attempt: int = 1) -> int:
        """Return the memory in MB: one process's share of the training memory of a node."""
        return -(-self.training_memory_mb(wildcards, attempt) // self.processes(wildcards))

    def runtime_min(self, wildcards: Wildcards) -> int:
        """Return the time for one job, in minutes."""
        return self._requested("runtime_min", wildcards)

    def one_process(self, **other: Any) -> dict[str, Any]:
        """Return the resources of a stage of one process. other: resources that replace these."""
        usual = {
            **self.gpu_resources(self.one_gpu),
            "devices": self.one_device,
            "cpus_per_task": self.cpus,
            "mem_mb": self.memory_mb,
            "runtime": self.runtime_min,
        }
        return usual | other

    def joining(self, **other: Any) -> dict[str, Any]:
        """Return the resources of a stage of one process that needs no GPU if several jobs have made its parts."""

        def request(name: str, wildcards: Wildcards, input: Any) -> str | int | None:
            return None if input.parts else self._gpu_request(name, self.one_gpu, wildcards)

        gpus = {name: partial(request, name) for name in _NAMES}
        return self.one_process(**gpus, devices=self.one_device_to_begin, **other)

    def gpu_resources(self, number: Callable[[Wildcards], int]) -> dict[str, Callable[[Wildcards], str | int | None]]:
        """Return the resources that request GPUs; those that the executor does not read are None. number: of GPUs."""
        return {name: partial(self._gpu_request, name, number) for name in _NAMES}

    def one_core(self) -> dict[str, Any]:
        """Return the resources of a stage that reads and writes weights."""
        return {"cpus_per_task": 1, "mem_mb": self.memory_mb, "runtime": 30}

    def sampling_min(self, wildcards: Wildcards) -> int:
        """Return the time for one sampling job, in minutes: the measurement of `doctor` plus 50 % and `_START_MIN`,
        at most `runtime_min`, which is also the time without a measurement."""
        longest, plan = self.runtime_min(wildcards), self.plans.plan_for(wildcards)
        try:
            forecast = read_json(Path(self.config.get("results", "results"), plan.experiment, "doctor.json"))
            return int(min(longest, _START_MIN + math.ceil(1.5 * forecast["sample_s"] / plan.sample_jobs / 60)))
        except (ValueError, KeyError, TypeError):
            return longest

    def sampling_jobs(self, wildcards: Wildcards) -> int:
        """Return the number of concurrent sampling jobs: all jobs in a queue, one for each GPU on this machine."""
        plan = self.plans.plan_for(wildcards)
        if self.queued or self.remote:
            return max(1, plan.sample_jobs)
        return max(1, min(self.jobs_at_once(plan), plan.most_sample_jobs))

    # ---- Training, on nodes of several processes

    def nodes(self, wildcards: Wildcards) -> int:
        """Number of machines that train together."""
        return self._requested("nodes", wildcards)

    def processes(self, wildcards: Wildcards) -> int:
        """Number of processes on each node."""
        return self._requested("processes_per_node", wildcards)

    def training_cpus(self, wildcards: Wildcards) -> int:
        """Number of CPU cores on each node."""
        return self.processes(wildcards) * self.cpus(wildcards)

    def training_threads(self, wildcards: Wildcards) -> int:
        """Return the CPU cores of a training on this machine (see `threads`)."""
        if self._uses_local_gpu(wildcards):
            return self._share() * self._processes_here(wildcards) if self.devices else ALL_CORES
        return self.training_cpus(wildcards)

    def training_devices(self, wildcards: Wildcards) -> int | None:
        """Return the number of GPUs that training reserves if this machine has several; None if it uses none."""
        return self._processes_here(wildcards) if self.devices and self._uses_local_gpu(wildcards) else None

    def training_memory_mb(self, wildcards: Wildcards, attempt: int = 1) -> int:
        """Return the MB of memory of each node: 50 % more after each attempt that ran out of it, at most three times.

        attempt: Snakemake's count, from 1. Attempts that ended for another reason, such as a time limit, add nothing.
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
        """Return the number of tasks of a job on several nodes, one per node; None on one node."""
        nodes = self.nodes(wildcards)
        return nodes if nodes > 1 else None

    def mpi(self, wildcards: Wildcards) -> str | None:
        """Return the resource that makes a job on several nodes start its own tasks; None on one node."""
        return "srun" if self.nodes(wildcards) > 1 else None

    def hang_s(self, wildcards: Wildcards) -> int:
        """Return the seconds that a training process waits for another."""
        return self._requested("hang_s", wildcards)

    def stage_to(self, wildcards: Wildcards) -> str:
        """Return the folder on a node's local disk that training copies its data to; empty for none."""
        return str(self.plans.plan_for(wildcards).resources["stage_to"])

    def grace_s(self, wildcards: Wildcards) -> int:
        """Return the seconds that training has to save and end: the time between Slurm's signal and the end of the
        job's time, minus 30 s for communication with the processes."""
        site = self.config.get("slurm") or {}
        every, stages = site.get("every_stage") or {}, site.get("stages") or {}
        extra = (stages.get("train") or {}).get("slurm_extra") or every.get("slurm_extra") or ""
        match = re.search(r"--signal[= ]\S*@(\d+)", extra)
        return max(1, (int(match[1]) if match else SIGNAL_LEAD_S) - 30)

    # ---- Jobs that stages share

    def shared_job(self, wildcards: Wildcards) -> str | None:
        """Return the name of the job that a stage shares with others, or None. With one_job, the stages of an
        experiment and the latents of its codec share a job; the stages of a data set do, if all its experiments set
        one_job. A site with its own resources for single stages uses one job per stage."""
        single = has(wildcards, "step")  # images of a checkpoint, during training by another Snakemake
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
        """Return True if an experiment requests GPUs and there is no queue."""
        wanted = any(self._resources_of(plan, "gpus_per_node") > 0 for plan in self.plans.by_name.values())
        return wanted and not (self.queued or self.remote)

    @property
    def at_once(self) -> int:
        """Return the number of GPUs that are used at once; 0 if GPUs are not reserved."""
        return len(self.devices) if self.limit is None else min(self.limit, len(self.devices))

    def jobs_at_once(self, plan: Plan) -> int:
        """Return the number of concurrent jobs of an experiment that use one GPU each."""
        return max(1, self.at_once) if self._resources_of(plan, "gpus_per_node") > 0 else 1

    def too_few_devices(self, trainings: Iterable[Wildcards]) -> str | None:
        """Return an error message if one of these trainings needs more devices than are available; else None."""
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
        """Return the number of training processes on this machine: all, or those of one node in a Slurm job."""
        nodes = 1 if "SLURM_JOB_ID" in os.environ else self.nodes(wildcards)
        return nodes * self.processes(wildcards)

    def _uses_local_gpu(self, wildcards: Wildcards) -> bool:
        """Return True for a stage that uses a GPU of this machine without a queue."""
        return self._requested("gpus_per_node", wildcards) > 0 and not (self.queued or self.remote)

    def _gpu_request(self, name: str, number: Callable[[Wildcards], int], wildcards: Wildcards) -> str | int | None:
        """Return a resource that requests a number of GPUs; None if the executor ignores it, or without GPUs."""
        executor, count = self.executor(), number(wildcards)
        names = ("gres",) if executor in _READS_GRES else _BY_EXECUTOR.get(executor, ("gpu", "gres"))
        if not count or name not in names:
            return None
        if name == "gres":
            kind = (self.config.get("slurm") or {}).get("gpu_type")
            return ":".join(["gpu", *([kind] if kind else []), str(count)])
        return _FIXED.get(name, count)


def requested_gpus(resources: Mapping[str, Any]) -> str | None:
    """Return the request of a job in its executor's form, such as "gpu:a100:2" or "2"; None without GPUs.

    resources: of the Snakemake job.
    """
    values = (resources.get(name) for name in _NUMBERS)
    return next((str(value) for value in values if value), None)


def number_of_gpus(resources: Mapping[str, Any]) -> int:
    """Return the number of GPUs that a job requests. A type without a number, as for Google Batch, is one GPU."""
    number = (requested_gpus(resources) or "0").rpartition(":")[2]
    return int(number) if number.isdigit() else 1


def doubt_about(executor: str) -> str | None:
    """Return a warning if it is unknown which resource an executor reads to request GPUs; else None."""
    if executor in _READS_GRES or executor in _BY_EXECUTOR:
        return None
    return (
        f"warning: The executor {executor} is not among those whose request for GPUs is known here. Its jobs have the "
        "resources gpu=N and gres=gpu:N. If it reads another one, set that: --set-resources train:NAME=N."
    )
