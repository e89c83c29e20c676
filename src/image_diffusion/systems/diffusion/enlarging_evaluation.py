"""Enlarged images beside their originals: PSNR of the samples, of their mean, and of a bicubic enlargement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.codecs.codec import from_uint8, to_uint8
from image_diffusion.core.pictures import image_grid, save_picture
from image_diffusion.metrics.features import AT_ONCE, ImageSet
from image_diffusion.metrics.intervals import mean_estimate
from image_diffusion.metrics.moments import block_of_each
from image_diffusion.metrics.reconstruction import psnr
from image_diffusion.metrics.samples import Samples
from image_diffusion.systems.diffusion.enlarging import shrink

_SHOWN = 10


def evaluate_enlarging(samples: Samples, originals: ImageSet, report: Path | None = None) -> dict[str, Any]:
    """Entries of metrics.json by name, for samples of `sample.small_images: validation`; nothing for other samples.

    Where seeds run through the held-out images k times, an image has k samples. "psnr": of each of them, in dB, mean
    over the images; "psnr_mean": of the mean of an image's samples, where k is above 1, an estimate of the posterior
    mean, which no sample can match in PSNR; "psnr_bicubic": of the bicubic enlargement of what the network was given;
    "psnr_gain": how far psnr_mean, or psnr, lies above that, image by image. report: a folder for enlarged.png, from
    above: given, bicubic, sample, mean of the samples where k is above 1, original.

    Raises ValueError when the held-out images are no longer those that were enlarged.
    """
    enlarged = samples.protocol.get("enlarged", {})
    if enlarged.get("split") != "validation":
        return {}
    if enlarged["data"] != originals.digest:
        raise ValueError("The data set has changed since its images were enlarged. Run sample again.")
    first_seed = int(samples.protocol["settings"]["first_seed"])
    row_of_each = (first_seed + np.arange(samples.num_samples)) % originals.num_samples
    rows = np.unique(row_of_each)
    several = len(rows) < samples.num_samples
    found: dict[str, list[Tensor]] = {}
    shown: Tensor | None = None
    for start in range(0, len(rows), AT_ONCE):
        chosen = rows[start : start + AT_ONCE]
        original = originals.gather(chosen)
        small = shrink(from_uint8(original), int(enlarged["side"]))
        # antialias changes nothing in an enlargement but the kernel, to that of Pillow and Matlab (a = -0.5)
        bicubic = to_uint8(F.interpolate(small, tuple(original.shape[2:]), mode="bicubic", antialias=True))
        place = np.searchsorted(chosen, row_of_each.clip(chosen[0], chosen[-1]))
        mine = np.flatnonzero(chosen[place] == row_of_each)
        image = torch.from_numpy(place[mine])
        made = samples.gather(mine)
        counts = torch.bincount(image, minlength=len(chosen)).to(torch.float64)
        each = torch.zeros(len(chosen), dtype=torch.float64).index_add_(0, image, psnr(original[image], made))
        total = torch.zeros(original.shape, dtype=torch.float64).index_add_(0, image, made.to(torch.float64))
        mean = (total / counts[:, None, None, None]).round().to(torch.uint8)
        values = {"psnr": each / counts, "psnr_bicubic": psnr(original, bicubic)}
        if several:
            values["psnr_mean"] = psnr(original, mean)
        values["psnr_gain"] = values.get("psnr_mean", values["psnr"]) - values["psnr_bicubic"]
        for name, value in values.items():
            found.setdefault(name, []).append(value)
        if shown is None:
            given = to_uint8(F.interpolate(small, tuple(original.shape[2:]), mode="nearest"))
            first = made[torch.tensor([int((image == i).nonzero()[0]) for i in range(min(_SHOWN, len(chosen)))])]
            columns = [given, bicubic, first, *([mean] if several else []), original]
            shown = torch.cat([column[:_SHOWN] for column in columns])
    if report is not None and shown is not None:
        save_picture(image_grid(shown, min(_SHOWN, len(rows))), report / "enlarged.png")
    block = block_of_each(len(rows))
    return {name: mean_estimate(torch.cat(values), block).as_dict() for name, values in found.items()}
