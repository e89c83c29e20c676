"""The samples of a prior: image embeddings of captions, in the layout that clip-retrieval writes.

img_emb/img_emb_0.npy, img_emb_1.npy, …         float16 [n, dim], one row a sample
metadata/metadata_0.parquet, …                  of the same rows: caption, seed, id
embeddings.json                                 how they were made
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.codecs.clip import ClipConfig
from image_diffusion.codecs.hashing import HashingText
from image_diffusion.codecs.text.encoder import TextEncoder, encode_captions
from image_diffusion.codecs.text.learned import read_text
from image_diffusion.core.devices import best_device
from image_diffusion.core.files import atomic_write, write_json
from image_diffusion.core.verify import describe
from image_diffusion.data.pairs import TEXT
from image_diffusion.data.sources.embeddings import write_columns
from image_diffusion.systems.diffusion.prompts import read_prompts
from image_diffusion.systems.embedding.sampling import EmbeddingGenerator, EmbeddingSampling, check_guided
from image_diffusion.systems.given import Model, ToSample, ToWrite
from image_diffusion.systems.system import on_best_device

if TYPE_CHECKING:
    from PIL import Image

    from image_diffusion.systems.prior import PriorSystem

FILE = "embeddings.json"
_ROWS = 100_000  # in a file, at most


class PriorSampleConfig(EmbeddingSampling):
    """Which image embeddings are made from which captions, and how."""

    prompts: tuple[str, ...] | str
    """Captions, each in turn: a list, or a file: `.txt` with one a line, or `.csv` or `.parquet` with a column
    "prompt"."""
    num_samples: int = Field(64, ge=1)
    """Number of embeddings."""
    first_seed: int = Field(0, ge=0)
    """Seed of the first embedding; embedding number i has seed first_seed + i."""
    embeddings_per_job: int = Field(100_000, ge=1)
    """Embeddings that one job makes; for more of them several run side by side. Does not change them."""
    clip: ClipConfig | None = None
    """Embeds the prompts where the pairs came with their text embeddings: the CLIP of those. Unset: what embedded the
    captions of the pairs."""

    @property
    def num_jobs(self) -> int:
        """How many jobs make the embeddings: each makes whole batches."""
        return min(-(-self.num_samples // self.embeddings_per_job), -(-self.num_samples // self.batch_size))

    @property
    def num_stored(self) -> int:
        """All of them are stored."""
        return self.num_samples


def check_sample(system: PriorSystem, settings: PriorSampleConfig) -> None:
    """Raise ValueError where steps, guidance or prompts do not fit; a file of prompts is read when it is there."""
    check_guided("sample", settings, system)
    try:
        settings.sampler.grid(system.process)
    except ValueError as error:
        raise ValueError(f"sample.sampler: {error}") from None
    if isinstance(settings.prompts, tuple):
        read_prompts(settings.prompts, "sample.prompts")


def make_embeddings(system: PriorSystem, given: ToSample) -> MadeEmbeddings:
    """What makes the embeddings of the stage `sample`. Raises ValueError for what does not fit the model."""
    settings = given.settings
    prompts = read_prompts(settings.prompts, "sample.prompts")[: settings.num_samples]
    embed = CaptionEmbedder(system, given.model, settings)
    return MadeEmbeddings(embed.generator, embed.told(prompts), prompts, settings)


class CaptionEmbedder:
    """Makes image embeddings of captions, each with its own seed. Raises ValueError for what does not fit the model."""

    def __init__(self, system: PriorSystem, model: Model, settings: PriorSampleConfig) -> None:
        self.generator = EmbeddingGenerator(on_best_device(model), system, model.spec, settings)
        self._system, self._dim = system, model.spec.channels
        self._text = text_encoder(model.pairs, settings.clip, model.folder)

    def __call__(self, captions: Sequence[str], seeds: Tensor) -> Tensor:
        """Float16 [N, dim], of seeds int64 [N]."""
        return self.generator(self.told(captions), seeds).half()

    def told(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """What the network is told of N captions."""
        encoded = encode_captions(self._text, list(captions))  # [N, 1 + L, dim]
        if encoded.shape[-1] != self._dim:
            raise ValueError(
                f"sample.prompts are embedded in {encoded.shape[-1]} dimensions, but the prior was trained on "
                f"{self._dim}. Set sample.clip to the CLIP that embedded its captions."
            )
        pairs = torch.cat([torch.zeros_like(encoded[:, :TEXT]), encoded], 1)  # the row of the image is not looked at
        return self._system.caption(pairs)


def text_encoder(pairs: Mapping[str, Any] | None, clip: ClipConfig | None, folder: Path | None = None) -> TextEncoder:
    """What embedded the captions that a prior learnt from, rebuilt. pairs: what their manifest says. clip: of the
    section. folder: of the prior's weights, and of what goes with them. Raises ValueError where nothing says so."""
    known = (pairs or {}).get("text", {})
    if clip is not None:
        return clip.build(best_device(), int(known.get("num_tokens", 0)))
    if known.get("type") not in _ENCODERS:
        raise ValueError(
            "The prior does not say what embedded the captions of its pairs. Set sample.clip to that CLIP, such as "
            "{weights: openai/clip-vit-large-patch14}."
        )
    encoder = _ENCODERS[known["type"]](known, folder)
    if encoder.identity != known:
        raise ValueError(
            f"The captions were embedded by {known}, but the text encoder is now {encoder.identity}. Train again."
        )
    return encoder


