"""Comparison of samples with the images or masks behind their conditions: enlarged images with the originals, images
made from masks with those masks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.codecs.base import to_uint8
from image_diffusion.core.config.base import parse
from image_diffusion.core.pictures import image_grid, save_picture
from image_diffusion.data.shards.reader import Shards
from image_diffusion.metrics.distances.jackknife import mean_estimate
from image_diffusion.metrics.features.base import AT_ONCE
from image_diffusion.metrics.images.reconstruction import psnr
from image_diffusion.metrics.images.segmentation import evaluate_masks
from image_diffusion.metrics.samples import Samples
from image_diffusion.samplers.image_noise import image_streams
from image_diffusion.systems.diffusion.conditioning import AnyImage
from image_diffusion.systems.diffusion.conditions.image import ImagePart, condition_pictures
from image_diffusion.systems.diffusion.conditions.paired_image import mask_picture

_SHOWN = 10


def evaluate_paired(
    samples: Samples, originals: Shards, report: Path | None = None, train: Shards | None = None
) -> dict[str, Any]:
    """Compare samples with the images that their conditions are derived from, and with guesses without a network.

    Returns entries of metrics.json by name, for samples whose conditions are derived from held-out images or stored
    with them; empty for others. originals: the held-out images, with their additional sets. train: the training images
    with theirs, if conditions are masks: samples are then compared with their masks only (`evaluate_masks`).

    If the seeds repeat the held-out images k times, an image has k samples. "psnr": of each sample, in dB, mean over
    the images; "psnr_mean": of the mean of an image's samples, if k is above 1: an estimate of the posterior mean,
    whose PSNR no sample can reach; for small images also "psnr_bicubic": of their bicubic enlargement, and "psnr_gain":
    psnr_mean (or psnr) minus psnr_bicubic, image by image. report: a folder for the picture enlarged.png, or paired.png
    if the condition is not a small image, from top to bottom: condition, bicubic, sample, mean of the samples if k is
    above 1, original.

    Raises ValueError when the held-out images are no longer those that the conditions were made of.
    """
    described = samples.protocol.get("image", {})
    if described.get("split") != "validation":
        return {}
    if described["data"] != originals.digest:
        raise ValueError("The data set has changed since its images were used as conditions. Run sample again.")
    condition: ImagePart = parse(AnyImage, described["condition"], "samples.json: image")
    labels: list[str] = described.get("labels", [])
    seed = int(samples.protocol["settings"]["seed"])
    first_seed = int(samples.protocol["settings"]["first_seed"])
    row_of_each = (first_seed + np.arange(samples.num_samples)) % originals.num_samples
    rows = np.unique(row_of_each)
    several = len(rows) < samples.num_samples
    if labels and train is not None:
        rows = rows[:_SHOWN]  # only for the picture
    parts: dict[str, list[Tensor]] = {}
    shown: Tensor | None = None
    for start in range(0, len(rows), AT_ONCE):
        chosen = rows[start : start + AT_ONCE]
        original = originals.gather(chosen)
        first_of_each = torch.from_numpy(first_seed + (chosen - first_seed) % originals.num_samples)
        size = (original.shape[2], original.shape[3])
        made = condition.of_held_out(originals, chosen, image_streams(first_of_each, seed))
        guesses = {name: to_uint8(guess) for name, guess in condition.baselines(made, size).items()}
        place = np.searchsorted(chosen, row_of_each.clip(chosen[0], chosen[-1]))
        numbers = np.flatnonzero(chosen[place] == row_of_each)
        image = torch.from_numpy(place[numbers])
        drawn = samples.gather(numbers)
        counts = torch.bincount(image, minlength=len(chosen)).to(torch.float64)
        sums = torch.zeros(len(chosen), dtype=torch.float64).index_add_(0, image, psnr(original[image], drawn))
        total = torch.zeros(original.shape, dtype=torch.float64).index_add_(0, image, drawn.to(torch.float64))
        mean = (total / counts[:, None, None, None]).round().to(torch.uint8)
        values = {"psnr": sums / counts} | {f"psnr_{name}": psnr(original, guess) for name, guess in guesses.items()}
        if several:
            values["psnr_mean"] = psnr(original, mean)
        for name in guesses:
            values["psnr_gain"] = values.get("psnr_mean", values["psnr"]) - values[f"psnr_{name}"]
        for name, value in values.items():
            parts.setdefault(name, []).append(value)
        if shown is None:
            seen = condition_pictures(mask_picture(made) if labels else made, original)
            first = drawn[torch.tensor([int((image == i).nonzero()[0]) for i in range(min(_SHOWN, len(chosen)))])]
            columns = [seen, *guesses.values(), first, *([mean] if several else []), original]
            shown = torch.cat([column[:_SHOWN] for column in columns])
    if report is not None and shown is not None:
        save_picture(image_grid(shown, min(_SHOWN, len(rows))), report / f"{condition.picture}.png")
    if labels and train is not None:
        return evaluate_masks(_AskedMasks(samples, originals, row_of_each), train, originals, labels)
    return {name: mean_estimate(torch.cat(values)).as_dict() for name, values in parts.items()}


@dataclass(frozen=True)
class _AskedMasks:
    """Samples with their requested masks. rows: of the held-out images that the masks belong to."""

    samples: Samples
    held_out: Shards
    rows: NDArray[np.int64]

    @property
    def num_samples(self) -> int:
        return self.samples.num_samples

    def gather(self, indices: NDArray[np.int64]) -> Tensor:
        return self.samples.gather(indices)

    def gather_of(self, kind: str, indices: NDArray[np.int64]) -> Tensor:
        return self.held_out.gather_of(kind, self.rows[indices])
