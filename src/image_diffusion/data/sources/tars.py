"""Tars of images as webdataset writes them, with 000001.cls, .txt or .json next to 000001.jpg: on this machine, or
remote, where each tar is fetched when its images are cropped, and deleted afterwards."""

from __future__ import annotations

import re
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import Field, field_validator

from image_diffusion.core.files.atomic import Stamp, digest, stamp_of
from image_diffusion.core.files.store import with_retries
from image_diffusion.core.process.errors import log_line, writing
from image_diffusion.core.process.secrets import check_query, for_shell
from image_diffusion.data.sources.base import (
    LONGEST_CLASS,
    FewFiles,
    ImageSource,
    Item,
    Listing,
    WithoutFiles,
    check_size,
    number_labels,
    plain_text,
)
from image_diffusion.data.sources.layouts import named_files
from image_diffusion.data.sources.tar_reader import Members, members_of

_ALONE = "a class without an image"
_FEWEST = 10  # minimum number of texts to tell captions from classes
_SCHEMES = ("pipe:", "http://", "https://", "s3://", "gs://")
_CURL = "curl --netrc-optional --connect-timeout 30 --retry 30 --retry-delay 2 -f -s -L -K -"
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_TARS = 100_000
_Label = Annotated[str, Field(min_length=1, max_length=LONGEST_CLASS)]


