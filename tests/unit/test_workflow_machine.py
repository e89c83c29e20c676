"""What a stage asks a machine for."""

from __future__ import annotations

from typing import Any

from image_diffusion.workflow.machine import ALL_CORES, Machine
from plans import RESOURCES, a_plan, plans_of

ONE = {"experiment": "one"}


def machine(config: dict[str, Any] | None = None, queued: bool = False, remote: bool = False, **asked: int) -> Machine:
    plans = plans_of(a_plan(resources={**RESOURCES, **asked}))
    return Machine(plans, config or {}, queued, remote)


def test_one_node_of_cpus_asks_for_nothing_special() -> None:
    here = machine(processes_per_node=3)
    assert (here.cpus(ONE), here.threads(ONE), here.training_cpus(ONE), here.training_threads(ONE)) == (2, 2, 6, 6)
    assert (here.memory_mb(ONE), here.runtime_min(ONE)) == (8000, 60)
    assert (here.nodes(ONE), here.processes(ONE)) == (1, 3)
    assert [ask(ONE) for ask in (here.gpus, here.one_gpu, here.tasks, here.mpi)] == [None] * 4


def test_several_nodes_start_their_tasks_themselves() -> None:
    cluster = machine(nodes=2, gpus_per_node=8)
    assert (cluster.tasks(ONE), cluster.mpi(ONE)) == (2, "srun")
    assert (cluster.gpus(ONE), cluster.one_gpu(ONE)) == ("gpu:8", "gpu:1")


def test_the_type_of_gpu_is_the_sites() -> None:
    assert machine({"slurm": {"gpu_type": "a100"}}, gpus_per_node=4).gpus(ONE) == "gpu:a100:4"
    assert machine({"slurm": None}, gpus_per_node=4).gpus(ONE) == "gpu:4"


def test_the_callers_number_goes_before_the_experiments() -> None:
    given = machine({"nodes": 4, "processes_per_node": 8, "gpus_per_node": 8}, nodes=1)
    assert (given.nodes(ONE), given.training_cpus(ONE), given.gpus(ONE)) == (4, 16, "gpu:8")
    assert machine({"gpus_per_node": 0}, gpus_per_node=8).one_gpu(ONE) is None


def test_stages_that_share_a_gpu_of_this_machine_run_one_at_a_time() -> None:
    here, sent = machine(gpus_per_node=1), machine(gpus_per_node=1, queued=True, remote=True)
    assert here.threads(ONE) == here.training_threads(ONE) == ALL_CORES
    assert (sent.threads(ONE), sent.training_threads(ONE)) == (2, 2)


def test_only_the_snakemake_that_sends_jobs_sends_them_again() -> None:
    assert machine(queued=True).attempts(20) == 20
    assert machine().attempts(20) == machine(queued=True, remote=True).attempts(20) == 0
