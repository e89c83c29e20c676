"""A data set of the package `datasets`, as its `save_to_disk` leaves it: a folder of Arrow files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from image_diffusion.core.files import Stamp, read_json, stamp_of
from image_diffusion.data.sources.listing import FewFiles, Item, Listing, number_labels, texts_of


class HuggingFace(FewFiles):
    """A folder that `datasets.save_to_disk` wrote: one data set, or one of several splits. Needs the package datasets.

    Images are read as the files they were; nothing is decoded twice. An image is named by its number, so images added
    at the end move no other.
    """

    type: Literal["huggingface"] = "huggingface"
    """A folder written by save_to_disk of the package datasets."""
    path: str = Field(min_length=1)
    """The folder."""
    split: str | None = None
    """Which split, where the folder holds several."""
    image_column: str = "image"
    """Name of the column of images."""
    label_column: str | None = "label"
    """Name of the column of classes, of type ClassLabel, text or whole numbers; null for unconditional data."""

    def listing(self) -> Listing:
        """Every row as an image, in their order. Raises ValueError for a folder or columns that do not fit."""
        dataset = self._dataset()
        names = [f"{number:09d}" for number in range(len(dataset))]
        if not names:
            raise ValueError(f"data.source.path: {self._folder()} has no rows. Give one row an image.")
        if self.label_column is None:
            return Listing([Item(name, None, (number,)) for number, name in enumerate(names)], [], [], 0)
        values = dataset.with_format(None)[self.label_column][:]
        classes = getattr(dataset.features[self.label_column], "names", None)
        if classes is not None:
            labels = [value if value is not None and value >= 0 else None for value in values]
        else:
            numbers = number_labels((str(value) for value in values if value is not None), self.path)
            labels = [None if value is None else numbers[str(value)] for value in values]
            classes = list(numbers)
        rows = list(enumerate(zip(names, labels, strict=True)))
        items = [Item(name, label, (number,)) for number, (name, label) in rows if label is not None]
        return Listing(items, list(classes), [(name, "no class") for _, (name, label) in rows if label is None], 0)

    def known_classes(self) -> list[str] | None:
        """None: they are known when the files have been read."""
        return None

    def read(self, item: Item) -> bytes:
        """The bytes of one image file. Raises OSError."""
        image = self._dataset()[int(item.address[0])][self.image_column]
        if image is None or image["bytes"] is None:
            raise OSError("the row holds no image")
        data: bytes = image["bytes"]
        return data

    def captions_beside(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """The captions in columns of the data set, each a text or a list of texts, by the number of the row."""
        rows = enumerate(self._rows(columns))
        return {f"{number:09d}": [text for cell in row for text in texts_of(cell)] for number, row in rows}

    def values_beside(self, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Columns of the data set, by the number of the row."""
        return {f"{number:09d}": dict(zip(names, row, strict=True)) for number, row in enumerate(self._rows(names))}

    def files(self) -> dict[str, tuple[str, Stamp]]:
        """The Arrow files, and what describes their columns. Raises ValueError when there are none."""
        folder = self._folder()
        paths = [*sorted(folder.glob("*.arrow")), folder / "dataset_info.json"]
        return {path.name: (str(path), stamp_of(path)) for path in paths if path.is_file()}

    def _rows(self, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
        """The cells of some columns, row by row. Raises ValueError."""
        dataset = self._dataset()
        for name in columns:
            if name not in dataset.features:
                raise ValueError(f"{self._folder()} has no column '{name}'. Known: {', '.join(dataset.features)}.")
        return zip(*(dataset.with_format(None)[name][:] for name in columns), strict=True)

    def _folder(self) -> Path:
        """Where the chosen split lies. Raises ValueError."""
        folder = Path(self.path)
        if (folder / "dataset_dict.json").is_file():
            splits: list[str] = read_json(folder / "dataset_dict.json").get("splits", [])
            if self.split not in splits and not (self.split is None and len(splits) == 1):
                known = ", ".join(splits)
                raise ValueError(
                    f"data.source.split is {self.split}, but {folder} holds {known}. Set it to one of them."
                )
            return folder / (self.split or splits[0])
        if not (folder / "state.json").is_file():
            raise ValueError(
                f"data.source.path: {folder} was not written by datasets.save_to_disk. Give such a folder."
            )
        if self.split is not None:
            raise ValueError(f"data.source.split is {self.split}, but {folder} has no splits. Leave it out.")
        return folder

    def _dataset(self) -> Any:
        folder = self._folder()
        return _load(str(folder), stamp_of(folder / "state.json"), self.image_column, self.label_column)


@lru_cache(maxsize=1)
def _load(folder: str, stamp: Stamp, image_column: str, label_column: str | None) -> Any:
    """The data set in a folder, its images as files. stamp: of its state, so that another state is loaded anew."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            "data.source.type is huggingface, which needs the package datasets. Run: python -m pip install datasets"
        ) from None
    try:
        dataset = datasets.load_from_disk(folder)
    except Exception as error:  # Arrow, JSON and datasets each raise their own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"data.source.path: {folder} cannot be read by datasets: {reason}. Save it again.") from None
    for name in (image_column, label_column):
        if name is not None and name not in dataset.features:
            raise ValueError(f"{folder} has no column '{name}'. Known: {', '.join(dataset.features)}.")
    if not isinstance(dataset.features[image_column], datasets.Image):
        raise ValueError(f"{folder}: column '{image_column}' holds no images. Cast it to datasets.Image().")
    return dataset.cast_column(image_column, datasets.Image(decode=False))
