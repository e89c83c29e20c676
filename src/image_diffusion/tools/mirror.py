"""Show and clean the mirror of a project: results in a bucket, from which another machine can continue.

Without options: files and bytes of the newest snapshot, by folder of results, and the machine that uses it. The key
`mirror` in config/config.yaml names the bucket; while Snakemake runs, finished results are sent there.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import NoReturn

from image_diffusion.core.config.base import read_yaml
from image_diffusion.core.files.atomic import make_folder
from image_diffusion.core.files.mirrored import LostError
from image_diffusion.core.files.store import Store
from image_diffusion.core.process import command
from image_diffusion.core.process.errors import log_line
from image_diffusion.workflow.mirror.lease import Lease, TakenError
from image_diffusion.workflow.mirror.mirror_process import DONE, READY, MirrorConfig
from image_diffusion.workflow.mirror.restore import ConflictError, DiskState, read_list, restore
from image_diffusion.workflow.mirror.snapshot import Project, Sender

_LAST_TRIES = 3
_ENDS_IN_MS = 5000
"""Milliseconds for Snakemake to end before it is interrupted again."""
_NOT_PRUNED = "Nothing is removed:"
_RUN_FIRST = "Run snakemake with this mirror first, which sends the list of files again once a stage has finished."
_stopping = threading.Lock()
_DOLLARS_PER_GB = 0.023
"""Price of a GB per month of S3 Standard in Northern Virginia, in 2026: an order of magnitude for other stores."""


def follow(config: MirrorConfig, project: Project) -> None:
    """Download the mirror, then send finished results, until the pipe from Snakemake is closed. The protocol has three
    lines: READY once small files are on this disk, the names of folders in reply, DONE once their large files are."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # Snakemake and its stages end first, and their last results are sent
    make_folder(project.state)
    with (project.state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the previous process may still be sending
        store = Store(config.url)
        lease, known = Lease(store, config.silence_s), DiskState.read(project, store.url)
        lease.check_conditions()
        is_own = lease.take(known.token, log_line)
        over = threading.Event()
        beating = threading.Thread(target=_renew, args=(lease, config.every_s, over), daemon=True, name="lease")
        beating.start()
        try:
            sender = restore(project, lease, known, is_own, _folders, log_line)
            print(DONE, flush=True)
            _send(sender, config.every_s)
            over.set()
            beating.join()
            sender.release()
        finally:
            over.set()


def _folders() -> list[str]:
    print(READY, flush=True)
    return sys.stdin.readline().strip().split("\t")


def _send(sender: Sender, every_s: float) -> None:
    """Send in rounds until the pipe is closed, then once more."""
    closed = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        closed.set()

    threading.Thread(target=wait, daemon=True, name="pipe").start()
    is_reachable = True
    while not closed.wait(every_s):
        try:
            sender.round()
            is_reachable = True
        except TakenError as error:
            _stop_snakemake(error)
        except ValueError as error:
            if is_reachable:
                log_line(f"warning: the mirror lacks the newest results, and is tried again: {error}")
            is_reachable = False
    for left in reversed(range(_LAST_TRIES)):
        try:
            sender.round()
            return
        except ValueError as error:
            if not left:
                raise ValueError(f"The mirror lacks the newest results; the next run sends them. {error}") from None


def _renew(lease: Lease, every_s: float, over: threading.Event) -> None:
    while not over.wait(every_s):
        try:
            lease.renew()
        except ValueError:
            continue  # reported by the rounds
        except TakenError as error:
            _stop_snakemake(error)


def _stop_snakemake(error: TakenError) -> NoReturn:
    """End Snakemake, and then this process. An interrupt can get lost in a callback, so it is repeated."""
    _stopping.acquire()  # acquired once and never released: two threads may get here
    log_line(f"error: {error}")
    parent, pipe = os.getppid(), select.poll()
    pipe.register(sys.stdin.fileno(), 0)  # a closed pipe is always reported
    while os.getppid() == parent:
        os.kill(parent, signal.SIGINT)
        if pipe.poll(_ENDS_IN_MS):
            break
    os._exit(1)


def show(store: Store) -> None:
    """Print the content of the newest snapshot."""
    number, head = Lease(store, 0.0).newest()
    if not number:
        print(f"{store.url} is empty.")
        return
    files = read_list(store, head.snapshot)
    by_folder: Counter[str] = Counter()
    for name, file in files.items():
        depth = 3 if name.startswith("results/datasets/") else 2 if name.startswith("results/") else 1
        by_folder["/".join(name.split("/")[:depth])] += file.size
    for folder, size in sorted(by_folder.items()):
        print(f"{folder:40} {size / 1e6:12,.1f} MB")
    print(f"{len(files):,} files, {_with_price(sum(by_folder.values()))}")
    print(f"{head.machine} {'has left it' if head.is_released else 'works with it'}.")


def prune(config: MirrorConfig, project: Project) -> None:
    """Remove chunks that the newest snapshot does not use, from interrupted uploads. Raises ValueError, and removes
    nothing, if its list of files cannot be read."""
    make_folder(project.state)
    with (project.state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError("Snakemake works in this folder, and with its mirror. Wait until it has ended.") from None
        store = Store(config.url)
        lease = Lease(store, config.silence_s)
        _, head = lease.newest()
        if head.is_damaged:
            raise ValueError(f"{_NOT_PRUNED} the newest head of {store.url} is damaged. {_RUN_FIRST}")
        try:
            read_list(store, head.snapshot)  # before this process adds heads, after which older ones are removed
        except LostError as error:
            raise ValueError(f"{_NOT_PRUNED} {error} {_RUN_FIRST}") from None
        lease.take(DiskState.read(project, store.url).token, log_line)
        try:
            files = read_list(store, lease.snapshot)
            named = {*lease.snapshot, *(chunk for file in files.values() for chunk in file.chunks)}
            stored = store.names("blobs")
            left = {name: size for name, size in stored.items() if name not in named}
            lease.renew()  # fails if another process has taken the mirror
            store.delete(f"blobs/{name}" for name in sorted(left))
        finally:
            lease.renew(is_released=True)
    removed, kept = sum(left.values()), sum(stored.values()) - sum(left.values())
    print(f"{len(left):,} objects removed, {removed / 1e6:,.1f} MB; {_with_price(kept)} kept.")


def _with_price(size: int) -> str:
    return f"{size / 1e6:,.1f} MB (${size / 1e9 * _DOLLARS_PER_GB:,.2f} a month at ${_DOLLARS_PER_GB} a GB)"


def main() -> None:
    parser = command.Parser(prog="image-diffusion mirror", description=__doc__)
    parser.add_argument("--url", help="mirror to use instead of that in config/config.yaml")
    parser.add_path("--results", "folder of all results", default=Path("results"))
    parser.add_argument("--prune", action="store_true", help="remove objects that the newest snapshot does not use")
    parser.add_argument("--follow", action="store_true", help="used by Snakemake: send until stdin is closed")
    parser.add_argument("--every-s", type=float, help="seconds between checks for new results")
    parser.add_argument("--silence-s", type=float, help="seconds of silence after which a machine loses the mirror")
    arguments = parser.parse_args()
    config = MirrorConfig.parse(arguments.url or read_yaml(Path("config/config.yaml")).get("mirror"))
    if config is None:
        raise ValueError("No mirror is set. Write mirror: s3://BUCKET/PREFIX into config/config.yaml, or use --url.")
    options = {name: getattr(arguments, name) for name in ("every_s", "silence_s")}
    config = config.model_copy(update={name: value for name, value in options.items() if value is not None})
    try:
        if arguments.follow:
            follow(config, Project(arguments.results))
        elif arguments.prune:
            prune(config, Project(arguments.results))
        else:
            show(Store(config.url))
    except (TakenError, ConflictError) as error:
        raise ValueError(str(error)) from None
