"""A small CLIP, trained on the crops of a data set and their captions: one space for both, without any download.

The image tower is the network of the embedded detector, with an embedding for its outputs; the text tower is a
transformer over words. Both learn by the symmetric cross entropy over the cosines of a batch (Radford et al. 2021,
arXiv:2103.00020, section 2.3 and figure 3), of which equal captions are no negatives. What is written:

image.safetensors, text.safetensors             the towers
towers.json                                     what they are, and how often a held-out image finds its caption
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
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

from image_diffusion.codecs.hashing import words_of
from image_diffusion.codecs.text.learned import FILE, LearnedText, read_text, word_numbers, write_text
from image_diffusion.core.config import Config, dump
from image_diffusion.core.files import digest, read_json, sha256_file, write_bytes, write_json
from image_diffusion.core.halfway import Arrays, batches
from image_diffusion.core.progress import Progress
from image_diffusion.data.captioned import CaptionedCrops
from image_diffusion.data.pairs import Splits
from image_diffusion.metrics.detector import FEATURES, Classifier
from image_diffusion.metrics.detector_training import shifted
from image_diffusion.metrics.retrieval import retrieval
from image_diffusion.networks.text_tower import TextTower

FORMAT = 1
_IMAGE, _DESCRIBED = "image.safetensors", "towers.json"
_LONGEST = 64  # words that are read of a caption
_MOST_WORDS = 20_000
_MOST_LOOKED_AT, _AT_ONCE = 5000, 256  # images that retrieval and statistics are of
_KEPT = 32  # times that a training is kept, to go on from
_TEMPERATURE, _MOST_SCALE = 0.07, 100.0  # at first, and the limit of its inverse: section 2.5


class ContrastiveTraining(Config):
    """How the two towers are trained."""

    seed: int = Field(0, ge=0)
    """Of the first weights, the order, the captions and the shifts."""
    epochs: float = Field(16, gt=0)
    """Passes over the training pairs."""
    batch_size: int = Field(256, ge=2)
    """Pairs of a step: each is told from all the others."""
    learning_rate: float = Field(0.002, gt=0)
    """The highest; it rises over the first 30 % and falls to zero (one cycle)."""


class ImageTower:
    """Images -> embeddings of norm 1. identity: that of both towers."""

    def __init__(self, network: Classifier, identity: dict[str, Any], device: torch.device) -> None:
        self._network, self._device = network.to(device).eval().requires_grad_(False), device
        self.identity, self.dim = identity, FEATURES

    @torch.inference_mode()
    def images(self, images: Tensor) -> Tensor:
        """Uint8 [B, C, H, W] -> float32 [B, dim], on the CPU."""
        return F.normalize(self._network(images.to(self._device))[1], dim=1).cpu()


def trained_towers(
    crops: CaptionedCrops,
    splits: Splits,
    settings: ContrastiveTraining,
    num_tokens: int,
    folder: Path,
    device: torch.device,
) -> tuple[ImageTower, LearnedText]:
    """The towers in a folder, trained first unless they are there.

    Neither the held-out crops nor pairs outside of the training split are learnt from: retrieval is measured on those.
    Raises ValueError, before any training, where captions are missing or all the same, or nothing is held out.
    """
    pairs = _Pairs.of(crops, splits)
    made_from = digest({"format": FORMAT, "pairs": pairs.digest, "training": dump(settings)})
    if not _is_kept(folder, made_from):
        _train(pairs, settings, made_from, folder, device)
    text = read_text(folder, num_tokens, device)
    image = Classifier(crops.shape[0], FEATURES, crops.shape[1])
    image.load_state_dict(load_file(folder / _IMAGE))
    return ImageTower(image, text.identity, device), text


def _is_kept(folder: Path, made_from: str) -> bool:
    if not all((folder / name).is_file() for name in (_DESCRIBED, _IMAGE, FILE)):
        return False
    found = read_json(folder / _DESCRIBED)
    hashes = {name: sha256_file(folder / name) for name in (_IMAGE, FILE)}
    return bool(found["made_from"] == made_from and found["files"] == hashes)


@dataclass(frozen=True)
class _Pairs:
    """The crops that have captions. rows: of each its number among the crops. held_out: bool [N]."""

    crops: CaptionedCrops
    rows: NDArray[np.int64]
    captions: list[list[str]]
    held_out: NDArray[np.bool_]
    digest: str

    @classmethod
    def of(cls, crops: CaptionedCrops, splits: Splits) -> _Pairs:
        found = [crops.of(shard) for shard in range(crops.num_shards)]
        captions = [each for shard in found for each in shard.captions]
        rows = np.concatenate([shard.rows for shard in found])
        hashes = [sample.sha256 for shard in found for sample in shard.samples]
        held_out = crops.held_out[rows] | ~splits.trains(hashes)
        shards = [shard.sha256 for shard in found]
        pairs = cls(crops, rows, captions, held_out, digest([shards, captions, held_out.tolist()]))
        pairs._check()
        return pairs

    def _check(self) -> None:
        if not self.captions:
            raise ValueError(
                "pairs.type is contrastive, but no image has a caption. Choose other pairs.captions, or put captions "
                "beside the images."
            )
        different = {caption for each in self.captions for caption in each}
        if len(different) < 2:
            raise ValueError(
                f"pairs.type is contrastive, but all {len(self.captions):,} images have the same caption, "
                f"{next(iter(different))!r}: there is nothing to tell apart. Choose other pairs.captions."
            )
        if not any(words_of(caption) for caption in different):
            raise ValueError("pairs.type is contrastive, but no caption has a word. Choose other pairs.captions.")
        if self.held_out.all() or not self.held_out.any():
            raise ValueError(
                f"pairs.type is contrastive, but {'all' if self.held_out.all() else 'none'} of {len(self.captions):,} "
                f"pairs are held out: some have to be learnt from, and others to be judged by. Change pairs.splits or "
                f"data.validation_fraction."
            )


def _train(pairs: _Pairs, settings: ContrastiveTraining, made_from: str, folder: Path, device: torch.device) -> None:
    """Train, and write the towers and what describes them."""
    learnt = np.flatnonzero(~pairs.held_out)
    words, length = _words([pairs.captions[i] for i in learnt])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        image = Classifier(pairs.crops.shape[0], FEATURES, pairs.crops.shape[1]).to(device)
        text = TextTower(len(words), length, FEATURES).to(device)
    _fit(image, text, pairs, learnt, words, settings, device)
    tensors = {name: value.cpu().contiguous() for name, value in image.state_dict().items()}
    if not all(bool(torch.isfinite(value).all()) for value in (*tensors.values(), *text.state_dict().values())):
        raise ValueError("The towers' weights are not finite. Lower pairs.training.learning_rate.")
    write_bytes(folder / _IMAGE, save(tensors))
    write_text(folder, text, words, sha256_file(folder / _IMAGE))
    files = {name: sha256_file(folder / name) for name in (_IMAGE, FILE)}
    encoder = read_text(folder, 0, device)
    found = _retrieval(ImageTower(image, encoder.identity, device), encoder, pairs)
    described = {"format": FORMAT, "made_from": made_from, "num_pairs": len(learnt), "num_words": len(words)}
    write_json(folder / _DESCRIBED, {**described, **found, "training": dump(settings), "files": files})
    print(
        f"towers: {found['retrieval_at_1']:.1%} of {found['num_held_out']:,} held-out images find their caption among "
        f"{found['num_captions']:,} (chance {found['chance']:.1%}), {folder / _DESCRIBED}"
    )


def _words(captions: list[list[str]]) -> tuple[list[str], int]:
    """The most frequent words, and how many the longest caption has, within limits."""
    counts, longest = dict[str, int](), 1
    for caption in (caption for each in captions for caption in each):
        found = words_of(caption)
        longest = max(longest, len(found))
        for word in found:
            counts[word] = counts.get(word, 0) + 1
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    return frequent[:_MOST_WORDS], min(longest, _LONGEST)


def _fit(
    image: Classifier,
    text: TextTower,
    pairs: _Pairs,
    learnt: NDArray[np.int64],
    words: list[str],
    settings: ContrastiveTraining,
    device: torch.device,
) -> None:
    """Train both in place; ends with the statistics of batch normalisation over the training images as they are."""
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
            if schedule.last_epoch < last:  # an earlier start has trained so far
                _go_on(modules, optimizer, schedule, state, last)
            progress.reach(last * size)
    shown = learnt[:_MOST_LOOKED_AT]  # what batches were normalised by lags behind, by far in a short training
    update_bn((pairs.crops.images(pairs.rows[each]).to(device) for each in _parts(shown)), image)


def _state(modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of a training, by name."""
    of_networks = {
        f"{name} {key}": each for name, module in modules.items() for key, each in module.state_dict().items()
    }
    moments = optimizer.state_dict()["state"]
    return of_networks | {f"optimizer {i} {key}": each for i in moments for key, each in moments[i].items()}


