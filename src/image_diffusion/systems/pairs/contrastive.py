"""A small CLIP, trained on the crops of a data set and their captions, without any download.

The image tower is the network of the embedded detector, with an embedding for its outputs; the text tower is a
transformer over words. Both learn by the symmetric cross entropy over the cosines of a batch (Radford et al. 2021,
arXiv:2103.00020, section 2.3 and figure 3), except that equal captions are not negatives. Files:

image.safetensors, text.safetensors             the towers
towers.json                                     what they are, and how often a held-out image finds its caption
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from image_diffusion.core.config.base import Config, dump
from image_diffusion.core.files.atomic import digest, read_json, sha256_file, write_bytes, write_json
from image_diffusion.core.files.partial_results import Arrays, batches
from image_diffusion.core.process.progress import Progress
from image_diffusion.data.encoded.captions import CaptionedCrops
from image_diffusion.data.encoded.pairs import Splits
from image_diffusion.metrics.features.classifier import FEATURES, Classifier
from image_diffusion.metrics.features.classifier_training import shifted
from image_diffusion.metrics.images.embedding_similarity import retrieval, spread_rows
from image_diffusion.networks.token_transformer import TextTower
from image_diffusion.text_encoders.hashing import words_of
from image_diffusion.text_encoders.learned import FILE, LearnedText, read_text, word_numbers, write_text

FORMAT = 1
_IMAGE, _DESCRIBED = "image.safetensors", "towers.json"
_LONGEST = 64  # maximum number of words of a caption
_MOST_WORDS = 20_000
_MOST_LOOKED_AT, _AT_ONCE = 5000, 256  # number of images for retrieval and statistics
_KEPT = 32  # number of times that the state of a training is stored
_TEMPERATURE, _MOST_SCALE = 0.07, 100.0  # initial value, and limit of its inverse: section 2.5


class ContrastiveTraining(Config):
    """Settings of the training of the two towers."""

    seed: int = Field(0, ge=0)
    """Seed of the initial weights, the order of the pairs, the choice of captions and the shifts of the images."""
    epochs: float = Field(16, gt=0)
    """Passes over the training pairs."""
    batch_size: int = Field(256, ge=2)
    """Number of pairs per step: each is contrasted with all others."""
    learning_rate: float = Field(0.002, gt=0)
    """Highest learning rate; it rises over the first 30 % of the steps and then falls to zero (one cycle)."""


class ImageTower:
    """Encoder of images -> embeddings of norm 1. identity: of both towers."""

    def __init__(self, network: Classifier, identity: dict[str, Any], device: torch.device) -> None:
        self._network, self._device = network.to(device).eval().requires_grad_(False), device
        self.identity, self.dim = identity, FEATURES

    @torch.inference_mode()
    def images(self, images: Tensor) -> Tensor:
        """Encode uint8 [B, C, H, W] -> float32 [B, dim], on the CPU."""
        return F.normalize(self._network(images.to(self._device))[1], dim=1).cpu()


def trained_towers(
    crops: CaptionedCrops,
    splits: Splits,
    settings: ContrastiveTraining,
    num_tokens: int,
    folder: Path,
    device: torch.device,
) -> tuple[ImageTower, LearnedText]:
    """Return the towers of a folder; train them first if they do not exist. Held-out crops and pairs outside the
    training split are only used to measure retrieval. Raises ValueError, before any training, if captions are missing
    or all the same, or if nothing is held out.
    """
    pairs = _CaptionedImages.from_crops(crops, splits)
    described = {"format": FORMAT, "pairs": pairs.digest, "training": dump(settings)}
    if crops.shape[2] > crops.shape[1]:
        described["resolution"] = max(crops.shape[1:])  # older towers used the height of wide images
    made_from = digest(described)
    if not _is_kept(folder, made_from):
        _train(pairs, settings, made_from, folder, device)
    text = read_text(folder, num_tokens, device)
    image = _image_network(crops)
    image.load_state_dict(load_file(folder / _IMAGE))
    return ImageTower(image, text.identity, device), text


def _image_network(crops: CaptionedCrops) -> Classifier:
    """Return the network of the image tower, with random weights, for the longer side of the crops."""
    return Classifier(crops.shape[0], FEATURES, max(crops.shape[1:]))


def _is_kept(folder: Path, made_from: str) -> bool:
    if not all((folder / name).is_file() for name in (_DESCRIBED, _IMAGE, FILE)):
        return False
    description = read_json(folder / _DESCRIBED)
    hashes = {name: sha256_file(folder / name) for name in (_IMAGE, FILE)}
    return bool(description["made_from"] == made_from and description["files"] == hashes)


@dataclass(frozen=True)
class _CaptionedImages:
    """Crops that have captions. rows: their numbers among the crops. held_out: bool [N]."""

    crops: CaptionedCrops
    rows: NDArray[np.int64]
    captions: list[list[str]]
    held_out: NDArray[np.bool_]
    digest: str

    @classmethod
    def from_crops(cls, crops: CaptionedCrops, splits: Splits) -> _CaptionedImages:
        contents = [crops.shard(shard) for shard in range(crops.num_shards)]
        captions = [texts for shard in contents for texts in shard.captions]
        rows = np.concatenate([shard.rows for shard in contents])
        hashes = [sample.sha256 for shard in contents for sample in shard.samples]
        held_out = crops.held_out[rows] | ~splits.trains(hashes)
        shards = [shard.sha256 for shard in contents]
        pairs = cls(crops, rows, captions, held_out, digest([shards, captions, held_out.tolist()]))
        pairs._check()
        return pairs

    def _check(self) -> None:
        if not self.captions:
            raise ValueError(
                "pairs.type is contrastive, but no image has a caption. Choose other pairs.captions, or put captions "
                "next to the images."
            )
        different = {caption for texts in self.captions for caption in texts}
        if len(different) < 2:
            raise ValueError(
                f"pairs.type is contrastive, but all {len(self.captions):,} images have the same caption, "
                f"{next(iter(different))!r}: training needs different captions. Choose other pairs.captions."
            )
        if self.held_out.all() or not self.held_out.any():
            raise ValueError(
                f"pairs.type is contrastive, but {'all' if self.held_out.all() else 'none'} of {len(self.captions):,} "
                f"pairs are held out: training needs some pairs and the retrieval needs others. Change pairs.splits or "
                f"data.validation_fraction."
            )
        learnt = (self.captions[i] for i in np.flatnonzero(~self.held_out))
        if not any(words_of(caption) for texts in learnt for caption in texts):
            raise ValueError("pairs.type is contrastive, but no caption has a word. Choose other pairs.captions.")


def _train(
    pairs: _CaptionedImages, settings: ContrastiveTraining, made_from: str, folder: Path, device: torch.device
) -> None:
    """Train, and write the towers and their description."""
    learnt = np.flatnonzero(~pairs.held_out)
    words, length = _words([pairs.captions[i] for i in learnt])
    captions = _with_words(pairs.captions, words)
    learnt = learnt[[bool(captions[i]) for i in learnt]]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        image = _image_network(pairs.crops).to(device)
        text = TextTower(len(words), length, FEATURES).to(device)
    _fit(image, text, replace(pairs, captions=captions), learnt, words, settings, device)
    tensors = {name: value.cpu().contiguous() for name, value in image.state_dict().items()}
    if not all(bool(torch.isfinite(value).all()) for value in (*tensors.values(), *text.state_dict().values())):
        raise ValueError("The towers' weights are not finite. Lower pairs.training.learning_rate.")
    write_bytes(folder / _IMAGE, save(tensors))
    write_text(folder, text, words, sha256_file(folder / _IMAGE))
    files = {name: sha256_file(folder / name) for name in (_IMAGE, FILE)}
    encoder = read_text(folder, 0, device)
    retrievals = _retrieval(ImageTower(image, encoder.identity, device), encoder, pairs)
    described = {"format": FORMAT, "made_from": made_from, "num_pairs": len(learnt), "num_words": len(words)}
    write_json(folder / _DESCRIBED, {**described, **retrievals, "training": dump(settings), "files": files})
    print(
        f"towers: {retrievals['retrieval_at_1']:.1%} of {retrievals['num_held_out']:,} held-out images find their "
        f"caption among {retrievals['num_captions']:,} (chance {retrievals['chance']:.1%}), {folder / _DESCRIBED}"
    )


def _words(captions: list[list[str]]) -> tuple[list[str], int]:
    """Return the most frequent words, and the number of words of the longest caption, both limited."""
    counts, longest = Counter[str](), 1
    for caption in (caption for texts in captions for caption in texts):
        words = words_of(caption)
        longest = max(longest, len(words))
        counts.update(words)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    return frequent[:_MOST_WORDS], min(longest, _LONGEST)


def _with_words(captions: list[list[str]], words: list[str]) -> list[list[str]]:
    """Return the captions of each image that contain one of the words; others carry no information."""
    known = set(words)
    return [[caption for caption in texts if not known.isdisjoint(words_of(caption))] for texts in captions]


def _fit(
    image: Classifier,
    text: TextTower,
    pairs: _CaptionedImages,
    learnt: NDArray[np.int64],
    words: list[str],
    settings: ContrastiveTraining,
    device: torch.device,
) -> None:
    """Train both towers in place; finally compute the statistics of batch normalisation from unshifted training
    images."""
    size = min(settings.batch_size, len(learnt))
    steps = max(8, math.ceil(settings.epochs * len(learnt) / size))
    log_scale = nn.Parameter(torch.tensor(-math.log(_TEMPERATURE), device=device))
    parameters = [*image.parameters(), *text.parameters(), log_scale]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=steps)
    image.train()

    def trained(first: int, last: int) -> Arrays:
        for step in range(first, last):
            rng = np.random.default_rng([settings.seed, 2, step])
            chosen = _batch(learnt, step, size, settings.seed)
            captions = [(own := pairs.captions[i])[rng.integers(len(own))] for i in chosen]
            pixels = pairs.crops.images(pairs.rows[chosen])
            reach = pixels.shape[2] // 16
            pixels = shifted(pixels, torch.from_numpy(rng.integers(-reach, reach + 1, (2, size)))).to(device)
            numbers = word_numbers(captions, words, text.length).to(device)
            loss = contrastive_loss(image(pixels)[1], text(numbers)[0], numbers, log_scale)
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            progress.advance(size, note=f"loss {loss.item():.3f}")
        return {name: tensor.detach().cpu().numpy() for name, tensor in _state(modules, optimizer).items()}

    modules = {"image": image, "text": text, "scale": nn.ParameterList([log_scale])}
    once, together = batches(["towers", pairs.digest, dump(settings)]), math.ceil(steps / _KEPT)
    with Progress("towers", steps * size, "pair") as progress:
        for first in range(0, steps, together):
            last = min(first + together, steps)
            state = once(f"{first}-{last}", partial(trained, first, last))
            if schedule.last_epoch < last:  # steps of an earlier run
                _restore_state(modules, optimizer, schedule, state, last)
            progress.reach(last * size)
    shown = learnt[:_MOST_LOOKED_AT]  # the running statistics lag behind, far so in a short training
    update_bn((pairs.crops.images(pairs.rows[part]).to(device) for part in _parts(shown)), image)


def _state(modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of a training, by name."""
    of_networks = {
        f"{name} {key}": tensor for name, module in modules.items() for key, tensor in module.state_dict().items()
    }
    moments = optimizer.state_dict()["state"]
    return of_networks | {f"optimizer {i} {key}": tensor for i in moments for key, tensor in moments[i].items()}


