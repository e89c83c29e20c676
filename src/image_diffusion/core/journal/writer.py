"""Journal of a stage on the local disk: append-only, with one file for each attempt and one writer for each file.

A stage logs only to its journal, so that no server can delay or stop it; `track` sends the journal to MLflow at any
time and repeatedly. Records are never removed: when a stage resumes, its new attempt records the step, and
`core.journal.reader` treats later records of earlier attempts as superseded.

Each attempt has a receipt next to the folder of journals: `.journal/<stage>/attempt-0001.json` has the header, the
parameters, the number of records and the ending. Readers compare the two to detect lost records and removed journals.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from zlib import crc32

from image_diffusion.core.files.atomic import digest, make_folder, sha256_file, sync_folder, write_bytes, write_json
from image_diffusion.core.process.errors import Stopped, log_line

Ending = Literal["finished", "failed", "stopped"]

# The only environment variables that are recorded: none of them contains a secret.
_ENVIRONMENT = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT")

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


class Journal:
    """Journal of one attempt of a stage in `<folder>/<stage>/attempt-0001.jsonl`; the number is that of the attempt.

    Every record is one line with a checksum, and is passed to the operating system before the call returns, so that
    SIGKILL loses nothing; `sync` flushes records to disk. A full or unavailable disk is reported once and never stops
    the stage: unwritten records are kept in memory and written with a later record. Methods are thread-safe.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self.id = path, str(header["id"])
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self._lock = threading.Lock()
        self._pending, self._num_records = b"", 0
        self._after = dict(header.get("after", ()))
        self._receipt: dict[str, Any] = {"header": dict(header), "params": {}, "end": None}
        self._warned = False
        # Held until this process ends, so that readers can distinguish killed attempts from running ones.
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._append(header)
        try:
            sync_folder(path.parent)
        except OSError as error:
            self._warn_once(f"it cannot be flushed to disk: {error}")
        self.sync()

    @classmethod
    def open(
        cls,
        folder: Path,
        stage: str,
        resume_step: int | None = None,
        tags: Mapping[str, str] | None = None,
        after: Mapping[str, int] | None = None,
    ) -> Journal:
        """Start a new attempt of `stage` in `folder`, which is `results/<experiment>/journal`.

        resume_step: the step of the checkpoint from which this attempt resumes; None: from the beginning. tags:
        describe this attempt. Attempts with the same tag "fingerprint" are one run, even if their parameters differ
        (more steps, other nodes); without it, attempts with equal parameters are. after: ids of the attempts that led
        to the checkpoint, each with its number of records at that time, by which readers detect missing records.
        """
        target = folder / stage
        make_folder(target)
        existing = [*target.glob("attempt-*.jsonl"), *receipts_of(target).glob("attempt-*.json")]
        number = max(map(attempt_number, existing), default=0) + 1
        header = {
            "type": "attempt",
            "format": 1,
            "id": uuid.uuid4().hex,
            "stage": stage,
            "time": _now_ms(),
            "resume_step": resume_step,
            "after": dict(after or {}),
            "tags": {**_provenance(), **(tags or {})},
        }
        while True:
            try:
                return cls(target / f"attempt-{number:04d}.jsonl", header)
            except FileExistsError:  # another attempt began at the same moment
                number += 1

    @property
    def attempts(self) -> dict[str, int]:
        """Return the attempts that led to a checkpoint made now: `after` of an attempt that resumes from it."""
        return {**self._after, self.id: self._num_records}

    def params(self, values: Mapping[str, Any]) -> None:
        """Record the parameters of the stage; nested mappings become dotted keys."""
        plain = dict(_flatten(values))
        self._receipt["params"] |= plain
        self._append({"type": "params", "time": _now_ms(), "values": plain})

    def metrics(self, values: Mapping[str, float], step: int, examples_seen: int | None = None) -> None:
        """Record metrics at a step. Names of measurements of time and load begin with `speed/` or `system/`."""
        record: dict[str, Any] = {"type": "metrics", "time": _now_ms(), "step": int(step)}
        if examples_seen is not None:
            record["examples_seen"] = int(examples_seen)
        record["values"] = {key: _plain_number(value) for key, value in values.items()}
        self._append(record)

    def image(self, key: str, path: Path, step: int) -> None:
        """Record an image at a step. The journal stores a copy, since a stage's outputs may be made again."""
        name = f"{uuid.uuid5(uuid.NAMESPACE_OID, key).hex}-{step}{path.suffix}"
        copy = self.path.parent / "images" / self.path.stem / name
        try:
            picture = path.read_bytes()
            write_bytes(copy, picture)
        except OSError as error:
            self._warn(f"the image {path} of step {step} is lost: {error}")
            return
        details = {"key": key, "path": str(copy.relative_to(self.path.parent)), "sha256": sha256(picture).hexdigest()}
        self._append({"type": "image", "time": _now_ms(), "step": int(step), **details})

    def artifact(self, path: Path, name: str | None = None) -> None:
        """Record a file that the stage made; `name` is its displayed name, e.g. "plots/roc.png". The journal records
        the path, size and sha256 of the file, and no copy."""
        try:
            size, checksum = path.stat().st_size, sha256_file(path)
        except OSError as error:
            self._warn(f"the file {path} is lost: {error}")
            return
        where = os.path.relpath(path, self.path.parent)
        record = {"type": "artifact", "time": _now_ms(), "name": name or path.name, "path": where}
        self._append({**record, "size": size, "sha256": checksum})

    def sync(self) -> None:
        """Flush every record to disk. Call it before a checkpoint is completed, so that a power failure cannot leave a
        checkpoint without its history."""
        with self._lock:
            self._write()
            if self._file < 0:
                return
            try:
                os.fsync(self._file)
            except OSError as error:
                self._warn_once(f"it cannot be flushed to disk: {error}")
            receipt = receipts_of(self.path.parent) / f"{self.path.stem}.json"
            try:
                write_json(receipt, {**self._receipt, "records": self._num_records})
            except OSError as error:
                self._warn(f"its receipt {receipt} cannot be written: {error}")

    def close(self, status: Ending = "finished") -> None:
        """End the attempt. Calling it again does nothing."""
        if self._file < 0:
            return
        end = {"type": "end", "time": _now_ms(), "status": status}
        self._append(end)
        self._receipt["end"] = end
        self.sync()
        with self._lock:
            if self._pending:
                self._warn(f"{len(self._pending):,} bytes could not be written")
            file, self._file = self._file, -1
            try:
                os.close(file)
            except OSError as error:  # of an earlier write, on a network file system
                self._warn_once(f"it cannot be flushed to disk: {error}")

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close("finished")
        else:
            self.close("stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed")

    def _append(self, record: Mapping[str, Any]) -> None:
        line = _encode(record).encode()
        with self._lock:
            self._pending += line[:-1] + b',"crc32":"%08x"}\n' % crc32(line)
            self._num_records += 1
            self._write()

    def _write(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._file, self._pending) :]
        except OSError as error:
            self._warn_once(f"it cannot be written: {error}")

    def _warn_once(self, message: str) -> None:
        if not self._warned:
            self._warn(message)
            self._warned = True

    def _warn(self, message: str) -> None:
        log_line(f"warning: journal {self.path}: {message}. The stage continues.")


