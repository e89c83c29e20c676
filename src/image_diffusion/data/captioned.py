"""The crops of a set and their captions, shard by shard: who has some, and who has none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.data.captions import Captions
from image_diffusion.data.records import Quarantined, Sample, read_record
from image_diffusion.data.shards import open_shards
from image_diffusion.data.sources import Source


@dataclass(frozen=True)
class Captioned:
    """The crops of a shard that have captions.

    samples, captions, rows: of each its record, its captions, one at least, and its number in the whole set. missing:
    crops without any. first_captions: of all crops of the shard; None for those without. sha256: of the shard.
    """

    samples: list[Sample]
    captions: list[list[str]]
    rows: NDArray[np.int64]
    missing: list[Quarantined]
    first_captions: list[str | None]
    sha256: str


class CaptionedCrops:
    """Every shard of a set of crops, with captions. source: where captions come from that come with the images.

    shape: of a crop, [C, R, R]. held_out: whether the set keeps each crop from training, bool [N].
    """

    def __init__(self, folder: Path, captions: Captions, source: Source | None) -> None:
        self._folder, self._shards = folder, open_shards(folder, "all")
        self._captions, self._source = captions, source
        self._entries = self._shards.manifest["shards"]
        self.shape, self.held_out = self._shards.shape, self._shards.held_out()
        counts = [entry["num_samples"] for entry in self._entries]
        self.num_shards, self.num_crops = len(counts), sum(counts)
        self._first = [sum(counts[:shard]) for shard in range(len(counts))]
        self._last: tuple[int, Captioned] | None = None

    def of(self, shard: int) -> Captioned:
        """One shard; the last one is remembered."""
        if self._last is None or self._last[0] != shard:
            self._last = shard, self._read(shard)
        return self._last[1]

    def _read(self, shard: int) -> Captioned:
        samples = read_record(self._folder, shard).samples
        captions = self._captions.of(samples, self._shards.classes, self._source)
        has = [row for row, found in enumerate(captions) if found]
        return Captioned(
            [samples[row] for row in has],
            [captions[row] for row in has],
            np.array(has, dtype=np.int64) + self._first[shard],
            [
                Quarantined(sample.path, "it has no caption", sample.sha256)
                for sample, found in zip(samples, captions, strict=True)
                if not found
            ],
            [found[0] if found else None for found in captions],
            self._entries[shard]["sha256"],
        )

    def images(self, rows: NDArray[np.int64]) -> Tensor:
        """Crops by number, uint8 [B, C, H, W]."""
        return self._shards.gather(rows)
