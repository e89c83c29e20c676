"""Exclusive lease on a mirror: a chain of numbered objects, each created atomically and never replaced.

The process that creates the next number holds the mirror; the object names the newest snapshot and the process. A
working machine keeps adding numbers; after the agreed time of silence, another machine may take the mirror by creating
the next number, and the first one notices when its own is refused. Clocks of machines are not compared.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from uuid import uuid4

from image_diffusion.core.files.atomic import digest, parse_json, to_json
from image_diffusion.core.files.store import Store

_KEPT = 20
"""Number of heads that are kept. Older ones are removed in order, so that there are no gaps."""
_BEGUN = "begun"
"""Object that marks a mirror as existing, since a listing of its heads may be out of date."""
_LOOKS = 5
_UNKNOWN = "another process"


@dataclass(frozen=True)
class Head:
    """Content of a numbered object. snapshot: the chunks of the list of files; empty before the first snapshot. token:
    of the process that created it. is_released: True if that process has ended."""

    snapshot: tuple[str, ...] = ()
    token: str = ""
    machine: str = ""
    is_released: bool = True

    @property
    def is_damaged(self) -> bool:
        """Return True if this head replaces an unreadable one: see `Lease._readable`."""
        return self.machine == _UNKNOWN

    @staticmethod
    def parse(data: bytes) -> Head:
        """Return the head in the bytes of an object. Raises ValueError."""
        plain = parse_json(data, "a head of the mirror", "Another one is used.")
        try:
            return Head(tuple(plain["snapshot"]), plain["token"], plain["machine"], plain["is_released"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"a head of the mirror is damaged: {error}.") from None

    def sealed(self, number: int) -> bytes:
        """Return the bytes of an object that holds the head."""
        plain = {**asdict(self), "number": number}
        return to_json({**plain, "seal": digest(plain)}).encode()


class TakenError(Exception):
    """Another process holds the mirror."""


class Lease:
    """Exclusive right to write a mirror. token: of this process."""

    def __init__(self, store: Store, silence_s: float) -> None:
        self.store, self._silence_s = store, silence_s
        self.token = uuid4().hex
        self._machine = f"process {os.getpid()} on {socket.gethostname()}"
        self._number, self._oldest, self._head = 0, 1, Head()
        self._lock = threading.Lock()

    @property
    def snapshot(self) -> tuple[str, ...]:
        """Chunks of the newest snapshot."""
        return self._head.snapshot

    def newest(self) -> tuple[int, Head]:
        """Return the newest number and its head; 0 and an empty head for a new mirror. A list of names may be out of
        date, so later numbers are probed. Raises ValueError."""
        for look in range(_LOOKS):
            numbers = [int(name) for name in self.store.names("heads") if name.isdigit()]
            if not numbers and self.store.get(_BEGUN) is None:
                return 0, Head()
            number = max(numbers, default=0)
            if numbers and (data := self.store.get(_name(number))) is not None:
                while (later := self.store.get(_name(number + 1))) is not None:
                    number, data = number + 1, later
                self._oldest = min(numbers)
                head = self._readable(number, data)
                if head.is_damaged and not head.snapshot:
                    raise ValueError(
                        f"The newest head of {self.store.url} is damaged, and none before it names a snapshot. Set "
                        f"another mirror."
                    )
                return number, head
            time.sleep(look)  # the listing is out of date
        raise ValueError(f"{self.store.url}/heads cannot be listed as it is. Try again in a minute.")

    def check_conditions(self) -> None:
        """Raise ValueError if the store does not refuse to create an object that exists."""
        self.store.create("probe", b"first")
        if self.store.create("probe", self.token.encode()):
            raise ValueError(
                f"{self.store.url} does not create objects on the condition that there is none of that name, so that "
                f"two machines would write one mirror. Use a store that does, such as Amazon S3 or Google's."
            )

    def take(self, own: str, tell: Callable[[str], None]) -> bool:
        """Take the mirror, waiting if another process may still use it. Return True if its last holder was the process
        with the token `own`.

        tell: prints a line. Raises TakenError naming the current holder, ValueError.
        """
        self._number, self._head = self.newest()
        is_own = own != "" and self._head.token == own
        if not self._head.is_released and not is_own:
            tell(
                f"note: {self._head.machine} has not left {self.store.url}. It is taken over if nothing is heard of it "
                f"for {self._silence_s:g} s."
            )
            until = time.monotonic() + self._silence_s
            while time.monotonic() < until:
                time.sleep(min(5.0, self._silence_s / 8))
                if (data := self.store.get(_name(self._number + 1))) is not None:
                    later = self._readable(self._number + 1, data)
                    if not later.is_released:
                        raise TakenError(_taken(later.machine, self.store.url))
                    self._number, self._head = self._number + 1, later
                    break
        self._create(self._head.snapshot)
        self.store.create(_BEGUN, b"")
        return is_own

    def older(self) -> Iterator[tuple[str, ...]]:
        """Return the snapshots of the readable heads before the newest head, the newest first."""
        return (head.snapshot for head in self._before(self._number))

    def _before(self, number: int) -> Iterator[Head]:
        for before in range(number - 1, max(0, number - _KEPT), -1):
            with suppress(ValueError):
                if (data := self.store.get(_name(before))) is not None:
                    yield Head.parse(data)

    def _readable(self, number: int, data: bytes) -> Head:
        """Return a head; if it is damaged, a head of an unknown process with the snapshot and the token of the previous
        head, since the disk with that token is at least as new as a damaged first head of another process."""
        try:
            return Head.parse(data)
        except ValueError:
            before = next(self._before(number), Head())
            return Head(before.snapshot, before.token, _UNKNOWN, is_released=False)

    def renew(self, snapshot: tuple[str, ...] | None = None, is_released: bool = False) -> None:
        """Add a number, optionally with a new snapshot. Raises TakenError, ValueError."""
        with self._lock:
            self._create(self._head.snapshot if snapshot is None else snapshot, is_released)

    def _create(self, snapshot: tuple[str, ...], is_released: bool = False) -> None:
        head = Head(snapshot, self.token, self._machine, is_released)
        for _ in range(_LOOKS):
            number = self._number + 1
            if self.store.create(_name(number), head.sealed(number)):
                self._number, self._head = number, head
                with suppress(ValueError):  # retried with the next number
                    while self._oldest <= number - _KEPT:
                        self.store.delete([_name(self._oldest)])
                        self._oldest += 1
                return
            if (data := self.store.get(_name(number))) is not None:
                other = self._readable(number, data)
                if other.is_damaged or other.token != self.token:
                    raise TakenError(_taken(other.machine, self.store.url))
                self._number, self._head = number, other  # from an attempt whose answer was lost
        raise ValueError(f"{self.store.url} refuses new objects.")


def _name(number: int) -> str:
    return f"heads/{number:010}"


def _taken(machine: str, url: str) -> str:
    return f"{machine} works with {url}. Wait until it has ended, or set another mirror."
