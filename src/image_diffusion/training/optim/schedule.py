"""The learning rate as a function of the number of updates done."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from image_diffusion.core.config.base import Config


class _Schedule(Config):
    has_horizon: ClassVar[bool] = False
    """True if the learning rate depends on the total number of steps."""

    warmup_steps: int = Field(0, ge=0)
    """Number of steps over which the learning rate first rises linearly from zero."""

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of the learning rate for the update that follows `step` of `steps` updates."""
        warmup = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return warmup * self._after_warmup(step, steps)

    @abstractmethod
    def _after_warmup(self, step: int, steps: int) -> float: ...


class Constant(_Schedule):
    """Keep the same learning rate throughout."""

    type: Literal["constant"] = "constant"
    """Keep the same learning rate throughout."""

    def _after_warmup(self, step: int, steps: int) -> float:
        return 1.0


class Linear(_Schedule):
    """Linear decay to `final` at the last step (Nichol and Dhariwal's lr_anneal_steps)."""

    has_horizon: ClassVar[bool] = True

    type: Literal["linear"] = "linear"
    """Linear decay to `final` at the last step."""
    final: float = Field(0.0, ge=0, le=1)
    """Share of the learning rate that is left at the last step."""

    def _after_warmup(self, step: int, steps: int) -> float:
        return 1.0 - (1.0 - self.final) * min(step / steps, 1.0)


class Cosine(_Schedule):
    """Cosine decay to `final` at the last step (Loshchilov and Hutter 2017, equation 5, without restarts)."""

    has_horizon: ClassVar[bool] = True

    type: Literal["cosine"] = "cosine"
    """Cosine decay to `final` at the last step."""
    final: float = Field(0.0, ge=0, le=1)
    """Share of the learning rate that is left at the last step."""

    def _after_warmup(self, step: int, steps: int) -> float:
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * min(step / steps, 1.0)))


class Exponential(_Schedule):
    """Multiplied with `decay` every `every_steps` steps, smoothly."""

    type: Literal["exponential"] = "exponential"
    """Multiplied with `decay` every `every_steps` steps, smoothly."""
    decay: float = Field(0.98, gt=0, le=1)
    """Share of the learning rate that is left after `every_steps` steps."""
    every_steps: int = Field(1000, gt=0)
    """Number of steps in which the learning rate is multiplied by `decay`."""

    def _after_warmup(self, step: int, steps: int) -> float:
        return float(self.decay ** (step / self.every_steps))


class Wsd(_Schedule):
    """Warmup, constant rate, and decay at the end (WSD; Hu et al. 2024, "MiniCPM", arXiv:2404.06395; the shapes: Hägele
    et al. 2024, "Scaling laws and compute-optimal training beyond fixed training durations", arXiv:2405.18392)."""

    has_horizon: ClassVar[bool] = True

    type: Literal["wsd"] = "wsd"
    """Warmup, constant rate, and decay at the end."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """Share of the steps, at the end, in which the learning rate decays."""
    shape: Literal["1-sqrt", "linear"] = "1-sqrt"
    """Shape of the decay, 1 - sqrt(x) or 1 - x, where x is 0 at its start and 1 at the last step."""
    final: float = Field(0.0, ge=0, le=1)
    """Share of the learning rate that is left at the last step."""

    def _after_warmup(self, step: int, steps: int) -> float:
        length = self.decay_fraction * steps
        x = min(max((step - (steps - length)) / length, 0.0), 1.0)
        return self.final + (1.0 - self.final) * (1.0 - (math.sqrt(x) if self.shape == "1-sqrt" else x))


class Power(_Schedule):
    """Constant for `constant_steps`, then decaying as a power of the step, without a fixed end (Karras et al. 2024,
    "Analyzing and improving the training dynamics of diffusion models": the inverse square root)."""

    type: Literal["power"] = "power"
    """Constant at first, then decaying as a power of the step."""
    constant_steps: int = Field(70_000, gt=0)
    """Number of steps before the decay begins: t_ref."""
    exponent: float = Field(0.5, gt=0, le=2)
    """Exponent of the decay: at step t the learning rate is multiplied by (constant_steps / t) to this power."""

    def _after_warmup(self, step: int, steps: int) -> float:
        return float(max(step / self.constant_steps, 1.0) ** -self.exponent)


Schedule = Annotated[Constant | Linear | Cosine | Exponential | Wsd | Power, Field(discriminator="type")]
