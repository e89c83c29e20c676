"""Sweeps: sampling and evaluation of the same weights with several settings, or of several steps or averages with the
same settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field, field_validator

from image_diffusion.core.config.base import Config, dump, parse
from image_diffusion.metrics.choice import Rule, parse_rule
from image_diffusion.samplers import Sampler
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.interface import TrainSettings

if TYPE_CHECKING:
    SamplerName = str
else:
    SamplerName = Literal[tuple(kind.model_fields["type"].default for kind in get_args(get_args(Sampler)[0]))]

_OF_THE_SAMPLER = {"num_steps": int, "time_difference": float, "temperature": float}
"""Type of the values of each axis that is a key of the sampler."""


class SweepConfig(Config):
    """Settings to vary, one at a time; all others are those of `sample`. Each list gives one curve."""

    guidance_scale: tuple[Annotated[float, Field(ge=0, le=1e6)], ...] = ()
    """Scales of classifier-free guidance, 1 for none."""
    sampler: tuple[SamplerName, ...] = ()
    """Samplers, each with the number of steps of `sample.sampler`."""
    num_steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers of sampling steps."""
    time_difference: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = ()
    """Values of the sampler's time_difference: the additional length of each step of ddpm or ddim, in continuous
    time."""
    checkpoint: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps of the training whose weights are sampled. Their checkpoints are kept with train.checkpoint.keep_every."""
    ema: tuple[Annotated[float, Field(ge=0, lt=1)] | Literal["raw"], ...] = ()
    """Averages of the training whose weights are sampled, each by its rate (or width) in `train.ema`; raw: the weights
    as trained. No training is repeated."""
    num_samples: int | None = Field(None, ge=2)
    """Images at each point; unset: as many as `sample.num_samples`."""

    choose: str = ""
    """Rule that chooses the step of `checkpoint` whose weights all later stages use: a metric (`distance`: the one that
    ranks the experiment) and optional conditions, such as `distance where copies.upper < 0.03`. A metric has value,
    lower and upper. The points then use other seeds than `sample`. Empty: the weights that the training wrote."""

    @field_validator("choose")
    @classmethod
    def _is_a_rule(cls, text: str) -> str:
        if text:
            parse_rule(text)
        return text

    @property
    def rule(self) -> Rule | None:
        """Return the rule that chooses a step; None without one."""
        return parse_rule(self.choose) if self.choose else None

    def points(self) -> dict[str, tuple[float | int | str, ...]]:
        """Return the values of every possible curve."""
        return {
            "guidance_scale": self.guidance_scale,
            "sampler": self.sampler,
            "num_steps": self.num_steps,
            "time_difference": self.time_difference,
            "checkpoint": self.checkpoint,
            "ema": self.ema,
        }

    @property
    def values(self) -> dict[str, list[str]]:
        """Return the values of each configured curve, as they are written in names of files."""
        return {axis: [_written(value) for value in of] for axis, of in self.points().items() if of}

    def samples(self, axis: str, value: str, base: SampleConfig) -> SampleConfig:
        """Return the settings of sampling at one point. Raises ValueError when the sampler does not take the settings
        of `sample`."""
        plain = dump(base)
        plain["num_samples"] = self.num_samples or base.num_samples
        if axis == "checkpoint" and self.choose:  # the images that decide the choice would overrate it
            plain["first_seed"] = base.first_seed + base.num_samples
        elif axis == "guidance_scale":
            plain["guidance"]["guidance_scale"] = float(value)
        elif axis in _OF_THE_SAMPLER:
            plain["sampler"][axis] = _OF_THE_SAMPLER[axis](value)
        elif axis == "sampler" and value != base.sampler.type:
            shared = ("num_steps", "clip_denoised", "shift")
            plain["sampler"] = {"type": value} | {name: plain["sampler"][name] for name in shared}
        return parse(type(base), plain, f"sweep.{axis} {value}")


def checked_points(
    sweep: SweepConfig, sample: SampleConfig, train: TrainSettings
) -> Iterator[tuple[str, SampleConfig]]:
    """Yield the name and the settings of each point. Raises ValueError, before any work, for a value that is named
    twice, for weights that are not kept, and where `SweepConfig.samples` does. train: the section whose checkpoints and
    averages are sampled.
    """
    for axis, values in sweep.values.items():
        if len(set(values)) < len(values):
            raise ValueError(f"sweep.{axis} names a value twice. Give each once.")
    if sweep.choose and len(sweep.checkpoint) < 2:
        raise ValueError(
            "sweep.choose chooses one of the steps of sweep.checkpoint, which names fewer than two. Name some."
        )
    if sweep.num_samples is not None and not sweep.values:
        raise ValueError(
            "sweep.num_samples is set, but sweep names no values of a curve. Name some, as guidance_scale: [1, 2]."
        )
    if sweep.checkpoint and train.patience is not None:
        raise ValueError(
            "sweep.checkpoint names steps, but with train.patience the training may end before them. Leave out one of "
            "the two."
        )
    for step in sweep.checkpoint:
        if not train.keeps(step):
            raise ValueError(
                f"sweep.checkpoint names step {step:,}, whose weights are not kept. Set train.checkpoint.keep_every so "
                "that it divides that step and is a multiple of every_steps; name none after train.steps."
            )
    for average in sweep.ema:
        try:
            train.check_average(average)
        except ValueError as error:
            raise ValueError(f"sweep.ema names {_written(average)}, but {error}") from None
    for axis, values in sweep.values.items():
        for value in values:
            yield f"sweep.{axis} {value}", sweep.samples(axis, value, sample)


def _written(value: float | str) -> str:
    return str(value).removesuffix(".0")
