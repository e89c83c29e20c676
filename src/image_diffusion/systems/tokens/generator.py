"""Images from a system of tokens: seeds and labels -> tokens -> pixels."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.codecs.base import Codec
from image_diffusion.core.config.base import Config
from image_diffusion.core.types import DataSpec
from image_diffusion.nn.precision import computes_in
from image_diffusion.samplers import Autoregressive, Masked, OfTokens
from image_diffusion.samplers.image_noise import image_streams
from image_diffusion.samplers.tokens.base import Predictor
from image_diffusion.samplers.tokens.maskgit import hidden_counts
from image_diffusion.systems.diffusion.generator import SampleConfig, chosen_classes, ten_of

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


def check_settings(
    section: str, settings: TokenSampleConfig, reading: TokenReading, classes: list[str] | None, spec: DataSpec
) -> None:
    """Raise ValueError if the sampler, the guidance or the labels of a section do not fit. classes: of the data; None
    if unknown or unused.
    """
    check_made(section, settings, reading, classes, spec)
    if classes is not None and not classes and settings.labels == "random":
        raise ValueError(f"{section}.labels is random, but the data have no classes. Leave it out.")
    if classes is not None and not isinstance(settings.labels, str):
        if not classes:
            raise ValueError(f"{section}.labels names classes, but the data have none. Leave it out.")
        chosen_classes(f"{section}.labels", settings.labels, classes)


def check_made(
    section: str, settings: TokenSampleConfig, reading: TokenReading, classes: list[str] | None, spec: DataSpec
) -> None:
    """Raise ValueError if the sampler or the guidance do not fit."""
    try:
        sampler = fitted(settings, reading.causal).sampler
        if isinstance(sampler, Masked):
            hidden_counts(math.prod(spec.size), sampler.num_steps)
    except ValueError as error:
        raise ValueError(f"{section}.sampler: {error}") from None
    _check_guidance(section, settings, reading.drops_labels, classes != [])


def _check_guidance(section: str, settings: TokenSampleConfig, drops_labels: bool, tells: bool) -> None:
    scale = settings.guidance.guidance_scale
    if scale != 1 and not drops_labels:
        raise ValueError(
            f"{section}.guidance.guidance_scale is {scale:g}, but the network never learns to do without a label. Use "
            f"1, or train with system.objective.label_drop_probability above 0."
        )
    if scale != 1 and not tells:
        raise ValueError(
            f"{section}.guidance.guidance_scale is {scale:g}, but the data have no classes that guidance could leave "
            f"out. Use 1."
        )


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
        _check_guidance("sample", settings, reading.drops_labels, bool(spec.num_classes or spec.conditions))
        self.settings = fitted(settings, reading.causal)
        self._network, self._spec, self._codec = network, spec, codec
        self._device = next(network.parameters()).device
        nothing = {"label": torch.tensor(spec.num_classes)} if spec.num_classes else {}
        nothing |= {name: torch.zeros(shape) for name, shape in spec.conditions.items()} | dict(null or {})
        self._nothing = {name: tensor.to(self._device) for name, tensor in nothing.items()}

    @torch.no_grad()
    def __call__(
        self,
        seeds: Tensor,
        labels: Tensor | None,
        conditions: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return uint8 images [N, C, H, W] of these seeds, int64 [N], and labels, int64 [N].

        conditions: the other conditions of each image, by name.
        """
        return self._decode(deque(self._steps(seeds, labels, conditions or {}), maxlen=1).pop())

    @torch.no_grad()
    def trajectory(
        self,
        seeds: Tensor,
        labels: Tensor | None,
        conditions: Mapping[str, Tensor] | None = None,
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
