"""Embeddings that others have computed: the folder that clip-retrieval writes and LAION publishes.

    img_emb/img_emb_0.npy, img_emb_1.npy, …         float [n, dim], one row an image
    text_emb/text_emb_0.npy, …                      float [n, dim], one row a caption; may be absent
    metadata/metadata_0.parquet, …                  one row a pair, with its caption

Parts belong together by the number that their names end in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from image_diffusion.core.files.atomic import Stamp, atomic_write, stamp_of
from image_diffusion.core.process.errors import package
from image_diffusion.data.sources.arrow import open_table
from image_diffusion.data.sources.base import FewFiles, Listing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Part:
    """One part: files with the same number of rows. text, metadata: None if the source has none."""

    image: Path
    text: Path | None
    metadata: Path | None
    num_rows: int
    dim: int


class Embeddings(FewFiles):
    """Embeddings of images and captions in `.npy` parts, captions in Parquet. The source has no images to crop."""

    type: Literal["embeddings"] = "embeddings"
    """Embeddings in the layout of clip-retrieval, img2dataset and LAION."""
    path: str = Field(min_length=1)
    """Path of the folder."""
    images: str = "img_emb"
    """Subfolder with the parts of image embeddings."""
    texts: str | None = "text_emb"
    """Subfolder with the parts of text embeddings; null: the source has none, and captions are embedded."""
    metadata: str | None = "metadata"
    """Subfolder with the parts of captions, Parquet; null: the source has no captions."""
    caption_column: str = "caption"
    """Name of the column of captions."""
    id_column: str | None = None
    """Name of the column with the permanent name of a pair, which decides its split; unset: part and row name it."""

    no_captions: ClassVar[str] = "data.source.type is embeddings: there are no images beside which captions could lie."

    def listing(self) -> Listing:
        """Raise ValueError: the source has no images."""
        raise ValueError("data.source.type is embeddings: there are no images to crop. Set pairs.type to files.")

    def files(self) -> dict[str, tuple[str, Stamp]]:
        paths = [path for part in self.parts() for path in (part.image, part.text, part.metadata) if path]
        return {f"{path.parent.name}/{path.name}": (str(path), stamp_of(path)) for path in paths}

    def parts(self) -> list[Part]:
        """Return the parts, by number. Raises ValueError for files that are missing, unreadable or inconsistent."""
        if self.metadata is None and self.texts is None:
            raise ValueError("data.source names neither texts nor metadata, so there are no captions. Give one.")
        if self.metadata is None and self.id_column is not None:
            raise ValueError(f"data.source.id_column is {self.id_column}, but there is no metadata. Leave it out.")
        images = self._numbered(self.images, ".npy")
        texts = self._numbered(self.texts, ".npy") if self.texts is not None else None
        metadata = self._numbered(self.metadata, ".parquet") if self.metadata is not None else None
        for others, folder in ((texts, self.texts), (metadata, self.metadata)):
            if others is not None and others.keys() != images.keys():
                number = min(others.keys() ^ images.keys())
                has, lacks = (self.images, folder) if number in images else (folder, self.images)
                raise ValueError(
                    f"data.source.path: {self.path}/{has} has a part {number}, but {self.path}/{lacks} has none. Copy "
                    f"every part of both."
                )
        parts: list[Part] = []
        for number, image in sorted(images.items()):
            rows, dim = open_rows(image).shape
            text = texts[number] if texts is not None else None
            table = metadata[number] if metadata is not None else None
            if text is not None:
                found_rows, text_dim = open_rows(text).shape
                _same_count(image, rows, text, found_rows)
                if text_dim != dim:
                    raise ValueError(
                        f"{image} has embeddings of {dim} dimensions but {text} of {text_dim}. Use those of one model."
                    )
            if table is not None:
                _same_count(image, rows, table, sum(open_table(table).sizes))
            if parts and dim != parts[0].dim:
                raise ValueError(
                    f"{image} has embeddings of {dim} dimensions but {parts[0].image} of {parts[0].dim}. Use those of "
                    f"one model."
                )
            parts.append(Part(image, text, table, rows, dim))
        return parts

    def captions(self, part: Part) -> list[str]:
        """Return the caption of every row of a part; empty if the row has none."""
        assert part.metadata is not None
        return [text if text.strip() else "" for text in _column(part.metadata, self.caption_column)]

    def ids(self, part: Part, number: int) -> list[str]:
        """Return the permanent names of the pairs of part number `number`. Raises ValueError if two have the same
        name."""
        if self.id_column is None:
            return [f"{number}/{row}" for row in range(part.num_rows)]
        assert part.metadata is not None
        ids = _column(part.metadata, self.id_column)
        if len(set(ids)) != len(ids) or "" in ids:
            raise ValueError(
                f"{part.metadata}: column {self.id_column} does not name each pair on its own. Choose another column, "
                f"or leave data.source.id_column out."
            )
        return ids

    def _numbered(self, name: str, suffix: str) -> dict[int, Path]:
        folder = Path(self.path) / name
        if not folder.is_dir():
            raise ValueError(f"data.source.path: {folder} does not exist. Give the folder that holds {name}.")
        paths: dict[int, Path] = {}
        for path in sorted(folder.glob(f"*{suffix}")):
            match = re.search(r"(\d+)$", path.stem)
            if match is None or int(match[1]) in paths:
                raise ValueError(f"{path} has no number of its own at the end of its name. Name parts like {name}_0.")
            paths[int(match[1])] = path
        if not paths:
            raise ValueError(
                f"data.source.path: {folder} holds no {suffix} file. Give the folder that holds the parts."
            )
        return paths


def open_rows(path: Path) -> NDArray[np.floating]:
    """Return the embeddings in a `.npy` file, [n, dim], memory-mapped. Raises ValueError for anything else."""
    import numpy as np  # imported here: change detection does not need it

    try:
        rows: NDArray[np.floating] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a .npy file of numbers: {error}. Copy it again.") from None
    if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.floating) or 0 in rows.shape:
        raise ValueError(f"{path} holds {rows.dtype} {list(rows.shape)}, not embeddings, floats [n, dim].")
    return rows


def _same_count(first: Path, rows: int, second: Path, other: int) -> None:
    if rows != other:
        raise ValueError(f"{first} has {rows:,} rows but {second} has {other:,}. Both must describe the same pairs.")


@lru_cache(maxsize=4)
def _column(path: Path, name: str) -> list[str]:
    return ["" if cell is None else str(cell) for cell in open_table(path).columns((name,))[name]]


def write_columns(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write a Parquet file with these columns, by name. Raises ValueError without pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"Captions of embeddings are Parquet, which needs {package('pyarrow', 'workflow')}") from None
    with atomic_write(path) as file:
        pyarrow.parquet.write_table(pyarrow.table({name: list(cells) for name, cells in columns.items()}), file)
