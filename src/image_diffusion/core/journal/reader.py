"""Reader of a stage's journal: merges its attempts into one history, with each step once. `core.journal.writer`
describes the format. Records after the step from which a later attempt resumed are superseded. Lines truncated by a
crash are skipped, and damaged lines are skipped with a warning. The receipt of an attempt, and later attempts that
resumed from it, contain its number of records, so that lost records are counted.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from zlib import crc32

from image_diffusion.core.files.atomic import digest, read_json, sha256_file
from image_diffusion.core.journal.writer import attempt_number, receipts_of
from image_diffusion.core.process.errors import log_line_once

_CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"}$')

Status = Literal["finished", "failed", "stopped", "killed", "running"]


@dataclass(frozen=True)
class Point:
    """One number: a metric at a step. time: milliseconds since 1970."""

    key: str
    value: float
    step: int
    time: int


@dataclass(frozen=True)
class Image:
    """Image at a step, and the journal's copy of it. sha256: digest of the original; empty if it was not recorded."""

    key: str
    step: int
    time: int
    path: Path
    sha256: str = ""

    @property
    def fault(self) -> str | None:
        """Return the fault of the copy as a phrase; None if it is unchanged."""
        if not self.path.is_file():
            return "is missing"
        return "is damaged" if self.sha256 and sha256_file(self.path) != self.sha256 else None


Entry = TypeVar("Entry", Point, Image)


@dataclass(frozen=True)
class Artifact:
    """File that a stage made: its displayed name, its path, and its size and digest when it was recorded."""

    name: str
    path: Path
    size: int
    sha256: str


@dataclass(frozen=True)
class History:
    """Merged attempts of one run of a stage: each step once, from the last attempt that did it.

    id: id of the first attempt; never changes. starts: start times of the attempts. changed: parameters with another
    value in a later attempt (`params` has the first value). superseded: points that earlier attempts wrote after the
    step from which a later one resumed. damaged: skipped parts, such as "attempt-0001.jsonl line 7" or "attempt
    18fb3396". num_records, num_lost: known number of records of the attempts, and the number of unreadable ones.
    """

    id: str
    stage: str
    starts: list[int]
    ended: int | None
    status: Status
    tags: dict[str, str]
    params: dict[str, Any]
    changed: dict[str, Any]
    points: list[Point]
    superseded: list[Point]
    images: list[Image]
    artifacts: list[Artifact]
    damaged: list[str]
    num_records: int
    num_lost: int

    @property
    def loss(self) -> str | None:
        """Return a phrase on lost records; None if the history is complete."""
        return f"{self.num_lost:,} of {self.num_records:,} records are lost" if self.num_lost else None

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of a metric, by step."""
        pairs = sorted((point.step, point.value) for point in self.points if point.key == key)
        return [step for step, _ in pairs], [value for _, value in pairs]


def read_journal(folder: Path) -> History | None:
    """Return the merged history of the stage with attempts in `folder`, `results/<experiment>/journal/<stage>`.

    If its attempts belong to several runs (the configuration changed), returns the most recent run. None without an
    attempt.
    """
    histories = read_journals(folder)
    return histories[-1] if histories else None


def read_journals(folder: Path) -> list[History]:
    """Return the merged history of every run with attempts in `folder`, the most recent run last.

    Attempts are in the order of their consecutive numbers, independent of clocks. An attempt belongs to the run with
    its fingerprint or parameters; if there are several, to the run from which it resumes. An attempt that starts from
    the beginning after that run finished is a new run. A truncated last line of a file is skipped, and damaged lines
    are skipped with a warning. Header, parameters and ending of an attempt that the journal has lost are taken from its
    receipt.
    """
    runs: list[list[_AttemptRecord]] = []
    for attempt in _attempts_in(folder):
        alike = [run for run in reversed(runs) if run[-1].run == attempt.run]
        same = next(
            (run for run in alike if any(earlier.id in attempt.after for earlier in run)), next(iter(alike), None)
        )
        if same is not None and (attempt.resumed is not None or not same[-1].finished):
            runs.remove(same)  # and move it to the end
            runs.append([*same, attempt])
        else:
            runs.append([attempt])
    return [_merge(run) for run in runs]


def history_for_weights(history: History, model: Mapping[str, Any]) -> History:
    """Return the history of a training; if it is of a finished run other than the one that trained the weights, marked
    as damaged, with a warning. model: model.json of the weights."""
    run = model.get("fingerprint")
    if run is None or history.status != "finished" or history.tags.get("fingerprint") == run:
        return history
    log_line_once(f"warning: the journal of run {run}, which trained these weights, is missing.")
    return replace(history, damaged=[*history.damaged, f"run {run}"])


def logged_stages(journals: Path) -> list[Path]:
    """Return the folder of each stage in `journals`, `results/<experiment>/journal`, sorted by name, including removed
    folders whose receipts still exist."""
    receipts = receipts_of(journals / "stage").parent
    names = {path.name for folder in (journals, receipts) for path in folder.glob("*") if path.is_dir()}
    return [journals / name for name in sorted(names)]


def has_resumed(folder: Path) -> bool:
    """Return True if the last attempt of a stage resumed from an earlier one, by its first line; False if that cannot
    be read. folder: as for `read_journal`."""
    last = max(folder.glob("attempt-*.jsonl"), key=attempt_number, default=None)
    if last is None:
        return False
    try:
        with last.open("rb") as file:
            return _record(file.readline().rstrip(b"\n"), sealed=False).get("resume_step") is not None
    except (ValueError, RecursionError):
        return False


@dataclass
class _AttemptRecord:
    """An attempt. num_lines: lines of its file, also unreadable ones. expected: number of records in its receipt."""

    header: dict[str, Any]
    alive: bool
    num_lines: int
    num_records: int
    expected: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    end: dict[str, Any] | None = None
    last_time: int = 0

    @property
    def id(self) -> str:
        return str(self.header["id"])

    @property
    def after(self) -> dict[str, int]:
        """Return the attempts that led to this one's first checkpoint, with their numbers of records then."""
        previous = self.header.get("after", ())  # old journals have no counts of records
        return previous if isinstance(previous, dict) else dict.fromkeys(previous, 0)

    @property
    def run(self) -> str:
        fingerprint = self.header["tags"].get("fingerprint")
        return f"fingerprint {fingerprint}" if fingerprint else f"params {digest(self.params)}"

    @property
    def resumed(self) -> int | None:
        return cast("int | None", self.header["resume_step"])

    @property
    def finished(self) -> bool:
        return self.end is not None and self.end["status"] == "finished"


