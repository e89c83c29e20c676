"""A prior in an exported folder: it makes its embeddings by the same `EmbeddingGenerator` as the package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from image_diffusion.export.bundle.base import ExportedModel
from image_diffusion.systems.prior.generator import EmbeddingGenerator, EmbeddingReading, EmbeddingSampling


class ExportedPrior(ExportedModel):
    """Embeddings of captions -> embeddings of images."""

    def forward(self, cond: dict[str, Tensor], seeds: list[int], settings: dict[str, Any]) -> Tensor:
        """Return embeddings, float32 [N, dim]; the arguments are those of the pipeline. Raises ValueError for arguments
        that do not fit."""
        chosen = EmbeddingSampling(**settings)
        reading = EmbeddingReading(**self.described["reading"])
        generator = EmbeddingGenerator(self.network, reading, self.spec, chosen)
        return generator(cond, torch.tensor(seeds, dtype=torch.int64))
