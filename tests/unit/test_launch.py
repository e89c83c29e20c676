"""The launcher: one command line for one node, another for several nodes of a Slurm job, the same processes in both."""

import subprocess
import sys
from pathlib import Path

import pytest

from image_diffusion.training.launch import Layout, command_line

MODULE = ["image_diffusion.train", "--config", "train.yaml"]
IN_SLURM = {"SLURM_JOB_ID": "40123"}


def layout(nodes: int, processes_per_node: int) -> Layout:
    return Layout(nodes, processes_per_node, threads_per_process=2, logs=Path("logs"))


@pytest.mark.parametrize("environment", [{}, IN_SLURM])
def test_one_node_never_calls_srun(environment: dict[str, str]) -> None:
    line = command_line(layout(1, 4), MODULE, environment, "first")
    assert line[:4] == [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    assert "--nproc-per-node=4" in line


def test_several_nodes_of_a_slurm_job_meet_at_the_first() -> None:
    line = command_line(layout(2, 4), MODULE, IN_SLURM, "first")
    assert line[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=1"} <= set(line)
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=first:20123", "--rdzv-id=40123"} <= set(line)


def test_several_nodes_outside_slurm_are_processes_here() -> None:
    line = command_line(layout(2, 4), MODULE, {}, "first")
    assert "--standalone" in line
    assert "--nproc-per-node=8" in line


def test_the_module_and_its_arguments_come_last() -> None:
    for nodes, environment in [(1, {}), (2, IN_SLURM)]:
        assert command_line(layout(nodes, 1), MODULE, environment, "first")[-4:] == ["--module", *MODULE]


def test_a_single_process_prints_where_it_was_started() -> None:
    assert not any(part.startswith("--redirects") for part in command_line(layout(1, 1), MODULE, {}, "first"))


def test_no_processes_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="--processes-per-node must be at least 1; got 0"):
        layout(1, 0)


def launch(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    launcher = [sys.executable, "-m", "image_diffusion.training.launch", "--logs", "logs"]
    environment = {"PATH": "/usr/bin:/bin"}
    line = [*launcher, *arguments, "--", "program"]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_process_runs_and_leaves_its_log(tmp_path: Path) -> None:
    program = "from os import environ as e\nprint(e['RANK'], 'of', e['WORLD_SIZE'], e['OMP_NUM_THREADS'])"
    done = launch(tmp_path, program, "--nodes", "2", "--threads-per-process", "3")
    assert done.returncode == 0, done.stderr
    printed = sorted(log.read_text().strip() for log in (tmp_path / "logs").rglob("stdout.log"))
    assert printed == ["0 of 2 3", "1 of 2 3"]


def test_a_failing_process_fails_the_command(tmp_path: Path) -> None:
    assert launch(tmp_path, "raise SystemExit(3)").returncode == 1
