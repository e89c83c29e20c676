"""Retrieval: the share of queries with a matching item among the k nearest of a gallery (R@k, Karpathy & Fei-Fei 2015).
The share depends on the size of the gallery, so every entry states the size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.metrics.distances.jackknife import Estimate, share_estimate

RANKS = (1, 5)
_AT_ONCE = 1024


def retrieval(
    query: Tensor, query_groups: Tensor, gallery: Tensor, gallery_groups: Tensor, of: str
) -> dict[str, Estimate]:
    """Return "retrieval_at_1" and "retrieval_at_5": the share of queries with an item of their own group among the k
    items of highest cosine.

    query: [N, dim]; gallery: [M, dim]; query_groups, gallery_groups: their groups, int64 [N] and [M]. of: the kind of
    the gallery's items, for the note. Ties count against the query, so that equal embeddings retrieve nothing.
    """
    directions = F.normalize(gallery.double(), dim=1)
    before = []
    for part, group in zip(query.split(_AT_ONCE), query_groups.split(_AT_ONCE), strict=True):
        cosine = F.normalize(part.double(), dim=1) @ directions.T  # [n, M]
        own = group[:, None] == gallery_groups
        best = cosine.masked_fill(~own, -torch.inf).amax(1, keepdim=True)
        before.append(((cosine >= best) & ~own).sum(1))
    rank = torch.cat(before)
    note = f"among {len(gallery):,} {of}"
    estimates = {f"retrieval_at_{k}": share_estimate(rank < k) for k in RANKS}
    return {
        name: replace(estimate, note="; ".join(filter(None, (note, estimate.note))))
        for name, estimate in estimates.items()
    }


def spread_rows(total: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` of `total` row indices, int64, evenly spaced, since rows are ordered by class."""
    return np.linspace(0, total - 1, min(total, most)).round().astype(np.int64)


def same_rows(rows: Tensor) -> Tensor:
    """Return a number for each row of [N, dim], int64 [N], the same for equal rows."""
    return torch.from_numpy(np.unique(rows.numpy(), axis=0, return_inverse=True)[1].reshape(-1))
