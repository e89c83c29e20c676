"""Start trainings and end them at a chosen instant, for the cost of a fork instead of an import of PyTorch.

`python attempts.py` imports everything once and then forks for every request that it reads, a line of JSON, from its
standard input. `Attempts` is the client. On a machine with a GPU, every process of a training imports everything again:
CUDA cannot be used after a fork.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

from forking import prepare_to_fork

HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))
IMPORTED_LATER = [
    "torch._dynamo",
    "torch.utils.flop_counter",
    "multiprocessing.synchronize",
    "image_diffusion.training.parallel.fsdp",
]
"""Modules that a training would import at its first step, or when it is sharded."""
FILE_OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}


@dataclass
class Attempt:
    """One start of a training.

    processes: how many train together. changes: of the configuration. kill_after_s: SIGKILL after this many seconds.
    kill_at_operation: SIGKILL of process `killed` just before its operation of this number on a file of the run.
    signals: (seconds, number) to send to every process, one after another. since: a file in the folder; seconds count
    from the moment at which it appears, not from the start. victim: the only process that gets any of this; by default
    all do. inject: a name in `tiny_runs.INJECTED`. drawn: a file for the drawn random numbers, a line per sample.
    """

    folder: str
    system: str = "mlp"
    processes: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    kill_after_s: float | None = None
    kill_at_operation: int | None = None
    killed: int = 0
    signals: list[tuple[float, int]] = field(default_factory=list)
    since: str = ""
    victim: int | None = None
    inject: str | None = None
    drawn: str | None = None


@dataclass
class Outcome:
    """codes: exit status of each process, negative for a signal. seconds: until the last one ended. operations: on
    files, by the first process, where it ended by itself. output: what each process printed."""

    codes: list[int]
    seconds: float
    operations: int | None
    output: list[str]


class Attempts:
    """Client of a server of attempts; a context manager."""

    def __enter__(self) -> Attempts:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, __file__]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def __call__(self, attempt: Attempt) -> Outcome:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(asdict(attempt)) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the server of attempts died"
        return Outcome(**json.loads(answer))


def serve() -> None:
    """Answer requests until standard input ends."""
    if not HAS_GPU:
        _import_everything()
        prepare_to_fork()
    for line in sys.stdin:
        attempt = Attempt(**json.loads(line))
        print(json.dumps(asdict(_run(attempt))), flush=True)


def _import_everything() -> None:
    import tiny_runs
    import torch

    from image_diffusion.training.parallel.world import World

    for module in IMPORTED_LATER:
        importlib.import_module(module)

    for kind in tiny_runs.TINY:  # and the modules that systems import when they are built
        tiny_runs.SYSTEMS[kind](World(0, 1, torch.device("cpu")))
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads cannot be forked safely"


def _run(attempt: Attempt) -> Outcome:
    folder = Path(attempt.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if attempt.since:
        (folder / attempt.since).unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.monotonic()
    children = []
    for rank in range(attempt.processes):
        (folder / f"output-{rank}").write_text("")  # a process can be killed before it does so
        if HAS_GPU:
            command = [sys.executable, __file__, json.dumps(asdict(attempt)), str(rank), str(port)]
            children.append(os.posix_spawn(sys.executable, command, os.environ))
        elif child := os.fork():
            children.append(child)
        else:
            _child(attempt, rank, port)
    codes = _watch(attempt, children, started)
    operations = folder / "operations"
    text = operations.read_text() if operations.exists() else ""  # a kill may come before the number is in it
    count = int(text) if text else None
    operations.unlink(missing_ok=True)
    output = [(folder / f"output-{rank}").read_text() for rank in range(attempt.processes)]
    return Outcome(codes, time.monotonic() - started, count, output)


def _watch(attempt: Attempt, children: Sequence[int], started: float) -> list[int]:
    """Send signals when they are due. Like a launcher, kill all other processes when one fails."""
    due = [(when, number) for when, number in attempt.signals]
    if attempt.kill_after_s is not None:
        due.append((attempt.kill_after_s, signal.SIGKILL))
    due.sort()
    codes: dict[int, int] = {}
    event = Path(attempt.folder, attempt.since) if attempt.since else None
    failed_at: float | None = None
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if event is not None and event.exists():
            started, event = time.monotonic(), None
        if event is None and due and time.monotonic() - started >= due[0][0]:
            _, number = due.pop(0)
            chosen = children if attempt.victim is None else [children[attempt.victim]]
            for child in chosen:
                if child not in codes:
                    os.kill(child, number)
        if failed_at is None and any(code not in (0, 75) for code in codes.values()):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at >= 0.2:  # time for the others to report the reason
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
        select.select([], [], [], 0.002)
    return [codes[child] for child in children]


def _child(attempt: Attempt, rank: int, port: int) -> NoReturn:
    code, folder = 1, Path(attempt.folder)
    try:
        with (folder / f"output-{rank}").open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        import tiny_runs

        if not HAS_GPU:  # with one, Triton needs a compiler
            os.environ["PATH"] = ""  # no git: the journal would ask it for the commit
        if attempt.processes > 1:
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ.update(where, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(attempt.processes))
        count = _count_operations(folder, attempt.kill_at_operation if rank == attempt.killed else None)
        os.environ["RUN"] = str(folder)
        if attempt.drawn is not None:
            os.environ["DRAWN"] = attempt.drawn
            from image_diffusion.training.monitor import meter

            meter.flops_per_example = lambda examples, losses_of: 0  # it draws for an example once more
        if attempt.inject is not None:
            tiny_runs.INJECTED[attempt.inject](rank)
        try:
            from image_diffusion.core.process import command

            command.run(lambda: tiny_runs.start(folder, attempt.system, **attempt.changes))
            code = 0
        except SystemExit as exit:
            code = int(exit.code or 0)
        if rank == 0:
            (folder / "operations").write_text(str(count[0]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _count_operations(folder: Path, kill_at: int | None) -> list[int]:
    """Count the operations on files in a folder from now on, and kill this process just before operation `kill_at`."""
    prefix, count = str(folder), [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILE_OPERATIONS and str(arguments[0]).startswith(prefix):
            count[0] += 1
            if count[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return count


def killed_run(
    attempts: Attempts, folder: Path, draw: random.Random, kills: int, usual: Outcome, **settings: Any
) -> int:
    """Start a training again and again, killed at random instants, until it ends; return how often it was killed.

    kills: the largest number. usual: an undisturbed run, for its length and its number of file operations. Half of the
    kills are at an instant of its whole length, half just before an operation on a file.
    """
    assert usual.operations is not None
    for done in range(kills):
        attempt = Attempt(str(folder), **settings)
        if draw.random() < 0.5:
            attempt.victim = draw.randrange(attempt.processes)
        if draw.random() < 0.5:
            attempt.kill_after_s = draw.uniform(0.0, 1.1 * usual.seconds)
        else:
            attempt.kill_at_operation = draw.randint(1, usual.operations)
        outcome = attempts(attempt)
        if outcome.codes == [0] * len(outcome.codes):
            return done
        assert -signal.SIGKILL in outcome.codes, outcome.output
    finished(attempts, folder, **settings)
    return kills


def finished(attempts: Attempts, folder: Path, **settings: Any) -> Outcome:
    """Run an undisturbed start, in which all processes must succeed."""
    outcome = attempts(Attempt(str(folder), **settings))
    assert outcome.codes == [0] * len(outcome.codes), outcome.output
    return outcome


def fresh(folder: Path) -> Path:
    """Empty the folder and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _child(Attempt(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
    serve()
