"""Differences between the variants of a study and its base, with intervals over seeds and samples.

Each seed trains its own weights and samples its own images, so the variance over the seeds of a variant includes both.
Three seeds give a poor estimate of a variance, so each variant's is shrunk towards the common one, as far as the
variants agree (Smyth 2004, "Linear models and empirical Bayes methods for assessing differential expression", sections
3 and 6.2), and the interval is Welch's. Distances are compared as ratios, by their logarithms. With one seed the
variance is unknown: the interval is over samples only, from the jackknife of each run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from image_diffusion.core.journal.metric_definitions import definition_of

SMALLEST_SPREAD = 1e-3
"""Share of the median variance that is assumed for a variant whose seeds give equal values."""

_RATIOS = ("fd", "fd_infinity", "spatial_fd", "class_fd", "reconstruction_fd")
Verdict = Literal["better", "worse", "within noise"]


@dataclass(frozen=True)
class Measured:
    """A metric of one run. deviation: its standard deviation over samples, if known."""

    value: float
    deviation: float | None = None


@dataclass(frozen=True)
class Difference:
    """Difference between a variant and the base.

    is_ratio: True for a share of the base's value, as for distances if all runs are positive: -0.2 is a fifth less.
    interval: 95 %; None if the noise is unknown. verdict: also None if the metric differs and has no better direction.
    over: the sources of the noise.
    """

    value: float
    interval: tuple[float, float] | None
    verdict: Verdict | None
    over: Literal["seeds and samples", "samples only"] | None
    is_ratio: bool


@dataclass(frozen=True)
class Level:
    """Mean of a metric over the runs of a variant, and two 95 % intervals, None if the noise is unknown.

    over_seeds: of the mean over new trainings, each with its own images. over_samples: of the mean over the same
    trainings with new images.
    """

    value: float
    over_seeds: tuple[float, float] | None
    over_samples: tuple[float, float] | None


def level(metric: str, runs: Sequence[Measured]) -> Level:
    """Return the level of the runs of one variant. runs: one for each seed, at least one.

    The interval over seeds is Student's, of the logarithms if values are compared as ratios; the interval over samples
    is from the jackknife of each run. Intervals of shares are cut to [0, 1].
    """
    from scipy.special import stdtrit

    log, n = _have_ratios(metric, runs), len(runs)
    scaled = [_scaled(run, log) for run in runs]
    mean, deviations = _mean(scaled), [run.deviation for run in scaled]

    definition = definition_of(metric)
    least, most = (0.0, 1.0) if definition is not None and definition.is_share else (-math.inf, math.inf)

    def level_at(reach: float) -> tuple[float, float]:
        low, high = mean - reach, mean + reach
        return (math.exp(low), math.exp(high)) if log else (max(low, least), min(high, most))

    seeds = level_at(float(stdtrit(n - 1, 0.975)) * math.sqrt(_variance(scaled) / n)) if n > 1 else None
    finite = [deviation for deviation in deviations if deviation is not None]
    samples = level_at(1.96 * math.hypot(*finite) / n) if len(finite) == n else None
    return Level(math.exp(mean) if log else mean, seeds, samples)


def is_ratio(metric: str) -> bool:
    """Return True if values of a metric are compared as ratios: distances, whose noise grows with their value."""
    definition = definition_of(metric)
    return definition is not None and definition.names in _RATIOS


def differences(
    metric: str, base: Sequence[Measured], variants: Mapping[str, Sequence[Measured]]
) -> dict[str, Difference]:
    """Return the difference between each variant and the base, by the variant's name. base, variants: the measurements
    of each run; a variant without runs is left out, and all are left out if the base has no runs.

    Variants with a run of zero or less, which `fd_infinity` may give, are compared separately from the others.
    """
    groups: dict[bool, dict[str, Sequence[Measured]]] = {}
    for name, runs in variants.items():
        groups.setdefault(_have_ratios(metric, (*base, *runs)), {})[name] = runs
    by_name: dict[str, Difference] = {}
    for log, group in groups.items():
        by_name |= _differences(metric, log, base, group)
    return {name: by_name[name] for name in variants if name in by_name}


def _have_ratios(metric: str, runs: Sequence[Measured]) -> bool:
    return is_ratio(metric) and all(run.value > 0 for run in runs)


def _differences(
    metric: str, log: bool, base: Sequence[Measured], variants: Mapping[str, Sequence[Measured]]
) -> dict[str, Difference]:
    """Return the differences of variants, in logarithms or in values."""
    groups = {name: [_scaled(run, log) for run in runs] for name, runs in {"": base, **variants}.items() if runs}
    if "" not in groups:
        return {}
    several = {name: runs for name, runs in groups.items() if len(runs) > 1}
    freedoms = [len(runs) - 1 for runs in several.values()]
    spread = dict(zip(several, moderated([_variance(runs) for runs in several.values()], freedoms), strict=True))
    with_spread = {name: (runs, spread.get(name)) for name, runs in groups.items()}
    own = with_spread.pop("")
    return {name: _difference(metric, log, sum(freedoms), own, variant) for name, variant in with_spread.items()}


def moderated(variances: Sequence[float], freedoms: Sequence[int]) -> list[tuple[float, float]]:
    """Return the variances of groups, each shrunk towards the common value, and its degrees of freedom (Smyth 2004)."""
    from scipy.special import digamma, polygamma

    positive = sorted(value for value in variances if value > 0)
    if not positive:
        return [(0.0, float(freedom)) for freedom in freedoms]
    smallest = SMALLEST_SPREAD * positive[len(positive) // 2]
    # log variances without bias: E log(chi²_d / d) = digamma(d / 2) - log(d / 2)
    logs = [
        math.log(max(variance, smallest)) - float(digamma(d / 2)) + math.log(d / 2)
        for variance, d in zip(variances, freedoms, strict=True)
    ]
    mean, count, total = math.fsum(logs) / len(logs), len(logs), float(sum(freedoms))
    if count < 2:
        return [(variances[0], total)]
    excess = math.fsum((value - mean) ** 2 for value in logs) / (count - 1)
    excess -= math.fsum(float(polygamma(1, d / 2)) for d in freedoms) / count
    if excess > 0:
        prior = 2 * _inverse_trigamma(excess)
        typical = math.exp(mean + float(digamma(prior / 2)) - math.log(prior / 2))
    else:  # no more different than by chance: one variance for all
        prior, typical = math.inf, math.fsum(v * d for v, d in zip(variances, freedoms, strict=True)) / total
    results = []
    for variance, d in zip(variances, freedoms, strict=True):
        weight = 1.0 if math.isinf(prior) else prior / (prior + d)
        results.append((weight * typical + (1 - weight) * max(variance, smallest), min(prior + d, total)))
    return results


def _difference(
    metric: str,
    log: bool,
    freedoms: int,
    base: tuple[Sequence[Measured], tuple[float, float] | None],
    variant: tuple[Sequence[Measured], tuple[float, float] | None],
) -> Difference:
    from scipy.special import stdtrit

    value = _mean(variant[0]) - _mean(base[0])
    over: Literal["seeds and samples", "samples only"] | None = None
    reach = math.nan
    if base[1] is not None and variant[1] is not None:
        parts = [(spread[0] / len(runs), spread[1]) for runs, spread in (base, variant) if spread is not None]
        variance = math.fsum(part for part, _ in parts)
        freedom = min(freedoms, variance**2 / math.fsum(part**2 / d for part, d in parts)) if variance else 1.0
        reach, over = float(stdtrit(freedom, 0.975)) * math.sqrt(variance), "seeds and samples"
    else:
        deviations = [run.deviation for runs in (base[0], variant[0]) for run in runs]
        if len(deviations) == 2 and None not in deviations:
            reach, over = 1.96 * math.hypot(*(run or 0.0 for run in deviations)), "samples only"
    bounds = None if math.isnan(reach) else (value - reach, value + reach)
    verdict: Verdict | None = None
    if bounds is not None:
        definition = definition_of(metric)
        better = definition.better if definition is not None else ""
        if bounds[0] <= 0 <= bounds[1]:
            verdict = "within noise"
        elif better in ("higher", "lower"):
            verdict = "better" if (value > 0) == (better == "higher") else "worse"
    if log:
        value, bounds = math.expm1(value), bounds and (math.expm1(bounds[0]), math.expm1(bounds[1]))
    return Difference(value, bounds, verdict, over, is_ratio=log)


def _scaled(run: Measured, log: bool) -> Measured:
    if not log:
        return run
    return Measured(math.log(run.value), None if run.deviation is None else run.deviation / run.value)


def _mean(runs: Sequence[Measured]) -> float:
    return math.fsum(run.value for run in runs) / len(runs)


def _variance(runs: Sequence[Measured]) -> float:
    """Return the variance over seeds; for runs with equal values, the variance over samples if all are known."""
    deviations = [run.deviation for run in runs if run.deviation is not None]
    if len({run.value for run in runs}) == 1:
        is_known = len(deviations) == len(runs)
        return math.fsum(deviation**2 for deviation in deviations) / len(runs) if is_known else 0.0
    mean = _mean(runs)
    return math.fsum((run.value - mean) ** 2 for run in runs) / (len(runs) - 1)


def _inverse_trigamma(value: float) -> float:
    """Return x with trigamma(x) = value, by Newton's method on 1 / trigamma (Smyth 2004, appendix)."""
    from scipy.special import polygamma

    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(polygamma(1, x))
        step = trigamma * (1 - trigamma / value) / float(polygamma(2, x))
        x += step
        if -step / x < 1e-8:
            break
    return x
