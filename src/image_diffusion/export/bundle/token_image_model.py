"""A model of tokens in an exported folder: it makes its images by the same `TokenGenerator` as the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from image_diffusion.codecs.base import Codec
from image_diffusion.export.bundle.image_model import ExportedDiffusion
from image_diffusion.systems.tokens.generator import TokenGenerator, TokenReading, TokenSampleConfig


class ExportedTokenModel(ExportedDiffusion):
    """Seeds -> tokens -> images."""

    settings: ClassVar = TokenSampleConfig

    def generator(self, codec: Codec, settings: TokenSampleConfig, null: dict[str, Tensor]) -> Callable[..., Tensor]:
        reading = TokenReading(**self.described["reading"])
        return TokenGenerator(self.network, reading, self.spec, codec, settings, null)
