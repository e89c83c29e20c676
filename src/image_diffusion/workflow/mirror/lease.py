"""One writer of a mirror: a chain of numbered objects, each created in one step and never replaced.

Whoever creates the next number has the mirror: it names the newest snapshot and who works with it. A machine that works
adds one again and again; one that is silent for the agreed time has lost the mirror to the machine that creates the
next number, and notices when its own is refused. Clocks of machines are not compared.
"""

from __future__ import annotations

import json
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
"""Numbers that stay. Older ones are removed one after another, so that those that are there have no gap."""
_BEGUN = "begun"
"""The object that says that there are numbers, whatever a list of them says."""
_LOOKS = 5
_UNKNOWN = "another process"


@dataclass(frozen=True)
class Head:
    """The newest number of a chain. snapshot: the chunks of the list of files; empty before the first snapshot. token:
    of the process that has created it. is_released: True if that process has ended."""

    snapshot: tuple[str, ...] = ()
    token: str = ""
    machine: str = ""
    is_released: bool = True

    @property
    def is_damaged(self) -> bool:
        """True if it stands for one that cannot be read: see `Lease._readable`."""
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
        plain = json.loads(json.dumps({**asdict(self), "number": number}))
        return to_json({**plain, "seal": digest(plain)}).encode()


class TakenError(Exception):
    """Another process has the mirror."""


class Lease:
    """The right to write a mirror. token: of this process."""

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
        """Return the newest number and its head; 0 and an empty one for a new mirror. A list of names may be out of
        date, so what lies beyond it is looked for. Raises ValueError."""
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
            time.sleep(look)  # the list is older than what has been removed since
        raise ValueError(f"{self.store.url}/heads cannot be listed as it is. Try again in a minute.")

    def check_conditions(self) -> None:
        """Raise ValueError for a store that does not refuse to create an object that exists."""
        self.store.create("probe", b"first")
        if self.store.create("probe", self.token.encode()):
            raise ValueError(
                f"{self.store.url} does not create objects on the condition that there is none of that name, so that "
                f"two machines would write one mirror. Use a store that does, such as Amazon S3 or Google's."
            )

    def take(self, own: str, tell: Callable[[str], None]) -> bool:
        """Take the mirror; wait where another process might still work with it. Return True if the last one to have it
        was the process with the token `own`.

        tell: prints a line. Raises TakenError naming the process that works with it, ValueError.
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
        """Return the snapshots of the heads before the newest that can be read, the newest first."""
        return (head.snapshot for head in self._before(self._number))

    def _before(self, number: int) -> Iterator[Head]:
        for before in range(number - 1, max(0, number - _KEPT), -1):
            with suppress(ValueError):
                if (data := self.store.get(_name(before))) is not None:
                    yield Head.parse(data)

    def _readable(self, number: int, data: bytes) -> Head:
        """Return a head; where it is damaged, one of an unknown process, with the snapshot and the token of the head
        before it: the disk of that token is not behind a process that has damaged its first head."""
        try:
            return Head.parse(data)
        except ValueError:
            before = next(self._before(number), Head())
            return Head(before.snapshot, before.token, _UNKNOWN, is_released=False)

    def renew(self, snapshot: tuple[str, ...] | None = None, is_released: bool = False) -> None:
        """Add a number, with another snapshot if one is given. Raises TakenError, ValueError."""
        with self._lock:
            self._create(self._head.snapshot if snapshot is None else snapshot, is_released)

    def _create(self, snapshot: tuple[str, ...], is_released: bool = False) -> None:
        head = Head(snapshot, self.token, self._machine, is_released)
        for _ in range(_LOOKS):
            number = self._number + 1
            if self.store.create(_name(number), head.sealed(number)):
                self._number, self._head = number, head
                with suppress(ValueError):  # the next number tries again
                    while self._oldest <= number - _KEPT:
                        self.store.delete([_name(self._oldest)])
                        self._oldest += 1
                return
            if (data := self.store.get(_name(number))) is not None:
                other = self._readable(number, data)
                if other.is_damaged or other.token != self.token:
                    raise TakenError(_taken(other.machine, self.store.url))
                self._number, self._head = number, other  # of an attempt whose answer got lost
        raise ValueError(f"{self.store.url} refuses new objects.")


def _name(number: int) -> str:
    return f"heads/{number:010}"


def _taken(machine: str, url: str) -> str:
    return f"{machine} works with {url}. Wait until it has ended, or set another mirror."
