"""Interface of the parts of a condition: their inputs, the request for images that they return, and checks and held-out
images that they share. Conditions are requested by prompts, as a list or in a file; and by rows of numbers, images and
classes, as a list, a product of values, a table, or a request of a served model.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.classes import ClassLabel
from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.texts import lines_in
from image_diffusion.core.types import IMAGE, DataSpec, SamplesOf
from image_diffusion.data.config import DataConfig
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.data.sources.table import read_columns
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.pairs.numbers import LABEL
from image_diffusion.systems.sampling import Column, Embed

Row = dict[str, Any]


def read_rows(conditions: list[Row] | dict[str, list[Any]] | str, key: str) -> list[Row]:
    """Return the rows of a list; of a product, whose last name changes fastest; or of a table.

    key: of the conditions in the configuration, for the message. Raises ValueError for a table that cannot be read.
    """
    if isinstance(conditions, str):
        table = Path(conditions)
        if not table.is_file():
            raise ValueError(f"{key}: {table} does not exist. Give a .csv, .tsv, .jsonl or .parquet, or rows.")
        columns = read_columns(table)
        rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        if not rows:
            raise ValueError(f"{key}: {table} has no rows. Write one at least.")
        return rows
    if isinstance(conditions, Mapping):
        return [dict(zip(conditions, values, strict=True)) for values in product(*conditions.values())]
    return conditions


def check_names(rows: Sequence[Row], columns: Sequence[str], key: str) -> None:
    """Raise ValueError for a name in a row that is neither a column nor the class."""
    known = (*columns, LABEL)
    for row in rows:
        if unknown := next((name for name in row if name not in known), None):
            raise ValueError(f"{key} names {unknown}, which is no column of pairs.columns. Known: {', '.join(known)}.")


def labels_of(rows: Sequence[Row], key: str) -> list[ClassLabel]:
    """Return the class of each row; empty if no row names one. Raises ValueError if only some do."""
    return [label if isinstance(label, int) else str(label) for label in _named(rows, LABEL, "a label", key)]


def images_of(rows: Sequence[Row], key: str, kind: type[str | bytes]) -> list[str | bytes]:
    """Return the image of each row; empty if no row names one. kind: str, for paths, or bytes, for the content of
    files. Raises ValueError if only some rows name an image, and for an image of another kind."""
    named = _named(rows, IMAGE, "an image", key)
    for row, cell in enumerate(named):
        if not isinstance(cell, kind):
            expected = "the path of an image file" if kind is str else "the bytes of an image file"
            raise ValueError(f"{key}: image of row {row} is of type {type(cell).__name__}. Give {expected}.")
    return named


def _named(rows: Sequence[Row], column: str, one: str, key: str) -> list[Any]:
    named = [cell for row in rows if (cell := row.get(column)) not in (None, "", b"")]
    if named and len(named) < len(rows):
        raise ValueError(f"{key}: {len(named)} of {len(rows)} rows name {one}. Give one to each row, or to none.")
    return named


_PROMPT = "prompt"  # column of a table
EXAMPLE_PROMPTS = ("a white square on black", "a black square on white")
"""Prompts in the example of a request."""


def read_prompts(prompts: tuple[str, ...] | str, key: str) -> list[str]:
    """Read the prompts of a list, of a `.txt` with one per line, or of the column "prompt" of a `.csv` or `.parquet`.

    key: their key in the configuration, for the message. Raises ValueError for a file that cannot be read, and if there
    are no prompts.
    """
    if isinstance(prompts, tuple):
        texts, where = list(prompts), "it"
    else:
        path, where = Path(prompts), prompts
        if not path.is_file():
            raise ValueError(f"{key}: {path} does not exist. Give a .txt, a .csv or a .parquet, or a list of prompts.")
        if path.suffix.lower() in (".csv", ".parquet"):
            texts = read_columns(path, _PROMPT)[_PROMPT]
        else:
            try:
                texts = lines_in(path.read_bytes())
            except ValueError as error:
                raise ValueError(f"{key}: {path} is not text: {error}, one prompt a line.") from None
    texts = [text for line in texts if (text := line.strip())]
    if not texts:
        raise ValueError(f"{key}: {where} holds no prompt. Write one at least.")
    return texts


def classes_named(prompts: list[str], classes: list[str]) -> Tensor | None:
    """Return the class that each prompt names, int64 [N]; None unless each prompt contains the name of exactly one
    class, as whole words."""
    names = [re.compile(rf"(?<!\w){re.escape(name.replace('_', ' '))}(?!\w)", re.IGNORECASE) for name in classes]
    matches: dict[str, list[int]] = {}
    for prompt in prompts:
        if prompt not in matches:
            matches[prompt] = [number for number, name in enumerate(names) if name.search(prompt)]
    if not prompts or any(len(numbers) != 1 for numbers in matches.values()):
        return None
    return torch.tensor([matches[prompt][0] for prompt in prompts], dtype=torch.int64)


@dataclass(frozen=True)
class ImageSource:
    """Images that are the condition of a network, or that the condition is computed from. spec: of the network. source:
    held-out images, the folder of their crops, or a samples.npz; None: not specified."""

    spec: DataSpec
    source: Shards | Path | None = None


@dataclass(frozen=True)
class ConditionInputs:
    """Inputs from which the conditions of samples are computed.

    settings: the section sample. seeds: of the images, int64 [N]. pairs: entries of the manifest of the paired shards:
    by kind for `Conditions`, of its own kind for a part. source: held-out images with their pairs, or the folders of
    those. image_source: of the images of a condition. rows: the requested conditions; image i takes row i modulo the
    number of rows; None: none. key: the key of the rows, for messages. is_request: True for the rows of a request of a
    served model, which hold the content of files in place of paths. embed: computes embeddings of captions, if a model
    for them is available.
    """

    settings: SampleConfig
    seeds: Tensor
    pairs: Mapping[str, Any] | None = None
    source: Shards | Sequence[Path] = ()
    image_source: ImageSource | None = None
    rows: Sequence[Row] | None = None
    key: str = "sample.conditions"
    is_request: bool = False
    embed: Embed | None = None


@dataclass(frozen=True)
class SamplingRequest:
    """Conditions of a request for images.

    titles: the title of each image in grids, such as its prompt; empty: none. conditions: the network's conditions by
    name, [P, …]; image i takes row i modulo P. null: the condition that guidance leads away from, by name, unless it is
    zeros. labels: the class that each image should show, int64 [N], if the conditions determine it. classes: the name
    of each image's class, for its title; empty: none. described: entries of samples.json: "prompts" of each image,
    "embeddings" with their origin, and so on. drawn: pictures shown above the images, such as masks, float32 [P, C, H,
    W] in [-1, 1]; None: none.
    """

    titles: list[str] = field(default_factory=list)
    conditions: dict[str, Tensor] = field(default_factory=dict)
    null: dict[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None
    classes: list[ClassLabel] = field(default_factory=list)
    described: dict[str, Any] = field(default_factory=dict)
    drawn: Tensor | None = None

    def select(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the conditions of some of the images, by their numbers."""
        return {name: tensor[rows % len(tensor)] for name, tensor in self.conditions.items()}


