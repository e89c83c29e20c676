"""Where the pairs of the prior come from: the section `pairs` of an experiment.

`hashed` needs no download: images as the small classifier of the data's own classes sees them, captions through a
hashing encoder. `contrastive` needs none either: it trains a small CLIP on the images and captions themselves. `clip`
embeds both by a CLIP. `files` takes embeddings that others have computed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.codecs.clip import ClipConfig
from image_diffusion.codecs.hashing import HashingText
from image_diffusion.codecs.text.encoder import TextEncoder
from image_diffusion.codecs.text.learned import FILE as TEXT_FILE
from image_diffusion.core.config import Config, dump
from image_diffusion.core.files import digest
from image_diffusion.data.captioned import CaptionedCrops
from image_diffusion.data.captions import Captions, ClassCaptions
from image_diffusion.data.pairs import TOKENS, PairSet, Splits
from image_diffusion.data.records import Quarantined, Sample
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.embeddings import Embeddings, Part, open_rows
from image_diffusion.metrics.detector import FEATURES, load_detector
from image_diffusion.systems.embedding.captions import CaptionPairs, MadeOfCrops
from image_diffusion.systems.embedding.contrastive import ContrastiveTraining, trained_towers
from image_diffusion.systems.embedding.features import FeaturePairs
from image_diffusion.systems.embedding.given import Given

PARTS = ("image", "text")
"""What the first rows of a pair are."""


class _Pairs(Config):
    kind: ClassVar[str] = "pairs"
    """Of the shards."""
    splits: Splits = Splits()
    """Shares of train, validation and test, by the hash of a pair's id."""
    dtype: Literal["float16", "float32"] = "float16"
    """How embeddings are stored."""
    num_tokens: int = Field(0, ge=0)
    """Encodings of single tokens kept of each caption, beside its embedding; 0: none."""

    @property
    def needs_detector(self) -> bool:
        """Whether the detector of the data set looks at the images."""
        return False

    @property
    def encoded_by(self) -> dict[str, Any] | None:
        """What the manifest has to name as their encoder: nothing, since they lie beside no data."""
        return None


class _OfCrops(_Pairs):
    captions: Captions = ClassCaptions()
    """What the captions are."""

    @property
    def needs_source(self) -> bool:
        """Whether files of the data's source are read."""
        return self.captions.type == "beside"


class HashedPairs(_OfCrops):
    """Pairs of the crops and their classes, without any download."""

    type: Literal["hashed"] = "hashed"
    """Image embeddings from the classifier that `detect` trains, text embeddings from a hashing encoder."""

    @property
    def needs_detector(self) -> bool:
        """Whether the detector of the data set looks at the images: that is what embeds them."""
        return True

    @property
    def name(self) -> str:
        """The folder of the pairs."""
        return "pairs-hashed"

    def build(self, given: Given) -> PairSet:
        """What makes the pairs. Raises ValueError for what is missing."""
        if given.crops is None or given.detector is None:
            raise ValueError("Hashed pairs are made from crops and their detector: give --data and --detector.")
        seen = _Detected(load_detector(given.detector, str(given.device)))
        return CropPairs(given.crops, seen, HashingText(FEATURES, self.num_tokens), self.captions, given.source)


class ContrastivePairs(_OfCrops):
    """Pairs of the crops and their captions in one space, which is learnt from the training split of both."""

    type: Literal["contrastive"] = "contrastive"
    """Image and text embeddings from a small CLIP that `embed` trains first on the same pairs: no download."""
    training: ContrastiveTraining = ContrastiveTraining()
    """How that is trained."""

    @property
    def name(self) -> str:
        """The folder of the pairs."""
        return "pairs-contrastive"

    def build(self, given: Given) -> PairSet:
        """What makes the pairs, once the towers are trained. Raises ValueError for what is missing."""
        if given.crops is None or given.output is None:
            raise ValueError("Contrastive pairs are made from crops, and trained where they are written: give --data.")
        crops = CaptionedCrops(given.crops, self.captions, given.source)
        towers = trained_towers(crops, self.splits, self.training, self.num_tokens, given.output, given.device)
        pairs = CropPairs(given.crops, *towers, self.captions, given.source)
        pairs.carried = (TEXT_FILE,)
        return pairs


class ClipPairs(_OfCrops):
    """Pairs of the crops and their captions, by a CLIP."""

    type: Literal["clip"] = "clip"
    """Image and text embeddings from a CLIP."""
    clip: ClipConfig = ClipConfig()
    """Which CLIP."""

    @property
    def name(self) -> str:
        """The folder of the pairs."""
        return "pairs-clip"

    def build(self, given: Given) -> PairSet:
        """What makes the pairs. Raises ValueError for what is missing."""
        if given.crops is None:
            raise ValueError("Pairs by a CLIP are made from crops: give --data.")
        clip = self.clip.build(given.device, self.num_tokens)
        return CropPairs(given.crops, clip, clip, self.captions, given.source)


