"""The launcher: its command lines for one node and for several nodes of a Slurm job, and its processes."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from image_diffusion.core.process.command import STOPPED, JobOutcome, read_attempts
from image_diffusion.core.process.parent_watch import VARIABLE, end_with_parent, process_identifier
from image_diffusion.training.parallel.launch import Layout, command_line, main, own_name, recorder
from warm import warm_python

MODULE = ["image_diffusion.stages.train", "--config", "train.yaml"]
IN_SLURM = {"SLURM_JOB_ID": "40123", "SLURM_NNODES": "2"}


def layout(nodes: int, processes_per_node: int) -> Layout:
    return Layout(nodes, processes_per_node, threads_per_process=2, logs=Path("logs"))


@pytest.mark.parametrize("environment", [{}, IN_SLURM])
def test_one_node_never_calls_srun(environment: dict[str, str]) -> None:
    line = command_line(layout(1, 4), MODULE, environment, "first")
    assert line[:4] == [sys.executable, "-m", "image_diffusion.training.parallel.launch_agent", "--standalone"]
    assert "--nproc-per-node=4" in line


def test_nodes_of_a_slurm_job_rendezvous_at_the_first() -> None:
    line = command_line(layout(2, 4), MODULE, IN_SLURM, "first")
    assert line[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=1"} <= set(line)
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=first:20123", "--rdzv-id=40123"} <= set(line)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"SLURM_NNODES": "1"}, r"trains on 2 nodes, and Slurm job 40123 has 1\. Ask for more \(salloc --nodes=2\)"),
        ({"SLURM_STEP_ID": "0"}, r"this is a step of Slurm job 40123, which cannot start others\. Start it outside"),
    ],
)
def test_insufficient_slurm_allocations_are_rejected(environment: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        command_line(layout(2, 4), MODULE, IN_SLURM | environment, "first")
    assert command_line(layout(1, 4), MODULE, IN_SLURM | environment, "first")[0] == sys.executable


def test_interactive_slurm_shell_is_not_a_job_step() -> None:
    assert command_line(layout(2, 4), MODULE, IN_SLURM | {"SLURM_STEP_ID": "4294967290"}, "first")[0] == "srun"


def test_slurm_node_name_is_used_if_it_resolves() -> None:
    assert own_name({"SLURMD_NODENAME": "localhost"}) == "localhost"
    assert own_name({"SLURMD_NODENAME": "no.such.invalid"}) == own_name({}) == socket.gethostname()


def test_nodes_outside_slurm_become_local_processes() -> None:
    line = command_line(layout(2, 4), MODULE, {}, "first")
    assert "--standalone" in line
    assert "--nproc-per-node=8" in line


def test_module_and_arguments_end_the_command_line() -> None:
    for nodes, environment in [(1, {}), (2, IN_SLURM)]:
        assert command_line(layout(nodes, 1), MODULE, environment, "first")[-4:] == ["--module", *MODULE]


def test_single_process_output_is_not_redirected() -> None:
    assert not any(part.startswith("--redirects") for part in command_line(layout(1, 1), MODULE, {}, "first"))


def test_zero_processes_are_rejected() -> None:
    with pytest.raises(ValueError, match="--processes-per-node must be at least 1; got 0"):
        layout(1, 0)


def test_launcher_execs_the_command_with_the_given_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setenv(VARIABLE, "another")  # so that monkeypatch restores it
    monkeypatch.setattr(os, "execvpe", lambda *given: started.append(given))
    given = ["launch", "--threads-per-process", "3", "--grace-s", "7"]
    given += ["--logs", "logs", "--", "program", "x"]
    monkeypatch.setattr(sys, "argv", given)
    main()
    ((program, line, environment),) = started
    assert program == line[0] == sys.executable and line[-3:] == ["--module", "program", "x"]
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "7"
    assert environment[VARIABLE] == f"another {process_identifier()}"


def launch(
    folder: Path, program: str, *options: str, arguments: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    launcher = [warm_python(), "-m", "image_diffusion.training.parallel.launch", "--logs", "logs"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    line = [*launcher, *options, "--", "program", *arguments]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_process_runs_and_writes_its_log(tmp_path: Path) -> None:
    program = "from os import environ as e\nprint(e['RANK'], 'of', e['WORLD_SIZE'], e['OMP_NUM_THREADS'])"
    done = launch(tmp_path, program, "--nodes", "2", "--threads-per-process", "3")
    assert done.returncode == 0, done.stderr
    printed = sorted(log.read_text().strip() for log in (tmp_path / "logs").rglob("stdout.log"))
    assert printed == ["0 of 2 3", "1 of 2 3"]
    assert done.stdout.splitlines() == ["[default0]:0 of 2 3"]  # workflow/scripts/logged removes this prefix


TOO_MANY = """
import torch
from image_diffusion.core.process import command
from image_diffusion.training.parallel.world import join

