"""Resources that stages request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from image_diffusion.core.files.atomic import write_json
from image_diffusion.workflow.resources import ALL_CORES, Machine, doubt_about
from plans import RESOURCES, a_plan, plans_of

ONE = {"experiment": "one"}


def machine(
    config: dict[str, Any] | None = None, queued: bool = False, remote: bool = False, **asked: int | None
) -> Machine:
    plans = plans_of(a_plan(resources={**RESOURCES, **asked}))
    return Machine(plans, config or {}, queued, remote)


def requests(asking: Machine) -> dict[str, Any]:
    """Return the resources by which a training requests its GPUs."""
    values = {name: value(ONE) for name, value in asking.gpu_resources(asking.gpus).items()}
    return {name: value for name, value in values.items() if value is not None}


def test_one_cpu_node_requests_no_special_resources() -> None:
    here = machine(processes_per_node=3)
    assert (here.cpus(ONE), here.threads(ONE), here.training_cpus(ONE), here.training_threads(ONE)) == (2, 2, 6, 6)
    assert (here.training_memory_mb(ONE), here.runtime_min(ONE)) == (8000, 60)
    assert (here.nodes(ONE), here.processes(ONE)) == (1, 3)
    assert (here.gpus(ONE), here.one_gpu(ONE), here.tasks(ONE), here.mpi(ONE)) == (0, 0, None, None)
    assert requests(here) == {}


def test_several_nodes_start_tasks_by_srun() -> None:
    cluster = machine(nodes=2, gpus_per_node=8)
    assert (cluster.tasks(ONE), cluster.mpi(ONE)) == (2, "srun")
    assert (cluster.gpus(ONE), cluster.one_gpu(ONE)) == (8, 1)
    assert requests(cluster) == {"gres": "gpu:8"} and cluster.one_process()["gres"](ONE) == "gpu:1"


def test_stage_of_one_gpu_requests_its_share_of_memory() -> None:
    node = machine(processes_per_node=8, gpus_per_node=8, memory_mb=256_001)
    assert (node.training_memory_mb(ONE), node.memory_mb(ONE)) == (256_001, 32_001)


def test_unset_gpus_default_to_one_per_process_on_clusters_only() -> None:
    asked: dict[str, Any] = {"gpus_per_node": None, "processes_per_node": 2}
    sent, here = machine(queued=True, **asked), machine(**asked)
    assert (sent.gpus(ONE), sent.one_gpu(ONE)) == (2, 1)
    assert (here.gpus(ONE), here.one_gpu(ONE), here.threads(ONE)) == (0, 0, 2)
    assert machine({"gpus_per_node": 0}, queued=True, **asked).gpus(ONE) == 0


def test_joining_parts_requests_no_gpu() -> None:
    node = machine(gpus_per_node=8)
    asked = [node.joining()["gres"](ONE, SimpleNamespace(parts=parts)) for parts in ([], ["part-0"])]
    assert asked == ["gpu:1", None]


@pytest.mark.parametrize(
    ("executor", "expected"),
    [
        ("slurm", {"gres": "gpu:2"}),
        ("kubernetes", {"gpu": 2, "gpu_manufacturer": "nvidia", "scale": 0}),
        ("aws-batch", {"_gpus": 2}),
        ("googlebatch", {"nvidia_gpu": 2}),
        ("lsf", {"gpu": 2, "gres": "gpu:2"}),
    ],
)
def test_gpu_requests_use_the_resources_of_each_executor(executor: str, expected: dict[str, Any]) -> None:
    node = replace(machine(queued=True, gpus_per_node=2), executor=lambda: executor)
    assert requests(node) == expected
    assert node.devices_option(ONE, expected) == ["--gpus", "2"]
    assert requests(replace(machine(queued=True, gpus_per_node=0), executor=lambda: executor)) == {}
    assert (doubt_about(executor) is None) == (executor != "lsf")


def test_gpu_type_of_google_batch_counts_as_one_gpu() -> None:
    assert machine().devices_option(ONE, {"nvidia_gpu": "nvidia-tesla-a100"}) == ["--gpus", "1"]


def test_gpu_type_comes_from_the_slurm_settings() -> None:
    assert requests(machine({"slurm": {"gpu_type": "a100"}}, gpus_per_node=4)) == {"gres": "gpu:a100:4"}
    assert requests(machine({"slurm": None}, gpus_per_node=4)) == {"gres": "gpu:4"}


@pytest.mark.parametrize(
    ("slurm", "grace_s"),
    [
        (None, 90),
        ({"every_stage": {"slurm_extra": "--exclusive"}}, 90),
        ({"every_stage": {"slurm_extra": "--signal=TERM@600 -x"}}, 570),
        (
            {
                "every_stage": {"slurm_extra": "--signal=TERM@600"},
                "stages": {"train": {"slurm_extra": "--signal B:INT@60"}},
            },
            30,
        ),
    ],
)
def test_grace_time_follows_the_slurm_signal(slurm: dict[str, Any] | None, grace_s: int) -> None:
    assert machine({"slurm": slurm}).grace_s(ONE) == grace_s


def test_command_line_numbers_override_the_experiment() -> None:
    given = machine({"nodes": 4, "processes_per_node": 8, "gpus_per_node": 8}, nodes=1)
    assert (given.nodes(ONE), given.training_cpus(ONE), given.gpus(ONE)) == (4, 16, 8)
    assert machine({"gpus_per_node": 0}, gpus_per_node=8).one_gpu(ONE) == 0


def test_stages_on_one_local_gpu_run_one_at_a_time() -> None:
    here = machine(gpus_per_node=1)
    assert here.threads(ONE) == here.training_threads(ONE) == ALL_CORES
    for remote in (False, True):
        sent = machine(gpus_per_node=1, processes_per_node=3, queued=True, remote=remote)
        assert (sent.threads(ONE), sent.training_threads(ONE)) == (2, 6)


def test_stages_get_one_gpu_each_and_share_cores_on_a_multi_gpu_machine() -> None:
    asked = {**RESOURCES, "gpus_per_node": 4, "processes_per_node": 4}
    plans = plans_of(a_plan(resources=asked), a_plan("cpus"))
    here = Machine(plans, {}, queued=False, remote=False, cores=36, devices=tuple("01234567"))
    assert (here.one_device(ONE), here.threads(ONE), here.jobs_at_once(plans.by_name["one"])) == (1, 4, 8)
    assert (here.training_devices(ONE), here.training_threads(ONE)) == (4, 16)
    joining = [here.one_device_to_begin(ONE, SimpleNamespace(parts=parts)) for parts in ([], ["part-0"])]
    assert joining == [1, None]
    other = {"experiment": "cpus"}
    assert (here.one_device(other), here.training_devices(other), here.threads(other)) == (None, None, 2)
    assert here.jobs_at_once(plans.by_name["cpus"]) == 1
    small = replace(here, plans=plans_of(a_plan(resources=asked, sample_batches=3)))
    many = replace(here, plans=plans_of(a_plan(resources=asked, sample_batches=100, sample_jobs=10)))
    samplers = [each.sampling_jobs(ONE) for each in (small, many, replace(many, queued=True), machine())]
    assert samplers == [3, 8, 10, 1]
    limited = replace(here, limit=2, cores=1)
    assert (limited.at_once, limited.threads(ONE), replace(here, limit=9).at_once) == (2, 1, 8)


def test_devices_are_assigned_to_stages_only_where_there_are_several() -> None:
    asks: dict[str, int | None] = {"gpus_per_node": 1}
    assert machine(**asks).uses_gpus and not machine(gpus_per_node=None).uses_gpus
    for one in (machine(**asks), machine(queued=True, **asks), machine(queued=True, remote=True, **asks)):
        assert (one.one_device(ONE), one.training_devices(ONE)) == (None, None)
        assert one.devices_option(ONE, {"gres": "gpu:1"}) == ["--gpus", "1"]
    assert machine().devices_option(ONE, {}) == []
    assert not machine(queued=True, **asks).uses_gpus and not machine(remote=True, **asks).uses_gpus
    given = {"gres": "gpu:a100:2", "devices": 2}
    assert machine(**asks).devices_option(ONE, given) == ["--gpus", "2", "--devices", "2"]


def test_training_with_too_few_gpus_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    plan = a_plan(resources={**RESOURCES, "nodes": 2, "gpus_per_node": 2, "processes_per_node": 2})
    there = Machine(plans_of(plan), {}, queued=False, remote=False, devices=tuple("0123"))
    assert there.too_few_devices([ONE]) is None and there.training_devices(ONE) == 4
    here = replace(there, limit=3)
    told = here.too_few_devices([ONE])
    assert told is not None and told.startswith("one trains with 4 processes, each of which needs a GPU of its own")
    assert "(--config nodes=1 processes_per_node=3)" in told
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert here.too_few_devices([ONE]) is None, "the other node has the others"


@pytest.mark.parametrize(
    ("told", "minutes"),
    [
        (None, 60),
        ({"sample_s": 600.0}, 25),
        ({"sample_s": 90_000.0}, 60),
        ({"train_s": 1.0}, 60),
        ({"sample_s": "?"}, 60),
    ],
)
def test_sampling_time_request_follows_the_doctor_measurement(tmp_path: Path, told: Any, minutes: int) -> None:
    if told is not None:
        write_json(tmp_path / "one/doctor.json", told)
    assert machine({"results": str(tmp_path)}).sampling_min(ONE) == minutes
    halves = Machine(plans_of(a_plan(sample_jobs=2)), {"results": str(tmp_path)}, queued=True, remote=False)
    assert halves.sampling_min(ONE) == {25: 18}.get(minutes, minutes)


def test_small_experiment_and_its_data_run_in_one_job_each() -> None:
    codec = a_plan("codec", resources={**RESOURCES, "one_job": True})
    small = a_plan("small", codec="codec", codec_experiment="codec", resources={**RESOURCES, "one_job": True})
    data, latents = {"dataset": "dots-16"}, {"dataset": "dots-16", "codec": "codec"}

    def shared(*plans: Any, config: dict[str, Any] | None = None, queued: bool = True) -> list[str | None]:
        sent = Machine(plans_of(*plans), config or {}, queued, remote=False)
        return [sent.shared_job(each) for each in ({"experiment": "small"}, data, latents)]

    assert shared(codec, small) == ["small", "data_dots-16", "codec"]
    assert shared(codec, small, a_plan()) == ["small", None, "codec"], "another experiment on the data is large"
    for config in ({"gpus_per_node": 1}, {"nodes": 2}, {"slurm": {"stages": {"train": {"runtime": 9}}}}):
        assert shared(codec, small, config=config) == [None] * 3, config
    assert shared(codec, small, queued=False) == [None] * 3
    checkpoint = {"experiment": "small", "step": "latest"}
    assert Machine(plans_of(codec, small), {}, queued=True, remote=False).shared_job(checkpoint) is None