def _go_on(
    modules: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    state: Arrays,
    step: int,
) -> None:
    """Put a training where it was after so many steps, with the tensors of `_state`."""
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
        warnings.simplefilter("ignore")  # that the optimizer has made no step, which it has in that start
        while schedule.last_epoch < step:
            schedule.step()
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})


def contrastive_loss(images: Tensor, texts: Tensor, captions: Tensor, log_scale: Tensor) -> Tensor:
    """The symmetric cross entropy of pairs [B, dim] (figure 3), a scalar; equal captions, int64 [B, L], are no
    negatives of one another, since either image goes with either."""
    scale = log_scale.exp().clamp(max=_MOST_SCALE)
    logits = scale * F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T  # [B, B]
    same = (captions[:, None] == captions).all(2).fill_diagonal_(False)
    logits, own = logits.masked_fill(same, -torch.inf), torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def _batch(learnt: NDArray[np.int64], step: int, size: int, seed: int) -> NDArray[np.int64]:
    """The pairs of a step: every one once an epoch, in an order of its own."""
    positions = np.arange(step * size, (step + 1) * size)
    epochs = positions // len(learnt)
    orders = {epoch: np.random.default_rng([seed, 3, int(epoch)]).permutation(learnt) for epoch in np.unique(epochs)}
    return np.array([orders[epoch][place] for epoch, place in zip(epochs, positions % len(learnt), strict=True)])


def _parts(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Rows, as many at a time as fit into memory."""
    return np.array_split(rows, -(-len(rows) // _AT_ONCE))


def _retrieval(image: ImageTower, text: LearnedText, pairs: _Pairs) -> dict[str, Any]:
    """How often a held-out image finds its first caption among all first captions of those."""
    rows = np.flatnonzero(pairs.held_out)[:_MOST_LOOKED_AT]
    captions = [pairs.captions[i][0] for i in rows]
    known = list(dict.fromkeys(captions))
    asked = torch.tensor([known.index(caption) for caption in captions])
    seen = torch.cat([image.images(pairs.crops.images(pairs.rows[each])) for each in _parts(rows)])
    found = retrieval(seen, asked, text(known)[0], torch.arange(len(known)), "captions")
    return {
        **{name: round(each.value, 6) for name, each in found.items()},
        "num_held_out": len(rows),
        "num_captions": len(known),
        "chance": round(1 / len(known), 6),
    }
