"""Guidance: a network made of two, the second saying which way not to go.

Classifier-free guidance: Ho & Salimans 2022, "Classifier-free diffusion guidance", with w = guidance_scale - 1.
Guidance interval: Kynkäänniemi et al. 2024, "Applying guidance in a limited interval improves sample quality".
Autoguidance: Karras et al. 2024, "Guiding a diffusion model with a bad version of itself".
Power-cosine scale: Gao et al. 2023, "MDTv2: Masked diffusion transformer is a strong image synthesizer", its code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import Network
from image_diffusion.process.grid import Grid

Channels = Literal["all", "first_three"]


class Guidance(Config):
    """Guidance of a network: its strength, on which channels, and at which noise levels."""

    guidance_scale: float = Field(1.0, ge=0, allow_inf_nan=False)
    """1: no guidance. Above 1: away from the unconditional (or the weaker) prediction."""
    channels: Channels = "all"
    """Which channels of x are guided. first_three: only the first three, as the published DiT samples were made."""
    interval: tuple[float, float] | None = None
    """Guide only where the noise level sigma / alpha lies between these two, both included; none: everywhere."""
    power: float | None = Field(None, gt=0)
    """Guide the less, the earlier: at time t, 1 where sampling begins, the scale is 1 + (guidance_scale - 1) times
    (1 - cos(pi (1 - t)^power)) / 2. Unset: the same scale throughout."""

    @model_validator(mode="after")
    def _interval_is_ordered(self) -> Guidance:
        if self.interval is not None and not 0 <= self.interval[0] < self.interval[1]:
            low, high = self.interval
            raise ValueError(f"The guidance interval is ({low}, {high}); expected 0 <= low < high, as sigma / alpha.")
        return self

    def share(self, grid: Grid) -> float:
        """Return the share of a grid's points with a second prediction, from 0 to 1."""
        if self.guidance_scale == 1:
            return 0.0
        if self.interval is None:
            return 1.0
        low, high = times_between(grid, *self.interval)
        return float(((grid.time >= low) & (grid.time <= high)).double().mean())

    def build(
        self, network: Network, null_cond: Mapping[str, Tensor], grid: Grid, negative: Network | None = None
    ) -> Network:
        """Return the guided network, to be sampled on `grid`. See `guided`."""
        times = None if self.interval is None else times_between(grid, *self.interval)
        scale_at = None if self.power is None else self._rising(self.power, grid.time[0].item())
        return guided(network, self.guidance_scale, null_cond, self.channels, times, negative, scale_at)

    def _rising(self, power: float, first: float) -> Callable[[Tensor], Tensor]:
        def scale_at(t: Tensor) -> Tensor:
            return 1 + (self.guidance_scale - 1) * (1 - torch.cos(math.pi * (1 - t / first) ** power)) / 2

        return scale_at


def guided(
    network: Network,
    guidance_scale: float,
    null_cond: Mapping[str, Tensor],
    channels: Channels = "all",
    times: tuple[float, float] | None = None,
    negative: Network | None = None,
    scale_at: Callable[[Tensor], Tensor] | None = None,
) -> Network:
    """Return a network that computes negative + guidance_scale * (positive - negative), where positive = network(x, t,
    **cond).

    null_cond: by name, what replaces the condition in the negative prediction; broadcast over the batch. A condition
    it does not name is kept. negative: the network of the negative prediction, for autoguidance a weaker one, with an
    empty null_cond; none: `network` itself, called once with [positive; negative] as one batch. times: guide only at
    t in [low, high], in the network's own time; elsewhere, and with guidance_scale 1, there is one plain call.
    scale_at: the scale at times t [B], where it is not the same at all of them. What the network returns beyond the
    guided channels of x (a learned variance) is the positive prediction's.

    Raises ValueError for nothing to differ between the two predictions, a null for an absent condition, or
    first_three on fewer than three channels.
    """
    if guidance_scale == 1:
        return network
    if not null_cond and negative is None:
        raise ValueError(
            f"guidance_scale is {guidance_scale}, but the network has no condition to leave out. Use guidance_scale 1, "
            "a network trained with conditions, or a weaker network as the negative."
        )

    def guided_network(x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor:
        inside = None if times is None else (t >= times[0]) & (t <= times[1])  # [B]
        if inside is not None and not bool(inside.any()):
            return network(x, t, **cond)
        null = cond | {name: _null(name, value, cond) for name, value in null_cond.items()}
        if negative is None:
            both = {name: torch.cat([cond[name], null[name]]) for name in cond}
            out_positive, out_negative = network(torch.cat([x, x]), torch.cat([t, t]), **both).chunk(2)
        else:
            out_positive, out_negative = network(x, t, **cond), negative(x, t, **null)
        count = _num_guided(channels, x.shape[1])
        first, base = out_positive[:, :count], out_negative[:, :count]
        scale = guidance_scale if scale_at is None else scale_at(t).view(-1, *[1] * (x.ndim - 1)).to(base)
        mixed = base + scale * (first - base)
        if inside is not None:
            mixed = torch.where(inside.view(-1, *[1] * (x.ndim - 1)), mixed, first)
        return torch.cat([mixed, out_positive[:, count:]], dim=1)

    return guided_network


def times_between(grid: Grid, low: float, high: float) -> tuple[float, float]:
    """Return the first and last time of a grid whose noise level sigma / alpha lies in [low, high]; (inf, -inf): none
    does."""
    level = grid.sigma[:-1] / grid.alpha[:-1]
    inside = grid.time[(level >= low) & (level <= high)].tolist()
    return (min(inside), max(inside)) if inside else (float("inf"), float("-inf"))


def _null(name: str, value: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
    if name not in cond:
        conditions = ", ".join(sorted(cond)) or "none"
        raise ValueError(f"Guidance leaves out '{name}', which is not a condition of the network. Known: {conditions}.")
    return value.to(cond[name]).expand_as(cond[name])


def _num_guided(channels: Channels, available: int) -> int:
    if channels == "all":
        return available
    if available < 3:
        raise ValueError(f"first_three guides three channels, but x has {available}. Use guidance channels 'all'.")
    return 3
