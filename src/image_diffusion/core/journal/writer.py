"""Journal of a stage, on the local disk first: append-only, one file an attempt, one writer a file.

A stage writes here and nowhere else, so no server can slow it down or stop it; `track` sends what is here to MLflow,
now or later, as often as one likes. Nothing is ever taken back: when a stage resumes, its new attempt says from which
step, and what the attempts before it wrote past that step is superseded when `core.journal.reader` reads the journal.

A receipt of each attempt lies beside the folder of journals: `.journal/<stage>/attempt-0001.json` holds the header, the
parameters, the number of records and the ending. A reader compares the two, so that records that were lost from a
journal, or a whole journal that was removed, are noticed.
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

from image_diffusion.core.files.atomic import make_folder, sha256_file, sync_folder, write_bytes, write_json
from image_diffusion.core.process.errors import Stopped, log_line

Ending = Literal["finished", "failed", "stopped"]

# The only environment variables that are ever recorded: none of them can hold a secret.
_ENVIRONMENT = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT")

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


class Journal:
    """Journal of one attempt of a stage: `<folder>/<stage>/attempt-0001.jsonl`, the next attempt in the next file.

    Every record is one line with a checksum, and is with the operating system before the call returns, so that SIGKILL
    loses nothing; `sync` brings it to the disk. A disk that is full or unavailable is reported once and never stops the
    stage: what could not be written is kept and written with a later record. Methods may be called from several
    threads.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self.id = path, str(header["id"])
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self._lock = threading.Lock()
        self._pending, self._num_records = b"", 0
        self._after = dict(header.get("after", ()))
        self._receipt: dict[str, Any] = {"header": dict(header), "params": {}, "end": None}
        self._warned = False
        # Held until this process ends, however it ends: this is how readers tell a killed attempt from a live one.
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

        resume_step: the step of the checkpoint this attempt continues from; None: from the beginning.
        tags: words that describe this attempt. "fingerprint" is special: attempts with one fingerprint are one run,
        also when their parameters differ (more steps, other nodes); without it, attempts with equal parameters are.
        after: the ids of the attempts that have led to that checkpoint, and how many records each had written by then:
        a reader knows by it whether any is missing.
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
        """Return the attempts that have led to a checkpoint made now, as it records them: `after` of the attempt that
        resumes from there."""
        return {**self._after, self.id: self._num_records}

    def params(self, values: Mapping[str, Any]) -> None:
        """Record what the stage runs with: nested mappings become dotted keys."""
        plain = dict(_flatten(values))
        self._receipt["params"] |= plain
        self._append({"type": "params", "time": _now_ms(), "values": plain})

    def metrics(self, values: Mapping[str, float], step: int, examples_seen: int | None = None) -> None:
        """Record numbers at a step. Timing-like ones are named `speed/...` or `system/...`."""
        record: dict[str, Any] = {"type": "metrics", "time": _now_ms(), "step": int(step)}
        if examples_seen is not None:
            record["examples_seen"] = int(examples_seen)
        record["values"] = {key: _plain_number(value) for key, value in values.items()}
        self._append(record)

    def image(self, key: str, path: Path, step: int) -> None:
        """Record an image at a step. The journal keeps its own copy: a stage's outputs may be deleted and redone."""
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
        """Record a file that the stage made; `name` is where it is shown, e.g. "plots/roc.png". The file stays where
        it is: the journal holds its place, size and sha256."""
        try:
            size, checksum = path.stat().st_size, sha256_file(path)
        except OSError as error:
            self._warn(f"the file {path} is lost: {error}")
            return
        where = os.path.relpath(path, self.path.parent)
        record = {"type": "artifact", "time": _now_ms(), "name": name or path.name, "path": where}
        self._append({**record, "size": size, "sha256": checksum})

    def sync(self) -> None:
        """Bring every record to the disk. Call it before a checkpoint is made final, so that a power cut cannot leave
        a checkpoint whose history is missing."""
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
            except OSError as error:  # of a write before, on a file system of another machine
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
    """Journal that keeps nothing: of the processes that are not the first, and of tests."""

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
    """Return a number as JSON can hold it. JSON has neither NaN nor infinity: they are written as words, which `float`
    reads back."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def attempt_number(path: Path) -> int:
    """Return the number of an attempt, from the name of its file."""
    digits = path.stem.removeprefix("attempt-")
    return int(digits) if digits.isdecimal() else 0


def open_journal(folder: Path | None, stage: str, tags: Mapping[str, str] | None = None) -> Journal | NullJournal:
    """Start a new attempt of a stage (`Journal.open`) in a folder; None: nothing is kept."""
    return NullJournal() if folder is None else Journal.open(folder, stage, tags=tags)


def receipts_of(folder: Path) -> Path:
    """Return the folder of the receipts that belong to the journal of a stage,
    `results/<experiment>/journal/<stage>`."""
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