_ENCODERS: dict[str, Callable[[dict[str, Any], Path | None], TextEncoder]] = {
    "hashing": lambda known, folder: HashingText(known["dim"], known["num_tokens"]),
    "contrastive": lambda known, folder: read_text(folder or Path(), known["num_tokens"], best_device()),
    "clip": lambda known, folder: ClipConfig(weights=known["weights"]).build(best_device(), known["num_tokens"]),
}
"""Text encoders of pairs, by the type that their identity names."""


class MadeEmbeddings:
    """Embeddings by row, as `systems.given.Maker` says. titles: the caption of each."""

    labels = None

    def __init__(
        self, generator: EmbeddingGenerator, told: dict[str, Tensor], prompts: list[str], settings: PriorSampleConfig
    ) -> None:
        self._generator, self._told, self._settings = generator, told, settings
        self.titles = [prompts[i % len(prompts)] for i in range(settings.num_samples)]
        self._prompts = len(prompts)
        self.described: dict[str, Any] = {"kind": "embeddings"}

    def __call__(self, rows: slice) -> Tensor:
        """Float16 [n, dim]."""
        number = torch.arange(self._settings.num_samples)[rows]
        cond = {name: each[number % self._prompts] for name, each in self._told.items()}
        return self._generator(cond, number + self._settings.first_seed).half()

    def pictures(self) -> dict[str, Image.Image]:
        """There are none."""
        return {}


@dataclass(frozen=True)
class EmbeddingFiles:
    """Samples that are embeddings."""

    kind: Literal["embeddings"] = "embeddings"
    one: str = "embedding"
    file: str = FILE

    def shown(self, settings: PriorSampleConfig) -> int:
        """All of them: there is no picture."""
        return settings.num_samples

    def write(self, given: ToWrite) -> dict[str, Path]:
        """Write them, so many a file that one fits into memory; what was there before goes."""
        folder, settings = given.output.parent, given.settings
        for name in ("img_emb", "metadata"):
            shutil.rmtree(folder / name, ignore_errors=True)
        written, start = list[Path](), 0
        for number, rows in enumerate(_files_of(given.batches)):
            stop = start + len(rows)
            image, table = folder / f"img_emb/img_emb_{number}.npy", folder / f"metadata/metadata_{number}.parquet"
            with atomic_write(image) as file:
                np.save(file, rows.numpy())
            _write_table(table, given.made.titles[start:stop], settings.first_seed, start)
            written, start = [*written, image, table], stop
        how = {"pairs": given.model.pairs, "files": describe(folder, written)}
        write_json(given.output, given.described | how)
        return {}


def _files_of(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Batches [B, dim] -> what goes into a file, [n, dim]."""
    waiting = list[Tensor]()
    for batch in batches:
        waiting.append(batch)
        if sum(map(len, waiting)) >= _ROWS:
            whole = torch.cat(waiting)
            yield whole[:_ROWS]
            waiting = [whole[_ROWS:]]
    if sum(map(len, waiting)):
        yield torch.cat(waiting)


def _write_table(path: Path, captions: list[str], first_seed: int, start: int) -> None:
    number = range(start, start + len(captions))
    seeds, ids = [first_seed + i for i in number], [f"{i:09d}" for i in number]
    write_columns(path, {"caption": captions, "seed": seeds, "id": ids})
