"""Sources of the pairs of a prior: the section `pairs` of an experiment. `hashed` embeds images by the small classifier
of the data's own classes, and captions by a hashing encoder. `contrastive` trains a small CLIP on the images and
captions. Neither needs a download. `clip` embeds both by a CLIP. `files` imports embeddings computed elsewhere.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import OneOrSeveral, dump, single_value
from image_diffusion.core.files.atomic import digest
from image_diffusion.data.encoded.captions import CaptionedCrops, Captions, ClassCaptions
from image_diffusion.data.encoded.pairs import TOKENS, PairSet, Splits
from image_diffusion.data.shards.records import Quarantined, Sample
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.embeddings import Embeddings, Part, open_rows
from image_diffusion.metrics.features.classifier import FEATURES, load_detector
from image_diffusion.systems.pairs.captions import CaptionPairs, MadeOfCrops
from image_diffusion.systems.pairs.contrastive import ContrastiveTraining, trained_towers
from image_diffusion.systems.pairs.images import ImageFilePairs
from image_diffusion.systems.pairs.inputs import PairInputs, PairSettings, sets_of
from image_diffusion.systems.pairs.numbers import NumberPairs
from image_diffusion.systems.pairs.teacher_features import FeaturePairs
from image_diffusion.text_encoders import TextEncoder
from image_diffusion.text_encoders.hashing import HashingText
from image_diffusion.text_encoders.learned import FILE as TEXT_FILE
from image_diffusion.text_encoders.pretrained import ClipConfig

PARTS = ("image", "text")
"""Names of the first rows of a pair."""


class _Pairs(PairSettings):
    kind: ClassVar[str] = "pairs"
    condition: ClassVar[str] = "embedding"
    splits: Splits = Splits()
    """Shares of the splits train, validation and test; the hash of a pair's id decides its split."""
    dtype: Literal["float16", "float32"] = "float16"
    """Data type of the stored embeddings."""
    num_tokens: int = Field(0, ge=0)
    """Number of token encodings stored for each caption, in addition to its embedding; 0: none."""

    @property
    def name(self) -> str:
        return f"{self.kind}-{getattr(self, 'type')}"  # noqa: B009 - each class has one of its own


class _OfCrops(_Pairs):
    captions: Captions = ClassCaptions()
    """Source of the captions."""

    @property
    def needs_source(self) -> bool:
        return self.captions.type == "beside"

    @property
    def other_files(self) -> str | None:
        return self.captions.table


class HashedPairs(_OfCrops):
    """Pairs of the crops and their classes, without any download."""

    type: Literal["hashed"] = "hashed"
    """Image embeddings from the classifier that `detect` trains, text embeddings from a hashing encoder."""

    @property
    def needs_detector(self) -> bool:
        return True  # which embeds the images

    def build(self, inputs: PairInputs) -> PairSet:
        if inputs.crops is None or inputs.detector is None:
            raise ValueError("Hashed pairs are made from crops and their detector: give --data and --detector.")
        images = _Detected(load_detector(inputs.detector, str(inputs.device)))
        return CropPairs(inputs.crops, images, HashingText(FEATURES, self.num_tokens), self.captions, inputs.source)


class ContrastivePairs(_OfCrops):
    """Pairs of crops and captions, embedded by a small CLIP that is trained on their training split."""

    type: Literal["contrastive"] = "contrastive"
    """Image and text embeddings from a small CLIP that `embed` trains first on the same pairs: no download."""
    training: ContrastiveTraining = ContrastiveTraining()
    """Settings of the contrastive training."""

    def build(self, inputs: PairInputs) -> PairSet:
        if inputs.crops is None or inputs.output is None:
            raise ValueError("Contrastive pairs are made from crops, and trained where they are written: give --data.")
        crops = CaptionedCrops(inputs.crops, self.captions, inputs.source)
        towers = trained_towers(crops, self.splits, self.training, self.num_tokens, inputs.output, inputs.device)
        pairs = CropPairs(inputs.crops, *towers, self.captions, inputs.source)
        pairs.carried = (TEXT_FILE,)
        return pairs


class ClipPairs(_OfCrops):
    """Pairs of the crops and their captions, by a CLIP."""

    type: Literal["clip"] = "clip"
    """Image and text embeddings from a CLIP."""
    clip: ClipConfig = ClipConfig()
    """Weights of the CLIP."""

    @property
    def encoder_weights(self) -> str | None:
        return self.clip.weights

    def check_channels(self, channels: int) -> None:
        if channels not in (1, 3):
            raise ValueError(
                f"pairs.type is clip, which embeds images of 1 or 3 channels, but data.channels has {channels}. Choose "
                f"other pairs, or other channels."
            )

    def build(self, inputs: PairInputs) -> PairSet:
        if inputs.crops is None:
            raise ValueError("Pairs by a CLIP are made from crops: give --data.")
        clip = self.clip.build(inputs.device, self.num_tokens)
        return CropPairs(inputs.crops, clip, clip, self.captions, inputs.source)


