"""Start of Snakemake: one at a time in a folder and in its results; the two patches of its internals; and the
experiments resolved to plans for the rules.

After a crash, the same command resumes. The patches decide which results count as unfinished, and which inputs count
when a result is compared with its record. These internals have no public interface: both are looked up before they are
replaced, and a Snakemake version without them is refused.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, TextIO

from image_diffusion.core.files.atomic import digest, sha256_file
from image_diffusion.core.native import fault_of
from image_diffusion.core.process.errors import sentence_on
from image_diffusion.core.process.parent_watch import end_with_parent
from image_diffusion.core.process.secrets import variable_of
from image_diffusion.workflow.code_digest import note_code
from image_diffusion.workflow.environment import package_beside, search_path
from image_diffusion.workflow.inputs import Files
from image_diffusion.workflow.jobs.gpu_locks import VARIABLE, devices_here
from image_diffusion.workflow.jobs.slurm_queue import is_in_queue
from image_diffusion.workflow.mirror.mirror_process import Mirroring
from image_diffusion.workflow.parts import Parts, look_at_sources
from image_diffusion.workflow.plans import Plans
from image_diffusion.workflow.resolve import requested, resolve, resolved
from image_diffusion.workflow.resources import Machine


@dataclass(frozen=True)
class Owner:
    """Owner of a folder. is_ours: True if this process works in it, and no other."""

    file: TextIO
    is_ours: bool


def take_over(folder: Path) -> Owner:
    """Remove the locks that a killed Snakemake left in a folder. Its queued jobs are handled by the code that submits
    jobs.

    A Snakemake has ended if its file lock, which the system releases with the process, is free. On another machine it
    may still run, unless it was a Slurm job that has ended; if it may, its locks are kept, and Snakemake reports that
    the folder is locked and how to unlock it. Returns the owner of the lock, which lasts until its file is closed. If
    the file cannot be written, Snakemake exits with a one-line error.
    """
    state = folder / ".snakemake"
    mine = _opened(state / "owner")
    try:
        fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return Owner(mine, False)
    mine.seek(0)
    last_host, _, last_job = mine.read().partition(" ")
    left = list((state / "locks").glob("*"))
    if left and last_host not in ("", socket.gethostname()) and (not last_job or is_in_queue(last_job)):
        return Owner(mine, False)
    for lock in left:
        lock.unlink()
    mine.truncate(0)
    mine.write(" ".join(filter(None, [socket.gethostname(), os.environ.get("SLURM_JOB_ID")])))
    mine.flush()
    return Owner(mine, True)


def lock_results(results: Path) -> TextIO:
    """Lock a folder of results until this process ends, against Snakemakes started in other folders. Those started in
    the same folder share the lock, since Snakemake's own locks separate their files, so that a checkpoint can be
    sampled during training.

    Call it before anything is written there. If another Snakemake holds the lock, or the folder cannot be written,
    Snakemake exits with a one-line error. On a file system without locks, nobody is refused.
    """
    mine = _opened(results / ".owner")
    with suppress(OSError):
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mine.seek(0)
            other = mine.read()
            if other.endswith(_this_process()):
                fcntl.flock(mine, fcntl.LOCK_SH)
                return mine
            raise SystemExit(
                f"error: Another Snakemake works in {results}: {other or 'it has just begun'}. Wait until it has "
                "ended, or set `results` in config/config.yaml to a folder of its own."
            ) from None
    mine.truncate(0)
    mine.write(f"process {os.getpid()}{_this_process()}")
    mine.flush()
    with suppress(OSError):
        fcntl.flock(mine, fcntl.LOCK_SH)
    return mine


def _this_process() -> str:
    return f" on {socket.gethostname()}, started in {Path.cwd()}"


def _opened(path: Path) -> TextIO:
    """Open a file, creating it and its folder if missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+")
    except OSError as error:
        links = (link for link in (path, *path.parents) if link.is_symlink() and not link.exists())
        if link := next(links, None):
            raise SystemExit(
                f"error: {link} is a link to {link.readlink()}, which is missing. Mount its disk, or make that folder."
            ) from None
        advice = "Remove it and start again"
        if isinstance(error, PermissionError):
            advice = "Make it writable and start again"
        elif isinstance(error, FileNotFoundError):  # a folder of virtual files, such as /proc
            advice = "Name another folder"
        message = sentence_on(error) or f"{error.filename} cannot be written: {error.strerror}. {advice}."
        raise SystemExit(f"error: {message}") from None


TESTED = ">=9.20,<10"
"""Versions of Snakemake that the project allows; the oldest and the newest of them are tested."""

_PART = re.compile(r".*/part-\d+-of-\d+\.(npz|done)")
"""Files of parts: their number depends on the GPUs of this machine, but the joined result does not."""


def count_damaged_as_unfinished(damaged: Callable[[Iterable[str]], bool]) -> None:
    """Make Snakemake treat damaged results like those of a killed stage: `--rerun-incomplete`, which the profiles set,
    makes them again.

    damaged: returns True if outputs of a job are no longer as its stage wrote them.
    """
    persistence = _persistence_class()
    unfinished = persistence.incomplete

    async def unfinished_or_damaged(self: Any, job: Any) -> Any:
        return list(job.output) if damaged(job.output) else await unfinished(self, job)

    persistence.incomplete = unfinished_or_damaged