def _attempts_in(folder: Path) -> list[_AttemptRecord]:
    """Return the attempts of a stage in the order of their numbers, from the journal and the receipts."""
    receipts = _receipts(receipts_of(folder))
    attempts: dict[int, _AttemptRecord] = {}
    for path in folder.glob("attempt-*.jsonl"):
        attempt = _read_attempt(path, receipts)
        if attempt is not None:
            attempts[attempt_number(path)] = attempt
    present = {attempt.id for attempt in attempts.values()}
    attempts |= {number: receipt for number, receipt in receipts.items() if receipt.id not in present}
    return [attempts[number] for number in sorted(attempts)]


def _receipts(folder: Path) -> dict[int, _AttemptRecord]:
    """Return the attempts by number, as described by their receipts, without records."""
    receipts = {}
    for path in sorted(folder.glob("attempt-*.json")):
        try:
            content = read_json(path)
            header, end = content["header"], content["end"]
            receipts[attempt_number(path)] = _AttemptRecord(
                header, False, 0, 0, content["records"], content["params"], end=end, last_time=(end or header)["time"]
            )
        except (ValueError, KeyError, TypeError) as error:
            log_line_once(f"warning: {path} cannot be read, so that losses of its journal go unnoticed: {error}")
    return receipts


def _read_attempt(path: Path, receipts: Mapping[int, _AttemptRecord]) -> _AttemptRecord | None:
    """Return the attempt in a file; None if neither its first line nor a receipt identifies it."""
    with path.open("rb") as file:
        alive = _is_locked(file.fileno())
        *lines, tail = file.read().split(b"\n")
    if b',"crc32":"' in tail:  # otherwise the tail is empty, or a line truncated by a crash
        lines.append(tail)
    records, damaged = [], []
    sealed = any(_CHECKSUM.search(line) for line in lines[:2])
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(line, sealed))
        except (ValueError, RecursionError) as error:  # a power failure can leave zeros
            damaged.append(f"{path.name} line {number}")
            consequence = ""
            if number == 1 and attempt_number(path) not in receipts:
                consequence = " It is the header, and without it this attempt cannot be read."
            log_line_once(f"warning: journal {path}: line {number} is damaged and left out: {error}.{consequence}")
            if consequence:
                return None
    if records and records[0]["type"] == "attempt":
        header = records[0]
        described = (deepcopy(receipt) for receipt in receipts.values() if receipt.id == header["id"])
        attempt = next(described, None) or _AttemptRecord(header, alive, 0, 0)
    elif attempt_number(path) in receipts:
        attempt = deepcopy(receipts[attempt_number(path)])
    else:
        return None
    attempt.alive, attempt.num_lines, attempt.num_records = alive, len(lines), len(records)
    attempt.damaged = damaged
    if records and attempt.end is None:
        attempt.last_time = records[-1]["time"]
    counted: set[int] = set()
    for record in records:
        match record["type"]:
            case "params":
                attempt.params |= record["values"]
            case "metrics":
                step, at = record["step"], record["time"]
                attempt.points += [Point(key, float(value), step, at) for key, value in record["values"].items()]
                if "examples_seen" in record and step not in counted:  # once a step
                    counted.add(step)
                    attempt.points.append(Point("examples_seen", float(record["examples_seen"]), step, at))
            case "image":
                where = path.parent / record["path"]
                sha256 = record.get("sha256", "")
                attempt.images.append(Image(record["key"], record["step"], record["time"], where, sha256))
            case "artifact":
                where = Path(os.path.normpath(path.parent / record["path"]))
                attempt.artifacts.append(Artifact(record["name"], where, record["size"], record["sha256"]))
            case "end":
                attempt.end, attempt.last_time = record, record["time"]
    return attempt


