"""Encoded captions of a set of crops, for text-conditional networks."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from image_diffusion.core.config.base import dump
from image_diffusion.core.files.atomic import digest
from image_diffusion.data.encoded.captions import CaptionedCrops, Captions, ClassCaptions
from image_diffusion.data.encoded.pairs import PairSet
from image_diffusion.data.shards.records import Quarantined, Sample
from image_diffusion.systems.pairs.inputs import JoinedPairs, PairInputs
from image_diffusion.text_encoders import TextEncoder, TextEncoderConfig, encode_captions
from image_diffusion.text_encoders.hashing import HashedText


class CaptionPairs(JoinedPairs):
    """Captions of the images, encoded once by a text encoder and stored next to the latents."""

    kind: ClassVar[str] = "captions"
    condition: ClassVar[str] = "text"
    type: Literal["captions"] = "captions"
    """Encoded captions of the crops, for system.condition text."""
    captions: Captions = ClassCaptions()
    """Source of the captions."""
    encoder: TextEncoderConfig = HashedText()
    """Text encoder."""
    num_tokens: int = Field(32, ge=1)
    """Number of tokens kept of each caption; longer captions are cut."""
    num_captions: int = Field(1, ge=1)
    """Number of captions kept of each image; training draws one of them in every epoch."""
    dtype: Literal["float16", "float32"] = "float16"
    """Data type of the stored encodings."""

    @property
    def name(self) -> str:
        return f"captions-{self.encoder.type}"

    @property
    def needs_source(self) -> bool:
        return self.captions.type == "beside"

    @property
    def other_files(self) -> str | None:
        return self.captions.table

    @property
    def encoder_weights(self) -> str | None:
        return getattr(self.encoder, "weights", None)

    @property
    def encoded_by(self) -> dict[str, Any]:
        return dump(self.encoder)

    def build(self, inputs: PairInputs) -> PairSet:
        if inputs.crops is None:
            raise ValueError("Captions are those of crops: give --data.")
        return EncodedCaptions(self, CaptionedCrops(inputs.crops, self.captions, inputs.source), inputs.device)


class MadeOfCrops(PairSet):
    """Base of the sets made from crops and their captions, with one shard for each shard of crops."""

    def __init__(self, crops: CaptionedCrops) -> None:
        self._crops, self.num_shards, self.num_rows = crops, crops.num_shards, crops.num_crops

    def samples(self, shard: int) -> list[Sample]:
        """Return the crops that have captions: their ids are the hashes of the images."""
        return self._crops.shard(shard).samples

    def missing(self, shard: int) -> list[Quarantined]:
        """Return the crops without any caption."""
        return self._crops.shard(shard).missing


class EncodedCaptions(MadeOfCrops):
    """Encodings [num_captions, 1 + num_tokens, dim] of each crop that has a caption; missing captions are zeros."""

    kind: ClassVar = "captions"
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
        """Return the digest of the captions and of their images' hashes; the encodings do not depend on pixels."""
        crops = self._crops.shard(shard)
        texts = [captions[: self._config.num_captions] for captions in crops.captions]
        images = [sample.sha256 for sample in crops.samples], [sample.path for sample in crops.missing]
        return digest([images, texts])

    def rows(self, shard: int, start: int, stop: int) -> NDArray[np.float32]:
        count = self._config.num_captions
        captions = [own_captions[:count] for own_captions in self._crops.shard(shard).captions[start:stop]]
        texts = list(dict.fromkeys(text for own_captions in captions for text in own_captions))
        number = {text: i for i, text in enumerate(texts)}
        encoded = encode_captions(self._encoder, texts).numpy()
        rows = np.zeros((len(captions), *self.shape), dtype=np.float32)
        for row, own_captions in enumerate(captions):
            rows[row, : len(own_captions)] = encoded[[number[text] for text in own_captions]]
        return rows
