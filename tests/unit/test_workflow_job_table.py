"""The table of resources that jobs will request from a queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from image_diffusion.workflow.terminal import request


def job(rule: str, is_local: bool = False, **resources: Any) -> SimpleNamespace:
    return SimpleNamespace(
        rule=SimpleNamespace(name=rule), is_local=is_local, resources=resources, is_group=lambda: False
    )


def test_equal_jobs_share_a_line_and_unused_columns_are_left_out() -> None:
    parts = [job("sample_part", nodes=1, gres="gpu:1", mem_mb=32_000, runtime=240) for _ in range(10)]
    crop = job("crop", nodes=1, mem_mb=8000, runtime=240)
    assert request([*parts, crop, job("track", is_local=True, mem_mb=1)]).splitlines() == [
        "Asked of the queue, for each job:",
        "Stage        Nodes  GPUs   Memory (MB)  Time (min)  Jobs",
        "crop         1      -      8000         240         1",
        "sample_part  1      gpu:1  32000        240         10",
    ]


def test_stages_of_a_shared_job_are_one_line() -> None:
    shared = SimpleNamespace(
        rules={"train", "sample"}, is_local=False, resources={"mem_mb": 8000, "runtime": 120}, is_group=lambda: True
    )
    assert request([shared]).splitlines()[1:] == [
        "Stage          Memory (MB)  Time (min)  Jobs",
        "sample, train  8000         120         1",
    ]


def test_gpus_are_shown_as_the_executor_reads_them() -> None:
    asked = [job("train", gpu=2, gpu_manufacturer="nvidia"), job("sample", _gpus=1), job("crop", mem_mb=1)]
    assert [line.split()[:2] for line in request(asked).splitlines()[2:]] == [
        ["crop", "-"],
        ["sample", "1"],
        ["train", "2"],
    ]


def test_gpu_request_of_an_unsupported_executor_causes_a_warning() -> None:
    gpu, cpu = job("train", gres="gpu:1"), job("crop", mem_mb=1)
    assert "executor lsf" in request([gpu, cpu], "lsf").splitlines()[-1]
    assert "lsf" not in request([cpu], "lsf") and "warning" not in request([gpu], "kubernetes")


def test_local_jobs_print_no_table() -> None:
    assert request([job("track", is_local=True)]) == ""