def _restore_state(
    modules: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    state: Arrays,
    step: int,
) -> None:
    """Resume a training after `step` steps from the tensors of `_state`."""
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    for name, module in modules.items():
        module.load_state_dict({key: tensors[f"{name} {key}"] for key in module.state_dict()})
    moments: dict[int, dict[str, Tensor]] = {}
    for name in tensors:
        kind, _, rest = name.partition(" ")
        if kind == "optimizer":
            number, key = rest.split(" ")
            moments.setdefault(int(number), {})[key] = tensors[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning of no optimizer step: the earlier run made it
        while schedule.last_epoch < step:
            schedule.step()
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})


def contrastive_loss(images: Tensor, texts: Tensor, captions: Tensor, log_scale: Tensor) -> Tensor:
    """Return the symmetric cross entropy of pairs [B, dim] (figure 3), a scalar; equal captions, int64 [B, L], are not
    negatives of one another, since each fits both images."""
    scale = log_scale.exp().clamp(max=_MOST_SCALE)
    logits = scale * F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T  # [B, B]
    same = (captions[:, None] == captions).all(2).fill_diagonal_(False)
    logits, own = logits.masked_fill(same, -torch.inf), torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def _batch(learnt: NDArray[np.int64], step: int, size: int, seed: int) -> NDArray[np.int64]:
    """Return the pairs of a step: each pair once per epoch, in an order that depends on the epoch."""
    positions = np.arange(step * size, (step + 1) * size)
    epochs = positions // len(learnt)
    orders = {epoch: np.random.default_rng([seed, 3, int(epoch)]).permutation(learnt) for epoch in np.unique(epochs)}
    return np.array([orders[epoch][place] for epoch, place in zip(epochs, positions % len(learnt), strict=True)])


def _parts(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return rows in parts that fit into memory."""
    return np.array_split(rows, -(-len(rows) // _AT_ONCE))


def _retrieval(image: ImageTower, text: LearnedText, pairs: _CaptionedImages) -> dict[str, Any]:
    """Return the rate at which held-out images retrieve their own caption among the first captions of all held-out
    images."""
    rows = np.flatnonzero(pairs.held_out)
    rows = rows[spread_rows(len(rows), _MOST_LOOKED_AT)]
    captions = [pairs.captions[i][0] for i in rows]
    gallery = list(dict.fromkeys(captions))
    groups = torch.tensor([gallery.index(caption) for caption in captions])
    embeddings = torch.cat([image.images(pairs.crops.images(pairs.rows[item])) for item in _parts(rows)])
    retrievals = retrieval(embeddings, groups, text(gallery)[0], torch.arange(len(gallery)), "captions")
    return {
        **{name: round(estimate.value, 6) for name, estimate in retrievals.items()},
        "num_held_out": len(rows),
        "num_captions": len(gallery),
        "chance": round(1 / len(gallery), 6),
    }
