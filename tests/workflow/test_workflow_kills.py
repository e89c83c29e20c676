"""All processes killed at once, Snakemake included: the same command resumes and ends with the same bytes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from projects import Project, make_project

from image_diffusion.core.files.atomic import read_json, write_json
from image_diffusion.core.files.partial_results import partial_folder
from warm import warm_server

pytestmark = pytest.mark.slow

RESULTS = ["results/micro/train/weights.safetensors", "results/micro/samples/samples.npz", "results/micro/metrics.json"]


def started(project: Project, *arguments: str) -> subprocess.Popen[bytes]:
    """Start Snakemake in a new session, without warm processes."""
    silent = subprocess.DEVNULL
    return subprocess.Popen(
        [*replace(project, cold=True).command(), *arguments],
        cwd=project.folder,
        start_new_session=True,
        stdout=silent,
        stderr=silent,
    )


def wait_for(path: Path, running: subprocess.Popen[bytes]) -> None:
    while not path.exists():
        assert running.poll() is None, f"ended before {path} was there"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "instant",
    [
        pytest.param("results/datasets/dots-16/crops/shard-00000.tar", marks=pytest.mark.long),
        pytest.param("results/micro/train/state", marks=pytest.mark.smoke),
    ],
)
def test_killed_workflow_resumes_bit_exactly(fresh: Project, made: Project, instant: str) -> None:
    with started(fresh) as running:
        wait_for(fresh / instant, running)
        os.killpg(running.pid, signal.SIGKILL)
    fresh.run()
    for result in RESULTS:
        assert (fresh / result).read_bytes() == (made / result).read_bytes(), result


def test_jobs_end_with_killed_snakemake_and_change_no_later_result(fresh: Project, made: Project) -> None:
    """Only Snakemake is killed during training; then the same command runs with fewer steps."""
    steps = yaml.safe_load((fresh / "config/experiments/micro.yaml").read_text())["train"]["steps"]
    fresh.edit(lambda experiment: experiment["train"].update(steps=10**6, checkpoint={"every_steps": 20}))
    with started(fresh) as running:
        wait_for(fresh / "results/micro/train/state/owner.json", running)
        running.kill()
    orphans = processes_in(fresh.folder)
    fresh.edit(lambda experiment: experiment["train"].update(steps=steps, checkpoint={"every_steps": 2}))
    fresh.run()
    until = time.monotonic() + 30
    while still := orphans & processes_in(fresh.folder):
        assert time.monotonic() < until, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in still]
        time.sleep(0.1)
    assert "Nothing to be done" in fresh.run()
    for result in RESULTS:
        assert (fresh / result).read_bytes() == (made / result).read_bytes(), result


def test_weights_of_another_training_are_not_used(finished: Project) -> None:
    path = finished / "results/micro/train/model.json"
    model = read_json(path)
    write_json(path, model | {"train": model["train"] | {"seed": 5}})
    (finished / "results/micro/samples/samples.npz").unlink()
    done = finished.snakemake("--rerun-triggers", "input")
    assert done.returncode == 1
    assert (
        "weights of another training than results/micro/config/train.yaml describes: train.seed (0 here, 5 there)"
        in (done.stdout)
    )


def processes_in(folder: Path) -> set[int]:
    """Return the ids of processes whose working directory is the folder."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.add(int(process.name))
    return found


