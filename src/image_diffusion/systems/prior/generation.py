"""Samples of a prior: image embeddings of captions, in the layout that clip-retrieval writes.

img_emb/img_emb_0.npy, img_emb_1.npy, …         float16 [n, dim], one row per sample
metadata/metadata_0.parquet, …                  of the same rows: caption, seed, id
embeddings.json                                 how they were made
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.devices import best_device
from image_diffusion.core.files.atomic import atomic_write, digest, write_json
from image_diffusion.core.files.checksums import describe
from image_diffusion.core.types import DataSpec
from image_diffusion.data.encoded.pairs import TEXT
from image_diffusion.data.sources.embeddings import write_columns
from image_diffusion.process.discrete import Discrete
from image_diffusion.systems.base import on_best_device
from image_diffusion.systems.diffusion.conditions.base import read_prompts
from image_diffusion.systems.interface import TrainedNetwork
from image_diffusion.systems.prior.generator import (
    EmbeddingGenerator,
    EmbeddingReading,
    EmbeddingSampling,
    caption_inputs,
    check_guided,
)
from image_diffusion.systems.sampling import SampleFiles, SamplesToWrite, Sampling, SamplingInputs
from image_diffusion.text_encoders import TextEncoder, encode_captions
from image_diffusion.text_encoders.hashing import HashingText
from image_diffusion.text_encoders.learned import read_text
from image_diffusion.text_encoders.pretrained import ClipConfig

if TYPE_CHECKING:
    from PIL import Image

FILE = "embeddings.json"
_ROWS = 100_000  # maximum number of embeddings in a file


class PriorSampleConfig(EmbeddingSampling):
    """Captions, number and seeds of the image embeddings to make, and the sampler's settings."""

    prompts: tuple[str, ...] | str
    """Captions, used in turn: a list, or a file: `.txt` with one caption per line, or `.csv` or `.parquet` with a
    column "prompt"."""
    num_samples: int = Field(64, ge=1)
    """Number of embeddings."""
    first_seed: int = Field(0, ge=0, lt=2**62)
    """Seed of the first embedding; embedding number i has seed first_seed + i."""
    embeddings_per_job: int = Field(100_000, ge=1)
    """Embeddings per job; more embeddings are made by several jobs in parallel. It does not change the embeddings."""
    clip: ClipConfig | None = None
    """CLIP that embeds the prompts, for pairs imported with text embeddings: the CLIP of those embeddings. Unset: the
    encoder that embedded the captions of the pairs."""

    @property
    def num_jobs(self) -> int:
        """Return the number of jobs that make the embeddings: each makes whole batches."""
        return min(-(-self.num_samples // self.embeddings_per_job), -(-self.num_samples // self.batch_size))

    @property
    def num_stored(self) -> int:
        """Return the number of all embeddings: each is stored."""
        return self.num_samples


def check_sample(settings: PriorSampleConfig, process: Discrete, drops_conditions: bool) -> None:
    """Raise ValueError if steps, guidance or listed prompts do not fit; a file of prompts is not read.
    drops_conditions: whether training drops the network's conditions.
    """
    check_guided("sample", settings, drops_conditions)
    try:
        settings.sampler.grid(process)
    except ValueError as error:
        raise ValueError(f"sample.sampler: {error}") from None
    if isinstance(settings.prompts, tuple):
        read_prompts(settings.prompts, "sample.prompts")


class CaptionEmbedder:
    """Generator of image embeddings of captions, each with its own seed. Raises ValueError for settings that do not fit
    the model."""

    def __init__(
        self, reading: EmbeddingReading, token_encodings: bool, model: TrainedNetwork, settings: PriorSampleConfig
    ) -> None:
        self.generator = EmbeddingGenerator(on_best_device(model), reading, model.spec, settings)
        self._token_encodings, self._dim = token_encodings, model.spec.channels
        self.text = text_encoder(model.pairs.get("pairs"), settings.clip, model.folder)

    def __call__(self, captions: Sequence[str], seeds: Tensor) -> Tensor:
        """Return float16 [N, dim], of seeds int64 [N]."""
        return self.generator(self.conditions(captions), seeds).half()

    def conditions(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the conditions of the network for N captions."""
        encoded = encode_captions(self.text, list(captions))  # [N, 1 + L, dim]
        if encoded.shape[-1] != self._dim:
            raise ValueError(
                f"sample.prompts are embedded in {encoded.shape[-1]} dimensions, but the prior was trained on "
                f"{self._dim}. Set sample.clip to the CLIP that embedded its captions."
            )
        pairs = torch.cat([torch.zeros_like(encoded[:, :TEXT]), encoded], 1)  # the row of the image is ignored
        return caption_inputs(pairs, self._token_encodings)


def text_encoder(pairs: Mapping[str, Any] | None, clip: ClipConfig | None, folder: Path | None = None) -> TextEncoder:
    """Rebuild the encoder of the captions that a prior was trained on. pairs: the content of their manifest. clip: of
    the section `sample`. folder: of the prior's weights and the files next to them. Raises ValueError if the encoder is
    not recorded."""
    description = (pairs or {}).get("text", {})
    if clip is not None:
        return clip.build(best_device(), int(description.get("num_tokens", 0)))
    encoder: TextEncoder
    match description.get("type"):
        case "hashing":
            encoder = HashingText(description["dim"], description["num_tokens"])
        case "contrastive":
            encoder = read_text(folder or Path(), description["num_tokens"], best_device())
        case "clip":
            encoder = ClipConfig(weights=description["weights"]).build(best_device(), description["num_tokens"])
        case _:
            raise ValueError(
                "The prior does not record the encoder of its captions. Set sample.clip to that CLIP, such as "
                "{weights: openai/clip-vit-large-patch14}."
            )
    identity = dict(encoder.identity)
    if "sha256" not in description:  # a CLIP from before weights were recorded
        identity.pop("sha256", None)
    if identity != description:
        raise ValueError(
            f"The captions were embedded by {description}, but the text encoder is now {encoder.identity}. Train again."
        )
    return encoder


class EmbeddingMaker:
    """Embeddings by row; implements `systems.sampling.Maker`. titles: their captions. text: identity of their
    encoder."""

    labels = None

    def __init__(
        self,
        generator: EmbeddingGenerator,
        conditions: dict[str, Tensor],
        prompts: list[str],
        text: Mapping[str, Any],
        settings: PriorSampleConfig,
    ) -> None:
        self._generator, self._conditions, self._settings = generator, conditions, settings
        self.titles = [prompts[i % len(prompts)] for i in range(settings.num_samples)]
        self._prompts = len(prompts)
        self.described: dict[str, Any] = {"kind": "embeddings", "prompts": digest([prompts, text])}

    def __call__(self, rows: slice) -> Tensor:
        """Return float16 [n, dim]."""
        number = torch.arange(self._settings.num_samples)[rows]
        cond = {name: tensor[number % self._prompts] for name, tensor in self._conditions.items()}
        return self._generator(cond, number + self._settings.first_seed).half()

    def pictures(self) -> dict[str, Image.Image]:
        """Return no pictures."""
        return {}


class EmbeddingFiles(SampleFiles):
    """Samples that are embeddings."""

    kind: ClassVar = "embeddings"
    one: ClassVar = "embedding"
    file: ClassVar = FILE

    def shown(self, settings: PriorSampleConfig) -> int:
        """Return the number of all embeddings, since they have no picture."""
        return settings.num_samples

    def write(self, samples: SamplesToWrite) -> dict[str, Path]:
        """Write the embeddings in files that each fit into memory, and remove earlier files."""
        folder, settings = samples.output.parent, samples.settings
        for name in ("img_emb", "metadata"):
            shutil.rmtree(folder / name, ignore_errors=True)
        written, start = list[Path](), 0
        for number, rows in enumerate(_files_of(samples.batches)):
            stop = start + len(rows)
            image, table = folder / f"img_emb/img_emb_{number}.npy", folder / f"metadata/metadata_{number}.parquet"
            with atomic_write(image) as file:
                np.save(file, rows.numpy())
            seeds = [settings.first_seed + i for i in range(start, stop)]
            ids = [f"{i:09d}" for i in range(start, stop)]
            write_columns(table, {"caption": samples.maker.titles[start:stop], "seed": seeds, "id": ids})
            written, start = [*written, image, table], stop
        how = {"pairs": samples.model.pairs.get("pairs"), "files": describe(folder, written)}
        write_json(samples.output, samples.description | how)
        return {}


@dataclass(frozen=True)
class PriorSampling(Sampling):
    """Sampling of embeddings. reading: for embeddings of a dimension. token_encodings: as in `caption_inputs`."""

    files: ClassVar[SampleFiles] = EmbeddingFiles()

    process: Discrete
    reading: Callable[[DataSpec], EmbeddingReading]
    token_encodings: bool

    def num_listed(self, settings: PriorSampleConfig) -> int:
        return len(read_prompts(settings.prompts, "sample.prompts"))

    def maker(self, inputs: SamplingInputs) -> EmbeddingMaker:
        settings = inputs.settings
        prompts = read_prompts(settings.prompts, "sample.prompts")[: settings.num_samples]
        embed = self.embedder(inputs.model, settings)
        return EmbeddingMaker(embed.generator, embed.conditions(prompts), prompts, embed.text.identity, settings)

    def num_evaluations(self, settings: PriorSampleConfig) -> int:
        calls: int = settings.sampler.calls(settings.sampler.grid(self.process))
        return calls * settings.num_candidates * (1 + (settings.guidance_scale != 1))

    def embedder(self, model: TrainedNetwork, settings: PriorSampleConfig) -> CaptionEmbedder:
        return CaptionEmbedder(self.reading(model.spec), self.token_encodings, model, settings)


def _files_of(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the content of each file, [n, dim], from batches [B, dim]."""
    waiting = list[Tensor]()
    for batch in batches:
        waiting.append(batch)
        if sum(map(len, waiting)) >= _ROWS:
            whole = torch.cat(waiting)
            yield whole[:_ROWS]
            waiting = [whole[_ROWS:]]
    if sum(map(len, waiting)):
        yield torch.cat(waiting)