def ignore_parts_in_records() -> None:
    """Keep a result if the number of its parts changes: parts are ignored in the inputs that Snakemake recorded."""
    persistence = _persistence_class()
    changed = persistence._input_changed

    def changed_beside_parts(self: Any, job: Any, file: Any = None) -> bool:
        return bool(changed(self, job, file) and _without_parts(self.input(file)) != _without_parts(self._input(job)))

    persistence._input_changed = changed_beside_parts


def _without_parts(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if not _PART.fullmatch(path)]


def _persistence_class() -> Any:
    from snakemake import persistence

    # A class in older versions; later, the base class of two, for files and for databases.
    base = getattr(persistence, "PersistenceBase", None) or getattr(persistence, "Persistence", None)
    if base is not None and hasattr(base, "_input_changed") and iscoroutinefunction(getattr(base, "incomplete", None)):
        return base
    raise SystemExit(
        f"error: Snakemake {version('snakemake')} keeps its records in another way than those that this workflow works "
        f"with. Run: python -m pip install 'snakemake{TESTED}'"
    )


_LISTS = {"--list-rules", "--list", "-l", "--list-target-rules", "--lt", "--lint"}
"""Arguments that make Snakemake only list its rules, which are independent of the files of data sets."""


@dataclass(frozen=True)
class WorkflowContext:
    """Context that the rules receive."""

    results: str
    """Folder of all results."""
    plans: Plans
    files: Files
    parts: Parts
    machine: Machine
    code: Mapping[str, str]
    """Digest of each stage's code."""
    pages: str
    """Digest of the scripts and templates of the pages, and of the package code that they import."""
    lock: TextIO | None
    """Open lock file that keeps other Snakemakes out of the results."""


def start(
    root: Path,
    config: Mapping[str, Any],
    queued: bool,
    remote: bool,
    moved: Callable[[str], str] = str,
    arguments: Sequence[str] = (),
    cores: int = 1,
    limit: int | None = None,
    executor: Callable[[], str] = lambda: "local",
    is_head: bool = False,
    holds: bool = False,
    beside: bool = False,
    provider: str | None = None,
) -> WorkflowContext:
    """Resolve everything once, where Snakemake was started; jobs on other machines use the cached result.

    root: the folder of the workflow. config: its configuration. queued: True if jobs are sent to a queue. remote: True
    if this is one of those jobs. moved: Snakemake's transformation of the paths that rules declare. arguments: of its
    command line, which may name experiments. cores: of this machine. limit: maximum number of its GPUs in use at once,
    if set. executor: returns the name of Snakemake's executor once jobs are planned. is_head: True if this process
    starts jobs in its own folder, which is then mirrored. holds: True if this process locks the results. beside: True
    if another Snakemake runs here. provider: Snakemake's storage provider. Processes started on this machine end with
    Snakemake and find the URI of MLflow's store in their environment. On an error, Snakemake exits with one line.
    """
    if provider:  # no rule declares shards, checkpoints and journals
        raise SystemExit(
            f"error: --default-storage-provider {provider} stores only what rules declare: shards, checkpoints and "
            "journals would be lost. Use a file system that all jobs share, or one machine with --config mirror=… "
            "(docs/cloud.md)."
        )
    ignore_parts_in_records()
    os.environ["PATH"] = search_path(root, os.environ.get("PATH", os.defpath))
    end_with_parent(os.environ, queued=remote)
    results = str(Path(str(config.get("results", "results"))))  # one spelling of a/, ./a and a, for the rules
    mirroring = Mirroring(config.get("mirror") if is_head else None, results, package_beside(root))
    # After the mirror, which may refuse this machine before it writes.
    lock = lock_results(Path(results)) if holds else None
    try:
        if moved(f"{results}/") != f"{results}/":
            raise ValueError(
                "The module has a prefix, which does not reach the paths that are written into files. Leave out prefix "
                "and replace_prefix, and set `results` in the module's config."
            )
        if remote:
            code, targets = resolved(Path(results))
        else:
            targets = requested(config, arguments)
            code = resolve(root, {**config, **targets}, beside)
        plans = Plans.read(results, targets["experiments"], targets["study"])
        if remote:  # Snakemake may have been started for other experiments since this job was submitted
            plans = plans.with_all_plans(results)
        else:
            if not _LISTS & set(arguments):
                look_at_sources(plans, Path(results), config.get("trust_ctime", True))
            compiled = sorted(Path(__file__).parents[1].rglob("*.compiled"))
            for sentence in (*note_code(plans, Path(results), code), *filter(None, map(fault_of, compiled))):
                print(sentence, file=sys.stderr)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {sentence_on(error) or error}") from None
    os.environ[variable_of(config["tracking"]["uri"])] = config["tracking"]["uri"]
    mirroring.fetch([*plans.by_name, *(f"datasets/{name}" for name in plans.datasets)])
    machine = Machine(plans, config, queued, remote, cores, executor=executor)
    if machine.uses_gpus and len(devices := devices_here(os.environ)) > 1:
        os.environ[VARIABLE] = ",".join(devices)
        machine = replace(machine, devices=devices, limit=limit)
    folders = (root / "workflow" / "pages", root / "workflow" / "scripts")
    pages = digest({path.name: sha256_file(path) for folder in folders for path in folder.iterdir() if path.is_file()})
    return WorkflowContext(
        results=results,
        plans=plans,
        files=Files(results, plans),
        parts=Parts(results, plans, machine.jobs_at_once),
        machine=machine,
        code=code,
        pages=digest([pages, code["pages"]]),
        lock=lock,
    )
