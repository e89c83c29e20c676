"""GPUs of a machine without a queue: their detection and exclusive assignment to stages."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from image_diffusion.core.files.atomic import write_json
from image_diffusion.workflow.jobs.gpu_locks import VARIABLE, devices_here
from image_diffusion.workflow.start import start
from plans import RESOURCES, a_plan, write_plans

ROOT = Path(__file__).resolve().parents[2]
START_S = 20.0
Start = Callable[[int, str], "subprocess.Popen[bytes]"]


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("0,1,7", ("0", "1", "7")),
        (" GPU-12ab , MIG-3c", ("GPU-12ab", "MIG-3c")),
        ("2,2", ("2",)),
        ("0,-1,1", ("0",)),
        ("", ()),
    ],
)
def test_visible_devices_of_the_user_are_used(visible: str, devices: tuple[str, ...]) -> None:
    assert devices_here({"CUDA_VISIBLE_DEVICES": visible, "PATH": "/nowhere"}) == devices


def with_driver(folder: Path, says: str) -> dict[str, str]:
    """Return an environment whose nvidia-smi runs the shell command `says` and writes the file `asked`."""
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" >{folder}/asked\n{says}\n')
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_driver_lists_the_devices_by_default(tmp_path: Path) -> None:
    listed = r"printf 'GPU 0: NVIDIA H100 (UUID: GPU-1)\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\nGPU 1: NVIDIA H100\n'"
    assert devices_here(with_driver(tmp_path, listed)) == ("0", "1")
    assert devices_here(with_driver(tmp_path, "echo 'Failed to initialize NVML'; exit 9")) == ()
    assert devices_here({"PATH": "/nowhere"}) == ()


@pytest.mark.parametrize(("gpus", "queued", "devices"), [(1, False, 2), (0, False, 0), (None, False, 0), (1, True, 0)])
def test_driver_is_queried_only_for_experiments_that_use_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int | None, queued: bool, devices: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", with_driver(tmp_path, r"printf 'GPU 0: x\nGPU 1: x\n'")["PATH"])
    monkeypatch.setenv(VARIABLE, "")
    write_plans(Path("results"), a_plan(resources={**RESOURCES, "gpus_per_node": gpus}))
    monkeypatch.setattr("image_diffusion.workflow.start.resolve", lambda *_: {"pages": "y"})
    for name in ("look_at_sources", "note_code"):
        monkeypatch.setattr(f"image_diffusion.workflow.start.{name}", lambda *given: [])
    config = {"experiments": ["one"], "tracking": {"uri": "sqlite:///mlflow.db"}}
    known = start(ROOT, config, queued=queued, remote=False, cores=9)
    assert len(known.machine.devices) == devices
    assert os.environ[VARIABLE] == ",".join("01"[:devices])
    assert (tmp_path / "asked").exists() == bool(devices)
    write_json(Path("results/.resolved.json"), {"code": {"pages": "y"}, "experiments": ["one"], "studies": []})
    assert start(ROOT, config, queued=False, remote=True).machine.devices == (), "a job has what the queue gave it"


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A function that starts code as rules do, on some of the devices 0, 1 and 2, which the code has in `mine`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "0,1,2")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def begin(number: int, code: str) -> subprocess.Popen[bytes]:
        code = f"import os, sys, time\nmine = os.environ['CUDA_VISIBLE_DEVICES'].split(',')\n{code}"
        line = [ROOT / "workflow/scripts/logged", "--devices", str(number), f"logs/{time.monotonic_ns()}.log"]
        return subprocess.Popen([*line, "python", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    return begin


TELL_AND_STAY = "print(','.join(mine), flush=True); sys.stdin.read()"


def line_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], START_S)[0], "it says nothing"
    return process.stdout.readline().decode().strip()


def told(process: subprocess.Popen[bytes]) -> str:
    """Return the first line of the stage after any waiting messages."""
    while (line := line_of(process)).startswith("Waiting for"):
        pass
    return line


def ended(*processes: subprocess.Popen[bytes]) -> list[int]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    return [process.wait(START_S) for process in processes]


def test_device_is_freed_when_its_stage_is_killed_despite_child_processes(stage: Start) -> None:
    """The stage has forked a process that inherits its open files and keeps running."""
    with stage(1, "child = os.fork() or time.sleep(30)\nprint(child, flush=True)\ntime.sleep(30)") as killed:
        child = int(told(killed))
        with stage(3, TELL_AND_STAY) as waiting:
            assert "Waiting for 3" in line_of(waiting)
            killed.kill()
            assert told(waiting) == "0,1,2"
            os.kill(child, signal.SIGKILL)  # raises if the child is not running
            assert ended(waiting) == [0]


def test_stage_of_several_devices_holds_all_or_none(stage: Start) -> None:
    with ExitStack() as running:
        two = running.enter_context(stage(2, TELL_AND_STAY))
        assert told(two) == "0,1"
        waiting = running.enter_context(stage(2, TELL_AND_STAY))
        one = running.enter_context(stage(1, TELL_AND_STAY))
        assert told(one) == "2", "who waits for two holds none"
        assert ended(two) == [0]
        assert told(waiting) == "0,1"
        assert ended(one, waiting) == [0, 0]


def test_no_device_is_shared_by_two_stages(stage: Start, tmp_path: Path) -> None:
    """Each stage creates a file named by its device, which must not exist yet, and removes it."""
    use = (
        "path = f'device-{mine[0]}'; os.close(os.open(path, os.O_CREAT | os.O_EXCL)); time.sleep(0.1); os.remove(path)"
    )
    stages = [stage(1, use) for _ in range(9)]
    assert [each.wait(START_S) for each in stages] == [0] * 9


def test_waiting_is_reported_and_can_be_terminated(stage: Start) -> None:
    with stage(3, TELL_AND_STAY) as all_of_them:
        assert told(all_of_them) == "0,1,2"
        with stage(1, TELL_AND_STAY) as waiting:
            assert line_of(waiting) == "Waiting for 1 free GPU: other stages use 0, 1, 2."
            waiting.terminate()
            assert waiting.wait(START_S) == -signal.SIGTERM
        assert ended(all_of_them) == [0]


def test_more_devices_than_present_are_rejected(stage: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with stage(4, TELL_AND_STAY) as refused:
        assert line_of(refused) == "error: 4 GPUs are asked for, and there are 3: 0, 1, 2."
        assert ended(refused) == [1]
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    with stage(1, TELL_AND_STAY) as pasted:
        assert told(pasted) == "GPU-1", "a command that was pasted into a shell"
        assert ended(pasted) == [0]
