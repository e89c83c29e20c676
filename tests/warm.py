"""Processes that are forked from one that has imported everything: they start in milliseconds instead of seconds.

`Warm` makes a folder with a `python`. It runs a module (`-m`) or a script in a new process, forked from a server that
has imported PyTorch, MLflow, diffusers and Snakemake, with the caller's working directory, environment, standard files,
file size limit and process group. `python` waits for it, forwards signals and ends with its status, or by the same
signal; when `python` is killed, so is the process. The real Python runs everything else, the process of a mirror, and
everything in a Slurm job. Processes that a command spawns are forked too, and a new MLflow store gets the tables of one
that exists.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import json
import multiprocessing
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from forking import prepare_to_fork

CLOCK = "SOAK_CLOCK_S"
"""Environment variable with the seconds by which the clock of a process is wrong."""
READY_S = 300.0

CLIENT = """#!{python} -SE
import json, os, resource, signal, socket, struct, sys

def real():
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])

arguments = sys.argv[1:]
while arguments[:1] == ["-u"]:
    del arguments[0]
if not arguments or (arguments[0] != "-m" and not arguments[0].endswith(".py")):
    real()
if "SLURM_JOB_ID" in os.environ:  # Slurm would not reach a process of the server
    real()
if arguments[1:3] == ["image_diffusion", "mirror"]:  # it sends a signal to its parent, which would be the server
    real()
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.connect({address!r})
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
request = json.dumps([arguments, os.getcwd(), dict(os.environ), os.getpgrp(), limit]).encode()
socket.send_fds(server, [struct.pack("<I", len(request))], [0, 1, 2])
server.sendall(request)
answers = server.makefile("rb")  # a line each: both may have come before the first is read
child = int(answers.readline() or b"0")
if not child:
    sys.exit(1)

def hand_on(number, frame):
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, hand_on)
answer = answers.readline()
code = int(answer) if answer else -signal.SIGKILL
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""

PACKAGE = "image_diffusion"
PRELOADED = [
    "snakemake.assets",
    "snakemake.benchmark",
    "snakemake.cli",
    "snakemake.executors.local",
    "snakemake.persistence",
    "snakemake.profiles",
    "snakemake.report.html_reporter",
    "snakemake.storage",
    "argparse_dataclass",
    "bokeh.resources",
    "docutils.core",
    "docutils.parsers.rst.states",
    "docutils.readers.doctree",
    "dpath",
    "jinja2",
    "jsonschema",
    "platformdirs",
    "platformdirs.unix",
    "smart_open",
    "webdataset",
    "yte",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.utils.flop_counter",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "scipy.special",
    "scipy.linalg.lapack",
    "sklearn.linear_model",
    "sklearn.pipeline",
    "sklearn.preprocessing",
    "pandas",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.transformers.dit_transformer_2d",
    "diffusers.schedulers.scheduling_ddim",
    "diffusers.schedulers.scheduling_dpmsolver_multistep",
    "diffusers.pipelines.dit.pipeline_dit",
    "mlflow",
    "mlflow.models",
    "mlflow.types",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.tracking.sqlalchemy_workspace_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_workspace_store",
    "mlflow.tracing.processor.base_mlflow",
    "alembic.command",
    "sqlalchemy.dialects.sqlite",
]


