"""Simulated machines: each has a disk in memory, a PID namespace and a host name, and is killed at once.

`Machine` forks a copy of the server of `warm.py` into a mount, a PID and a UTS namespace. As their first process it
mounts the disk and answers requests, so that processes start in milliseconds there too. When the first process is
killed, the kernel kills every other one and the disk is gone with them. The network is shared: a server on loopback is
the store of all machines.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from warm import Warm, answer, end_with_parent, listen, write_clients

NAMESPACES = 0x00020000 | 0x20000000 | 0x04000000
"""CLONE_NEWNS, CLONE_NEWPID and CLONE_NEWUTS."""
NEEDED = "A machine is a mount, a PID and a UTS namespace: run as root, in a container with CAP_SYS_ADMIN."
SIZE = "1g"
OUTSIDE = ("SNAKEMAKE_", "SLURM_")
"""Prefixes of environment variables that belong to the caller of the tests."""


def is_permitted() -> bool:
    """Return whether this process may create namespaces."""
    return subprocess.run(["unshare", "-m", "-p", "-u", "-f", "true"], capture_output=True, check=False).returncode == 0


class Running:
    """A process on a machine. output: file with its output, outside the machine."""

    def __init__(self, server: socket.socket, output: Path) -> None:
        self.output = output
        self._server, self._code = server, None if server.recv(64) else -signal.SIGKILL

    def wait(self, timeout: float | None) -> int:
        """Return the exit status, negative for a signal: SIGKILL if the machine is gone. Raise TimeoutError."""
        if self._code is None:
            self._server.settimeout(timeout)
            try:
                told = self._server.recv(64)
            except ConnectionError:
                told = b""
            self._code = int(told) if told else -signal.SIGKILL
            self._server.close()
        return self._code

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        with suppress(TimeoutError, BlockingIOError):
            return self.wait(0)
        return None

    def said(self) -> str:
        return self.output.read_text(errors="replace")


class Machine:
    """A context manager that runs a machine. disk: its folder as processes on it name it. folder: the same, seen from
    outside, as long as the machine runs."""

    def __init__(self, warm: Warm, work: Path, name: str) -> None:
        """work: an empty folder, for the output of the machine's processes and as the mount point of the disk."""
        self.work, self.name = work, name
        self.disk = work / "disk"
        self.disk.mkdir(parents=True)
        self._sockets = Path(tempfile.mkdtemp(prefix="machine-"))
        self._address = str(self._sockets / "socket")
        self._commands = 0
        command = [str(warm.python), __file__, self._address, str(self.disk), name]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(OUTSIDE)}
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        told = self._process.stdout.readline()
        if not told:  # it has printed the reason
            self._process.wait()
            shutil.rmtree(self._sockets)
            raise PermissionError(NEEDED)
        self._pid = int(told)
        self.folder = Path(f"/proc/{self._pid}/root") / self.disk.relative_to("/")

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill every process of the machine at once. Return when all of them and the disk are gone."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def stop(self) -> None:
        """Stop every process until `go_on`, as a host does that moves or freezes a machine."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        self._send(signal.SIGCONT)

    def running(self) -> list[str]:
        """Return the names of running processes that were started through `python`, as `Warm.running`."""
        found = []
        for path in sorted(self._sockets.glob("[0-9]*")):
            with suppress(FileNotFoundError):
                found.append(path.read_text())
        return list(filter(None, found))  # a process that is starting may not have written its name yet

    def start(self, arguments: Sequence[str], folder: str = ".", **settings: str) -> Running:
        """Start a module (`-m`) or a script. folder: on the disk, to run it in. settings: environment variables."""
        self._commands += 1
        output = self.work / f"said-{self._commands}.txt"
        environment = {key: value for key, value in os.environ.items() if not key.startswith(OUTSIDE)}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "HOME": str(self.disk / "home"),
            "TMPDIR": str(self.disk / "tmp"),
            "PATH": f"{self.disk / 'bin'}{os.pathsep}{environment['PATH']}",
        }
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        request = json.dumps([list(arguments), str(self.disk / folder), environment | settings, -1, limit]).encode()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.connect(self._address)
        with output.open("wb") as log, Path(os.devnull).open() as nothing:
            socket.send_fds(server, [struct.pack("<I", len(request))], [nothing.fileno(), log.fileno(), log.fileno()])
            server.sendall(request)
            return Running(server, output)

    def _send(self, number: int) -> None:
        """Send a signal to every process of the machine, until there are no new ones."""
        namespace, done = Path(f"/proc/{self._pid}/ns/pid").readlink(), set[int]()
        while True:
            present = set()
            for path in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    if (path / "ns" / "pid").readlink() == namespace:
                        present.add(int(path.name))
            if not present - done:
                return
            for pid in present - done:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            done |= present


def begin(address: str, disk: str, name: str) -> None:
    """Start the first process of a machine, and wait for its end."""
    end_with_parent()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NAMESPACES) != 0:
        sys.exit(f"error: {os.strerror(ctypes.get_errno())}. {NEEDED}")
    first = os.fork()
    if first == 0:
        try:
            _be_first(address, Path(disk), name)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.waitpid(first, 0)


def _be_first(address: str, disk: Path, name: str) -> NoReturn:
    """Set up the machine, report the process id that this process has outside, and answer requests."""
    end_with_parent()
    number = Path("/proc/self").readlink()
    _mount("--make-rprivate", "/")
    _mount("-t", "tmpfs", "-o", f"size={SIZE}", "disk", str(disk))
    _mount("-t", "tmpfs", "-o", f"size={SIZE}", "shm", "/dev/shm")
    _mount("-t", "proc", "proc", "/proc")
    socket.sethostname(name)
    hosts = disk / "hosts"  # a machine can resolve its own name
    hosts.write_text(f"127.0.0.1 localhost {name}\n")
    _mount("--bind", str(hosts), "/etc/hosts")
    for each in ("home", "tmp", "project"):
        (disk / each).mkdir()
    python = disk / "bin" / "python"
    write_clients(python, address)
    os.chdir("/")
    listening = listen(address)
    print(number, flush=True)
    answer(listening, str(python), dict(os.environ))


def _mount(*options: str) -> None:
    subprocess.run(["mount", *options], check=True)


if __name__ == "__main__":
    begin(*sys.argv[1:])
