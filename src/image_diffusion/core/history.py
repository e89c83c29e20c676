"""The attempts of a stage, read from its journal and merged into one history: each step once.

`core.journal` says how attempts are written. What an attempt wrote past the step that a later one resumed from is
superseded; a line that a crash cut off is left out, and so is a damaged one, which is told. What an attempt had written
when a later one went on from it is known, so that a file that was cut short is told, too.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from zlib import crc32

from image_diffusion.core.errors import tell_once
from image_diffusion.core.files import digest, sha256_file
from image_diffusion.core.journal import attempt_number

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
    """One picture at a step, and the journal's copy of it. sha256: of what was copied; empty where nobody noted it."""

    key: str
    step: int
    time: int
    path: Path
    sha256: str = ""

    @property
    def fault(self) -> str | None:
        """What is wrong with the copy now; None for one that is as it was."""
        if not self.path.is_file():
            return "is missing"
        return "is damaged" if self.sha256 and sha256_file(self.path) != self.sha256 else None


Entry = TypeVar("Entry", Point, Image)


@dataclass(frozen=True)
class Artifact:
    """One file that a stage made: where it is shown, where it lies, and what it held when it was recorded."""

    name: str
    path: Path
    size: int
    sha256: str


@dataclass(frozen=True)
class History:
    """The attempts of one run of a stage, merged: each step once, as the last attempt that did it wrote it.

    id: of its first attempt; never changes. starts: when each attempt began. changed: parameters that a later attempt
    gave another value (`params` keeps the first). superseded, superseded_images: what dead attempts wrote past the
    step that was resumed from. damaged: what is left out, as "attempt-0001.jsonl line 7" or "attempt 18fb3396".
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
    superseded_images: list[Image]
    artifacts: list[Artifact]
    damaged: list[str]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, by step."""
        pairs = sorted((point.step, point.value) for point in self.points if point.key == key)
        return [step for step, _ in pairs], [value for _, value in pairs]


def read_journal(folder: Path) -> History | None:
    """The merged history of the stage whose attempts lie in `folder`, `results/<experiment>/journal/<stage>`.

    When its attempts belong to several runs (the configuration changed), the run that was worked on last. None when
    there is no attempt.
    """
    histories = read_journals(folder)
    return histories[-1] if histories else None


def read_journals(folder: Path) -> list[History]:
    """The merged history of every run whose attempts lie in `folder`, the one that was worked on last at the end.

    Attempts are in the order of their numbers, which were given one by one: no clock and no name decides. An attempt
    belongs to the run with its fingerprint or parameters, of several to that of the attempts it goes on from; but one
    that starts from the beginning after that run finished is a run of its own. A line that a crash cut off, at the end
    of a file, is left out. A damaged one is left out and told, and with the first line all of an attempt.
    """
    runs: list[list[_Attempt]] = []
    for path in sorted(folder.glob("attempt-*.jsonl"), key=attempt_number):
        attempt = _read_attempt(path)
        if attempt is None:
            continue
        alike = [run for run in reversed(runs) if run[-1].run == attempt.run]
        same = next((run for run in alike if any(each.id in attempt.after for each in run)), next(iter(alike), None))
        if same is not None and (attempt.resumed is not None or not same[-1].finished):
            runs.remove(same)  # and put at the end
            runs.append([*same, attempt])
        else:
            runs.append([attempt])
    return [_merge(run) for run in runs]


def of_weights(history: History, model: Mapping[str, Any]) -> History:
    """The history of a training beside the weights it ended with. model: their model.json; where that is of another
    run than one that finished here, the journal of the weights is missing, which is told."""
    run = model.get("fingerprint")
    if run is None or history.status != "finished" or history.tags.get("fingerprint") == run:
        return history
    tell_once(f"warning: the journal of run {run}, whose weights these are, is missing.")
    return replace(history, damaged=[*history.damaged, f"run {run}"])


@dataclass
class _Attempt:
    header: dict[str, Any]
    alive: bool
    num_records: int
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
        """The attempts that led to the checkpoint that this one began with, and the records of each by then."""
        found = self.header.get("after", ())  # where no records are told, none is missed
        return found if isinstance(found, dict) else dict.fromkeys(found, 0)

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


