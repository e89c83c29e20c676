"""Interface of the section `pairs` to the stages, and inputs of the stage `embed` for making pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from image_diffusion.core.config.base import Config
from image_diffusion.data.config import DataConfig
from image_diffusion.data.encoded.pairs import PairSet, Splits
from image_diffusion.data.sources import Source


@dataclass(frozen=True)
class PairInputs:
    """Inputs that pairs are made from. crops: their folder. source: of the data, if it is read (`needs_source`).

    num_shards: of a set that is not made from crops; other sets have one shard for each shard of crops. detector: its
    folder. device: of the networks. output: the folder of the pairs, for sets that train their own encoder. data: the
    section `data`, if images are cropped by it (`needs_crop`).
    """

    crops: Path | None
    source: Source | None
    num_shards: int
    detector: Path | None
    device: torch.device
    output: Path | None = None
    data: DataConfig | None = None


class PairSettings(Config, ABC):
    """Base of the section `pairs`. By default pairs are made from crops alone."""

    kind: ClassVar[str]
    """Kind of the shards."""
    condition: ClassVar[str | None] = None
    """Type of the condition that reads the shards; None: no condition does."""

    @property
    def name(self) -> str:
        """Return the name of the folder of the set."""
        return self.kind

    @abstractmethod
    def build(self, inputs: PairInputs) -> PairSet:
        """Return the set that makes the pairs. Raises ValueError for inputs that are missing or do not fit."""

    def check_channels(self, channels: int) -> None:
        """Raise ValueError for a number of channels that the pairs do not support. By default all are supported."""
        return

    @property
    def needs_source(self) -> bool:
        """True if files of the data's source are read."""
        return False

    @property
    def needs_crop(self) -> bool:
        """True if images are cropped as those of the data."""
        return False

    @property
    def needs_detector(self) -> bool:
        """True if the pairs need the detector of the data set."""
        return False

    @property
    def other_files(self) -> str | None:
        """Return the table or folder that is read in addition to the data's source; None without one."""
        return None

    @property
    def encoder_weights(self) -> str | None:
        """Return the name, file or folder of the weights of a pretrained encoder; None without one."""
        return None

    @property
    def encoded_by(self) -> dict[str, Any] | None:
        """Return the encoder that the manifest must name; None: no encoder."""
        return None


def sets_of(pairs: Any) -> tuple[Any, ...]:
    """Return the sets of a section `pairs`, which is None, one set or a list."""
    if pairs is None:
        return ()
    return pairs if isinstance(pairs, tuple) else (pairs,)


def pairs_entry(described: Mapping[str, Any], kinds: Sequence[str]) -> Any:
    """Return the entries of sets in the form of files: by kind; for a single set its entry; None without sets."""
    if len(kinds) < 2:
        return next(iter(described.values()), None)
    return dict(described)


def pairs_by_kind(said: Any, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the entries of sets by kind, from the form that `pairs_entry` returns."""
    if said is None:
        return {}
    return {kinds[0]: said} if len(kinds) == 1 else dict(said)


class JoinedPairs(PairSettings):
    """Base of the sections `pairs` whose sets are read next to the images."""

    @property
    def splits(self) -> Splits:
        """Return splits that keep all samples: the split of each is that of its image."""
        return Splits(train=1, validation=0, test=0)
