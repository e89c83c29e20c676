"""Faults of training on two nodes, and Slurm's warning before the time limit: each run ends with the bytes of an
undisturbed one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import Cluster, cropped_project, slurm_project, snakemake, steps_saved, wait_until
from projects import Project, made_once

from image_diffusion.core.journal.reader import read_journal
from image_diffusion.core.process.command import read_attempts

WEIGHTS = "results/micro/train/weights.safetensors"
TWO_NODES = ["--config", "nodes=2", "processes_per_node=1", "gpus_per_node=0"]


def long_training(project: Project) -> None:
    """Make the training long, with the same result for any number of processes."""
    project.edit(
        lambda experiment: experiment["train"].update(
            steps=240,
            deterministic="strict",
            strict_chunk=4,
            checkpoint={"every_steps": 10},
            validate_every_steps=None,
            log_every_steps=10,
        )
    )
    project.edit(lambda experiment: experiment["resources"].update(hang_s=40))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of an undisturbed run on this machine."""

    def run(folder: Path) -> None:
        project = slurm_project(folder)
        long_training(project)
        project.run(WEIGHTS)

    return (made_once(tmp_path_factory, "undisturbed_nodes", run) / WEIGHTS).read_bytes()


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project with crops. None of its jobs is in the queue when the test ends."""
    project = cropped_project(tmp_path_factory, tmp_path / "project")
    long_training(project)
    yield project
    cluster.cancel_all()


def starts(project: Project) -> int:
    """Return how often training started or resumed."""
    history = read_journal(project / "results/micro/journal/train")
    return 0 if history is None else len(history.starts)


def trainings(project: Project, node: str | None = None) -> Iterator[int]:
    """Yield the processes that train in a project, or those of one node."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
            is_here = (process / "cwd").readlink() == project.folder.resolve()
        except OSError:  # it has ended
            continue
        is_rank = is_here and b"image_diffusion\0train" in command and b"\0RANK=" in environment
        if is_rank and (node is None or f"\0SLURMD_NODENAME={node}\0".encode() in environment):
            yield int(process.name)


def kill_rank(cluster: Cluster, project: Project) -> None:
    for pid in trainings(project, "n2"):
        os.kill(pid, signal.SIGKILL)


def lose_node(cluster: Cluster, project: Project) -> None:
    """Kill the node's daemon and its trainings, as a power failure does; it comes back later."""
    cluster.kill_daemon("slurmd-n2")
    kill_rank(cluster, project)


def stop_rank(cluster: Cluster, project: Project) -> None:
    """Let a process hang; the others wait for it until `hang_s`."""
    for pid in trainings(project, "n2"):
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    "fault", [lose_node, *(pytest.param(each, marks=pytest.mark.long) for each in (kill_rank, stop_rank))]
)
def test_training_on_two_nodes_resumes_after(
    cluster: Cluster, training: Project, undisturbed: bytes, fault: Callable[[Cluster, Project], None]
) -> None:
    with snakemake(training, WEIGHTS, *TWO_NODES) as running:
        wait_until(lambda: steps_saved(training) > 0 and cluster.job_of("train"), 300)
        job = cluster.job_of("train")
        assert job is not None and [*trainings(training, "n1")] and [*trainings(training, "n2")]
        fault(cluster, training)
        # The job of a lost node stays in the queue until the node is back.
        wait_until(lambda: not cluster.has(job) or not [*trainings(training)], 240)
        cluster.script("up")
        assert running.wait(600) == 0
    assert (training / WEIGHTS).read_bytes() == undisturbed
    assert starts(training) >= 2


def is_told(pid: int) -> bool:
    """Return whether SIGTERM is pending for a stopped process, or has ended it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (signal.SIGTERM - 1) & 1 for mask in pending)


def test_training_saves_on_slurm_warning_before_time_limit(
    cluster: Cluster, training: Project, undisturbed: bytes
) -> None:
    """Of four minutes, the profile's `--signal=TERM@120` leaves two, or one if Slurm is early. Training is stopped
    until then, so that it does not finish before."""
    with snakemake(training, WEIGHTS, "--set-resources", "train:runtime=4") as running:
        wait_until(lambda: steps_saved(training) > 0 and cluster.job_of("train"), 300)
        job = cluster.job_of("train")
        assert job is not None
        ranks = [*trainings(training)]
        assert ranks
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(map(is_told, ranks)), 300)
        before = steps_saved(training)
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not cluster.has(job), 180)
        assert steps_saved(training) >= before
        assert running.wait(600) == 0
    assert (training / WEIGHTS).read_bytes() == undisturbed
    assert starts(training) >= 2
    printed = (training / "printed.log").read_text()
    first, *others = read_attempts(training / "logs" / "micro" / "train.log.attempt")
    assert (first.job, first.ending) == (job, "stopped") and others[-1].ending is None
    assert "Traceback" not in printed