def joined(parts: Sequence[SamplingRequest]) -> SamplingRequest:
    """Return one request with the conditions of several requests."""
    return SamplingRequest(
        titles=[", ".join(of_image) for of_image in zip(*(part.titles for part in parts if part.titles), strict=True)],
        conditions={name: tensor for part in parts for name, tensor in part.conditions.items()},
        null={name: tensor for part in parts for name, tensor in part.null.items()},
        labels=next((part.labels for part in parts if part.labels is not None), None),
        described={key: value for part in parts for key, value in part.described.items()},
        drawn=next((part.drawn for part in parts if part.drawn is not None), None),
    )


@dataclass(frozen=True)
class ServedModel:
    """Properties of a model that determine the columns of a request. spec: of its data. classes: their names by number.
    pairs: entries of the manifest of the additional shards: by kind for `Conditions`, of its own kind for a part.
    embeds: whether a model that makes embeddings of captions is served with it."""

    spec: DataSpec
    classes: Sequence[str]
    pairs: Mapping[str, Any] | None = None
    embeds: bool = False


class ConditionPart(Config, ABC):
    """Part of the condition of a network: the whole condition, or one of several parts (`Conditions`). Its `type` is
    the name of the condition in `DataSpec.conditions` and in the inputs of the network."""

    takes_classes: ClassVar[bool] = False
    """True if the part is the class of an image."""
    keys: ClassVar[frozenset[str]]
    """Keys of the section sample that provide conditions."""
    reads: ClassVar[str | None] = None
    """Kind of the additional shards that contain the condition; None: no such shards."""
    pairs_example: ClassVar[str]
    """Example of a set of the section `pairs` that provides these shards, for messages."""
    source_key: ClassVar[str]
    """Key of the section sample that names the source of `draws`."""
    source_advice: ClassVar[str]
    """Advice in messages if this key is unset and there are no held-out images."""

    def check(self, section: str, settings: SampleConfig, pairs: Any = None) -> None:
        """Raise ValueError for settings without effect and for missing ones. section: their name. pairs: the section
        pairs, if it is known."""
        check_unused(section, settings, self.keys)

    def check_pairs(self, pairs: Any, data: DataConfig) -> None:
        """Raise ValueError if the section pairs does not fit the part or the data."""

    def spec(self, spec: DataSpec, pairs: Shards | None) -> DataSpec:
        """Return the data spec of the network, with this condition."""
        return spec

    def training_conditions(self, stored: Tensor, streams: Streams, spec: DataSpec) -> dict[str, Tensor]:
        """Return the conditions of stored samples other than the class, by name, from the additional shards. spec: of
        the network."""
        return {}

    def draws(self, settings: SampleConfig) -> SamplesOf | str | None:
        """Return the source of conditions that the settings do not contain: "validation" for held-out images; None:
        none is needed."""
        return None

    def pictures(self, settings: SampleConfig) -> list[Path]:
        """Return the image files that the settings name. Raises ValueError if a folder contains none."""
        return []

    def names(self, pairs: Any) -> tuple[str, ...]:
        """Return the columns of rows (sample.conditions) that the part reads. pairs: the section pairs, or its
        description in a manifest."""
        return ()

    @abstractmethod
    def served(self, model: ServedModel) -> dict[str, Column] | None:
        """Return the columns that a request of a served model has for the part; None: a request cannot contain it.
        Raises ValueError for a model without the necessary information."""

    @abstractmethod
    def sampling_request(self, inputs: ConditionInputs) -> SamplingRequest:
        """Return the conditions of samples."""