class Warm:
    """A context manager that runs the server. `python` is the program to start processes with."""

    def __init__(self, folder: Path, source: Path) -> None:
        """folder: for `python`. source: the folder that holds the package."""
        self.folder, self._source = folder, source
        self.python = folder / "bin" / "python"

    def __enter__(self) -> Warm:
        self._sockets = Path(tempfile.mkdtemp(prefix="warm-"))  # the path of a socket has 108 bytes at most
        address = str(self._sockets / "socket")
        write_clients(self.python, address)
        path = os.pathsep.join([str(self._source), *filter(None, [os.environ.get("PYTHONPATH")])])
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE"), "1")
        self._process = subprocess.Popen(
            [sys.executable, __file__, address, str(self.python)], env={**os.environ, **one, "PYTHONPATH": path}
        )
        until = time.monotonic() + READY_S
        while not Path(address).exists():
            assert self._process.poll() is None and time.monotonic() < until, "the server did not start"
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_all()
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._sockets)

    def end_all(self) -> None:
        """Kill the running processes; return when they are gone."""
        while running := self.running():
            for pid, _ in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def running(self) -> list[tuple[int, str]]:
        """Return the running processes, each with the last word of its module or script."""
        found = []
        for pid in Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split():
            with suppress(FileNotFoundError):
                found.append((int(pid), (self._sockets / pid).read_text()))
        return found


def write_clients(python: Path, address: str) -> None:
    """Write `python` and `python3`, programs that send requests to the server at this address."""
    python.parent.mkdir(parents=True, exist_ok=True)
    for path in (python, python.with_name("python3")):
        path.write_text(CLIENT.format(python=sys.executable, address=address))
        path.chmod(0o755)


@cache
def warm_server() -> Warm:
    """Return the server that all tests of a process share."""
    warm = Warm(Path(tempfile.mkdtemp(prefix="warm-python-")), Path(__file__).resolve().parents[1] / "src")
    atexit.register(shutil.rmtree, warm.folder)
    atexit.register(warm.__exit__, None, None, None)
    return warm.__enter__()


def warm_python() -> str:
    """Return a Python with which commands of this repository start at once."""
    return str(warm_server().python)


