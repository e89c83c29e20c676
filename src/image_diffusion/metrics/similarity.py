"""How near predicted image embeddings are to their captions and to the real ones: cosines, a number a pair.

Where it differs from DALLE2-pytorch: means are over every pair, those of similarity 0 among them, which the original
drops as padding; unrelated captions come from the whole set, not from the same batch.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from image_diffusion.metrics.intervals import Estimate, mean_estimate
from image_diffusion.metrics.moments import block_of_each

_EPS = 1e-6


def cosine(first: Tensor, second: Tensor) -> Tensor:
    """The cosine of each row of two [N, dim], float64 [N]."""
    return F.cosine_similarity(first.double(), second.double(), dim=1, eps=_EPS)


def similarities(text: Tensor, image: Tensor, predicted: Tensor, unrelated: Tensor) -> dict[str, Tensor]:
    """Of N pairs, float64 [N] each, by name. All arguments: [N, dim].

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


def similarity_estimates(found: dict[str, Tensor]) -> dict[str, Estimate]:
    """Their means, with intervals."""
    return {name: mean_estimate(each, block_of_each(len(each)), -2, 2) for name, each in found.items()}