def _record(line: bytes, sealed: bool) -> dict[str, Any]:
    """Parse a line. sealed: True if it must have a checksum, which old journals do not have. Raises ValueError."""
    checksum = _CHECKSUM.search(line)
    if checksum is None and sealed:
        raise ValueError("its checksum is missing")
    text = line if checksum is None else line[: checksum.start()] + b"}"
    if checksum is not None and crc32(text) != int(checksum[1], 16):
        raise ValueError("its checksum does not match it")
    record = json.loads(text)
    if not isinstance(record, dict) or "type" not in record or "time" not in record:
        raise ValueError("it is not a record")
    return record


def _merge(attempts: list[_AttemptRecord]) -> History:
    """Merge the attempts of one run, in order, into one history. An attempt is valid up to the lowest step from which a
    later one resumed. For attempts that led to the last one, only resumptions among them count."""
    on_the_way = {attempts[-1].id, *attempts[-1].after} if attempts[-1].after else {attempt.id for attempt in attempts}
    limits: list[float] = []
    limit = limit_on_the_way = math.inf
    for attempt in reversed(attempts):  # backwards, since only later attempts limit one
        limits.insert(0, limit_on_the_way if attempt.id in on_the_way else limit)
        resumed = -math.inf if attempt.resumed is None else attempt.resumed
        limit = min(limit, resumed)
        if attempt.id in on_the_way:
            limit_on_the_way = min(limit_on_the_way, resumed)
    points, superseded = _split_superseded([attempt.points for attempt in attempts], limits)
    images, _ = _split_superseded([attempt.images for attempt in attempts], limits)
    first, last = attempts[0], attempts[-1]
    absent = {id_ for attempt in attempts for id_ in attempt.after} - {attempt.id for attempt in attempts}
    records_of_absent = {id_: last.after.get(id_, 0) for id_ in sorted(absent)}
    for id_, records in records_of_absent.items():
        _warn_of_loss(first.header["stage"], id_, records, records)
    expected = {  # the most records by the receipt, by the last attempt that resumed from it, by its file
        attempt.id: max(attempt.expected, last.after.get(attempt.id, 0), attempt.num_lines) for attempt in attempts
    }
    incomplete = [attempt for attempt in attempts if attempt.num_lines < expected[attempt.id]]
    for attempt in incomplete:
        missing = expected[attempt.id] - attempt.num_records
        _warn_of_loss(first.header["stage"], attempt.id, missing, expected[attempt.id])
    params: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    for attempt in attempts:
        changed |= {key: value for key, value in attempt.params.items() if params.setdefault(key, value) != value}
    ended = None if last.alive and last.end is None else last.last_time
    status: Status = last.end["status"] if last.end else ("running" if last.alive else "killed")
    return History(
        id=first.id,
        stage=first.header["stage"],
        starts=[attempt.header["time"] for attempt in attempts],
        ended=ended,
        status=status,
        tags={key: value for attempt in attempts for key, value in attempt.header["tags"].items()},
        params=params,
        changed=changed,
        points=points,
        superseded=superseded,
        images=images,
        artifacts=list({artifact.name: artifact for attempt in attempts for artifact in attempt.artifacts}.values()),
        damaged=[
            *(line for attempt in attempts for line in attempt.damaged),
            *(f"attempt {id_[:8]}" for id_ in (*records_of_absent, *(attempt.id for attempt in incomplete))),
        ],
        num_records=sum(expected.values()) + sum(records_of_absent.values()),
        num_lost=sum(max(0, expected[attempt.id] - attempt.num_records) for attempt in attempts)
        + sum(records_of_absent.values()),
    )


def _warn_of_loss(stage: str, attempt: str, lost: int, records: int) -> None:
    missing = "all records" if lost == records else f"{lost:,} of {records:,} records"
    log_line_once(
        f"warning: the journal of {stage} is incomplete: {missing} of attempt {attempt[:8]} are lost, and missing in "
        f"the report and in MLflow. Restore the journal from a backup, or delete what the stage made to run it again."
    )


def _split_superseded(attempts: list[list[Entry]], limits: list[float]) -> tuple[list[Entry], list[Entry]]:
    """Return the entries with each (key, step) once, from the last attempt that is valid there, and the rest."""
    latest: dict[tuple[str, int], Entry] = {}
    superseded: list[Entry] = []
    for entries, limit in zip(attempts, limits, strict=True):
        for entry in entries:
            if entry.step > limit:
                superseded.append(entry)
                continue
            if (entry.key, entry.step) in latest:
                superseded.append(latest[entry.key, entry.step])
            latest[entry.key, entry.step] = entry
    return list(latest.values()), superseded


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    return False