def _read_attempt(path: Path) -> _Attempt | None:
    with path.open("rb") as file:
        alive = _is_locked(file.fileno())
        *lines, rest = file.read().split(b"\n")
    if b',"crc32":"' in rest:  # else behind the last newline is nothing, or a line that a crash cut off
        lines.append(rest)
    records, damaged = [], []
    sealed = any(_CHECKSUM.search(line) for line in lines[:2])
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(line, sealed))
        except (ValueError, RecursionError) as error:  # a disk that lost power can leave zeros
            damaged.append(f"{path.name} line {number}")
            whole = " It is the first, and nothing of this attempt can be read without it." if number == 1 else ""
            tell_once(f"warning: journal {path}: line {number} is damaged and left out: {error}.{whole}")
            if number == 1:
                return None
    if not records or records[0]["type"] != "attempt":
        return None
    counted: set[int] = set()
    attempt = _Attempt(records[0], alive, len(lines), damaged=damaged, last_time=records[-1]["time"])
    for record in records[1:]:
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
                attempt.end = record
    return attempt


def _record(line: bytes, sealed: bool) -> dict[str, Any]:
    """What a line says. sealed: whether it must have a checksum; an old journal has none. Raises ValueError."""
    found = _CHECKSUM.search(line)
    if found is None and sealed:
        raise ValueError("its checksum is missing")
    text = line if found is None else line[: found.start()] + b"}"
    if found is not None and crc32(text) != int(found[1], 16):
        raise ValueError("its checksum is that of another line")
    record = json.loads(text)
    if not isinstance(record, dict) or "type" not in record or "time" not in record:
        raise ValueError("it is no record")
    return record


def _merge(attempts: list[_Attempt]) -> History:
    """Attempts of one run, in order -> one history. Each attempt holds up to the lowest step resumed from after it; of
    those that the last goes on from, up to the lowest resumed from among them, whatever began elsewhere since."""
    on_the_way = {attempts[-1].id, *attempts[-1].after} if attempts[-1].after else {each.id for each in attempts}
    limits: list[float] = []
    limit = limit_on_the_way = math.inf
    for attempt in reversed(attempts):
        limits.insert(0, limit_on_the_way if attempt.id in on_the_way else limit)
        resumed = -math.inf if attempt.resumed is None else attempt.resumed
        limit = min(limit, resumed)
        if attempt.id in on_the_way:
            limit_on_the_way = min(limit_on_the_way, resumed)
    points, superseded = _held([attempt.points for attempt in attempts], limits)
    images, superseded_images = _held([attempt.images for attempt in attempts], limits)
    first, last = attempts[0], attempts[-1]
    ids = {attempt.id for attempt in attempts}
    lost = sorted({each for attempt in attempts for each in attempt.after} - ids)
    for each in lost:
        stage = first.header["stage"]
        tell_once(f"warning: attempt {each[:8]} of {stage} is missing in its journal: what it logged is left out.")
    lost += _cut_short(attempts)
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
        superseded_images=superseded_images,
        artifacts=list({artifact.name: artifact for attempt in attempts for artifact in attempt.artifacts}.values()),
        damaged=[
            *(line for attempt in attempts for line in attempt.damaged),
            *(f"attempt {each[:8]}" for each in lost),
        ],
    )


def _cut_short(attempts: list[_Attempt]) -> list[str]:
    """The attempts on the way to the last one of which less is here than when it was gone on from."""
    short = []
    for attempt in attempts:
        missing = attempts[-1].after.get(attempt.id, 0) - attempt.num_records
        if missing > 0:
            short.append(attempt.id)
            stage = attempt.header["stage"]
            tell_once(f"warning: attempt {attempt.id[:8]} of {stage} lacks its last {missing:,} records.")
    return short


def _held(attempts: list[list[Entry]], limits: list[float]) -> tuple[list[Entry], list[Entry]]:
    """What the attempts wrote: each (key, step) once, by the last attempt that holds at this step; and the rest."""
    kept: dict[tuple[str, int], Entry] = {}
    superseded: list[Entry] = []
    for entries, limit in zip(attempts, limits, strict=True):
        for entry in entries:
            if entry.step > limit:
                superseded.append(entry)
                continue
            if (entry.key, entry.step) in kept:
                superseded.append(kept[entry.key, entry.step])
            kept[entry.key, entry.step] = entry
    return list(kept.values()), superseded


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    return False
