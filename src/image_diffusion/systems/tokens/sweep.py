"""Sweeps of a token model: the same weights sampled and evaluated with several settings, or other weights."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from image_diffusion.core.types import DataSpec
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.diffusion.sweep import SweepConfig, check_values
from image_diffusion.systems.interface import TrainSettings
from image_diffusion.systems.tokens.generator import TokenReading, TokenSampleConfig, check_made


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


KEYS = frozenset({"guidance_scale", "num_steps", "temperature", "checkpoint", "ema", "num_samples", "choose"})
"""Keys of the section that have an effect."""


def check_sweep(
    sweep: TokenSweepConfig,
    sample: TokenSampleConfig,
    reading: TokenReading,
    classes: list[str] | None,
    spec: DataSpec,
    train: TrainSettings,
) -> None:
    """Raise ValueError, before any work, for a point that cannot be sampled. classes: as in `check_settings`."""
    check_values(sweep, train)
    for axis, values in sweep.values.items():
        for value in values:
            point: Any = sweep.samples(axis, value, sample)
            check_made(f"sweep.{axis} {value}", point, reading, classes, spec)
