"""Curves of a system of tokens: the same weights sampled and judged at each of several settings, or other weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from image_diffusion.core.config import dump, parse
from image_diffusion.core.types import DataSpec
from image_diffusion.systems.diffusion.sampling import SampleConfig
from image_diffusion.systems.diffusion.sweep import SweepConfig, check_values
from image_diffusion.systems.given import Sections
from image_diffusion.systems.token.sampling import check_made

if TYPE_CHECKING:
    from image_diffusion.systems.tokens import TokensSystem

_OF_THE_SAMPLER = {"temperature": float, "num_steps": int}


class TokenSweepConfig(SweepConfig):
    """What is varied of images from tokens, one thing at a time; everything else is as in `sample`."""

    temperature: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """What logits are divided by."""

    def points(self) -> dict[str, tuple[float | int | str, ...]]:
        return super().points() | {"temperature": self.temperature}

    def samples(self, axis: str, value: str, base: SampleConfig) -> SampleConfig:
        """What is sampled at one point. Raises ValueError when the sampler that it changes is not written."""
        if axis not in _OF_THE_SAMPLER:
            return super().samples(axis, value, base)
        plain: dict[str, Any] = dump(base)
        if plain["sampler"] is None:
            raise ValueError(f"sweep.{axis} varies a key of sample.sampler, which is missing. Write it with its type.")
        plain["sampler"][axis] = _OF_THE_SAMPLER[axis](value)
        plain["num_samples"] = self.num_samples or base.num_samples
        found: SampleConfig = parse(type(base), plain, f"sweep.{axis} {value}")
        return found


KEYS = frozenset({"guidance_scale", "num_steps", "temperature", "checkpoint", "ema", "num_samples"})
"""Those of its keys that do something."""


def check_sweep(system: TokensSystem, experiment: Sections, spec: DataSpec) -> None:
    """Raise ValueError, before any work, for a point that cannot be sampled."""
    sweep: TokenSweepConfig = experiment.section("sweep")
    check_values(sweep, experiment.train)
    for axis, values in sweep.values.items():
        for value in values:
            point: Any = sweep.samples(axis, value, experiment.section("sample"))
            check_made(f"sweep.{axis} {value}", point, system, experiment, spec)
