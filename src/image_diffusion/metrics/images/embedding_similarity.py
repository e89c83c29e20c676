"""Cosines of embeddings of images and of texts, one value per pair, and retrieval: the share of queries with a matching
item among the k nearest of a gallery (R@k, Karpathy & Fei-Fei 2015), which depends on the size of the gallery, so every
entry states the size. They measure the predictions of a prior, and the agreement of images with their prompts, by a
model that embeds both in one space, such as a CLIP or a SigLIP.

Differences from DALLE2-pytorch: means include pairs of similarity 0, which the original drops as padding; an unrelated
caption is a different caption from anywhere in the set, while the original takes the neighbour's in the batch, even in
a batch of one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.pictures import new_figure, save_figure
from image_diffusion.metrics.distances.jackknife import Estimate, mean_estimate, share_estimate
from image_diffusion.metrics.features.base import Detector, detect
from image_diffusion.metrics.features.pretrained import Transformers
from image_diffusion.metrics.samples import Samples

_EPS = 1e-6
_AT_ONCE = 1024
_GALLERY = 10_000  # maximum number of pairs for `caption_retrieval`


def cosine(first: Tensor, second: Tensor) -> Tensor:
    """Return the cosine of each row of two [N, dim], float64 [N]."""
    return F.cosine_similarity(first.double(), second.double(), dim=1, eps=_EPS)


def similarities(text: Tensor, image: Tensor, predicted: Tensor, unrelated: Tensor) -> dict[str, Tensor]:
    """Return the similarities of N pairs, float64 [N] each, by name. All arguments: [N, dim].

    predicted: from each pair's own caption. unrelated: from another caption. baseline_similarity: caption and real
    image. similarity_with_text, similarity_with_image: the prediction with its caption, and with the real image.
    similarity_with_unrelated_caption: the caption and the unrelated prediction. unrelated_similarity_with_image: the
    real image and the unrelated prediction. difference_from_baseline: of similarity_with_text.
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

    text, image: [N, dim]; train_text, train_image: of training pairs, [M, dim]. Each is the cosine between the real
    image and an embedding that needs no prior. mean_image_similarity_with_image: the mean of the training images.
    nearest_caption_similarity_with_image: the image of the nearest training caption. other_caption_…: the real image of
    another caption (`other_captions`), if there is one.
    """
    similarities = {
        "mean_image_similarity_with_image": cosine(image, train_image.double().mean(0, keepdim=True).expand_as(image)),
        "nearest_caption_similarity_with_image": cosine(image, train_image[nearest_captions(text, train_text)]),
    }
    if (others := other_captions(text)) is not None:
        similarities["other_caption_similarity_with_image"] = cosine(image, image[torch.from_numpy(others)])
    return similarities


def nearest_captions(text: Tensor, captions: Tensor) -> Tensor:
    """Return for each of N texts the index of the caption with the highest cosine, int64 [N].

    text: [N, dim]; captions: [M, dim].

    Captions with equal embeddings, which are common for class captions, are used in rotation.
    """
    different, which = np.unique(captions.numpy(), axis=0, return_inverse=True)
    which = which.reshape(-1)
    rows, counts = np.argsort(which, kind="stable"), np.bincount(which)
    first = np.cumsum(counts) - counts
    directions = F.normalize(torch.from_numpy(different).double(), dim=1)
    nearest = torch.cat([(part.double() @ directions.T).argmax(1) for part in text.split(_AT_ONCE)]).numpy()
    return torch.from_numpy(rows[first[nearest] + np.arange(len(text)) % counts[nearest]])


def other_captions(text: Tensor) -> NDArray[np.int64] | None:
    """Return for each of N pairs the index of a pair with another caption, int64 [N]; None if all captions are equal.

    text: [N, dim]. The result is the next pair with another caption in a fixed random, cyclic order.
    """
    count = len(text)
    order = np.random.default_rng(0).permutation(count)
    twice = np.concatenate([same_rows(text).numpy()[order]] * 2)  # a second round, for pairs without one in the first
    ends_run = np.append(twice[:-1] != twice[1:], False)
    if not ends_run.any():
        return None
    last = np.where(ends_run, np.arange(2 * count), 2 * count)  # end of the run of equal captions around each
    last = np.minimum.accumulate(last[::-1])[::-1][:count]
    others = np.empty(count, dtype=np.int64)
    others[order] = order[(last + 1) % count]
    return others


def similarity_estimates(similarities: dict[str, Tensor]) -> dict[str, Estimate]:
    """Return the means of similarities, with intervals."""
    return {name: mean_estimate(values, -2, 2) for name, values in similarities.items()}


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
        similar = F.normalize(part.double(), dim=1) @ directions.T  # [n, M]
        own = group[:, None] == gallery_groups
        best = similar.masked_fill(~own, -torch.inf).amax(1, keepdim=True)
        before.append(((similar >= best) & ~own).sum(1))
    rank = torch.cat(before)
    note = f"among {len(gallery):,} {of}"
    return {f"retrieval_at_{k}": replace(share_estimate(rank < k), note=note) for k in (1, 5)}


def caption_retrieval(query: Tensor, image: Tensor, captions: Tensor) -> dict[str, Estimate]:
    """Return R@k over at most `_GALLERY` pairs: the rate at which an embedding retrieves an image of its own caption.
    query, image: [N, dim]; captions: the number of each pair's caption, int64 [N]."""
    rows = spread_rows(len(captions), _GALLERY)
    query, image, captions = query[rows], image[rows], captions[rows]
    return retrieval(query, captions, image, captions, f"images of {len(captions.unique()):,} captions")


