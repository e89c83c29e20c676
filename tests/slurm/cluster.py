"""The local Slurm cluster of the tests, and Snakemake runs that submit jobs to it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from projects import ROOT, Project, made_once, make_project

CROPS = "results/datasets/dots-16/crops/manifest.json"
WATCHFUL = Path(__file__).with_name("watchful_snakemake.py")
# A small queue answers sooner than a site's: poll after two seconds, and expect files at once.
SLURM = ["--profile", "slurm", "--slurm-init-seconds-before-status-checks", "2", "--latency-wait", "5"]


@dataclass(frozen=True)
class Cluster:
    """The cluster that local_slurm.sh keeps in a folder."""

    folder: Path
    port: int

    def script(self, command: str) -> None:
        """Run the script; it must succeed."""
        settings = {"LOCAL_SLURM_DIR": str(self.folder), "LOCAL_SLURM_PORT": str(self.port)}
        script = Path(__file__).parent / "local_slurm.sh"
        subprocess.run([script, command], env=os.environ | settings, check=True, stdout=subprocess.DEVNULL)

    def environment(self) -> dict[str, str]:
        """Return the environment that a process needs to use the cluster."""
        clients = self.folder / "bin"
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{clients}{os.pathsep}{os.environ['PATH']}"}

    def jobs(self, *states: str) -> list[str]:
        """Return the jobs in the queue, by id and rule."""
        wanted = [f"--states={','.join(states)}"] if states else []
        listed = subprocess.run(
            ["squeue", "--noheader", "--format=%A %k", *wanted], check=True, capture_output=True, text=True
        )
        return listed.stdout.splitlines()

    def job_of(self, rule: str) -> str | None:
        """Return the id of the running job of a rule."""
        running = [line.split()[0] for line in self.jobs("RUNNING") if f"rule_{rule}" in line]
        return running[0] if running else None

    def has(self, job: str) -> bool:
        """Return whether a job is in the queue, in any state."""
        return any(line.startswith(f"{job} ") for line in self.jobs())

    def kill_daemon(self, name: str) -> None:
        """SIGKILL one daemon, slurmctld, slurmd-n1 or slurmd-n2, and wait until it has ended."""
        pid_file = self.folder / "run" / f"{name}.pid"
        process = os.pidfd_open(int(pid_file.read_text()))
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            assert select.select([process], [], [], 10)[0], f"{name} outlives SIGKILL"
        finally:
            os.close(process)
        pid_file.unlink()  # the process id of a dead daemon can be reused

    @contextmanager
    def hiding(self, folder: Path) -> Iterator[None]:
        """Hide a folder from the nodes, as if it were not on a shared file system. Requires root."""
        hide = 'mount -t tmpfs none "$0" && exec slurmd -N "$1"'
        path = os.environ["PATH"] + ":/usr/sbin"
        nodes = [pid.stem.removeprefix("slurmd-") for pid in (self.folder / "run").glob("slurmd-*.pid")]
        for node in nodes:
            self.kill_daemon(f"slurmd-{node}")
            command = ["unshare", "--mount", "sh", "-c", hide, str(folder), node]
            subprocess.run(command, env=os.environ | {"PATH": path}, check=True)
        try:
            yield
        finally:
            for node in nodes:
                self.kill_daemon(f"slurmd-{node}")
            self.script("up")

    def cancel_all(self) -> None:
        """Empty the queue."""
        for job in self.jobs():
            subprocess.run(["scancel", job.split()[0]], check=True)
        wait_until(lambda: not self.jobs(), 60)


@contextmanager
def snakemake(project: Project, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run Snakemake, with its output in printed.log; kill it if it still runs at the end."""
    python, _, _, *options = project.command()
    command = [python, str(WATCHFUL), *options, *SLURM, *arguments]
    with (
        (project / "printed.log").open("ab") as printed,
        subprocess.Popen(command, cwd=project.folder, stdout=printed, stderr=printed) as running,
    ):
        try:
            yield running
        finally:
            running.kill()


def slurm_project(folder: Path) -> Project:
    """Create a project of the workflow tests, with the profile where the literal command finds it. Snakemake runs in a
    warm process; the processes of a job start as they do for a user."""
    project = make_project(folder)
    (folder / "slurm").symlink_to(ROOT / "slurm", target_is_directory=True)
    return project


def cropped_project(factory: pytest.TempPathFactory, folder: Path) -> Project:
    """Return a new project with crops that were made on this machine, once for all tests."""
    cropped = made_once(factory, "cropped", lambda empty: slurm_project(empty).run(CROPS))
    subprocess.run(["cp", "--archive", cropped, folder], check=True)
    return Project(folder)


def finish(project: Project, *arguments: str) -> None:
    """Run Snakemake on the cluster; it must succeed."""
    with snakemake(project, *arguments) as running:
        code = running.wait(900)
    assert code == 0, (project / "printed.log").read_text()[-5000:]


def wait_until(condition: Callable[[], object], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)


def steps_saved(project: Project) -> int:
    """Return the step of the last complete checkpoint of the training."""
    saved = (project / "results/micro/train/state").glob("*/step-*")
    return max((int(path.name.split("-")[1].split(".")[0]) for path in saved), default=0)