class FilePairs(_Pairs):
    """Pairs of embeddings computed elsewhere, read from data.source."""

    type: Literal["files"] = "files"
    """Embeddings in files (data.source.type: embeddings)."""
    clip: ClipConfig | None = None
    """CLIP that embeds the captions if the files have no text embeddings or num_tokens is not 0."""

    @property
    def needs_source(self) -> bool:
        return True  # which is the only input of these pairs

    @property
    def encoder_weights(self) -> str | None:
        return None if self.clip is None else self.clip.weights

    def build(self, inputs: PairInputs) -> PairSet:
        source = inputs.source
        if not isinstance(source, Embeddings):
            raise ValueError("Pairs of files need their source. Set data.source.type to embeddings.")
        needs_text = source.texts is None or self.num_tokens > 0
        if needs_text and (self.clip is None or source.metadata is None):
            raise ValueError(
                "Captions have to be embedded, since data.source.texts is null or pairs.num_tokens is not 0: set "
                "pairs.clip, and data.source.metadata to the folder of captions."
            )
        text = self.clip.build(inputs.device, self.num_tokens) if needs_text and self.clip is not None else None
        return StoredPairs(source, inputs.num_shards, text)


_Embedded = HashedPairs | ContrastivePairs | ClipPairs
_Vector = NumberPairs | ImageFilePairs
_Beside = CaptionPairs | _Vector | FeaturePairs

EmbeddingPairs = Annotated[_Embedded | FilePairs, Field(discriminator="type")]
"""Pairs of an image embedding and a caption embedding, for training a prior."""

ImagePairs = Annotated[_Beside | _Embedded, Field(discriminator="type")]
"""Source of the conditions or features that an image network reads next to the images."""

VectorPairs = Annotated[_Vector, Field(discriminator="type")]
"""Source of the numbers or images that every image network can read next to the images."""

PairsConfig = Annotated[_Embedded | FilePairs | _Beside, Field(discriminator="type")]


def _of_different_kinds(value: Any) -> Any:
    """Return the sets. Raises ValueError for two sets of the same kind."""
    kinds = [pairs.kind for pairs in sets_of(value)]
    if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
        raise ValueError(f"two sets hold {twice}. Name one set of each kind.")
    return value


_EXAMPLE = "a set, such as {type: captions}"

SeveralImagePairs = Annotated[OneOrSeveral[ImagePairs], single_value(_EXAMPLE), AfterValidator(_of_different_kinds)]
"""One set, or a list of sets, that an image network reads next to the images. A list of one set equals that set."""

SeveralVectorPairs = Annotated[OneOrSeveral[VectorPairs], single_value(_EXAMPLE), AfterValidator(_of_different_kinds)]
"""One set, or a list of sets, that every image network can read next to the images."""

SeveralPairs = OneOrSeveral[PairsConfig]


class ImageEncoder(Protocol):
    """Encoder of images -> embeddings."""

    dim: int
    identity: dict[str, Any]

    def images(self, images: Tensor) -> Tensor:
        """Encode uint8 [B, C, H, W] -> float32 [B, dim]."""
        ...


class _Detected:
    """Features of a detector, of norm 1."""

    def __init__(self, detector: Any) -> None:
        self._detector, self.dim = detector, FEATURES
        self.identity: dict[str, Any] = {"type": "detector", "sha256": detector.identity["sha256"]}

    @torch.inference_mode()
    def images(self, images: Tensor) -> Tensor:
        return F.normalize(self._detector(images).features, dim=1)


class CropPairs(MadeOfCrops):
    """Pairs made from crops."""

    kind: ClassVar = "pairs"
    parts: ClassVar = PARTS
    made_from_pixels: ClassVar = True

    def __init__(
        self, crops: Path, images: ImageEncoder, texts: TextEncoder, captions: Captions, source: Source | None
    ) -> None:
        if images.dim != texts.dim:
            raise ValueError(
                f"Image embeddings have {images.dim} dimensions but text embeddings {texts.dim}. Use those of one "
                f"model."
            )
        super().__init__(CaptionedCrops(crops, captions, source))
        self._images, self._texts = images, texts
        self.shape = (TOKENS + texts.num_tokens, images.dim)
        self.identity: dict[str, Any] = {
            "image": images.identity,
            "text": texts.identity,
            "shared_space": images.identity == texts.identity,
        }

    def made_from(self, shard: int) -> str:
        """Return the digest of the crops, and of the first caption of each."""
        crops = self._crops.shard(shard)
        return digest([crops.sha256, crops.first_captions])

    def rows(self, shard: int, start: int, stop: int) -> NDArray[np.float32]:
        crops = self._crops.shard(shard)
        texts, tokens = self._texts([captions[0] for captions in crops.captions[start:stop]])
        images = self._images.images(self._crops.images(crops.rows[start:stop]))
        return torch.cat([images.cpu()[:, None], texts[:, None], tokens], 1).numpy()