_UNUSED = {
    "prompts": "words. Leave it out, or set system.condition.type to text",
    "negative_prompt": "words. Leave it out, or set system.condition.type to text",
    "embeddings": "embeddings. Leave it out, or set system.condition.type to embedding",
    "conditions": "numbers. Leave it out, or add {type: numbers} or an image to system.condition",
    "small_images": "image. Leave it out, or add {type: image, from: self, shrink: N} to system.condition",
}
"""End of the message for each unused key: the condition that the network does not take, and advice."""


def check_unused(section: str, settings: SampleConfig, keys: Container[str]) -> None:
    """Raise ValueError for prompts, embeddings, numbers or images that are set and not used. section: the name of the
    settings. keys: used by the condition."""
    for key, advice in _UNUSED.items():
        if key not in keys and getattr(settings, key, None) not in (None, ""):
            raise ValueError(f"{section}.{key} is set, but the network takes no {advice}.")


def held_out(folders: Shards | Sequence[Path], key: str = "embeddings") -> Shards:
    """Return held-out images with their additional sets. folders: of each additional set, and last that of the crops;
    or the images themselves. key: the unset key of the section sample. Raises ValueError for too few folders, and
    without held-out images."""
    if isinstance(folders, Shards):
        return folders
    if len(folders) < 2:
        raise ValueError(
            f"sample.{key} is not set, so held-out images provide the {key}. Name the folders of their pairs and of "
            f"their crops: --embeddings PAIRS CROPS."
        )
    crops = open_shards(folders[-1], "validation")
    if not crops.num_samples:
        raise ValueError(
            f"{folders[-1]} has no held-out images to provide the {key}. Set data.validation_fraction, or sample.{key}."
        )
    for folder in folders[:-1]:
        crops.join(open_shards(folder, "all"))
    return crops


def rows_of(images: Shards, seeds: Tensor) -> tuple[NDArray[np.int64], Tensor | None, dict[str, Any]]:
    """Return the rows of held-out images for some seeds, int64 [N]: seed s takes image s modulo their number. Also
    their classes, if the data have any, and the description of their origin for samples.json."""
    rows = (seeds % images.num_samples).numpy()
    labels = torch.from_numpy(images.labels[rows]) if images.num_classes else None
    return rows, labels, {"split": "validation", "data": images.digest}
