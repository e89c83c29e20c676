"""Images from a system of tokens: seeds and labels -> tokens -> pixels."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.codecs.codec import Codec
from image_diffusion.core.config import Config
from image_diffusion.core.types import DataSpec
from image_diffusion.nn.precision import computes_in
from image_diffusion.samplers import Autoregressive, Masked, OfTokens
from image_diffusion.samplers.masked import hidden_counts
from image_diffusion.samplers.noise import image_streams
from image_diffusion.samplers.token_sampler import Predictor
from image_diffusion.systems.diffusion.sampling import SampleConfig, chosen_classes, ten_of

if TYPE_CHECKING:
    from image_diffusion.systems.given import Sections
    from image_diffusion.systems.tokens import TokensSystem

_GREY = 128


class LogitGuidance(Config):
    """How strongly what the network says is guided."""

    guidance_scale: float = Field(1.0, ge=0, allow_inf_nan=False)
    """1: no guidance. Above 1: away from what it says without a class or caption."""


class TokenSampleConfig(SampleConfig):
    """Which images are made of tokens, and how."""

    sampler: OfTokens | None = None  # type: ignore[assignment]
    """How tokens are drawn; unset: as the network was trained, with the defaults of that."""
    guidance: LogitGuidance = LogitGuidance()  # type: ignore[assignment]
    """Classifier-free guidance of the logits; a scale of 1 is none."""


KEYS = frozenset(
    {"num_samples", "first_seed", "seed", "labels", "prompts", "negative_prompt", "sampler", "guidance", "batch_size"}
    | {"images_per_job", "precision", "pictures", "grid_images", "keep"}
)
"""Those of its keys that do something."""


class TokenReading(Config):
    """What `TokenGenerator` asks of a system. An exported model holds this in the system's place."""

    causal: bool
    """Whether its network tells each token from those before it, in place of those that are not hidden."""
    drops_labels: bool
    """Whether it learnt to do without a label."""


def fitted(settings: TokenSampleConfig, causal: bool) -> TokenSampleConfig:
    """The settings with a sampler. Raises ValueError for one of the other kind of network."""
    sampler = settings.sampler or (Autoregressive() if causal else Masked())
    wanted = "autoregressive" if causal else "masked"
    if sampler.type != wanted:
        raise ValueError(
            f"The sampler is {sampler.type}, but system.objective.type is {wanted}. Take the sampler of that name."
        )
    return settings.model_copy(update={"sampler": sampler})


def check_settings(section: str, system: TokensSystem, experiment: Sections, spec: DataSpec) -> None:
    """Raise ValueError where the sampler, the guidance or the labels of a section do not fit system and data."""
    settings: TokenSampleConfig = experiment.section(section)
    check_made(section, settings, system, experiment, spec)
    system.condition.check(section, settings)
    classes = _classes(system, experiment)
    if classes is not None and not isinstance(settings.labels, str):
        if not classes:
            raise ValueError(f"{section}.labels names classes, but the data have none. Leave it out.")
        chosen_classes(f"{section}.labels", settings.labels, classes)


def check_made(
    section: str, settings: TokenSampleConfig, system: TokensSystem, experiment: Sections, spec: DataSpec
) -> None:
    """Raise ValueError where sampler or guidance do not fit system and data."""
    try:
        sampler = fitted(settings, system.objective.causal).sampler
        if isinstance(sampler, Masked):
            hidden_counts(spec.resolution**2, sampler.num_steps)
    except ValueError as error:
        raise ValueError(f"{section}.sampler: {error}") from None
    _check_guidance(section, settings, system.drops_labels, _classes(system, experiment) != [])


def _classes(system: TokensSystem, experiment: Sections) -> list[str] | None:
    """The classes of the data, where they are known and told."""
    return None if system.told_words else experiment.data.source.known_classes()


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
    """Makes images from seeds, on the device of the network. null: what guidance leads away from, by name, where that
    is not the label of no class, or zeros.

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
        self._nothing = {name: each.to(self._device) for name, each in nothing.items()}

    @torch.no_grad()
    def __call__(
        self,
        seeds: Tensor,
        labels: Tensor | None,
        low_res: Tensor | None = None,
        told: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Uint8 images [N, C, H, W] of these seeds, int64 [N], and labels, int64 [N]. told: what else the network is
        told of each image, by name."""
        assert low_res is None
        return self._decode(deque(self._steps(seeds, labels, told or {}), maxlen=1).pop())

    @torch.no_grad()
    def trajectory(
        self,
        seeds: Tensor,
        labels: Tensor | None,
        low_res: Tensor | None = None,
        told: Mapping[str, Tensor] | None = None,
    ) -> list[Tensor]:
        """The images after ten of the steps at most, grey where tokens are still hidden."""
        return [self._with_gaps(tokens) for tokens in ten_of(list(self._steps(seeds, labels, told or {})))]

    def _steps(self, seeds: Tensor, labels: Tensor | None, told: Mapping[str, Tensor]) -> Iterator[Tensor]:
        given: dict[str, Any] = {"label": labels, **told}
        cond = {name: each.to(self._device) for name, each in given.items() if each is not None}
        streams = image_streams(seeds.to(self._device), self.settings.seed)
        predictor = Predictor(self._network, cond, self._nothing, self.settings.guidance.guidance_scale, len(seeds))
        assert self.settings.sampler is not None
        with computes_in(self.settings.precision, self._device):
            yield from self.settings.sampler.steps(predictor, streams, self._spec.resolution**2)

    def _decode(self, tokens: Tensor) -> Tensor:
        side = self._spec.resolution
        return self._codec.decode(tokens.view(-1, side, side)).cpu()

    def _with_gaps(self, tokens: Tensor) -> Tensor:
        side, hidden = self._spec.resolution, tokens == self._spec.channels
        images = self._decode(tokens.masked_fill(hidden, 0))
        gaps = F.interpolate(hidden.view(-1, 1, side, side).float(), size=images.shape[2:]).bool().cpu()
        return images.masked_fill(gaps, _GREY)
