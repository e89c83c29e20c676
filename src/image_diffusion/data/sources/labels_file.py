"""dataset.json: the classes of images by name, as dataset_tool.py of StyleGAN3 and EDM2 writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from image_diffusion.core.files import ZIP_FAULTS
from image_diffusion.data.sources.listing import LARGEST_TEXT, Item, Listing, number_labels, plain_text

LABELS_FILE = "dataset.json"
"""Its name, in the folder or at the root of the zip."""
LARGEST_LABELS = 200 * LARGEST_TEXT
"""Bytes that it may have."""


def labels_in(data: bytes, where: str) -> dict[str, str] | None:
    """The class of each image that it names; None where it says that there are no classes. Raises ValueError."""
    try:
        content: Any = json.loads(data)
        labels = content["labels"]
        return None if labels is None else {str(name).replace("\\", "/"): str(int(label)) for name, label in labels}
    except (*ZIP_FAULTS, TypeError) as error:
        told = "it must hold the key labels, pairs of a name and the number of its class"
        raise ValueError(f"{where}: {LABELS_FILE} cannot be read: {error}; {told}.") from None


def labelled(names: Iterable[tuple[str, str]], labels: dict[str, str], where: str, inside: str) -> Listing:
    """The images that it names, with their classes; all others as rejected.

    names: in plain text and as they are, sorted. where, inside: the path, and what lies there, to name them.
    """
    numbers = number_labels(labels.values(), f"{where}, {LABELS_FILE}")
    names = list(names)
    items = [Item(shown, numbers[labels[name]], (name,)) for shown, name in names if name in labels]
    rejected = [(shown, f"no class in {LABELS_FILE}") for shown, name in names if name not in labels]
    missing = labels.keys() - {name for _, name in names}
    rejected += [(plain_text(name), f"named in {LABELS_FILE}, but not in the {inside}") for name in missing]
    return Listing(items, list(numbers), sorted(rejected), 0)