class StoredPairs(PairSet):
    """Pairs read from the source's parts, in shards of equal size, which do not depend on the sizes of the parts."""

    kind: ClassVar = "pairs"
    parts: ClassVar = PARTS

    def __init__(self, source: Embeddings, num_shards: int, text: TextEncoder | None) -> None:
        self._source, self._text = source, text
        self._listed = lru_cache(maxsize=1)(self._list)  # a shard is read in many calls; listing reads its captions
        self._parts = source.parts()
        self._starts = np.cumsum([0, *(part.num_rows for part in self._parts)]).tolist()
        self.dim = self._parts[0].dim
        self.shape = (TOKENS + (text.num_tokens if text else 0), self.dim)
        if text is not None and text.dim != self.dim:
            raise ValueError(
                f"Image embeddings have {self.dim} dimensions but pairs.clip embeds captions in {text.dim}. Choose the "
                f"CLIP that embedded the images."
            )
        self.num_rows: int = self._starts[-1]
        self.num_shards = min(num_shards, self.num_rows)
        files = {"image": {"type": "files"}, "text": {"type": "files"} if text is None else text.identity}
        self.identity: dict[str, Any] = {**files, "source": dump(source) | {"path": ""}, "shared_space": True}

    def samples(self, shard: int) -> list[Sample]:
        return self._listed(shard)[0]

    def missing(self, shard: int) -> list[Quarantined]:
        """Return the rows without a caption."""
        return self._listed(shard)[1]

    def _list(self, shard: int) -> tuple[list[Sample], list[Quarantined], list[int]]:
        """Return the pairs of a shard, the quarantined rows, and the positions of the pairs in all parts together."""
        samples, missing, kept = list[Sample](), list[Quarantined](), list[int]()
        for number, part, rows in self._pieces(shard):
            ids = self._source.ids(part, number)[rows]
            captions = self._source.captions(part)[rows] if part.metadata is not None else None
            for i, row in enumerate(range(rows.start, rows.stop)):
                path, sha256 = f"{part.image.name} row {row}", hashlib.sha256(ids[i].encode()).hexdigest()
                if captions is not None and not captions[i]:
                    missing.append(Quarantined(path, "it has no caption", sha256))
                    continue
                samples.append(Sample("", path, sha256, None, (0, 0), []))
                kept.append(self._starts[number] + row)
        return samples, missing, kept

    def made_from(self, shard: int) -> str:
        """Return the digest of the embeddings and captions, which does not change if a file is touched or copied."""
        content = hashlib.sha256()
        for number, part, rows in self._pieces(shard):
            for path in filter(None, (part.image, part.text)):
                content.update(np.ascontiguousarray(open_rows(path)[rows]).tobytes())
            captions = self._source.captions(part)[rows] if part.metadata is not None else []
            content.update(digest([captions, self._source.ids(part, number)[rows]]).encode())
        return content.hexdigest()

    def rows(self, shard: int, start: int, stop: int) -> NDArray[np.float32]:
        chosen, arrays = np.array(self._listed(shard)[2][start:stop], dtype=np.int64), []
        for number, part in enumerate(self._parts):
            rows = chosen[(chosen >= self._starts[number]) & (chosen < self._starts[number + 1])] - self._starts[number]
            if not len(rows):
                continue
            stored = [np.asarray(open_rows(part.image)[rows], dtype=np.float32)[:, None]]
            if self._text is not None:
                captions = self._source.captions(part)
                texts, tokens = self._text([captions[row] for row in rows])
                stored += [texts[:, None].numpy(), tokens.numpy()]
            if part.text is not None:
                stored[1:2] = [np.asarray(open_rows(part.text)[rows], dtype=np.float32)[:, None]]
            arrays.append(np.concatenate(stored, axis=1))
        return np.concatenate(arrays)

    def _pieces(self, shard: int) -> list[tuple[int, Part, slice]]:
        """Return the parts of the source in a shard, as (number, part, rows)."""
        start, stop = (self.num_rows * i // self.num_shards for i in (shard, shard + 1))
        pieces: list[tuple[int, Part, slice]] = []
        for number, part in enumerate(self._parts):
            offset = self._starts[number]
            low, high = max(start - offset, 0), min(stop - offset, part.num_rows)
            if low < high:
                pieces.append((number, part, slice(low, high)))
        return pieces