def plot_similarities(similarities: dict[str, Tensor], title: str, path: Path) -> None:
    """Write two histograms as PNG: cosines of the real images with predictions from their own and other captions."""
    figure = new_figure(8, 4)
    axis = figure.subplots()
    kinds = {"similarity_with_image": "own caption", "unrelated_similarity_with_image": "another caption"}
    for name, label in kinds.items():
        if name in similarities:
            axis.hist(similarities[name].numpy(), bins=50, range=(-1, 1), alpha=0.6, label=label)
    axis.set(title=title, xlabel="cosine of the real image embedding and the one predicted from", ylabel="pairs")
    axis.legend()
    save_figure(figure, path)


def spread_rows(total: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` of `total` row indices, int64, evenly spaced, since rows are ordered by class."""
    return np.linspace(0, total - 1, min(total, most)).round().astype(np.int64)


def same_rows(rows: Tensor) -> Tensor:
    """Return a number for each row of [N, dim], int64 [N], the same for equal rows."""
    return torch.from_numpy(np.unique(rows.numpy(), axis=0, return_inverse=True)[1].reshape(-1))


_PROMPTS_AT_ONCE = 64


class PromptJudge(Transformers):
    """Model of the package transformers that embeds images and texts: CLIP, SigLIP."""

    def build_both(self, device: str = "cpu") -> PromptEncoder:
        """Load both towers. Raises ValueError if the package or the weights are missing, or the model has no text
        tower."""
        import transformers  # `load` of the base class explains how to install it

        images, model, where = self.load(device)
        if not hasattr(model, "get_text_features"):
            raise ValueError(f"evaluate.prompts: {self.weights} embeds no words. Name a CLIP or a SigLIP.")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(where)
        except (OSError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"evaluate.prompts: {self.weights} has no tokenizer: {reason}") from None
        return PromptEncoder(images, model, tokenizer)


class PromptEncoder:
    """Encoder of prompts. images: the detector of the model's vision tower."""

    def __init__(self, images: Detector, model: Any, tokenizer: Any) -> None:
        self.images, self._model, self._tokenizer = images, model, tokenizer

    @torch.inference_mode()
    def texts(self, prompts: list[str]) -> Tensor:
        """Embed N prompts -> float32 [N, dim] on the CPU. Prompts longer than the model's limit are cut."""
        device, parts = next(self._model.parameters()).device, []
        for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
            read = self._tokenizer(
                prompts[start : start + _PROMPTS_AT_ONCE],
                padding="max_length",  # as in SigLIP's training; a CLIP ignores the padding
                truncation=True,
                max_length=self._model.config.text_config.max_position_embeddings,
                return_tensors="pt",
            ).to(device)
            output: Any = self._model.get_text_features(**read)
            parts.append(getattr(output, "pooler_output", output).float().cpu())  # the type depends on the release
        return torch.cat(parts)


def check_prompted(samples: Samples) -> None:
    """Raise ValueError for samples without prompts."""
    if len(samples.protocol.get("prompts", [])) != samples.num_samples:
        raise ValueError(
            "evaluate.prompts is set, but the samples have no prompts. Evaluate a model that takes prompts, or "
            "embeddings made from captions; or leave it out."
        )


def evaluate_prompted(samples: Samples, encoder: PromptEncoder) -> dict[str, Any]:
    """Return entries of metrics.json by name, with the suffix of the detector.

    prompt_similarity: the cosine of image and prompt, which is CLIPScore without its factor 2.5 and its cut at 0.
    other_prompt_similarity: the cosine of the image and another prompt, if there are several. prompt_retrieval_at_1,
    …_at_5: the share of images whose prompt is among the k nearest distinct prompts.
    """
    prompts: list[str] = samples.protocol["prompts"]
    different = sorted(set(prompts))
    numbers = {prompt: number for number, prompt in enumerate(different)}
    number = torch.tensor([numbers[prompt] for prompt in prompts])
    texts = encoder.texts(different)
    features = detect(encoder.images, samples, "images beside prompts").features
    pairs = {"prompt_similarity": texts[number]}
    if (others := other_captions(number[:, None])) is not None:
        pairs["other_prompt_similarity"] = texts[number[torch.from_numpy(others)]]
    entries = {name: mean_estimate(cosine(features, text), -1, 1) for name, text in pairs.items()}
    retrievals = retrieval(features, number, texts, torch.arange(len(texts)), "prompts")
    entries |= {f"prompt_{name}": entry for name, entry in retrievals.items()}
    return {encoder.images.metric_name(name): entry.as_dict() for name, entry in entries.items()}
