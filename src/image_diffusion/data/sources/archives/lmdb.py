"""LMDB databases with an image file under each key, the format of LSUN."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from image_diffusion.core.files.atomic import Stamp, stamp_of
from image_diffusion.core.process.errors import package
from image_diffusion.core.texts import class_name
from image_diffusion.data.sources.base import FewFiles, Item, Listing, check_size, number_classes, plain_text

_DATA = "data.mdb"
_ENDING = re.compile(r"(_(train|val|test))?_lmdb$")


class Lmdb(FewFiles):
    """Databases of image files, each a folder with a `data.mdb`. Needs the package lmdb.

    In a folder of several databases, each is a class, named by its folder without LSUN's `_train_lmdb` or `_val_lmdb`.
    An image is named by its database and its key.
    """

    type: Literal["lmdb"] = "lmdb"
    """LMDB databases of image files, such as LSUN's."""
    path: str = Field(min_length=1)
    """Folder of a database, or a folder of such folders."""
    classes: Literal["databases", "none"] = "databases"
    """databases: each database of a folder is a class; a single database has no classes. none: unconditional data."""

    no_captions: ClassVar[str] = "data.source.type is lmdb, which holds no captions. Set pairs.captions.type to table."

    def listing(self) -> Listing:
        """Return every key as an image, by database and key. Raises ValueError for a database that is missing or
        damaged."""
        databases = {name: Path(path).parent for name, (path, _) in self.files().items()}
        keys = {name: _keys(folder, self.path) for name, folder in databases.items()}
        if not any(keys.values()):
            raise ValueError(f"data.source.path: {self.path} holds no images. Put one under each key.")
        numbers = number_classes(self.known_classes())
        items = [
            Item(f"{name}/{_text_of(key)}", numbers.get(_class_of(name)), (str(folder), key.hex()), name)
            for name, folder in databases.items()
            for key in keys[name]
        ]
        return Listing(sorted(items, key=lambda item: item.name), list(numbers), [])

    def known_classes(self) -> list[str]:
        is_one = (Path(self.path) / _DATA).is_file()
        return [] if is_one or self.classes == "none" else sorted({_class_of(name) for name in self.files()})

    def read(self, item: Item) -> bytes:
        import lmdb

        folder, key = str(item.address[0]), bytes.fromhex(str(item.address[1]))
        try:
            with _open(Path(folder)) as database, database.begin(buffers=True) as transaction:
                data = transaction.get(key)
                if data is None:
                    raise OSError("its key is no longer there")
                check_size(len(data))
                return bytes(data)
        except lmdb.Error as error:
            raise OSError(f"damaged in the database: {str(error).replace(folder, Path(folder).name)}") from None

    def files(self) -> dict[str, tuple[str, Stamp]]:
        path = Path(self.path)
        paths = [path / _DATA] if (path / _DATA).is_file() else sorted(path.glob(f"*/{_DATA}"))
        if not paths:
            raise ValueError(f"data.source.path: {self.path} holds no {_DATA}. Give a database, or a folder of them.")
        return {plain_text(path.parent.resolve().name): (str(path), stamp_of(path)) for path in paths}


def _text_of(key: bytes) -> str:
    """Return a key unchanged if it is a line of text, else in hexadecimal."""
    text = key.decode("ascii", errors="replace")
    return text if text.isascii() and text.isprintable() else key.hex()


def _class_of(name: str) -> str:
    return class_name(_ENDING.sub("", name))


def _keys(folder: Path, source: str) -> list[bytes]:
    """Return every key of a database. Raises ValueError."""
    try:
        import lmdb  # imported here: planning does not need it
    except ImportError:
        raise ValueError(f"{source}: reading LMDB needs {package('lmdb', 'lsun')}") from None
    try:
        with _open(folder) as database, database.begin() as transaction:
            return [bytes(key) for key in transaction.cursor().iternext(keys=True, values=False)]
    except lmdb.Error as error:
        raise ValueError(f"{folder} cannot be read as an LMDB database: {error}. Write it again.") from None


def _open(folder: Path) -> Any:
    """Open the database for reading. Close it at once, since a process may have it open only once."""
    import lmdb

    return lmdb.open(str(folder), readonly=True, lock=False, readahead=False)
