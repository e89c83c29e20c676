"""Inputs that the stage `embed` gives to the makers of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from image_diffusion.data.sources import Source


@dataclass(frozen=True)
class PairInputs:
    """Inputs that pairs are made from. crops: their folder. source: of the data, where it is read (`needs_source`).

    num_shards: of a set that is not made from crops, which has a shard for each of theirs. detector: its folder.
    device: where networks compute. output: the folder that pairs are written to, for those that train what embeds them.
    """

    crops: Path | None
    source: Source | None
    num_shards: int
    detector: Path | None
    device: torch.device
    output: Path | None = None
