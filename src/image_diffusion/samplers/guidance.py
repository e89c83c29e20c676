"""Guidance: a network that combines two predictions and leads away from the second.

Classifier-free guidance: Ho & Salimans 2022, "Classifier-free diffusion guidance", with w = guidance_scale - 1.
Guidance interval: Kynkäänniemi et al. 2024, "Applying guidance in a limited interval improves sample quality".
Autoguidance: Karras et al. 2024, "Guiding a diffusion model with a bad version of itself". Scales of parts: Brooks et
al. 2023, "InstructPix2Pix: Learning to follow image editing instructions", equation 3. Power-cosine scale: the code of
Gao et al. 2023, "MDTv2: Masked diffusion transformer is a strong image synthesizer".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, field_serializer, field_validator, model_validator
from torch import Tensor

from image_diffusion.core.config.base import Sparse
from image_diffusion.core.types import Network
from image_diffusion.process.base import Grid

Channels = Literal["all", "first_three"]


class Guidance(Sparse):
    """Guidance of a network: its strength, on which channels, and at which noise levels."""

    if_set: ClassVar[frozenset[str]] = frozenset({"scales"})

    guidance_scale: float = Field(1.0, ge=0, le=1e6)
    """Guidance scale. 1: no guidance. Above 1: away from the unconditional (or the weaker) prediction."""
    channels: Channels = "all"
    """Channels of x that are guided. first_three: only the first three, as for the published DiT samples."""
    interval: tuple[float, float] | None = None
    """Lowest and highest noise level sigma / alpha that are guided, both included; unset: all."""
    power: float | None = Field(None, gt=0)
    """Increase the scale during sampling: at time t, from 1 to 0, it is 1 + (guidance_scale - 1) times (1 - cos(pi (1 -
    t)^power)) / 2. Unset: a constant scale. Not for the process edm, whose time is a logarithm of sigma."""
    scales: dict[str, Annotated[float, Field(ge=0, le=1e6)]] | None = Field(None, min_length=1)
    """Scale of each part of the condition, by its type, in place of guidance_scale. In this order, each part leads away
    from the prediction without it and the parts after it. A part without a scale is in all predictions. Each scale
    costs one more prediction. The parts must have been dropped alone (system.objective.drop_probabilities)."""

    @field_serializer("scales")
    def _as_pairs(self, scales: dict[str, float] | None) -> list[list[str | float]] | None:
        """Return scales as pairs: their order changes the samples, but a digest ignores the order of keys."""
        return None if scales is None else [[name, scale] for name, scale in scales.items()]

    @field_validator("scales", mode="before")
    @classmethod
    def _of_pairs(cls, value: Any) -> Any:
        """Return the scales by name, as a configuration has them, also from the pairs of `_as_pairs`."""
        return dict(value) if isinstance(value, list | tuple) and all(map(_is_pair, value)) else value

    @model_validator(mode="after")
    def _fits_together(self) -> Guidance:
        if self.scales is not None and self.guidance_scale != 1:
            raise ValueError(
                f"guidance_scale is {self.guidance_scale:g} and scales is set, each in place of the other. Leave one "
                f"of the two out."
            )
        if self.interval is not None and not 0 <= self.interval[0] < self.interval[1]:
            low, high = self.interval
            raise ValueError(f"The guidance interval is ({low}, {high}); expected 0 <= low < high, as sigma / alpha.")
        return self

    def share(self, grid: Grid) -> float:
        """Return the mean number of additional predictions per point of a grid."""
        if self.guidance_scale == 1 and self.scales is None:
            return 0.0
        count = float(len(self.scales or "1"))
        if self.interval is None:
            return count
        low, high = times_between(grid, *self.interval)
        return count * float(((grid.time >= low) & (grid.time <= high)).double().mean())

    def build(
        self, network: Network, null_cond: Mapping[str, Tensor], grid: Grid, negative: Network | None = None
    ) -> Network:
        """Return the guided network, to be sampled on `grid`. See `guided`."""
        times = None if self.interval is None else times_between(grid, *self.interval)
        scale_ramp = None if self.power is None else partial(_rise, self.power, grid.time[0].item())
        scale = self.guidance_scale if self.scales is None else self.scales
        return guided(network, scale, null_cond, self.channels, times, negative, scale_ramp)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str)


def _rise(power: float, first: float, t: Tensor) -> Tensor:
    return (1 - torch.cos(math.pi * (1 - t / first) ** power)) / 2


def guided(
    network: Network,
    guidance_scale: float | Mapping[str, float],
    null_cond: Mapping[str, Tensor],
    channels: Channels = "all",
    times: tuple[float, float] | None = None,
    negative: Network | None = None,
    scale_ramp: Callable[[Tensor], Tensor] | None = None,
) -> Network:
    """Return a network that computes negative + guidance_scale * (positive - negative), where positive = network(x, t,
    **cond). With a scale s_k for each of n parts of the condition it computes e_0 + sum of s_k * (e_k - e_{k-1}), where
    e_k has the first k of them, so that e_n is positive.

    null_cond: replacements of conditions in the negative prediction, by name; broadcast over the batch. A condition
    that it does not name is kept. negative: the network of the negative prediction, for autoguidance a weaker one, with
    an empty null_cond; None: `network` itself, called once with [positive; negative] as one batch. times: guide only at
    t in [low, high], in the network's own time; elsewhere, and with guidance_scale 1, there is one plain call.
    scale_ramp: the position between 1 and the scale at times t [B], from 0 to 1; None: always 1. Output channels beyond
    the guided ones (such as a learned variance) are those of the positive prediction.

    Raises ValueError if the two predictions do not differ, for a null or a scale of an absent condition, and for
    first_three on fewer than three channels.
    """
    if guidance_scale == 1:
        return network
    if isinstance(guidance_scale, Mapping):
        names, scales = list(guidance_scale), list(guidance_scale.values())
        if unknown := next((name for name in names if name not in null_cond), None):
            known = ", ".join(null_cond) or "none"
            raise ValueError(
                f"Guidance has a scale for '{unknown}', which is no condition of the network. Known: {known}."
            )
        nulls = [{name: null_cond[name] for name in names[k:]} for k in range(len(names))]  # of e_0, e_1, …
    else:
        scales, nulls = [guidance_scale], [dict(null_cond)]
    if not null_cond and negative is None:
        raise ValueError(
            f"guidance_scale is {guidance_scale}, but the network has no condition to leave out. Use guidance_scale 1, "
            "a network trained with conditions, or a weaker network as the negative."
        )

    def guided_network(x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor:
        inside = None if times is None else (t >= times[0]) & (t <= times[1])  # [B]
        if inside is not None and not bool(inside.any()):
            return network(x, t, **cond)
        conds = [cond | {name: _null(name, value, cond) for name, value in null.items()} for null in reversed(nulls)]
        if negative is None:
            times_as_many = 1 + len(conds)
            together = {name: torch.cat([cond[name], *(some[name] for some in conds)]) for name in cond}
            out = network(torch.cat([x] * times_as_many), torch.cat([t] * times_as_many), **together)
            predictions = list(out.chunk(times_as_many))
        else:
            predictions = [network(x, t, **cond), negative(x, t, **conds[0])]
        out_positive, count = predictions[0], _num_guided(channels, x.shape[1])
        parts = [prediction[:, :count] for prediction in reversed(predictions)]  # e_0, e_1, …
        mixed, first = parts[0], parts[-1]
        rise = None if scale_ramp is None else scale_ramp(t).view(-1, *[1] * (x.ndim - 1))
        for scale, before, after in zip(scales, parts[:-1], parts[1:], strict=True):
            factor = scale if rise is None else (1 + (scale - 1) * rise).to(mixed)
            mixed = mixed + factor * (after - before)
        if inside is not None:
            mixed = torch.where(inside.view(-1, *[1] * (x.ndim - 1)), mixed, first)
        return torch.cat([mixed, out_positive[:, count:]], dim=1)

    return guided_network


def times_between(grid: Grid, low: float, high: float) -> tuple[float, float]:
    """Return the first and last time of a grid whose noise level sigma / alpha lies in [low, high]; (inf, -inf) if none
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