def signal_jobs(running: subprocess.Popen[bytes], folder: Path, number: int = signal.SIGKILL) -> None:
    """Send a signal to the processes that Snakemake has started in a folder. Some may end because others did."""
    for process in processes_in(folder) - {running.pid}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def writes(process: int, output: str) -> bool:
    """Return whether a process was started to write an output; not if it has ended."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"--output" in command and output.encode() in command


@pytest.fixture(scope="module")
def of_many_batches(made: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A finished project whose samples are made one by one, in many steps."""
    folder = tmp_path_factory.mktemp("batches") / "project"
    subprocess.run(["cp", "--archive", made.folder, folder], check=True)
    project = Project(folder)
    project.edit(
        lambda experiment: experiment["sample"].update(sampler={"type": "ddim", "num_steps": 99}, batch_size=1)
    )
    project.run("results/micro/metrics.json")
    return project


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, id="time limit", marks=pytest.mark.long), pytest.param(signal.SIGKILL, id="kill")],
)
@pytest.mark.parametrize(
    ("stage", "output", "files"),
    [("sample", "samples/samples.npz", 2), ("evaluate", "metrics.json", 1)],
    ids=["sample", "evaluate"],
)
def test_interrupted_stage_reuses_finished_batches(
    of_many_batches: Project, tmp_path: Path, stage: str, output: str, files: int, number: int
) -> None:
    """Snakemake removes the output of the failed stage but not its finished batches."""
    subprocess.run(["cp", "--archive", of_many_batches.folder, tmp_path / "project"], check=True)
    finished = Project(tmp_path / "project")
    path = finished / "results/micro" / output
    undisturbed, halfway = path.read_bytes(), partial_folder(path)
    path.unlink()
    with started(finished, f"results/micro/{output}") as running:
        while len(list(halfway.glob("*/*.npz"))) < files:
            assert running.poll() is None, "ended before anything was made"
            time.sleep(0.01)
        # The stage first: if only the processes that wait for it were killed, it could finish another batch.
        stages = {process for process, name in warm_server().running() if name == stage}
        waiting = {process for process in processes_in(finished.folder) if writes(process, f"results/micro/{output}")}
        for process in [*stages, *waiting]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
    assert running.returncode == 1 and not path.exists()
    there = len(list(halfway.glob("*/*.npz")))
    assert there >= files
    finished.run(f"results/micro/{output}")
    assert path.read_bytes() == undisturbed and not halfway.exists()
    logged = "".join(log.read_text() for log in (finished / "logs/micro").glob("*.log"))
    assert re.search(rf"{path.name}: {there} of \d+ batches are reused from an earlier run", logged)


def test_second_snakemake_is_refused_by_lock(fresh: Project) -> None:
    with started(fresh) as running:
        wait_for(fresh / "logs/datasets/dots-16/crop.log", running)
        second = fresh.snakemake()
        os.killpg(running.pid, signal.SIGKILL)
    assert second.returncode == 1
    assert "Directory cannot be locked" in second.stdout


def test_second_snakemake_from_another_clone_is_refused(fresh: Project, tmp_path: Path) -> None:
    """Two clones whose config.yaml names the same folder of results. A dry run is refused: it writes configurations."""
    shared = tmp_path / "results"
    clone = make_project(tmp_path / "clone")
    with started(fresh, "--config", f"results={shared}") as running:
        wait_for(shared / "datasets/dots-16/crops/shard-00000.tar", running)
        second = clone.snakemake("--config", f"results={shared}")
        looked = clone.snakemake("--dry-run", "--config", f"results={shared}")
        os.killpg(running.pid, signal.SIGKILL)
    for refused in (second, looked):
        assert refused.returncode == 1
        assert f"error: Another Snakemake works in {shared}: process {running.pid} on " in refused.stdout
        assert "Traceback" not in refused.stdout


def test_crops_and_two_processes_need_no_shared_memory(fresh: Project) -> None:
    """In a mount namespace in which /dev/shm is read-only, as in some containers."""
    hide = 'mount -t tmpfs -o ro none /dev/shm && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", hide, "sh"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    fresh.edit(lambda experiment: experiment["resources"].update(processes_per_node=2))
    command = [*inside, *replace(fresh, cold=True).command(), "results/micro/train/weights.safetensors"]
    done = subprocess.run(command, cwd=fresh.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "crop: one process crops, since several share memory in /dev/shm, which this machine does not" in done.stdout
