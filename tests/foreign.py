"""Images and files as other programs write them, for tests of the sources that read them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

from image_diffusion.core.config.base import parse
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import Listing


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((6, 6, 3), number, np.uint8)).save(buffer, "png")
    return buffer.getvalue()


def listing(**source: Any) -> Listing:
    return parse(Source, source, "here").listing()


def labels(found: Listing) -> list[str]:
    return [found.classes[item.label] for item in found.items if item.label is not None]


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def write_parquet(file: Path, names: list[str] | None = None, **columns: Any) -> None:
    table = pyarrow.table(columns)
    if names is not None:
        features = {"label": {"_type": "ClassLabel", "names": names}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(table, file)
