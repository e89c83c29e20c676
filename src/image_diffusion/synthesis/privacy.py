"""Statistics of the information in synthetic images about the training images of their model. Distances are between
images reduced to 16 x 16 pixels (`metrics/images/memorization.py`), not between features of the data set's own
detector: it was trained on the same images, which by itself sets them apart from held-out images.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from image_diffusion.metrics.distances.jackknife import Estimate, mean_estimate, share_estimate
from image_diffusion.metrics.distances.precision_recall import squared_distances
from image_diffusion.metrics.images.memorization import LEAST_HELD_OUT

FALSE_POSITIVES = 0.01
"""False-positive rate at which `true_positives` is measured."""
_LEAST = 20


def nearest_distances(queries: Tensor, images: Tensor, k: int = 1) -> Tensor:
    """Return the distances of queries [N, D] to their k nearest images of [M, D], float64 [N, k], the nearest first."""
    rows = [squared.topk(k, largest=False).values.sqrt().cpu() for _, squared in squared_distances(queries, images)]
    return torch.cat(rows)


def membership_auc(members: Tensor, others: Tensor) -> Estimate:
    """Return the area under the ROC curve of membership inference by the distance to the nearest synthetic image.

    It is the probability that a training image is nearer to the synthetic set than an image outside the training set;
    0.5: the set does not distinguish them (the attack of Chen et al. 2020, "GAN-Leaks", on generated samples alone).
    members, others: distances [N] and [M]. The interval is DeLong's (DeLong et al. 1988), over members and others of
    the same distributions, for a fixed synthetic set.
    """
    n, m = len(members), len(others)
    if min(n, m) < _LEAST:
        value = _placements(members, others).mean().item() if min(n, m) else math.nan
        return Estimate(value, n, note=f"no interval: {min(n, m)} images are fewer than {_LEAST}")
    of_members, of_others = _placements(members, others), 1 - _placements(others, members)
    value = float(of_members.mean())
    reach = 1.96 * math.sqrt(float(of_members.var() / n + of_others.var() / m))
    return Estimate(value, n, value, (max(0.0, value - reach), min(1.0, value + reach)))


def _placements(near: Tensor, far: Tensor) -> Tensor:
    """Return for each distance of `near` the share of larger distances in `far`; ties count half. Float64 [N]."""
    ordered = far.to(torch.float64).sort().values
    below, up_to = (torch.searchsorted(ordered, near.to(torch.float64), right=right) for right in (False, True))
    return 1 - (below + up_to).to(torch.float64) / 2 / len(far)


def true_positives(members: Tensor, others: Tensor) -> Estimate:
    """Return the share of members that are recognised at the threshold where 1 % of the others are mistaken for members
    (Carlini et al. 2022, "Membership inference attacks from first principles", section III).

    members, others: distances to the nearest synthetic image, [N] and [M]. Others at a distance of 0 are left out: they
    are trained on, too. The interval is Wilson's, for a fixed threshold.
    """
    others = others[others > 0]
    if len(others) < LEAST_HELD_OUT:
        return Estimate(math.nan, len(members), note=f"not measured: it takes {LEAST_HELD_OUT} held-out images")
    return share_estimate(members < others.quantile(FALSE_POSITIVES))


def nearest_ratio(samples: Tensor, train: Tensor) -> Estimate:
    """Return the mean ratio of the distances to the nearest and the second nearest training image: near 0 for copies of
    single images. samples, train: [N, D] and [M, D]."""
    first, second = nearest_distances(samples, train, 2).unbind(dim=1)
    ratio = torch.where(second > 0, first / second, torch.zeros_like(first))
    return mean_estimate(ratio, 0, 1)