def main():
    with join():
        print("met")

torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
command.run(main)
"""


def test_more_processes_than_gpus_is_a_one_line_error(tmp_path: Path) -> None:
    done = launch(tmp_path, TOO_MANY, "--processes-per-node", "2")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "error: 2 processes cannot share the 1 GPU of " in line


ONE_FAILS = """
import os, signal, time
from image_diffusion.core.process import command

def main():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if os.environ["RANK"] in "23":
        raise ValueError("the disk of this machine is full.")
    time.sleep(60)

command.run(main)
"""


def test_errors_of_processes_other_than_the_first_are_shown(tmp_path: Path) -> None:
    done = launch(tmp_path, ONE_FAILS, "--processes-per-node", "4")
    assert done.returncode == 1
    assert re.fullmatch(r"error: the disk of this machine is full\. \(process [23]\)\n", done.stderr)


RECORDS = """
import os, sys
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_file

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if len(sys.argv) > 1:
    _dump_fr_trace_file(dist.get_rank())  # what a timeout makes PyTorch do
dist.destroy_process_group()
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_flight_recorder_files_of_hung_processes_are_kept_with_logs(tmp_path: Path, hangs: bool) -> None:
    done = launch(tmp_path, RECORDS, "--processes-per-node", "2", arguments=["hangs"] * hangs)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    left = sorted(path.name for path in (tmp_path / "logs").glob("*") if path.is_file())
    assert left == (["flight_recorder_rank_0", "flight_recorder_rank_1"] if hangs else [])


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_flight_recorder_path_can_be_set_by_the_user(name: str) -> None:
    assert recorder(layout(1, 2), {name: "elsewhere"}) == {}
    assert recorder(layout(1, 2), {}) == {"TORCH_FR_DUMP_TEMP_FILE": f"{Path.cwd()}/logs/flight_recorder_rank_"}


def test_error_of_a_failing_process_is_the_only_output(tmp_path: Path) -> None:
    done = launch(tmp_path, "import sys\nprint('error: the loss is gone', file=sys.stderr)\nsys.exit(3)")
    assert (done.returncode, done.stderr) == (3, "error: the loss is gone\n")


def test_killed_process_is_a_one_line_error(tmp_path: Path) -> None:
    program = "import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(60)"
    done = launch(tmp_path, program, "--processes-per-node", "2")
    assert done.returncode == 1
    assert done.stderr == (
        "error: Process 1 was ended by SIGKILL. The machine may have run out of memory: see train.microbatch. Run the "
        "same command again to go on from the last checkpoint.\n"
    )


SLOW = """
import os, pathlib, signal, time
from image_diffusion.core.process import command
from image_diffusion.core.process.errors import Stopped

def stop(number, _):
    signal.signal(number, signal.SIG_IGN)  # a stop is asked for again and again, by all who notice
    raise Stopped("saved.")

def main():
    signal.signal(signal.SIGTERM, stop)
    pathlib.Path("running").touch()
    time.sleep(60)

command.run(main)
"""