def serve(address: str, python: str) -> NoReturn:
    """Import everything, and answer requests until stopped."""
    import importlib
    import pkgutil

    import image_diffusion

    outside = dict(os.environ)
    end_with_parent()
    for module in pkgutil.walk_packages(image_diffusion.__path__, "image_diffusion."):
        importlib.import_module(module.name)
    for name in PRELOADED:
        importlib.import_module(name)
    _do_in_advance(Path(image_diffusion.__file__).parents[1])
    assert threading.active_count() == 1, "a process with threads cannot be forked safely"
    set_by_imports = {name: value for name, value in os.environ.items() if name not in outside}
    prepare_to_fork()
    answer(listen(address), python, set_by_imports)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def listen(address: str) -> socket.socket:
    """Return a socket that listens at a path, which exists from then on."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"{address}.new")
    listening.listen(64)
    Path(f"{address}.new").rename(address)
    return listening


def answer(listening: socket.socket, python: str, set_by_imports: dict[str, str]) -> NoReturn:
    """Answer requests until stopped. Next to the socket is a file with the name of each running process.

    python: the program that sends requests. set_by_imports: environment variables that every process gets in addition
    to those of its request.
    """
    folder = Path(listening.getsockname()).parent
    wake, alarm = os.pipe()
    os.set_blocking(alarm, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
    clients: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listening, wake, *clients.values()], [], [])
        if wake in ready:
            os.read(wake, 4096)
        for child, client in list(clients.items()):
            if client in ready:  # the client has closed its end: it is gone
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                clients.pop(child).close()
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not child:
                break
            (folder / str(child)).unlink(missing_ok=True)  # or an orphan: this is the first process
            ended = clients.pop(child, None)
            if ended is not None:
                with suppress(OSError), ended:
                    ended.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        if listening in ready:
            client, _ = listening.accept()
            try:
                size, files, _, _ = socket.recv_fds(client, 4, 3)
                request = b""
                while len(request) < int.from_bytes(size, "little"):
                    more = client.recv(1 << 20)
                    if not more:
                        raise OSError("the caller is gone")
                    request += more
            except OSError:
                client.close()
                continue
            child = os.fork()
            if child == 0:
                for each in (listening, client, *clients.values()):
                    each.close()
                os.close(wake)
                os.close(alarm)
                _begin(json.loads(request), files, python, set_by_imports)
            for each in files:
                os.close(each)
            (folder / str(child)).write_text(_name(json.loads(request)[0]))
            with suppress(OSError):
                client.sendall(f"{child}\n".encode())
            clients[child] = client


def _do_in_advance(source: Path) -> None:
    """Do work in advance that most processes would repeat with the same result: it takes as long as many imports.

    source: the folder that contains the package.
    """
    from mlflow.utils import requirements_utils
    from PIL import Image

    from image_diffusion.workflow.code_digest import stage_digests

    Image.preinit()
    stage_digests(source)  # caches the syntax of each file by its bytes
    _keep_new_store()
    requirements_utils._init_modules_to_packages_map()
    # torchrun inspects its stack dozens of times. For a file that belongs to no module, `inspect` searches all modules.
    inspect.modulesbyfile["<frozen runpy>"] = "runpy"  # type: ignore[attr-defined]
    inspect.stack()


def _keep_new_store() -> None:
    """Make the tables of an MLflow store once, and copy them into each new one: the migrations take seconds."""
    import sqlalchemy
    from mlflow.store.db import utils

    with tempfile.TemporaryDirectory() as folder:
        engine = sqlalchemy.create_engine(f"sqlite:///{folder}/store.db")
        utils._initialize_tables(engine)
        engine.dispose()
        tables = Path(folder, "store.db").read_bytes()

    def copy_tables(engine: sqlalchemy.engine.Engine) -> None:
        with closing(sqlite3.connect(":memory:")) as source, closing(engine.raw_connection()) as target:
            source.deserialize(tables)
            source.backup(target.driver_connection)

    utils._initialize_tables = copy_tables


def _name(arguments: list[str]) -> str:
    """Return the command of this package, the last word of another module, or the stem of a script; "follow" for a
    `track` that follows the stages."""
    if arguments[0] != "-m":
        return Path(arguments[0]).stem
    if "--follow" in arguments:
        return "follow"
    return arguments[2] if arguments[1] == PACKAGE and len(arguments) > 2 else arguments[1].rpartition(".")[2]


def _begin(
    request: tuple[list[str], str, dict[str, str], int, list[int]],
    files: list[int],
    python: str,
    set_by_imports: dict[str, str],
) -> NoReturn:
    """Become the requested process."""
    arguments, folder, environment, group, (soft, hard) = request
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        os.setpgid(0, group)
    except OSError:  # it is of another session
        os.setsid()
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(set_by_imports | environment)
    sys.executable, tempfile.tempdir = python, None
    multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.get_context("fork")  # type: ignore[attr-defined]
    _shift_clock(float(environment.get(CLOCK, "0")))
    is_module = arguments[0] == "-m"
    name, sys.argv = (arguments[1], arguments[1:]) if is_module else (arguments[0], list(arguments))
    # The folders in which Python would look for modules.
    paths = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [
        folder if is_module else str(Path(name).parent),
        *paths,
        *(p for p in sys.path[1:] if p not in paths),
    ]
    code = 1
    try:
        try:
            if is_module:
                sys.modules.pop(f"{name}.__main__", None)
                if name == PACKAGE:  # its __main__ runs the module of a command
                    from image_diffusion.core.process.commands import COMMANDS, module_of

                    for command in set(arguments[2:3]) & set(COMMANDS):
                        sys.modules.pop(module_of(command), None)
                elif not hasattr(sys.modules.get(name), "__path__"):  # a package runs as its __main__
                    sys.modules.pop(name, None)
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
            code = 0
        except SystemExit as exit:
            if isinstance(exit.code, str):
                print(exit.code, file=sys.stderr)
            code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        except BaseException:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _shift_clock(by_s: float) -> None:
    """Shift the wall clock of this process by this many seconds."""
    if by_s:
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() + by_s
        time.time_ns = lambda: now_ns() + int(by_s * 1e9)


if __name__ == "__main__":
    serve(*sys.argv[1:])