class NullJournal:
    """Journal that records nothing, for processes other than the first, and for tests."""

    @property
    def attempts(self) -> dict[str, int]:
        return {}

    def params(self, values: Mapping[str, Any]) -> None: ...

    def metrics(self, values: Mapping[str, float], step: int, examples_seen: int | None = None) -> None: ...

    def image(self, key: str, path: Path, step: int) -> None: ...

    def artifact(self, path: Path, name: str | None = None) -> None: ...

    def sync(self) -> None: ...

    def close(self, status: Ending = "finished") -> None: ...

    def __enter__(self) -> NullJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield f"{prefix}{key}", _plain_number(value)
        elif value is None or isinstance(value, str | bool | int):
            yield f"{prefix}{key}", value
        else:
            yield f"{prefix}{key}", str(value)


def _plain_number(value: float) -> float | str:
    """Return a number for JSON. JSON has no NaN and infinity: they become strings, which `float` accepts."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def attempt_number(path: Path) -> int:
    """Return the number of an attempt, from the name of its file."""
    digits = path.stem.removeprefix("attempt-")
    return int(digits) if digits.isdecimal() else 0


def open_journal(
    folder: Path | None, stage: str, tags: Mapping[str, str] | None = None, identity: Any = None
) -> Journal | NullJournal:
    """Start a new attempt of a stage (`Journal.open`) in a folder; None: nothing is recorded.

    identity: plain data that determines the results. Attempts with equal data are one run; None: those with equal
    parameters.
    """
    if folder is None:
        return NullJournal()
    fingerprint = {} if identity is None else {"fingerprint": digest(identity)[:16]}
    return Journal.open(folder, stage, tags={**(tags or {}), **fingerprint})


def receipts_of(folder: Path) -> Path:
    """Return the folder of the receipts of a stage's journal, `results/<experiment>/journal/<stage>`."""
    journals = folder.absolute().parent
    return journals.with_name(f".{journals.name}") / folder.name


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _provenance() -> dict[str, str]:
    """Return the provenance of this attempt: the code's commit, and the Slurm job if it runs in one."""
    tags = {name.lower(): os.environ[name] for name in _ENVIRONMENT if os.environ.get(name)}
    try:
        _git("ls-files", "--error-unmatch", "--", Path(__file__).name)
        lines = _git("status", "--porcelain=v2", "--branch", "--untracked-files=no").splitlines()
    except (OSError, subprocess.SubprocessError):  # no git, or installed from a wheel, maybe in a repository of others
        return tags
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid")]
    dirty = any(not line.startswith("#") for line in lines)
    return {**tags, "git_commit": commits[0], "git_dirty": str(dirty).lower()} if commits else tags


def _git(*arguments: str) -> str:
    """Return the output of git in the folder of this file. Raises OSError or SubprocessError."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
