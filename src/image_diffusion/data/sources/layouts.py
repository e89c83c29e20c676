"""Recognise splits and wrapping folders, which are not classes, by their names; and read the classes that dataset.json
states, as dataset_tool.py of StyleGAN3 and EDM2 writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field

from image_diffusion.core.config.base import Config
from image_diffusion.core.files.atomic import ZIP_FAULTS
from image_diffusion.core.texts import class_name, decoded
from image_diffusion.data.sources.base import (
    LARGEST_TEXT,
    Item,
    Listing,
    is_text,
    number_classes,
    number_labels,
    plain_text,
)

_SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
    "testing": "test",
}
"""Split by folder name."""


class Level(Config):
    """Folders at a stated level as the classes, whatever their names."""

    level: int = Field(ge=1, le=16)
    """Level of the folder in an image's path that names its class, counted from the source: 2 for train/cat/1.jpg."""


Inside = Callable[[str], Set[str]]
"""Function from the path of a folder relative to the source to the names of its folders; "" is the source itself."""


def level_of(classes: str | Level, path: str, inside: Inside, is_archive: bool = False) -> int:
    """Return the level of the class folders: the first, unless the configuration states another.

    In an archive, a single folder around all others is skipped. path: of the source, for messages. Raises ValueError if
    the folders are splits, or, outside of an archive, if a single folder holds all others, unless the configuration
    states a level.
    """
    if isinstance(classes, Level):
        return classes.level
    above, names = "", inside("")
    if len(names) == 1 and is_archive and len(inside(next(iter(names)))) > 1:
        above = next(iter(names))
        names = inside(above)
    here = "/".join(filter(None, (path, above)))
    level = 1 + bool(above)
    splits = sorted(name for name in names if name.lower() in _SPLITS)
    within = [inside("/".join(filter(None, (above, name)))) for name in splits]
    # Splits: all folders are named so, or two of them hold folders of the same name. A class named "test" passes.
    if splits and (len(splits) == len(names) or any(a & b for i, a in enumerate(within) for b in within[:i])):
        train = next((name for name in splits if _SPLITS[name.lower()] == "train"), splits[0])
        one = f"{'Unpack it and set' if is_archive else 'Set'} data.source.path to {here}/{train} to read that one"
        join = f"{{level: {level + 1}}}" if any(within) else "none"
        others = ", ".join(f"{name}/*" for name in splits if name != train)
        raise ValueError(
            f"data.source.path: {here} holds the folders {', '.join(splits)}: splits, not classes. {one}, or set "
            f"data.source.classes to {join} to join all of them, with data.held_out: [{others}] to keep those for "
            f"validation. {{level: {level}}} makes them the classes."
        )
    if len(names) == 1 and len(wrapped := inside(name := next(iter(names)))) > 1:
        shown = ", ".join(sorted(wrapped)[:3]) + (", …" if len(wrapped) > 3 else "")
        raise ValueError(
            f"data.source.path: {path} holds one folder, {name}, and that holds {len(wrapped):,}: {shown}. Set "
            f"data.source.path to {path}/{name} where these are the classes; data.source.classes: {{level: 1}} makes "
            f"{name} the only class."
        )
    return level


def by_folder(names: Sequence[tuple[str, str]], level: int) -> Listing:
    """Return the images in class folders; files outside of them, or in folders of texts only, are rejected.

    names: pairs of the plain text and the original name, sorted.
    """
    parts = {name: class_name(name.split("/")[level - 1]) for name, _ in names if name.count("/") >= level}
    numbers = number_classes(parts[name] for name in parts if not is_text(name))
    items, rejected = [], []
    for name, address in names:
        if parts.get(name) in numbers:
            items.append(Item(name, numbers[parts[name]], (address,)))
        else:
            rejected.append((name, "lies in a folder of texts" if name in parts else "lies outside every class folder"))
    return Listing(items, list(numbers), rejected)


def named_files(path: str, suffix: str) -> tuple[Path, list[Path]]:
    """Return the folder relative to which the files of a path are named, and the files, sorted.

    path: a file, a folder, which stands for all its files with the suffix, or a pattern. Raises ValueError if a folder
    holds files of several splits, of which a pattern can select one.
    """
    named = Path(path)
    folder = Path(*takewhile(lambda part: not set(part) & set("*?["), named.parts))
    if folder != named:
        paths = sorted(folder.glob(str(named.relative_to(folder))))
    elif named.is_dir():
        folder, paths = named, sorted(named.glob(f"*{suffix}"))
        splits = _splits_of(file.name for file in paths)
        if len(splits) > 1:
            prefix, *_ = splits.get("train") or next(iter(splits.values()))
            raise ValueError(
                f"data.source.path: {path} holds files of several splits: {', '.join(sorted(splits))}. Set "
                f"data.source.path to a pattern, {path}/*{prefix}*{suffix} for one of them or {path}/*{suffix} for all."
            )
    else:
        folder, paths = named.parent, [named]
    return folder, paths


def _splits_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the splits in the names of files, with the words that denote them."""
    words: dict[str, list[str]] = {}
    for name in names:
        for word in re.split(r"[^a-z]+", PurePosixPath(name).stem.lower()):
            if word in _SPLITS:
                words.setdefault(_SPLITS[word], []).append(word)
    return words


LABELS_FILE = "dataset.json"
"""Name of the file of labels, in the folder or at the root of the zip."""
LARGEST_LABELS = 200 * LARGEST_TEXT
"""Maximum size of the file of labels in bytes."""


def labels_in(data: bytes, where: str) -> dict[str, str] | None:
    """Return the class of each image in a file of labels; None if it states that there are no classes. Raises
    ValueError."""
    try:
        content: Any = json.loads(decoded(data))
        labels = content["labels"]
        return None if labels is None else {str(name).replace("\\", "/"): str(int(label)) for name, label in labels}
    except (*ZIP_FAULTS, TypeError) as error:
        expected = "it must hold the key labels, pairs of a name and the number of its class"
        raise ValueError(f"{where}: {LABELS_FILE} cannot be read: {error}; {expected}.") from None


def labelled(names: Sequence[tuple[str, str]], labels: dict[str, str], where: str, inside: str) -> Listing:
    """Return the images in a file of labels with their classes; all other images are rejected.

    names: pairs of the plain text and the original name, sorted. where, inside: path and kind of the source, for
    messages.
    """
    numbers = number_labels(labels.values(), f"{where}, {LABELS_FILE}")
    items = [Item(shown, numbers[labels[name]], (name,)) for shown, name in names if name in labels]
    rejected = [(shown, f"no class in {LABELS_FILE}") for shown, name in names if name not in labels]
    missing = labels.keys() - {name for _, name in names}
    rejected += [(plain_text(name), f"named in {LABELS_FILE}, but not in the {inside}") for name in missing]
    return Listing(items, list(numbers), sorted(rejected))
