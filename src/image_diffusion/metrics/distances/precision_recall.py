"""Precision and recall (Kynkäänniemi et al. 2019, eq. 1 and 2), density and coverage (Naeem et al. 2020, eq. 3 and 4).

A set's manifold is the union of balls around its members that reach to their k-th nearest neighbour in the set.
Distances are squared and Euclidean, and a point on the border counts as inside, as in ADM's evaluator. Distances are
computed on a GPU if available. torch-fidelity has neither density and coverage nor intervals.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from image_diffusion.core.devices import best_device
from image_diffusion.metrics.distances.jackknife import Estimate, jackknife, mean_estimate, too_few
from image_diffusion.metrics.distances.moments import NUM_BLOCKS, block_of_each

_ROWS = 1024
_FLOAT32_NOISE = 1e-13  # squared distance, relative to squared norms, under which float32 features are the same point
_SPARE_NEIGHBOURS = 20
_BORDER = 1 + 1e-9  # factor of squared radii, far above the rounding errors that put copies on the border outside


def manifold_estimates(
    features: Tensor, reference: Tensor, k: int = 3, reference_radii: Tensor | None = None
) -> dict[str, Estimate]:
    """Return precision, recall, density and coverage of samples [N, D] against a reference [M, D].

    Intervals leave out one block of the samples at a time, exactly: a ball that loses a neighbour is measured again.
    reference_radii: `ball_radii` of the reference; unset: computed. Raises ValueError if a set has k members or fewer.
    """
    _check_number("samples", features, k)
    radii = ball_radii(reference, k) if reference_radii is None else reference_radii
    device = best_device()
    features, reference, block = (tensor.to(device) for tensor in (features, reference, block_of_each(len(features))))
    without = (_BORDER * _radii_without_each_block(features, k, block)).T.contiguous()  # [1 + blocks, N]
    widest = without.amax(dim=0)
    samples_inside = torch.zeros(len(features), dtype=torch.float64, device=device)
    covered_by = torch.zeros(len(reference), NUM_BLOCKS, dtype=torch.bool, device=device)
    recalled = torch.zeros(len(reference), 1 + NUM_BLOCKS, dtype=torch.bool, device=device)
    membership = torch.nn.functional.one_hot(block, NUM_BLOCKS).to(torch.float32)
    for rows, squared in squared_distances(reference, features):
        inside = squared <= radii[rows].unsqueeze(1)  # [R, N]: sample in the ball of a reference image
        samples_inside += inside.sum(dim=0)
        covered_by[rows] = inside.to(torch.float32) @ membership > 0
        reaching = (squared <= widest).any(dim=0)  # few samples have a ball that reaches one of these rows
        near, radii_of = squared[:, reaching], without[:, reaching]
        for column, radius in enumerate(radii_of):
            recalled[rows, column] = (near <= radius).any(dim=1)
    others = covered_by.sum(dim=1, keepdim=True) - covered_by.to(torch.int64)
    covered = torch.cat([covered_by.any(dim=1, keepdim=True), others > 0], dim=1)
    n = len(features)
    samples_inside, recalled, covered = (tensor.cpu() for tensor in (samples_inside, recalled, covered))
    return {
        "precision": mean_estimate((samples_inside > 0).to(torch.float64), 0, 1),
        "recall": _share(recalled, n),
        "density": mean_estimate(samples_inside / k, 0),
        "coverage": _share(covered, n),
    }


def ball_radii(reference: Tensor, k: int) -> Tensor:
    """Return the squared radii of the balls of a reference [M, D], float64 [M], on the best device.

    Raises ValueError if it has k members or fewer.
    """
    _check_number("reference images", reference, k)
    return _BORDER * neighbour_radii(reference.to(best_device()), k)


def neighbour_radii(points: Tensor, k: int) -> Tensor:
    """Return the squared distance of each point to its k-th nearest neighbour in the set, float64 [N]."""
    return torch.cat(
        [squared.topk(k + 1, largest=False).values[:, k] for _, squared in squared_distances(points, points)]
    )


def squared_distances(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield squared Euclidean distances in float64, a slice of `first` at a time: (int64 [R], float64 [R, M]), on the
    device of the inputs."""
    centre = second.to(torch.float64).mean(dim=0)
    x, y = first.to(torch.float64) - centre, second.to(torch.float64) - centre
    x_norm, y_norm = x.square().sum(dim=1), y.square().sum(dim=1)
    for rows in torch.arange(len(x), device=x.device).split(_ROWS):
        norms = x_norm[rows].unsqueeze(1) + y_norm
        squared = (x[rows] @ y.T).mul_(-2).add_(norms)
        yield rows, squared.masked_fill_(squared <= norms.mul_(_FLOAT32_NOISE), 0)


def _check_number(kind: str, rows: Tensor, k: int) -> None:
    if len(rows) <= k:
        raise ValueError(f"Precision and recall with k = {k} need more than {k} {kind}; got {len(rows)}.")


def _radii_without_each_block(points: Tensor, k: int, block: Tensor) -> Tensor:
    """Return squared radii in the whole set, then without each block, float64 [N, 1 + blocks]; -1 for the block's
    members.

    Only the k + 21 nearest points are searched: blocks are random, so a neighbour certainly remains among them (the
    probability that all 21 are in one block is 1e-27).
    """
    near = min(k + 1 + _SPARE_NEIGHBOURS, len(points))
    radii = torch.empty(len(points), 1 + NUM_BLOCKS, dtype=torch.float64, device=points.device)
    for rows, squared in squared_distances(points, points):
        nearest = squared.topk(near, largest=False, sorted=True)
        radii[rows, 0] = nearest.values[:, k]
        for number in range(NUM_BLOCKS):
            remaining = block[nearest.indices] != number
            position = (remaining.cumsum(dim=1) <= k).sum(dim=1).clamp(max=near - 1)
            radii[rows, 1 + number] = nearest.values.gather(1, position.unsqueeze(1)).squeeze(1)
    radii[torch.arange(len(points), device=points.device), 1 + block] = -1
    return radii


def _share(hit: Tensor, n: int) -> Estimate:
    """Return the share in the first column; the other columns are its values with one block left out.

    More samples cover more, and this dependence on the number of samples is not a bias of order 1/N.
    """
    shares = hit.to(torch.float64).mean(dim=0).tolist()
    if few := too_few(n):
        return Estimate(shares[0], n, note=few)
    return jackknife(shares[0], shares[1:], n, 0, 1, centre="value")
