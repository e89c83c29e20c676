"""Images from a system of tokens: seeds and labels -> tokens -> pixels, and sweeps of their settings."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.codecs.base import Codec
from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import image_streams
from image_diffusion.core.types import DataSpec
from image_diffusion.nn.precision import computes_in
from image_diffusion.samplers import OfTokens
from image_diffusion.samplers.tokens import Autoregressive, Masked, Predictor, hidden_counts
from image_diffusion.systems.diffusion.generator import SampleConfig, check_scale, null_conditions, ten_of
from image_diffusion.systems.diffusion.sweep import SweepConfig

_GREY = 128


class LogitGuidance(Config):
    """Strength of the guidance of the network's logits."""

    guidance_scale: float = Field(1.0, ge=0, le=1e6)
    """Guidance scale. 1: no guidance. Above 1: away from the prediction without a class or caption."""

    scales: ClassVar[None] = None
    """Parts of a condition have no scales of their own."""


class TokenSampleConfig(SampleConfig):
    """Number, seeds and classes of the images to make from tokens, and the sampler's settings."""

    sampler: OfTokens | None = None  # type: ignore[assignment]
    """Sampler of tokens; unset: the sampler that fits the network's training, with its default settings."""
    guidance: LogitGuidance = LogitGuidance()  # type: ignore[assignment]
    """Classifier-free guidance of the logits; a scale of 1 is none."""


KEYS = frozenset(
    {"num_samples", "first_seed", "seed", "labels", "prompts", "negative_prompt", "sampler", "guidance", "batch_size"}
    | {"images_per_job", "precision", "pictures", "grid_images", "keep"}
)
"""Keys of the section that have an effect."""


class TokenReading(Config):
    """Properties of a system that `TokenGenerator` needs. An exported model contains them instead of the system."""

    causal: bool
    """True if the network predicts each token from the earlier ones, instead of from all unmasked ones."""
    drops_labels: bool
    """True if labels were dropped in training, so that guidance is possible."""


def fitted(settings: TokenSampleConfig, causal: bool) -> TokenSampleConfig:
    """Return the settings with a sampler, by default that of the network. Raises ValueError if the sampler does not
    fit."""
    sampler = settings.sampler or (Autoregressive() if causal else Masked())
    expected = "autoregressive" if causal else "masked"
    if sampler.type != expected:
        raise ValueError(
            f"The sampler is {sampler.type}, but system.objective.type is {expected}. Take the sampler of that name."
        )
    return settings.model_copy(update={"sampler": sampler})


def check_made(
    section: str, settings: TokenSampleConfig, reading: TokenReading, classes: list[str] | None, spec: DataSpec
) -> None:
    """Raise ValueError if the sampler or the guidance of a section do not fit. classes: of the data; None if unknown or
    unused."""
    try:
        sampler = fitted(settings, reading.causal).sampler
        if isinstance(sampler, Masked):
            hidden_counts(math.prod(spec.size), sampler.num_steps)
    except ValueError as error:
        raise ValueError(f"{section}.sampler: {error}") from None
    check_scale(section, settings.guidance.guidance_scale, reading.drops_labels, classes != [])


class TokenGenerator:
    """Generator of images from seeds, on the device of the network. null: the condition that guidance leads away from,
    by name, unless it is the null label or zeros.

    Raises ValueError when the sampler or the guidance do not fit the system.
    """

    def __init__(
        self,
        network: nn.Module,
        reading: TokenReading,
        spec: DataSpec,
        codec: Codec,
        settings: TokenSampleConfig,
        null: Mapping[str, Tensor] | None = None,
    ) -> None:
        has_classes = bool(spec.num_classes or spec.conditions)
        check_scale("sample", settings.guidance.guidance_scale, reading.drops_labels, has_classes)
        self.settings = fitted(settings, reading.causal)
        self._network, self._spec, self._codec = network, spec, codec
        self._device = next(network.parameters()).device
        self._nothing = null_conditions(spec, null, self._device)

    @torch.no_grad()
    def __call__(self, seeds: Tensor, labels: Tensor | None, conditions: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return uint8 images [N, C, H, W] of these seeds, int64 [N], and labels, int64 [N].

        conditions: the other conditions of each image, by name.
        """
        return self._decode(deque(self._steps(seeds, labels, conditions or {}), maxlen=1).pop())

    @torch.no_grad()
    def trajectory(
        self, seeds: Tensor, labels: Tensor | None, conditions: Mapping[str, Tensor] | None = None
    ) -> list[Tensor]:
        """Return the images after up to ten of the steps, grey where tokens are still hidden."""
        return [self._with_gaps(tokens) for tokens in ten_of(list(self._steps(seeds, labels, conditions or {})))]

    def _steps(self, seeds: Tensor, labels: Tensor | None, conditions: Mapping[str, Tensor]) -> Iterator[Tensor]:
        inputs: dict[str, Any] = {"label": labels, **conditions}
        cond = {name: tensor.to(self._device) for name, tensor in inputs.items() if tensor is not None}
        streams = image_streams(seeds.to(self._device), self.settings.seed)
        predictor = Predictor(self._network, cond, self._nothing, self.settings.guidance.guidance_scale, len(seeds))
        assert self.settings.sampler is not None
        with computes_in(self.settings.precision, self._device):
            yield from self.settings.sampler.steps(predictor, streams, math.prod(self._spec.size))

    def _decode(self, tokens: Tensor) -> Tensor:
        return self._codec.decode(tokens.view(-1, *self._spec.size)).cpu()

    def _with_gaps(self, tokens: Tensor) -> Tensor:
        hidden = tokens == self._spec.channels
        images = self._decode(tokens.masked_fill(hidden, 0))
        gaps = F.interpolate(hidden.view(-1, 1, *self._spec.size).float(), size=images.shape[2:]).bool().cpu()
        return torch.where(gaps, images.new_full((), _GREY), images)


class TokenSweepConfig(SweepConfig):
    """Settings to vary for images made from tokens, one at a time; all others are those of `sample`."""

    temperature: tuple[Annotated[float, Field(ge=1e-30)], ...] = ()
    """Temperatures by which the logits are divided."""

    def points(self) -> dict[str, tuple[float | int | str, ...]]:
        return super().points() | {"temperature": self.temperature}

    def samples(self, axis: str, value: str, base: SampleConfig) -> SampleConfig:
        if axis in ("temperature", "num_steps") and base.sampler is None:
            raise ValueError(f"sweep.{axis} varies a key of sample.sampler, which is missing. Write it with its type.")
        return super().samples(axis, value, base)


SWEPT = frozenset({"guidance_scale", "num_steps", "temperature", "checkpoint", "ema", "num_samples", "choose"})
"""Keys of the section that have an effect."""
