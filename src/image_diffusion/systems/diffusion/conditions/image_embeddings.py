"""Embeddings to sample images from: of held-out images, or sampled by a prior from captions (unCLIP)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.files.atomic import read_json, sha256_file
from image_diffusion.core.files.checksums import check_files
from image_diffusion.core.types import EMBEDDING
from image_diffusion.data.encoded.pairs import IMAGE
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.data.sources.embeddings import Embeddings, Part, open_rows
from image_diffusion.systems.diffusion.sampling_request import SamplingRequest

_DESCRIBED = "embeddings.json"


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


def of_held_out(images: Shards, seeds: Tensor) -> SamplingRequest:
    """Return the embeddings of held-out images for some seeds, int64 [N]."""
    rows, labels, origin = rows_of(images, seeds)
    image = images.gather_of("pairs", rows)[:, IMAGE].float()
    return SamplingRequest(conditions={EMBEDDING: image}, labels=labels, described={"embeddings": origin})


def of_folder(folder: Path, pairs: Mapping[str, Any] | None, seeds: Tensor) -> SamplingRequest:
    """Read embeddings written by a prior's `sample` or by clip-retrieval, for seeds int64 [N]: seed s uses row s modulo
    their number, and its caption.

    pairs: the manifest's description of the pairs that the network was trained on. Raises ValueError for files that
    cannot be read or are damaged, and for embeddings by another encoder.
    """
    source, described = Embeddings(path=str(folder), texts=None), folder / _DESCRIBED
    origin: dict[str, Any] = {}
    if described.is_file():
        origin = {"sha256": sha256_file(described)}
        said = read_json(described)
        check_files(folder, said["files"], "Run the stage that writes it again.")
        prior_encoder, own_encoder = (_encoder(described_pairs) for described_pairs in (said["pairs"], pairs))
        if None not in (prior_encoder, own_encoder) and prior_encoder != own_encoder:
            raise ValueError(
                f"sample.embeddings: the prior of {folder} predicts embeddings of {prior_encoder}, but the network "
                f"was trained on those of {own_encoder}. Train both on the same pairs."
            )
    try:
        parts = source.parts()
        embeddings, captions = _rows(source, parts, (seeds % sum(part.num_rows for part in parts)).numpy())
    except ValueError as error:
        raise ValueError(f"sample.embeddings: {str(error).removeprefix('data.source.path: ')}") from None
    sources: dict[str, Any] = {"prompts": captions} | ({"embeddings": origin} if origin else {})
    return SamplingRequest(captions, {EMBEDDING: embeddings}, described=sources)


def _encoder(pairs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the encoder that embedded the images of pairs, without the number of caption tokens; None if it is not
    recorded."""
    encoder = {name: value for name, value in (pairs or {}).get("image", {}).items() if name != "num_tokens"}
    return encoder if encoder.get("type", "files") != "files" else None


def _rows(source: Embeddings, parts: Sequence[Part], numbers: np.ndarray[Any, Any]) -> tuple[Tensor, list[str]]:
    """Return rows by number, over all parts: float32 [N, dim], and their captions."""
    starts = np.cumsum([0, *(part.num_rows for part in parts)])
    embeddings, captions = torch.zeros(len(numbers), parts[0].dim), [""] * len(numbers)
    for part, start, stop in zip(parts, starts[:-1], starts[1:], strict=True):
        inside = np.flatnonzero((numbers >= start) & (numbers < stop))
        embeddings[inside] = torch.from_numpy(
            np.asarray(open_rows(part.image)[numbers[inside] - start], dtype=np.float32)
        )
        texts = source.captions(part)
        for row in inside:
            captions[row] = texts[numbers[row] - start]
    return embeddings, captions
