"""Start one command as several processes, on one node or on several.

    python -m image_diffusion.training.parallel.launch --nodes 2 --logs logs -- MODULE ARGUMENTS

One node: torchrun. Several nodes: the same torchrun on each node of the Slurm job, through srun; the agents meet (c10d)
at the first node. Several nodes outside Slurm: all the processes on this machine, which gives the same numbers.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from image_diffusion.core.process import command, parent_watch

_FIRST_PORT, _PORTS = 20000, 10000
"""Ports for the rendezvous of a job's nodes, below Linux's ephemeral ports (32768 and above)."""
_SPECIAL_STEP = 0xFFFFFFF0
"""Lowest of Slurm's special step numbers, such as those of a batch script and of the shell of `salloc`."""
_RECORDER_FILE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Environment variables with the prefix of the files, completed by the rank, into which PyTorch's flight recorder, on
by default, writes the last collective operations when a process hangs. PyTorch reads the second, older one with a
warning."""


@dataclass(frozen=True)
class Layout:
    """Distribution of the processes of one run over machines.

    nodes, processes_per_node: their product is the world size. threads_per_process: CPU threads of each process; set
    for the run, not by the machine, because the order of sums depends on it. logs: folder for the output of each
    process, if there are several; the first process of each node also prints to the terminal. grace_s: seconds that the
    processes have to save and end after a signal.
    """

    nodes: int
    processes_per_node: int
    threads_per_process: int
    logs: Path
    grace_s: int = parent_watch.GRACE_S

    def __post_init__(self) -> None:
        for name in ("nodes", "processes_per_node", "threads_per_process", "grace_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(self, name)}.")


def command_line(layout: Layout, module: Sequence[str], environment: Mapping[str, str], host: str) -> list[str]:
    """Return the command that starts `module` (a module's name and its arguments).

    environment: contains SLURM_JOB_ID in a Slurm job. host: the network name of this node for the other nodes. Raises
    ValueError for a job with fewer nodes, and within a job step, in which srun would wait forever.
    """
    job = environment.get("SLURM_JOB_ID")
    if layout.nodes == 1 or job is None:
        processes = layout.nodes * layout.processes_per_node
        return _torchrun(layout, processes, ["--standalone"], module)
    there = int(environment.get("SLURM_NNODES", layout.nodes))
    if there < layout.nodes:
        raise ValueError(
            f"The experiment trains on {layout.nodes} nodes, and Slurm job {job} has {there}. Ask for more (salloc "
            f"--nodes={layout.nodes}), or train on what there is: --config nodes={there}."
        )
    if int(environment.get("SLURM_STEP_ID", _SPECIAL_STEP)) < _SPECIAL_STEP:
        raise ValueError(
            f"The experiment trains on {layout.nodes} nodes, and this is a step of Slurm job {job}, which cannot start "
            "others. Start it outside of srun, from the shell of salloc or with --profile slurm; or --config nodes=1."
        )
    meeting = [
        f"--nnodes={layout.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:{_FIRST_PORT + int(job) % _PORTS}",
        f"--rdzv-id={job}",
    ]
    return [
        "srun",
        f"--nodes={layout.nodes}",
        f"--ntasks={layout.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={layout.processes_per_node * layout.threads_per_process}",
        "--kill-on-bad-exit=1",
        "--label",
        *_torchrun(layout, layout.processes_per_node, meeting, module),
    ]


def _torchrun(layout: Layout, processes: int, meeting: Sequence[str], module: Sequence[str]) -> list[str]:
    several = layout.nodes * layout.processes_per_node > 1
    logs = [f"--log-dir={layout.logs}", "--redirects=3", "--tee=0:3"] if several else []
    return [
        *(sys.executable, "-m", "image_diffusion.training.parallel.launch_agent"),
        *meeting,
        f"--nproc-per-node={processes}",
        "--max-restarts=0",
        *logs,
        "--module",
        *module,
    ]


def recorder(layout: Layout, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that makes hanging processes write their last operations to the folder of logs;
    empty if the user has set one."""
    if any(name in environment for name in _RECORDER_FILE):
        return {}
    return {_RECORDER_FILE[0]: f"{layout.logs.absolute()}/flight_recorder_rank_"}


def own_name(environment: Mapping[str, str]) -> str:
    """Return the network name of this machine: Slurm's, if it can be resolved, else the hostname. The hostname alone
    may be `localhost`, or a name in another network."""
    name = environment.get("SLURMD_NODENAME", "")
    try:
        socket.getaddrinfo(name or None, _FIRST_PORT)
    except OSError:
        return socket.gethostname()
    return name or socket.gethostname()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m image_diffusion.training.parallel.launch", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, help="machines (1)")
    parser.add_argument("--processes-per-node", type=int, default=1, help="one for each GPU of a machine (1)")
    parser.add_argument("--threads-per-process", type=int, default=1, help="CPU threads of each process (1)")
    parser.add_argument("--logs", type=Path, required=True, help="folder for what each of several processes prints")
    parser.add_argument(
        "--grace-s", type=int, default=parent_watch.GRACE_S, help="seconds to save and end after a signal (%(default)s)"
    )
    parser.add_argument("module", nargs="+", help="after --: the module to run, and its arguments")
    arguments = vars(parser.parse_args())
    module = arguments.pop("module")
    layout = Layout(**arguments)
    line = command_line(layout, module, os.environ, own_name(os.environ))
    threads = str(layout.threads_per_process)
    settings = recorder(layout, os.environ) | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(layout.grace_s),
    }
    parent_watch.end_with_parent(os.environ)  # the processes also end with torchrun, which replaces this process
    os.execvpe(line[0], line, os.environ | settings)


if __name__ == "__main__":
    command.run(main)