class FilePairs(_Pairs):
    """Pairs that others have embedded; data.source tells where."""

    type: Literal["files"] = "files"
    """Embeddings in files (data.source.type: embeddings)."""
    clip: ClipConfig | None = None
    """Embeds the captions where the files have no text embeddings, or num_tokens is not 0."""

    @property
    def name(self) -> str:
        """The folder of the pairs."""
        return "pairs-files"

    @property
    def needs_source(self) -> bool:
        """Files of the data's source are all there is."""
        return True

    def build(self, given: Given) -> PairSet:
        """What makes the pairs. Raises ValueError for what is missing."""
        source = given.source
        if not isinstance(source, Embeddings):
            raise ValueError("Pairs of files need their source. Set data.source.type to embeddings.")
        needs_text = source.texts is None or self.num_tokens > 0
        if needs_text and (self.clip is None or source.metadata is None):
            raise ValueError(
                "Captions have to be embedded, since data.source.texts is null or pairs.num_tokens is not 0: set "
                "pairs.clip, and data.source.metadata to the folder of captions."
            )
        text = self.clip.build(given.device, self.num_tokens) if needs_text and self.clip is not None else None
        return StoredPairs(source, given.num_shards, text)


EmbeddingPairs = Annotated[HashedPairs | ContrastivePairs | ClipPairs | FilePairs, Field(discriminator="type")]
"""Pairs of embeddings, of an image and of its caption: what a prior learns from."""

PairsConfig = Annotated[
    HashedPairs | ContrastivePairs | ClipPairs | FilePairs | CaptionPairs | FeaturePairs, Field(discriminator="type")
]


class ImageEncoder(Protocol):
    """Images -> embeddings."""

    dim: int
    identity: dict[str, Any]

    def images(self, images: Tensor) -> Tensor:
        """Uint8 [B, C, H, W] -> float32 [B, dim]."""
        ...


class _Detected:
    """The features of a detector, of norm 1."""

    def __init__(self, detector: Any) -> None:
        self._detector, self.dim = detector, FEATURES
        self.identity: dict[str, Any] = {"type": "detector", "sha256": detector.identity["sha256"]}

    @torch.inference_mode()
    def images(self, images: Tensor) -> Tensor:
        return F.normalize(self._detector(images).features, dim=1)


class CropPairs(MadeOfCrops):
    """Pairs made from crops."""

    kind: ClassVar[Literal["pairs"]] = "pairs"
    members: ClassVar = ("npy",)
    parts: ClassVar = PARTS

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
        """The crops, and the first caption of each."""
        mine = self._crops.of(shard)
        return digest([mine.sha256, mine.first_captions])

    def rows(self, shard: int, start: int, stop: int) -> NDArray[np.float32]:
        mine = self._crops.of(shard)
        texts, tokens = self._texts([captions[0] for captions in mine.captions[start:stop]])
        images = self._images.images(self._crops.images(mine.rows[start:stop]))
        rows: NDArray[np.float32] = torch.cat([images.cpu()[:, None], texts[:, None], tokens], 1).numpy()
        return rows


class StoredPairs:
    """Pairs read from parts, cut into shards of equal size whatever the parts are."""

    kind: ClassVar[Literal["pairs"]] = "pairs"
    members: ClassVar = ("npy",)
    parts: ClassVar = PARTS
    carried: ClassVar = ()

    def __init__(self, source: Embeddings, num_shards: int, text: TextEncoder | None) -> None:
        self._source, self._text = source, text
        self._shard, self._kept = -1, np.empty(0, dtype=np.int64)  # of the shard that rows were asked of last
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
        """Rows without a caption."""
        return self._listed(shard)[1]

    def _listed(self, shard: int) -> tuple[list[Sample], list[Quarantined], list[int]]:
        """The pairs of a shard, what is none, and the rows of the pairs among all rows of all parts."""
        samples, missing, kept = list[Sample](), list[Quarantined](), list[int]()
        for number, part, rows in self._pieces(*self._range(shard)):
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
        """The numbers and captions themselves: touching or copying a file changes nothing."""
        content = hashlib.sha256()
        for number, part, rows in self._pieces(*self._range(shard)):
            for path in filter(None, (part.image, part.text)):
                content.update(np.ascontiguousarray(open_rows(path)[rows]).tobytes())
            captions = self._source.captions(part)[rows] if part.metadata is not None else []
            content.update(digest([captions, self._source.ids(part, number)[rows]]).encode())
        return content.hexdigest()

    def rows(self, shard: int, start: int, stop: int) -> NDArray[np.float32]:
        if shard != self._shard:
            self._shard, self._kept = shard, np.array(self._listed(shard)[2], dtype=np.int64)
        wanted, made = self._kept[start:stop], []
        for number, part in enumerate(self._parts):
            rows = wanted[(wanted >= self._starts[number]) & (wanted < self._starts[number + 1])] - self._starts[number]
            if not len(rows):
                continue
            stored = [np.asarray(open_rows(part.image)[rows], dtype=np.float32)[:, None]]
            if self._text is not None:
                captions = self._source.captions(part)
                texts, tokens = self._text([captions[row] for row in rows])
                stored += [texts[:, None].numpy(), tokens.numpy()]
            if part.text is not None:
                stored[1:2] = [np.asarray(open_rows(part.text)[rows], dtype=np.float32)[:, None]]
            made.append(np.concatenate(stored, axis=1))
        return np.concatenate(made)

    def _range(self, shard: int) -> tuple[int, int]:
        total = self._starts[-1]
        return total * shard // self.num_shards, total * (shard + 1) // self.num_shards

    def _pieces(self, start: int, stop: int) -> list[tuple[int, Part, slice]]:
        """What of each part lies in [start, stop) of all rows: (number, part, its rows)."""
        found: list[tuple[int, Part, slice]] = []
        for number, part in enumerate(self._parts):
            offset = self._starts[number]
            low, high = max(start - offset, 0), min(stop - offset, part.num_rows)
            if low < high:
                found.append((number, part, slice(low, high)))
        return found
