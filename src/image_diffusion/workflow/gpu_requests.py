"""Requests for GPUs, in the resources that each Snakemake executor reads.

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

from collections.abc import Mapping
from typing import Any

_BY_EXECUTOR = {
    "kubernetes": ("gpu", "gpu_manufacturer", "scale"),
    "aws-batch": ("_gpus",),
    "googlebatch": ("nvidia_gpu",),
}
_OTHERS = ("gpu", "gres")
_ON_SLURM = ("gres",)
_READS_GRES = ("slurm", "slurm-jobstep", "local", "dryrun", "touch")
"""Executors that read `gres` or start no jobs on other machines."""
_NUMBERS = ("gres", "gpu", "_gpus", "nvidia_gpu")
_FIXED: dict[str, str | int] = {"gpu_manufacturer": "nvidia", "scale": 0}
NAMES = (*_NUMBERS, *_FIXED)
"""All resources that a rule may set."""


def gpu_request(name: str, executor: str, count: int, kind: str | None = None) -> str | int | None:
    """Return the value of a resource for a number of GPUs; None if the executor does not read it, or without GPUs.

    kind: the type of GPU in Slurm's syntax; None for any.
    """
    names = _ON_SLURM if executor in _READS_GRES else _BY_EXECUTOR.get(executor, _OTHERS)
    if not count or name not in names:
        return None
    if name == "gres":
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
