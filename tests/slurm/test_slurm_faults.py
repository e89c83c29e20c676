"""Real faults of a cluster: each run ends with the bytes of an undisturbed one, and with an empty queue."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import Cluster, cropped_project, finish, slurm_project, snakemake, steps_saved, wait_until
from projects import Project, made_once

from image_diffusion.core.journal.reader import read_journal

WEIGHTS = "results/micro/train/weights.safetensors"
STEPS = 1200


def long_training(project: Project, steps: int, save_every: int = 50) -> None:
    """Make the training long; saving does not change its result."""
    project.edit(
        lambda experiment: experiment["train"].update(
            steps=steps, checkpoint={"every_steps": save_every}, validate_every_steps=None, log_every_steps=50
        )
    )


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of an undisturbed run on this machine."""

    def run(folder: Path) -> None:
        project = slurm_project(folder)
        long_training(project, STEPS)
        project.run(WEIGHTS)

    return (made_once(tmp_path_factory, "undisturbed", run) / WEIGHTS).read_bytes()


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project with crops. None of its jobs is in the queue when the test ends."""
    project = cropped_project(tmp_path_factory, tmp_path / "project")
    long_training(project, STEPS)
    yield project
    cluster.cancel_all()


@pytest.fixture
def cold_training(training: Project) -> Project:
    """The same project without warm processes: its Snakemake starts as for a user, who may kill it."""
    return replace(training, cold=True)


def wait_for_training(cluster: Cluster, project: Project, steps: int) -> str:
    """Return the job of the training, once it has saved more than `steps` steps."""
    wait_until(lambda: steps_saved(project) > steps and cluster.job_of("train"), 300)
    job = cluster.job_of("train")
    assert job is not None
    return job


def test_a_cancelled_job_is_sent_again(cluster: Cluster, training: Project, undisturbed: bytes) -> None:
    with snakemake(training, WEIGHTS) as running:
        job = wait_for_training(cluster, training, 0)
        subprocess.run(["scancel", job], check=True)
        assert running.wait(600) == 0
    assert (training / WEIGHTS).read_bytes() == undisturbed
    assert not cluster.jobs()


@pytest.mark.long
def test_killed_daemons_lose_nothing(cluster: Cluster, training: Project, undisturbed: bytes) -> None:
    with snakemake(training, WEIGHTS) as running:
        wait_for_training(cluster, training, 0)
        for daemon in ("slurmd-n1", "slurmd-n2", "slurmctld"):
            cluster.kill_daemon(daemon)
        cluster.script("up")
        assert running.wait(600) == 0
    assert (training / WEIGHTS).read_bytes() == undisturbed


@pytest.mark.long
def test_an_interrupted_snakemake_leaves_no_job(cluster: Cluster, cold_training: Project, undisturbed: bytes) -> None:
    long_training(cold_training, STEPS, save_every=1)  # it must not end before its job is cancelled
    with snakemake(cold_training, WEIGHTS) as running:
        wait_for_training(cluster, cold_training, 0)
        running.send_signal(signal.SIGINT)
        assert running.wait(120) != 0
    wait_until(lambda: not cluster.jobs(), 60)
    saved = steps_saved(cold_training)
    finish(cold_training, WEIGHTS)
    assert (cold_training / WEIGHTS).read_bytes() == undisturbed
    history = read_journal(cold_training / "results/micro/journal/train")
    assert history is not None
    assert saved > 0
    assert len(history.starts) == 2


@pytest.mark.parametrize(
    "elsewhere",
    [pytest.param(False, id="here"), pytest.param(True, id="on another login node", marks=pytest.mark.long)],
)
def test_command_after_killed_snakemake_waits_for_its_job(
    cluster: Cluster, cold_training: Project, undisturbed: bytes, elsewhere: bool
) -> None:
    with snakemake(cold_training, WEIGHTS) as running:
        orphan = wait_for_training(cluster, cold_training, 0)
        running.kill()
    subprocess.run(["scancel", "--signal=STOP", orphan], check=True)  # so that it still runs after the checks
    if elsewhere:
        (cold_training / ".snakemake/owner").write_text("login2")  # the host where it started, as far as this one knows
    cold_training.run("--profile", "slurm", "--dry-run", WEIGHTS)
    cold_training.run("--list-rules")
    assert cluster.has(orphan), "who only looks cancels nothing"
    if elsewhere:
        with snakemake(cold_training, WEIGHTS) as running:
            assert running.wait(120) == 1
        assert "Directory cannot be locked" in printed(cold_training) and cluster.has(orphan)
        cold_training.run("--unlock")
    with snakemake(cold_training, WEIGHTS) as running:
        wait_until(lambda: f"Waiting for Slurm job {orphan}" in printed(cold_training), 120)
        subprocess.run(["scancel", "--signal=CONT", orphan], check=True)
        assert running.wait(600) == 0
    assert (cold_training / WEIGHTS).read_bytes() == undisturbed
    assert "Cancelling" not in printed(cold_training) and not cluster.jobs()


@pytest.mark.long
def test_job_of_killed_snakemake_is_cancelled_if_configuration_changed(
    cluster: Cluster, cold_training: Project
) -> None:
    with snakemake(cold_training, WEIGHTS) as running:
        orphan = wait_for_training(cluster, cold_training, 0)
        running.kill()
    subprocess.run(["scancel", "--signal=STOP", orphan], check=True)
    cold_training.edit(lambda experiment: experiment["train"].update(steps=8))
    finish(cold_training, WEIGHTS)
    assert f"Cancelling what a killed Snakemake left in the queue: {orphan}" in printed(cold_training)
    assert json.loads((cold_training / WEIGHTS).with_name("model.json").read_text())["step"] == 8


@pytest.mark.long
def test_job_out_of_time_twice_resumes(cluster: Cluster, training: Project, undisturbed: bytes) -> None:
    limits = ["--set-resources", "train:runtime=1", "train:slurm_extra=None"]
    with snakemake(training, WEIGHTS, *limits) as running:
        for _ in range(2):
            job = wait_for_training(cluster, training, steps_saved(training))
            subprocess.run(["scancel", "--signal=STOP", job], check=True)  # so that a minute is not enough
            wait_until(lambda last=job: not cluster.has(last), 180)
        assert running.wait(600) == 0
    assert (training / WEIGHTS).read_bytes() == undisturbed
    history = read_journal(training / "results/micro/journal/train")
    assert history is not None
    assert len(history.starts) > 2


def submissions(project: Project, rule: str) -> int:
    return len(re.findall(rf"has been submitted with SLURM jobid .*/rule_{rule}/", printed(project)))


def test_mistake_is_retried_as_configured_and_is_one_line(project: Project) -> None:
    project.edit(lambda experiment: experiment["train"].update(optimizer={"type": "adamw", "lr": 10}))
    with snakemake(project, WEIGHTS, "--retries", "1") as running:
        assert running.wait(300) == 1
    assert submissions(project, "train") == 2
    told = re.findall(
        r"^error: micro/train \(job \d+, n\d\) failed and would fail so again: ", printed(project), re.MULTILINE
    )
    assert len(told) == 1


@pytest.mark.long
def test_job_out_of_memory_is_sent_again_with_more(cluster: Cluster, training: Project, undisturbed: bytes) -> None:
    training.edit(lambda experiment: experiment["resources"].update(memory_mb=800))
    finish(training, WEIGHTS)
    assert (training / WEIGHTS).read_bytes() == undisturbed
    *_, log = sorted((training / ".snakemake/log").glob("*.snakemake.log"))
    asked = re.findall(r"^rule train:$.*?mem_mb=(\d+)", log.read_text(), re.MULTILINE | re.DOTALL)
    assert asked[:2] == ["800", "1200"] and submissions(training, "train") == len(asked), asked


def printed(project: Project) -> str:
    return (project / "printed.log").read_text()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("crop:slurm_partition=nowhere", "invalid partition specified: nowhere"),
        pytest.param("crop:cpus_per_task=64", "More processors requested than permitted", marks=pytest.mark.long),
        pytest.param("crop:runtime=100000", "Requested time limit is invalid", marks=pytest.mark.long),
    ],
)
def test_refusal_by_cluster_is_printed(project: Project, asked: str, message: str) -> None:
    with snakemake(project, "results/datasets/dots-16/crops/manifest.json", "--set-resources", asked) as running:
        assert running.wait(120) == 1
    assert message in printed(project)


@pytest.mark.skipif(os.geteuid() != 0, reason="hiding a folder from a node takes root")
def test_folder_missing_on_node_is_named(cluster: Cluster, project: Project) -> None:
    with cluster.hiding(project.folder), snakemake(project, "results/datasets/dots-16/crops/manifest.json") as running:
        assert running.wait(300) == 1
    (line,) = re.findall(r"^error: .*", printed(project), re.MULTILINE)
    assert "left no log" in line
    assert str(project.folder) in line
