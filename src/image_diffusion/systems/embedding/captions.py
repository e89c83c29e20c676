"""The captions of a set of crops, encoded: what a network that is told in words reads beside each image."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from image_diffusion.codecs.text import TextEncoderConfig
from image_diffusion.codecs.text.encoder import TextEncoder, encode_captions
from image_diffusion.codecs.text.hashed import HashedText
from image_diffusion.core.config import Config, dump
from image_diffusion.core.files import digest
from image_diffusion.data.captioned import CaptionedCrops
from image_diffusion.data.captions import Captions, ClassCaptions
from image_diffusion.data.pairs import PairSet, Splits
from image_diffusion.data.records import Quarantined, Sample
from image_diffusion.systems.embedding.given import Given


class CaptionPairs(Config):
    """Images and their captions, which a text encoder encodes once; they are stored beside the latents."""

    kind: ClassVar[str] = "captions"
    """Of the shards."""
    type: Literal["captions"] = "captions"
    """The captions of the crops, encoded; for system.condition text."""
    captions: Captions = ClassCaptions()
    """What the captions are."""
    encoder: TextEncoderConfig = HashedText()
    """The text encoder."""
    num_tokens: int = Field(32, ge=1)
    """Tokens kept of each caption; longer ones are cut."""
    num_captions: int = Field(1, ge=1)
    """Captions kept of each image; training draws one of them in every epoch."""
    dtype: Literal["float16", "float32"] = "float16"
    """How encodings are stored."""

    @property
    def name(self) -> str:
        """The folder of the encoded captions."""
        return f"captions-{self.encoder.type}"

    @property
    def needs_source(self) -> bool:
        """Whether files of the data's source are read."""
        return self.captions.type == "beside"

    @property
    def needs_detector(self) -> bool:
        """Whether the detector of the data set looks at the images: it does not."""
        return False

    @property
    def encoded_by(self) -> dict[str, Any]:
        """The encoder, as the manifest of the captions has it."""
        return dump(self.encoder)

    @property
    def splits(self) -> Splits:
        """All of them: the split is that of the image."""
        return Splits(train=1, validation=0, test=0)

    def build(self, given: Given) -> PairSet:
        """What encodes the captions. Raises ValueError for what is missing."""
        if given.crops is None:
            raise ValueError("Captions are those of crops: give --data.")
        return EncodedCaptions(self, CaptionedCrops(given.crops, self.captions, given.source), given.device)


class MadeOfCrops:
    """What is made of crops and their captions, a shard from each of theirs."""

    def __init__(self, crops: CaptionedCrops) -> None:
        self._crops, self.num_shards, self.num_rows = crops, crops.num_shards, crops.num_crops
        self.carried: tuple[str, ...] = ()

    def samples(self, shard: int) -> list[Sample]:
        """The crops that have captions: their ids are the hashes of the images."""
        return self._crops.of(shard).samples

    def missing(self, shard: int) -> list[Quarantined]:
        """Crops without any."""
        return self._crops.of(shard).missing


class EncodedCaptions(MadeOfCrops):
    """[num_captions, 1 + num_tokens, dim] of each crop that has a caption; captions that it does not have are zeros."""

    kind: ClassVar[Literal["captions"]] = "captions"
    members: ClassVar = ("npy",)
    parts: ClassVar = ("caption",)

    def __init__(self, config: CaptionPairs, crops: CaptionedCrops, device: torch.device) -> None:
        super().__init__(crops)
        self._config = config
        self._encoder: TextEncoder = config.encoder.build(device, config.num_tokens)
        self.shape = (config.num_captions, 1 + config.num_tokens, self._encoder.dim)
        self.identity: dict[str, Any] = {
            "text": self._encoder.identity,
            "encoder": dump(config.encoder),
            "num_tokens": config.num_tokens,
            "num_captions": config.num_captions,
        }

    def made_from(self, shard: int) -> str:
        """The captions, and which images they belong to: the pixels decide nothing."""
        mine = self._crops.of(shard)
        kept = [captions[: self._config.num_captions] for captions in mine.captions]
        images = [sample.sha256 for sample in mine.samples], [each.path for each in mine.missing]
        return digest([images, kept])

    def rows(self, shard: int, start: int, stop: int) -> NDArray[np.float32]:
        count = self._config.num_captions
        captions = [each[:count] for each in self._crops.of(shard).captions[start:stop]]
        texts = list(dict.fromkeys(text for each in captions for text in each))
        number = {text: i for i, text in enumerate(texts)}
        encoded = encode_captions(self._encoder, texts).numpy()
        found = np.zeros((len(captions), *self.shape), dtype=np.float32)
        for row, each in enumerate(captions):
            found[row, : len(each)] = encoded[[number[text] for text in each]]
        return found
