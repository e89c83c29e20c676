"""A folder of images, in class folders or without classes."""

from __future__ import annotations

import errno
import os
import re
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from image_diffusion.core.files.atomic import Stamp
from image_diffusion.core.texts import class_name
from image_diffusion.data.sources.base import (
    LARGEST_TEXT,
    FileGroup,
    ImageSource,
    Item,
    Listing,
    captions_in,
    is_hidden,
    is_text,
    number_classes,
    number_labels,
    plain_text,
    read_image,
    values_in,
)
from image_diffusion.data.sources.entries import Entries, entries_of
from image_diffusion.data.sources.layouts import (
    LABELS_FILE,
    LARGEST_LABELS,
    Level,
    by_folder,
    labelled,
    labels_in,
    level_of,
)

T = TypeVar("T")

_METADATA = ("metadata.csv", "metadata.jsonl")  # of the layout imagefolder of Hugging Face
_CAPTIONS = (".txt", ".json")


class Folder(ImageSource):
    """Images in a folder. Each first-level folder is a class, with everything below it; images in the folder itself,
    without folders next to them, have no class.

    Files are recognised by their content, not by their extension. Hidden files are ignored, and so are a `.txt` and a
    `.json` next to an image of the same name, which may be its caption. Symbolic links are followed wherever they
    point, since many data sets are folders of links; a link back to a folder that contains it is rejected.
    """

    type: Literal["folder"] = "folder"
    """Images in a folder."""
    path: str = Field(min_length=1)
    """Path of the folder, absolute or relative to the working directory."""
    classes: Literal["folders", "names", "labels", "none"] | Level = "folders"
    """folders: the first-level folder of an image is its class; {level: 2}: the second-level folder, as in
    train/cat/1.jpg. With `folders`, folders named like splits (train, val, test) and a single folder around all others
    are errors; a level accepts any names. names: the file name up to the first underscore is the class, in any folder:
    cat_0001.jpg, as in improved-diffusion. labels: dataset.json in the folder lists the classes, as dataset_tool.py of
    StyleGAN3 and EDM2 writes it. none: unconditional data, in any arrangement."""
    class_pattern: str | None = None
    """With `names`: a regular expression whose one group is the class, searched in the path relative to the folder.
    Example: `^[^/]+/(\\w+)-` for train/cat-0001.jpg."""

    @field_validator("class_pattern")
    @classmethod
    def _has_one_group(cls, value: str | None) -> str | None:
        try:
            if value is not None and re.compile(value).groups != 1:
                raise ValueError(f"{value!r} must have one group in parentheses, the class.")
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}.") from None
        return value

    @model_validator(mode="after")
    def _pattern_is_of_names(self) -> Folder:
        if self.class_pattern is not None and self.classes != "names":
            raise ValueError("class_pattern is only used with classes: names. Set that, or leave the pattern out.")
        return self

    def listing(self) -> Listing:
        """Return every file as an image, sorted by path. Raises ValueError when the folder is missing or empty."""
        walk = Walk(self._root())
        names = sorted((plain_text(relative), relative) for relative in walk.files())
        if not names:
            raise ValueError(self._empty())
        beside = _beside_images(name for name, _ in names)
        names = [(name, relative) for name, relative in names if name not in beside]
        walk.passed_over += sorted(beside)
        rejected = sorted(walk.rejected)
        notices = self._tables(name for name, _ in names)
        if self.classes == "names":
            return self._by_name(names, rejected, walk.passed_over)
        if self.classes == "labels":
            listing = labelled([pair for pair in names if pair[0] != LABELS_FILE], self._labels(), self.path, "folder")
            return replace(listing, rejected=sorted([*listing.rejected, *rejected]), passed_over=walk.passed_over)
        in_folders = [name for name, _ in names if "/" in name]
        if self.classes == "none" or not in_folders:
            items = [Item(name, None, (relative,)) for name, relative in names]
            return Listing(items, [], rejected, walk.passed_over, notices=notices)
        listing = by_folder(names, level_of(self.classes, self.path, self._inside))
        rejected = sorted([*listing.rejected, *rejected])
        return replace(listing, rejected=rejected, passed_over=walk.passed_over, notices=notices)

    def _tables(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return a notice for each table of images in the folder, which this source does not read."""
        return tuple(
            f"{self.path}/{name} is not read: {{type: table, path: {self.path}/{name}, path_column: file_name}} as "
            f"data.source reads the images that it names, with their classes (label_column: null where it has no "
            f"column label) and captions"
            for name in names
            if PurePosixPath(name).name in _METADATA
        )

    def _by_name(
        self, names: list[tuple[str, str]], rejected: list[tuple[str, str]], passed_over: list[str]
    ) -> Listing:
        """Return the listing with classes from the names of the files."""
        pattern = re.compile(self.class_pattern or r"(?:^|/)([^/_]+)_[^/]*$")
        classes = {name: class_name(match[1]) for name, _ in names if (match := pattern.search(name)) and match[1]}
        numbers = number_labels(classes.values(), self.path)
        items = [Item(name, numbers[classes[name]], (relative,)) for name, relative in names if name in classes]
        reason = "no class in its name: " + ("no underscore" if self.class_pattern is None else "no match")
        unnamed = [(name, reason) for name, _ in names if name not in classes]
        return Listing(items, list(numbers), sorted([*rejected, *unnamed]), passed_over)

    def known_classes(self) -> list[str] | None:
        """Return the class folders that hold more than texts; None if the folder does not exist yet. Raises ValueError
        if the folders are splits, or one folder holds all others."""
        if self.classes == "none":
            return []
        if self.classes in ("names", "labels"):
            return None
        try:
            folders = [""]
            for _ in range(level_of(self.classes, self.path, self._inside)):
                folders = [f"{above}{name}/" for above in folders for name in self._inside(above)]
            return list(
                number_classes(
                    class_name(plain_text(folder.split("/")[-2]))
                    for folder in folders
                    if any(
                        not is_hidden(entry.name) and not is_text(entry.name) for entry in os.scandir(self._at(folder))
                    )
                )
            )
        except OSError:
            return None

    def _inside(self, folder: str) -> set[str]:
        """Return the names of the folders in a folder, which is a path relative to the source."""
        with os.scandir(self._at(folder)) as entries:
            return {entry.name for entry in entries if not is_hidden(entry.name) and entry.is_dir()}

    def _at(self, folder: str) -> str:
        return f"{self.path}/{folder}"

    def read(self, item: Item) -> bytes:
        return read_image(Path(self.path) / str(item.address[0]))

    def read_captions(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """Return the captions in files next to the images, by the image's name without its extension: the lines of
        `.txt`, or the key "caption" of `.json`. Raises ValueError for a file that cannot be read as captions."""
        return {stem: captions for stem, captions in self._sidecars("caption", _CAPTIONS, captions_in) if captions}

    def read_values(self, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Return the values of keys in the `.json` next to each image, by the image's name without its extension."""
        return dict(self._sidecars("JSON", (".json",), lambda data, _: values_in(data, names)))

    def _sidecars(
        self, what: str, extensions: tuple[str, ...], read: Callable[[bytes, str], T]
    ) -> Iterator[tuple[str, T]]:
        """Yield the name of each file next to an image, without its extension, and its content as `read` returns it.
        what: expected content, for the error. Raises ValueError."""
        root = self._root()
        for name in sorted(_beside_images(plain_text(name) for name in Walk(root).files())):
            stem, extension = os.path.splitext(name)  # noqa: PTH122 - Path would take a name apart further
            if extension.lower() not in extensions:
                continue
            try:
                if (size := (Path(root) / name).stat().st_size) > LARGEST_TEXT:
                    raise ValueError(f"it has {size:,} bytes, and one has at most {LARGEST_TEXT:,}")
                yield stem, read((Path(root) / name).read_bytes(), extension[1:].lower())
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{root}/{name} is no {what}: {error}. Repair or remove it.") from None

    def file_groups(self) -> Iterator[FileGroup]:
        empty = True
        for group in Walk(self._root()).file_groups():
            yield group
            empty = False
        if empty:
            raise ValueError(self._empty())

    def _empty(self) -> str:
        return f"data.source.path: {self.path} holds no files. Put images into it, in class folders or not."

    def _labels(self) -> dict[str, str]:
        """Return the labels in dataset.json. Raises ValueError where it is missing or has none."""
        path = Path(self.path) / LABELS_FILE
        if not path.is_file():
            raise ValueError(f"data.source.classes is labels, but {path} does not exist. Write it, or set classes.")
        if (size := path.stat().st_size) > LARGEST_LABELS:
            raise ValueError(f"{path} has {size:,} bytes, and may have {LARGEST_LABELS:,}. Is it another file?")
        labels = labels_in(path.read_bytes(), self.path)
        if labels is None:
            raise ValueError(f"{path} says that there are no classes. Set data.source.classes to none.")
        return labels

    def _root(self) -> str:
        if not Path(self.path).exists():
            raise ValueError(f"data.source.path: {self.path} does not exist. Give the folder that holds the images.")
        if not Path(self.path).is_dir():
            raise ValueError(f"data.source.path: {self.path} is not a folder. Give the folder that holds the images.")
        return self.path


def _beside_images(names: Iterable[str]) -> set[str]:
    """Return the names that end in `.txt` or `.json` and differ from another name only in the extension."""
    parts = [os.path.splitext(name) for name in names]  # noqa: PTH122
    stems = {stem for stem, extension in parts if extension.lower() not in _CAPTIONS}
    return {stem + extension for stem, extension in parts if extension.lower() in _CAPTIONS and stem in stems}


class Walk:
    """Recursive listing of a folder."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.passed_over: list[str] = []
        self.rejected: list[tuple[str, str]] = []

    def files(self) -> dict[str, Stamp]:
        """Return the stamp of every file that is not hidden, by its path relative to the root, with "/"."""
        return {
            group.at(name)[len(self.root) + 1 :]: group.stamp(number)
            for group in self.file_groups()
            for number, name in enumerate(group.names)
        }

    def file_groups(self) -> Iterator[FileGroup]:
        """Yield the files, folder by folder."""
        return self._below(self.root, "", (os.path.realpath(self.root),))

    def _below(self, folder: str, prefix: str, above: tuple[str, ...]) -> Iterator[FileGroup]:
        names: list[str] = []
        stamps, folders = array("q"), list[str]()
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:  # looking up an entry by the folder's descriptor takes two thirds of the time of a lookup by path
            for entries in entries_of(descriptor):
                files = entries.names, entries.stamps
                if set(entries.kinds) != {stat.S_IFREG} or any(map(is_hidden, entries.names)):
                    files = self._sorted_out(entries, prefix, folders)
                names += files[0]
                stamps += files[1]
        finally:
            os.close(descriptor)
        if names:
            yield FileGroup(plain_text(prefix), names, stamps, partial("{}/{}".format, folder))
        for name in folders:
            path = f"{folder}/{name}"
            real = os.path.realpath(path)
            if real in above:
                self.rejected.append((plain_text(prefix + name), "a link to a folder that holds it"))
                continue
            try:
                yield from self._below(path, f"{prefix}{name}/", (*above, real))
            except OSError as error:
                self.rejected.append((plain_text(prefix + name), _why(error.errno)))

    def _sorted_out(self, entries: Entries, prefix: str, folders: list[str]) -> tuple[list[str], array[int]]:
        """Return the names and stamps of the files among the entries, and append the folders to `folders`."""
        names, stamps = list[str](), array("q")
        for number, (name, kind) in enumerate(zip(entries.names, entries.kinds, strict=True)):
            if is_hidden(name):
                self.passed_over.append(plain_text(prefix + name))
            elif kind == stat.S_IFREG:
                names.append(name)
                stamps += entries.stamps[4 * number : 4 * number + 4]
            elif kind == stat.S_IFDIR:
                folders.append(name)
            else:
                why = _why(-kind) if kind < 0 else "neither a file nor a folder"
                self.rejected.append((plain_text(prefix + name), why))
        return names, stamps


def _why(number: int | None) -> str:
    """Return an errno as a reason in words."""
    if number == errno.ENOENT:
        return "a link to nothing"
    return os.strerror(number).lower() if number else "cannot be read"


def reads_below(folder: str, path: Path) -> bool:
    """Return True if a source of this folder would read the files below a path: it is inside, and not hidden."""
    root, path = Path(folder).resolve(), path.resolve()
    return path.is_relative_to(root) and not any(map(is_hidden, path.relative_to(root).parts))


def files_in(folder: str, key: str) -> dict[str, Path]:
    """Return the files of a folder by their path within it, without the suffix. key: configuration key of the folder,
    for errors. Raises ValueError for a missing or empty folder, and for files that differ only in their suffix."""
    try:
        listing = Folder(path=folder, classes="none").listing()
    except ValueError as error:
        raise ValueError(f"{key}: {str(error).removeprefix('data.source.path: ')}") from None
    files: dict[str, Path] = {}
    for item in listing.items:
        path = Path(folder, str(item.address[0]))
        if (other := files.setdefault(stem_of(item.name), path)) is not path:
            raise ValueError(f"{key}: {other} and {path} differ in their suffix alone. Remove one of them.")
    return files


def stem_of(name: str) -> str:
    """Return the name of an image without its suffix."""
    return str(PurePosixPath(name).with_suffix(""))
