"""Simulated machines: their processes, what is visible from outside, and that a kill leaves nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from machines import NEEDED, Machine, is_permitted
from warm import warm_server

HERE = """
import json, os, socket, sys, time
from pathlib import Path
Path("beside.txt").write_text(socket.gethostname())
print(json.dumps([socket.gethostname(), socket.gethostbyname(socket.gethostname()), os.getpid(), os.environ["HOME"]]))
sys.stdout.flush()
time.sleep(float(sys.argv[1]))
sys.exit(3)
"""


needs_namespaces = pytest.mark.skipif(not is_permitted(), reason=NEEDED)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines at once, each with the script `here.py` in its project."""
    warm = warm_server()
    with Machine(warm, tmp_path / "one", "one") as one, Machine(warm, tmp_path / "two", "two") as two:
        for machine in (one, two):
            (machine.folder / "project" / "here.py").write_text(HERE)
        yield one, two


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)


@pytest.mark.slow
@needs_namespaces
def test_machines_have_separate_disks_names_and_processes(two: tuple[Machine, Machine]) -> None:
    running = [machine.start(["here.py", "0"], "project") for machine in two]
    assert [each.wait(60) for each in running] == [3, 3]
    for machine, each in zip(two, running, strict=True):
        name, address, pid, home = json.loads(each.said())
        assert (name, address, home) == (machine.name, "127.0.0.1", str(machine.disk / "home"))
        assert 1 < pid < 50
        assert (machine.folder / "project" / "beside.txt").read_text() == machine.name
        assert list(machine.disk.iterdir()) == []  # outside the machine it is an empty folder


def processes(namespace: Path) -> list[int]:
    """Return the processes in a PID namespace by their ids outside it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (path / "ns" / "pid").readlink() == namespace:
                found.append(int(path.name))
    return found


@pytest.mark.slow
@needs_namespaces
def test_kill_ends_every_process_and_removes_disk(two: tuple[Machine, Machine]) -> None:
    one, other = two
    running = [machine.start(["here.py", "600"], "project") for machine in two]
    for machine in two:
        wait_for(machine.folder / "project" / "beside.txt")
    assert one.running() == other.running() == ["here"]
    namespace = Path(f"/proc/{one._pid}/ns/pid").readlink()
    assert len(processes(namespace)) == 2
    one.kill()
    assert processes(namespace) == []
    assert not one.folder.exists()
    assert running[0].wait(60) == -signal.SIGKILL
    assert running[1].poll() is None and other.running() == ["here"]


@pytest.mark.slow
@needs_namespaces
def test_a_stopped_machine_does_nothing_until_it_goes_on(two: tuple[Machine, Machine]) -> None:
    one, _ = two
    script = one.folder / "project" / "counts.py"
    script.write_text("import time\nwhile True:\n    open('count.txt', 'a').write('.')\n    time.sleep(0.01)\n")
    running = one.start(["counts.py"], "project")
    count = one.folder / "project" / "count.txt"
    wait_for(count)
    one.stop()
    before = count.stat().st_size
    with pytest.raises(TimeoutError):
        running.wait(0.3)
    assert count.stat().st_size == before
    one.go_on()
    until = time.monotonic() + 60
    while count.stat().st_size == before:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
@needs_namespaces
def test_a_machine_ends_with_the_process_that_has_started_it(two: tuple[Machine, Machine]) -> None:
    one, _ = two
    running = one.start(["here.py", "600"], "project")
    wait_for(one.folder / "project" / "beside.txt")
    namespace = Path(f"/proc/{one._pid}/ns/pid").readlink()
    one._process.kill()
    assert running.wait(60) == -signal.SIGKILL
    until = time.monotonic() + 60
    while processes(namespace):
        assert time.monotonic() < until
        time.sleep(0.01)


@needs_namespaces
def test_missing_permission_for_namespaces_is_an_error(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "machines.py"
    command = [sys.executable, str(script), str(tmp_path / "socket"), str(tmp_path), "one"]
    ended = subprocess.run(
        ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stdout == "" and ended.stderr == f"error: Operation not permitted. {NEEDED}\n"
