"""The embeddings that images are made of: those of held-out images, or what a prior has made of captions (unCLIP)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from image_diffusion.core.files import read_json, sha256_file
from image_diffusion.core.types import EMBEDDING
from image_diffusion.core.verify import check_files
from image_diffusion.data.pairs import IMAGE
from image_diffusion.data.shards import Shards, open_shards
from image_diffusion.data.sources.embeddings import Embeddings, Part, open_rows
from image_diffusion.systems.diffusion.asked import Asked

_DESCRIBED = "embeddings.json"


def held_out(folders: Sequence[Path]) -> Shards:
    """Held-out images and the pairs of the same ones. folders: of the pairs, and of the crops. Raises ValueError for
    others, and where no image is held out."""
    if len(folders) != 2:
        raise ValueError(
            "sample.embeddings is not set, so that images are made of the embeddings of held-out ones. Name the "
            "folders of their pairs and of their crops: --embeddings PAIRS CROPS."
        )
    pairs, crops = open_shards(folders[0], "all"), open_shards(folders[1], "validation")
    if not crops.num_samples:
        raise ValueError(
            f"{folders[1]} holds no image out, of whose embeddings others could be made. Set data.validation_fraction, "
            f"or sample.embeddings."
        )
    return crops.join(pairs)


def of_held_out(images: Shards, seeds: Tensor) -> Asked:
    """The embeddings of held-out images, for some seeds, int64 [N]: seed s has image s modulo their number."""
    rows = (seeds % images.num_samples).numpy()
    (pairs,) = images.gather_beside(rows)
    labels = torch.from_numpy(images.labels[rows]) if images.num_classes else None
    source = {"split": "validation", "data": images.digest}
    return Asked(told={EMBEDDING: pairs[:, IMAGE].float()}, labels=labels, source=source)


def of_folder(folder: Path, pairs: Mapping[str, Any] | None, seeds: Tensor) -> Asked:
    """Embeddings as a prior's `sample` or clip-retrieval writes them, for some seeds, int64 [N]: seed s has row s
    modulo their number, and its caption.

    pairs: what the network learnt from, as their manifest says. Raises ValueError for files that cannot be read or are
    damaged, and for embeddings by another encoder.
    """
    source, described = Embeddings(path=str(folder), texts=None), folder / _DESCRIBED
    made: dict[str, Any] = {}
    if described.is_file():
        made = {"sha256": sha256_file(described)}
        said = read_json(described)
        check_files(folder, said["files"], "Run the stage that writes it again.")
        theirs, ours = (_encoder(each) for each in (said["pairs"], pairs))
        if None not in (theirs, ours) and theirs != ours:
            raise ValueError(
                f"sample.embeddings: the prior of {folder} makes embeddings of {theirs}, but the network learnt from "
                f"those of {ours}. Train both on the same pairs."
            )
    try:
        parts = source.parts()
        told, captions = _rows(source, parts, (seeds % sum(part.num_rows for part in parts)).numpy())
    except ValueError as error:
        raise ValueError(f"sample.embeddings: {str(error).removeprefix('data.source.path: ')}") from None
    return Asked(captions, {EMBEDDING: told}, source=made)


def _encoder(pairs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What embedded the images of pairs; None where nothing says so. How many tokens are kept of captions decides
    nothing."""
    known = {name: value for name, value in (pairs or {}).get("image", {}).items() if name != "num_tokens"}
    return known if known.get("type", "files") != "files" else None


def _rows(source: Embeddings, parts: Sequence[Part], wanted: np.ndarray[Any, Any]) -> tuple[Tensor, list[str]]:
    """Rows by number, over all parts: float32 [N, dim], and their captions."""
    starts = np.cumsum([0, *(part.num_rows for part in parts)])
    found, captions = torch.zeros(len(wanted), parts[0].dim), [""] * len(wanted)
    for part, start, stop in zip(parts, starts[:-1], starts[1:], strict=True):
        here = np.flatnonzero((wanted >= start) & (wanted < stop))
        found[here] = torch.from_numpy(np.asarray(open_rows(part.image)[wanted[here] - start], dtype=np.float32))
        texts = source.captions(part)
        for row in here:
            captions[row] = texts[wanted[row] - start]
    return found, captions
