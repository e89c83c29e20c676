"""A list of image files: one line an image, its path and perhaps its class or a caption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from image_diffusion.core.files import Stamp
from image_diffusion.data.sources.listing import FewFiles, Item, Listing, number_labels, texts_of
from image_diffusion.data.sources.table import files_named, listing_of, read_named

Part = Literal["path", "label", "caption"]


class PathList(FewFiles):
    """A text file of paths, absolute or relative to it, as `find` prints them. A class or a caption may stand behind
    the path, parted by a tab; a class that ends the line also by a space, as in the lists of Caffe."""

    type: Literal["list"] = "list"
    """A text file of paths."""
    path: str = Field(min_length=1)
    """The file, UTF-8. Empty lines are left out."""
    parts: list[Part] = Field(["path"], min_length=1, max_length=3)
    """What a line holds, in its order."""

    @field_validator("parts")
    @classmethod
    def _has_a_path(cls, value: list[Part]) -> list[Part]:
        if value[0] != "path" or len(set(value)) < len(value):
            raise ValueError(f"{value} must begin with path and name nothing twice. Example: [path, label].")
        return value

    def listing(self) -> Listing:
        """Every line as an image, sorted by path. Raises ValueError for a list that is missing, empty or unfit."""
        return listing_of(((line["path"], line.get("label")) for line in self._lines()), self.path)

    def known_classes(self) -> list[str] | None:
        """Those in the list; None where it is not there yet."""
        if "label" not in self.parts:
            return []
        try:
            return list(number_labels((line["label"] for line in self._lines() if line["label"]), self.path))
        except ValueError:
            return None

    def read(self, item: Item) -> bytes:
        """The bytes of one file. Raises OSError, with the whole path that was tried."""
        return read_named(Path(self.path), item)

    def captions_beside(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """The captions in the list, by path. Raises ValueError where it has none."""
        if "caption" not in self.parts:
            raise ValueError(
                f"{self.path} has no captions. Set data.source.parts to [path, caption], or as they stand."
            )
        found: dict[str, list[str]] = {}
        for line in self._lines():
            found.setdefault(line["path"], []).extend(texts_of(line["caption"]))
        return found

    def files(self) -> dict[str, tuple[str, Stamp]]:
        """The list, and every image in it that is there."""
        return files_named(Path(self.path), [line["path"] for line in self._lines()])

    def _lines(self) -> list[dict[Part, str]]:
        """The parts of every line. Raises ValueError."""
        path = Path(self.path)
        if not path.is_file():
            raise ValueError(f"data.source.path: {path.absolute()} does not exist. Give a text file of paths.")
        try:
            lines = list(self._parted(path.read_text(encoding="utf-8-sig")))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8: {error}. Save it as such.") from None
        if not lines:
            raise ValueError(f"{path} has no lines. Give one line an image.")
        return lines

    def _parted(self, text: str) -> Iterator[dict[Part, str]]:
        for number, line in enumerate(text.split("\n"), 1):
            if not (line := line.rstrip("\r")).strip():
                continue
            cells = line.split("\t") if len(self.parts) > 1 else [line]
            if len(cells) == 1 and self.parts == ["path", "label"]:
                cells = line.rstrip().rsplit(" ", 1)
            if len(cells) != len(self.parts):
                raise ValueError(
                    f"{self.path}, line {number}: {line[:80]!r} has {len(cells)} of the parts {', '.join(self.parts)}. "
                    "Part them by tabs, or set data.source.parts to what a line holds."
                )
            yield {part: cell.strip() for part, cell in zip(self.parts, cells, strict=True)}
