"""Cosines of predicted image embeddings to their captions and to the real ones, a number a pair.

Differences from DALLE2-pytorch: means are over every pair, those of similarity 0 among them, which the original drops
as padding; an unrelated caption is another one, from anywhere in the set, where the original takes that of the
neighbour in the batch, even in a batch of one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.metrics.distances.jackknife import Estimate, mean_estimate

_EPS = 1e-6


def cosine(first: Tensor, second: Tensor) -> Tensor:
    """Return the cosine of each row of two [N, dim], float64 [N]."""
    return F.cosine_similarity(first.double(), second.double(), dim=1, eps=_EPS)


def similarities(text: Tensor, image: Tensor, predicted: Tensor, unrelated: Tensor) -> dict[str, Tensor]:
    """Return the similarities of N pairs, float64 [N] each, by name. All arguments: [N, dim].

    predicted: from each pair's own caption. unrelated: from another one's. baseline_similarity: caption and real image.
    similarity_with_text, similarity_with_image: the prediction and its caption, and the real image.
    similarity_with_unrelated_caption: the caption and the prediction from another. unrelated_similarity_with_image: the
    real image and that prediction. difference_from_baseline: of similarity_with_text.
    """
    baseline, with_text = cosine(text, image), cosine(text, predicted)
    return {
        "baseline_similarity": baseline,
        "similarity_with_text": with_text,
        "similarity_with_image": cosine(image, predicted),
        "similarity_with_unrelated_caption": cosine(text, unrelated),
        "unrelated_similarity_with_image": cosine(image, unrelated),
        "difference_from_baseline": with_text - baseline,
    }


def baselines(text: Tensor, image: Tensor, train_text: Tensor, train_image: Tensor) -> dict[str, Tensor]:
    """Return the baselines of a prediction's cosine to the real image, of N pairs, float64 [N] each, by name.

    text, image: [N, dim]; train_text, train_image: of training pairs, [M, dim]. Each is the cosine of the real image
    and an embedding for which no prior is needed. mean_image_similarity_with_image: the mean of the training images.
    nearest_caption_similarity_with_image: the image of the nearest training caption. other_caption_…: the real image
    of another caption (`other_captions`), where there is one.
    """
    similarities = {
        "mean_image_similarity_with_image": cosine(image, train_image.double().mean(0, keepdim=True).expand_as(image)),
        "nearest_caption_similarity_with_image": cosine(image, train_image[nearest_captions(text, train_text)]),
    }
    if (others := other_captions(text)) is not None:
        similarities["other_caption_similarity_with_image"] = cosine(image, image[torch.from_numpy(others)])
    return similarities


def nearest_captions(text: Tensor, captions: Tensor) -> Tensor:
    """Return for each of N texts the number of the caption of the highest cosine, int64 [N].

    text: [N, dim]; captions: [M, dim].

    Captions with the same embedding, as many captions of classes have, are taken in turn.
    """
    different, which = np.unique(captions.numpy(), axis=0, return_inverse=True)
    which = which.reshape(-1)
    rows, counts = np.argsort(which, kind="stable"), np.bincount(which)
    first = np.cumsum(counts) - counts
    directions = F.normalize(torch.from_numpy(different).double(), dim=1)
    nearest = torch.cat([(part.double() @ directions.T).argmax(1) for part in text.split(1024)]).numpy()
    return torch.from_numpy(rows[first[nearest] + np.arange(len(text)) % counts[nearest]])


def other_captions(text: Tensor) -> NDArray[np.int64] | None:
    """Return for each of N pairs another pair whose caption is not the same, int64 [N]; None for a single caption.

    text: [N, dim]. In an order drawn once and for all, the next pair with another caption, round the whole set.
    """
    count = len(text)
    _, caption = np.unique(text.numpy(), axis=0, return_inverse=True)
    order = np.random.default_rng(0).permutation(count)
    twice = np.concatenate([caption.reshape(-1)[order]] * 2)  # a second round, for those that find nothing in the first
    ends_run = np.append(twice[:-1] != twice[1:], False)
    if not ends_run.any():
        return None
    last = np.where(ends_run, np.arange(2 * count), 2 * count)  # of the run of equal captions that each is in
    last = np.minimum.accumulate(last[::-1])[::-1][:count]
    others = np.empty(count, dtype=np.int64)
    others[order] = order[(last + 1) % count]
    return others


def similarity_estimates(similarities: dict[str, Tensor]) -> dict[str, Estimate]:
    """Return the means of similarities, with intervals."""
    return {name: mean_estimate(values, -2, 2) for name, values in similarities.items()}