class TarSource(ImageSource):
    """Base of the sources that read tars of samples, local or remote."""

    @abstractmethod
    def members(self, labelled: bool, names: tuple[str, ...] = ()) -> Iterator[tuple[str, Members]]:
        """Yield the name of each tar and its members, as listed by `members_of`. Raises ValueError."""

    def read_captions(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """Return the captions in the tars, by the name of the image: the lines of `.txt`, or the key "caption" of
        `.json`."""
        tars = self.members(labelled=False)
        return {f"{name}/{key}": captions for name, members in tars for key, captions in members.captions.items()}


class Webdataset(FewFiles, TarSource):
    """Tar files of samples. Members whose names are equal up to the first dot form one sample, unless that would join
    images: photo 1.0.jpg and photo 1.1.jpg are two samples. A sample is an image and a class, which is read from the
    first that exists of `.cls`, the key "label" of `.json`, and `.txt`.

    Tars are never unpacked. A tar with a member whose path leads outside of it is an error.
    """

    type: Literal["webdataset"] = "webdataset"
    """Tar files of images and their classes."""
    path: str = Field(min_length=1)
    """A tar file, a folder (every `.tar` in it is read; tars of several splits are an error), or a pattern:
    `data/train-*.tar`."""
    labels: bool = True
    """True if `.cls`, `.txt` and `.json` give classes; false: unconditional data, whose `.txt` may be captions."""

    def listing(self) -> Listing:
        """Return every sample of every tar, sorted by tar and key. Raises ValueError for a tar that cannot be read."""
        samples: list[tuple[str, str | None, tuple[str | int, ...]]] = []
        rejected: list[tuple[str, str]] = []
        passed_over: list[str] = []
        texts: list[str | None] = []
        for (name, members), (path, _) in zip(self.members(self.labels), self.files().values(), strict=True):
            passed_over += [f"{name}/{file}" for file in members.passed_over]
            texts += [labels["txt"] if labels.keys() == {"txt"} else None for labels in members.labels.values()]
            samples += [(f"{name}/{key}", members.label(key), (path, *at)) for key, at in members.images.items()]
            alone = members.labels.keys() - members.images.keys()
            kinds = {file.rpartition(".")[0]: file.rpartition(".")[2] for file in members.passed_over}
            rejected += [
                (f"{name}/{key}", _ALONE + (f": .{kinds[key]} is not read" if key in kinds else "")) for key in alone
            ]
        if not samples:
            raise ValueError(f"data.source.path: {self.path} holds no images. Its tars must hold files like 0001.jpg.")
        self._check_captions(texts)
        numbers = number_labels((label for _, label, _ in samples if label is not None), self.path)
        items = []
        for name, label, address in sorted(samples):
            if numbers and label is None:
                rejected.append((name, "an image without a class, while others have one"))
            else:
                items.append(Item(name, None if label is None else numbers[label], address))
        return Listing(items, list(numbers), sorted(rejected), passed_over)

    def _check_captions(self, texts: list[str | None]) -> None:
        """Raise ValueError if only `.txt` gives classes, but more than half of at least 10 texts are different, as in
        captions. texts: the `.txt` of each sample with a class; None if another file gives the class."""
        different = len(set(texts))
        if None not in texts and len(texts) >= _FEWEST and different * 2 > len(texts):
            raise ValueError(
                f"data.source.path: {self.path}: the .txt of {len(texts):,} images hold {different:,} different texts, "
                f"as captions do. Set data.source.labels to false (pairs.captions: {{type: beside}} reads captions), "
                f"or write classes to .cls."
            )

    def read(self, item: Item) -> bytes:
        """Return the bytes of one image, read at its offset in the tar. Raises OSError."""
        path, start, size = item.address
        with Path(str(path)).open("rb") as file:
            return _read(file, int(start), int(size))

    def read_values(self, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Return the values of these keys in the `.json` of each sample, by the name of the image."""
        tars = self.members(labelled=False, names=names)
        return {f"{name}/{key}": values for name, members in tars for key, values in members.values.items()}

    def members(self, labelled: bool, names: tuple[str, ...] = ()) -> Iterator[tuple[str, Members]]:
        for name, (path, _) in self.files().items():
            with Path(path).open("rb") as file:
                yield name, members_of(file, path, labelled, names)

    def files(self) -> dict[str, tuple[str, Stamp]]:
        folder, tars = named_files(self.path, ".tar")
        if not folder.exists() or (tars == [Path(self.path)] and not tars[0].exists()):
            raise ValueError(f"data.source.path: {self.path} does not exist. Give a tar file or a folder of them.")
        if not tars:
            raise ValueError(f"data.source.path: {self.path} holds no .tar file. Give a tar file or a folder of them.")
        for tar in tars:
            if not tar.is_file():
                raise ValueError(f"{tar} is a folder, a pipe or a device, not a file. Give tar files.")
        return {plain_text(tar.name): (str(tar), stamp_of(tar)) for tar in tars}


class TarStream(WithoutFiles, TarSource):
    """Tars in webdataset's layout, read from URLs or commands: http and https by curl, gs by gsutil, s3 by aws, `pipe:`
    by any command that writes a tar. Each process that crops keeps one tar on disk at a time, in TMPDIR.

    Planning fetches nothing: the content at an address is assumed not to change.
    """

    type: Literal["tar_stream"] = "tar_stream"
    """Tars of images behind URLs, fetched one at a time."""
    urls: Annotated[list[str], Field(min_length=1)]
    """Addresses of the tars; {000..127} expands to each of these numbers, ${NAME} to an environment variable. Example:
    `https://host/train-{000..127}.tar?${SIGNATURE}`."""
    classes: Annotated[int, Field(ge=1, le=1_000_000)] | Annotated[list[_Label], Field(min_length=1)] | None = None
    """Class names, or the number of classes; `.cls`, the key "label" of `.json`, or `.txt` gives the class by its name,
    or as a number from 0. Unset: unconditional data, whose `.txt` and `.json` may be captions."""

    @field_validator("urls")
    @classmethod
    def _can_be_opened(cls, value: list[str]) -> list[str]:
        for url in value:
            if not url.startswith(_SCHEMES):
                raise ValueError(f"{url!r} is not the URL of a tar. It begins with one of {', '.join(_SCHEMES)}")
            check_query(url, "it")
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
        """Return the tars in the order of their addresses. Raises ValueError if one is listed twice."""
        urls = [address for url in self.urls for address in _expanded(url)]
        names = [plain_text(url if url.startswith("pipe:") else url.partition("?")[0]) for url in urls]
        if len(set(names)) < len(names):
            raise ValueError("data.source.urls names a tar twice. Name each once.")
        items = [
            Item(name, None, (url,), tar_number=tar_number)
            for tar_number, (name, url) in enumerate(zip(names, urls, strict=True))
        ]
        return Listing(items, self.known_classes(), [], unit="tar")

    def known_classes(self) -> list[str]:
        if isinstance(self.classes, int):
            return [str(number) for number in range(self.classes)]
        return self.classes or []

    def state_of(self, item: Item) -> str:
        """Return a digest of the class names: nothing else is known before a tar is fetched."""
        return digest(self.known_classes())

    def images_of(self, item: Item) -> Iterator[tuple[Item, Callable[[], bytes]]]:
        """Yield the images of a tar, sorted by key. Raises ValueError when it cannot be fetched or read."""
        numbers = {name: number for number, name in enumerate(self.known_classes())}
        with _fetched(item) as file:
            members = members_of(file, item.name, labelled=bool(numbers))
            if passed := members.passed_over:
                log_line(f"crop: {item.name}: {len(passed):,} files are passed over; for example {passed[0]}.")
            for key in sorted(members.images.keys() | members.labels.keys()):
                label, problem = _label(members, key, numbers)
                at = members.images.get(key, (0, 0))
                yield Item(f"{item.name}/{key}", label, at), partial(_read, file, *at, problem)

    def read_captions(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """Fetch all tars and return their captions. Raises ValueError if `classes` is set: the texts are then
        classes."""
        if self.classes is not None:
            raise ValueError("data.source.classes is set, so that texts in the tars are classes. Leave one out.")
        return super().read_captions(columns)

    def members(self, labelled: bool, names: tuple[str, ...] = ()) -> Iterator[tuple[str, Members]]:
        for item in self.listing().items:
            with _fetched(item) as file:
                yield item.name, members_of(file, item.name, labelled, names)


def _expanded(url: str) -> list[str]:
    """Return the addresses to which an address with ranges of numbers expands."""
    span = _RANGE.search(url)
    if span is None:
        return [url]
    first, last = span.groups()
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [address for number in numbers for address in _expanded(url[: span.start()] + number + url[span.end() :])]


def _label(members: Members, key: str, numbers: dict[str, int]) -> tuple[int | None, str]:
    """Return the class number of a sample, and the reason to reject the sample, empty if it is accepted."""
    if key not in members.images:
        return None, _ALONE
    if not numbers:
        return None, ""
    label = members.label(key)
    if label is None:
        return None, "an image without a class, while data.source.classes is set"
    return numbers.get(label), "" if label in numbers else f"'{label[:LONGEST_CLASS]}' is not in data.source.classes"


def _read(file: IO[bytes], start: int, size: int, problem: str = "") -> bytes:
    """Return the bytes of one image. Raises OSError with `problem` unless it is empty."""
    if problem:
        raise OSError(problem)
    check_size(size)
    file.seek(start)
    return file.read(size)


@contextmanager
def _fetched(item: Item) -> Iterator[IO[bytes]]:
    """Fetch a tar into an unnamed temporary file, which does not outlive this process. Raises ValueError, or OSError
    that names the temporary folder if its disk is full."""
    with tempfile.TemporaryFile() as file:
        with_retries(item.name, lambda: _fetch(str(item.address[0]), file))
        yield file


def _command(url: str) -> str:
    """Return the address that webdataset's gopen opens. curl reads its URL from a pipe, so that no list of processes
    shows a signature."""
    if url.startswith(("http://", "https://")):
        return f"pipe:printf 'url=\"%s\"\\n' {for_shell(url)} | {_CURL}"
    return f"pipe:aws s3 cp {for_shell(url)} -" if url.startswith("s3://") else url


def _fetch(url: str, file: IO[bytes]) -> None:
    from webdataset.gopen import gopen  # imports PyTorch, which planning does not need

    file.seek(0)
    file.truncate()
    try:
        with writing(Path(tempfile.gettempdir())), gopen(_command(url)) as stream:
            shutil.copyfileobj(stream, file, 1 << 20)
            file.flush()
    except FileNotFoundError as error:
        raise ValueError(f"the command {error.filename} is not installed") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise ConnectionError(f"the command that fetches it ended with status {stream.status}") from None