@pytest.mark.parametrize("ended", ["launcher", "Snakemake"])
def test_planned_stop_reports_the_saved_checkpoint(tmp_path: Path, ended: str) -> None:
    """If the launcher is stopped, or if only its parent is killed: its processes then stop as well."""
    (tmp_path / "program.py").write_text(SLOW)
    starter = (
        "import os, subprocess, sys; from image_diffusion.core.process.parent_watch import end_with_parent\n"
        "end_with_parent(os.environ); "
        "child = subprocess.Popen(sys.argv[1:]); print(child.pid, flush=True); sys.exit(child.wait())"
    )
    launcher = [warm_python(), "-m", "image_diffusion.training.parallel.launch", "--logs", "logs", "--", "program"]
    with subprocess.Popen(
        [sys.executable, "-c", starter, *launcher],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        child = int(running.stdout.readline())
        while not (tmp_path / "running").exists():
            assert running.poll() is None
            time.sleep(0.05)
        if ended == "launcher":
            os.kill(child, signal.SIGTERM)
        else:
            running.kill()
        said = running.stderr.read()  # returns when the last process ends
    assert "Traceback" not in said
    assert "stopped: saved.\n" in said
    if ended == "launcher":
        assert (running.returncode, said) == (75, "stopped: saved.\n")


ASKED_TWICE = """
import os, signal, sys
from image_diffusion.core.process import command
from image_diffusion.core.process.errors import Stopped

class Teller:
    def write(self, text):
        os.kill(os.getpid(), signal.SIGTERM)
        return sys.__stderr__.write(text)

    def flush(self):
        sys.__stderr__.flush()

def main():
    sys.stderr = Teller()
    raise Stopped("saved.")

command.run(main)
"""


def test_second_signal_during_shutdown_keeps_the_stopped_status() -> None:
    """Launcher and parent watch may both send one; ending by the signal would look like a crash."""
    done = subprocess.run([sys.executable, "-c", ASKED_TWICE], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, "stopped: saved.\n")


@pytest.mark.parametrize("raised", ["Stopped('saved.')", "ValueError('wrong.')", "KeyboardInterrupt"])
def test_final_messages_are_written_in_a_single_call(raised: str) -> None:
    """Several processes share a terminal: separate writes would mix their lines."""
    code = (
        "import os, sys; from image_diffusion.core.process import command\n"
        "from image_diffusion.core.process.errors import Stopped\n"
        "class Teller:\n"
        "    def write(self, text): os.write(1, f'{text!r} '.encode())\n"
        "    def flush(self): pass\n"
        "def main():\n"
        "    sys.stderr = Teller()\n"
        f"    raise {raised}\n"
        "command.run(main)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert len(done.stdout.split("' ")) == 2 and done.stdout.endswith("\\n' "), done.stdout


def test_queued_jobs_outlive_their_submitting_process() -> None:
    environment = {VARIABLE: "another"}
    end_with_parent(environment)
    assert environment[VARIABLE] == f"another {process_identifier()}"
    end_with_parent(environment, queued=True)
    assert environment[VARIABLE] == process_identifier()


def test_terminated_run_with_nothing_to_save_counts_as_stopped(tmp_path: Path) -> None:
    """Slurm's signal may arrive while training starts or after its last step: no process then reports a save."""
    (tmp_path / "ready.py").write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(600)\n"
    )
    attempt = tmp_path / "train.log.attempt"
    attempt.write_text("24 n1 5\n")
    sources = os.pathsep.join([*filter(None, sys.path), str(tmp_path)])
    environment = os.environ | {"IMAGE_DIFFUSION_ATTEMPT": str(attempt), "PYTHONPATH": sources}
    line = command_line(Layout(1, 1, 1, tmp_path), ["ready"], {}, "first")
    with subprocess.Popen(line, cwd=tmp_path, env=environment) as running:
        until = time.monotonic() + 120
        while not (tmp_path / "ready").exists() and time.monotonic() < until:
            time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        assert running.wait(120) == STOPPED
    assert read_attempts(attempt) == [
        JobOutcome("24", "n1", 5, "stopped", "SIGTERM came, and no process has noted that it saved.")
    ]
