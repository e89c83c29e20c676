"""A prior in an exported folder: it makes its embeddings here as there, by the same `EmbeddingGenerator`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from image_diffusion.systems.embedding.reading import EmbeddingReading
from image_diffusion.systems.embedding.sampling import EmbeddingGenerator, EmbeddingSampling
from image_diffusion.systems.hub.exported import ExportedModel


class ExportedPrior(ExportedModel):
    """Captions' embeddings -> images' embeddings."""

    def forward(self, cond: dict[str, Tensor], seeds: list[int], settings: dict[str, Any]) -> Tensor:
        """Float32 [N, dim]; the pipeline says what is what. Raises ValueError for what does not fit."""
        chosen = EmbeddingSampling(**settings)
        reading = EmbeddingReading(**self.described["reading"])
        generator = EmbeddingGenerator(self.network, reading, self.spec, chosen)
        return generator(cond, torch.tensor(seeds, dtype=torch.int64))
