"""Tars of images that lie elsewhere: each is fetched when its turn comes, read, and not kept."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import IO, Annotated, Literal

from pydantic import Field, field_validator

from image_diffusion.core.files import Stamp, digest
from image_diffusion.data.remote import patiently
from image_diffusion.data.sources.listing import LONGEST_CLASS, FewFiles, Item, Listing, check_size, plain_text
from image_diffusion.data.sources.tar_members import Members, members_of

_SCHEMES = ("pipe:", "http://", "https://", "s3://", "gs://")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_TARS = 100_000
_Label = Annotated[str, Field(min_length=1, max_length=LONGEST_CLASS)]


class TarStream(FewFiles):
    """Tars in webdataset's layout behind URLs, or from commands: http and https by curl, gs by gsutil, s3 by aws,
    `pipe:` by any command that writes a tar. Each process that crops holds one of them on disk at a time, in TMPDIR.

    Nothing is fetched to plan: what lies behind an address is taken to stay as it is.
    """

    type: Literal["tar_stream"] = "tar_stream"
    """Tars of images behind URLs, fetched one at a time."""
    urls: Annotated[list[str], Field(min_length=1)]
    """Their addresses; {000..127} stands for each of these numbers. Example: `https://host/train-{000..127}.tar`."""
    classes: Annotated[int, Field(ge=1, le=1_000_000)] | Annotated[list[_Label], Field(min_length=1)] | None = None
    """What `.cls`, the key "label" of `.json`, or `.txt` tells: one of these classes, or a number below this one.
    Unset: unconditional data, whose `.txt` and `.json` may be captions."""

    @field_validator("urls")
    @classmethod
    def _can_be_opened(cls, value: list[str]) -> list[str]:
        for url in value:
            if not url.startswith(_SCHEMES):
                raise ValueError(f"{url!r} is no address of a tar. It begins with one of {', '.join(_SCHEMES)}")
        count = sum(prod(max(0, int(b) - int(a) + 1) for a, b in _RANGE.findall(url)) for url in value)
        if not 1 <= count <= _MOST_TARS:
            raise ValueError(f"these are {count:,} tars. Give from 1 to {_MOST_TARS:,}, as {{000..127}}.")
        return value

    @field_validator("classes")
    @classmethod
    def _are_different(cls, value: int | list[str] | None) -> int | list[str] | None:
        if isinstance(value, list) and len(set(value)) < len(value):
            raise ValueError("a class is named twice. Name each once, in the order of their numbers.")
        return value

    def listing(self) -> Listing:
        """The tars, in their order. Raises ValueError where one is named twice."""
        urls = [each for url in self.urls for each in _expanded(url)]
        names = [plain_text(url if url.startswith("pipe:") else url.partition("?")[0]) for url in urls]
        if len(set(names)) < len(names):
            raise ValueError("data.source.urls names a tar twice. Name each once.")
        items = [Item(name, None, (url,), turn=turn) for turn, (name, url) in enumerate(zip(names, urls, strict=True))]
        return Listing(items, self.known_classes(), [], 0, unit="tar")

    def known_classes(self) -> list[str]:
        """Those that the configuration names."""
        if isinstance(self.classes, int):
            return [str(number) for number in range(self.classes)]
        return self.classes or []

    def state(self, item: Item) -> str:
        """What decides the images of a tar, as far as it can be told before it is fetched: which classes there are."""
        return digest(self.known_classes())

    def images(self, item: Item) -> Iterator[tuple[Item, Callable[[], bytes]]]:
        """The images of a tar and how each is read, sorted by key. Raises ValueError when it cannot be fetched or read;
        reading raises OSError."""
        numbers = {name: number for number, name in enumerate(self.known_classes())}
        with _fetched(item) as file:
            members = members_of(file, item.name, labelled=bool(numbers))
            for key in sorted(members.images.keys() | members.labels.keys()):
                label, problem = _label(members, key, numbers)
                at = members.images.get(key, (0, 0))
                yield Item(f"{item.name}/{key}", label, at), partial(_read, file, *at, problem)

    def captions_beside(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """The captions in the tars, all of which are fetched, by the name of the image: the lines of `.txt`, or the key
        "caption" of `.json`. Raises ValueError where these tell classes."""
        if self.classes is not None:
            raise ValueError("data.source.classes is set, so that texts in the tars tell classes. Leave one out.")
        found: dict[str, list[str]] = {}
        for item in self.listing().items:
            with _fetched(item) as file:
                captions = members_of(file, item.name, labelled=False).captions
            found |= {f"{item.name}/{key}": texts for key, texts in captions.items()}
        return found

    def files(self) -> dict[str, tuple[str, Stamp]]:
        """None on this machine."""
        return {}


def _expanded(url: str) -> list[str]:
    """The addresses that one with ranges of numbers stands for."""
    found = _RANGE.search(url)
    if found is None:
        return [url]
    first, last = found.groups()
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [each for number in numbers for each in _expanded(url[: found.start()] + number + url[found.end() :])]


def _label(members: Members, key: str, numbers: dict[str, int]) -> tuple[int | None, str]:
    """The number of the class of a sample, and why the sample is none, if it is not."""
    if key not in members.images:
        return None, "a class without an image"
    if not numbers:
        return None, ""
    told = members.label(key)
    if told is None:
        return None, "an image without a class, while data.source.classes is set"
    return numbers.get(told), "" if told in numbers else f"'{told[:LONGEST_CLASS]}' is not in data.source.classes"


def _read(file: IO[bytes], start: int, size: int, problem: str) -> bytes:
    if problem:
        raise OSError(problem)
    check_size(size)
    file.seek(start)
    return file.read(size)


@contextmanager
def _fetched(item: Item) -> Iterator[IO[bytes]]:
    """A tar as a file without a name, which is gone with this process whatever ends it."""
    with tempfile.TemporaryFile() as file:
        patiently(item.name, lambda: _fetch(str(item.address[0]), file))
        yield file


def _fetch(url: str, file: IO[bytes]) -> None:
    from webdataset.gopen import gopen  # it imports PyTorch: not for those who only plan

    file.seek(0)
    file.truncate()
    try:
        with gopen(f"pipe:aws s3 cp {shlex.quote(url)} -" if url.startswith("s3://") else url) as stream:
            shutil.copyfileobj(stream, file, 1 << 20)
    except FileNotFoundError as error:
        raise ValueError(f"the command {error.filename} is not installed") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise ConnectionError(f"the command that fetches it ended with status {stream.status}") from None
