"""Bits per dimension of real images: the variational bound of a pixel diffusion and its terms.

Each image is measured once, with its own noise, and means are taken over images. Unlike image_nll of
improved-diffusion, the result does not depend on the batch, and no image is repeated or dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from image_diffusion.core.classes import ClassLabel
from image_diffusion.core.config.base import Config
from image_diffusion.core.files.partial_results import Arrays, batches
from image_diffusion.core.pictures import new_figure, save_figure
from image_diffusion.core.process.progress import Progress
from image_diffusion.metrics.distances.jackknife import mean_estimate
from image_diffusion.metrics.features.base import ImageSet
from image_diffusion.process.likelihood import BitsPerDim


class LikelihoodConfig(Config):
    """Measurement of bits per dimension: one call of the network for each image and timestep."""

    split: Literal["train", "validation"] = "validation"
    """Split of the images: train, the images of the training, or validation, the held-out images."""
    num_samples: int | None = Field(None, ge=1)
    """Number of images, from the start of the split; unset: all."""
    timesteps: str | int | list[int] = ""
    """Timesteps of the bound: "" for those of the training; 250, [10, 15, 20] in equal sections, or "ddim50" for a
    subset of the process's timesteps, which gives a looser bound."""
    label: ClassLabel | None = None
    """Class that the network is conditioned on for every image, as in sample.labels; none: the null label, if labels
    were dropped in training. For data whose classes are not the network's. Unset: each image's own class."""
    clip_denoised: bool = True
    """Clip each predicted x0 to [-1, 1], the range of pixels, as published numbers do."""
    seed: int = Field(0, ge=0)
    """Seed of the noise: one draw for each image and timestep."""
    batch_size: int = Field(64, ge=1)
    """Images measured at once. Does not affect the result."""


def chosen_images(images: ImageSet, settings: LikelihoodConfig) -> int:
    """Return the number of images that are measured. Raises ValueError if the split has none, or fewer than
    requested."""
    count = settings.num_samples or max(images.num_samples, 1)
    if count > images.num_samples:
        raise ValueError(
            f"evaluate.likelihood asks for {count:,} images of the {settings.split} split, which has "
            f"{images.num_samples:,}. Ask for fewer, set evaluate.likelihood.split to the other one, or set "
            f"data.validation_fraction higher."
        )
    return count


def measure_likelihood(
    bound: Callable[[Tensor, Tensor, Tensor], BitsPerDim],
    timesteps: list[int],
    images: ImageSet,
    settings: LikelihoodConfig,
    report: Path | None = None,
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return entries of metrics.json for a split, by name, and the means at each timestep, the most noise first.

    bound: uint8 images [B, C, H, W], labels int64 [B] and indices in the split int64 [B] -> bounds with the terms of
    `timesteps`. report: a folder for the plot.

    "bits_per_dim" is the sum of "bits_prior", the information of the noisiest x_t about the image; "bits_steps", the
    divergences of all steps but the last; and "bits_pixels", the bits of the pixels given the least noisy x_t. By
    timestep: "vb" in bits per dimension, "x0_mse" and "eps_mse", the mean squared errors of x0 and of the noise.

    Raises ValueError for a split with too few images.
    """
    count = chosen_images(images, settings)
    sums = {name: torch.zeros(len(timesteps), dtype=torch.float64) for name in ("vb", "x0_mse", "eps_mse")}
    parts = []

    def measure(rows: NDArray[np.int64]) -> Arrays:
        bits = bound(images.gather(rows), torch.from_numpy(images.labels[rows]), torch.from_numpy(rows))
        terms = bits.terms.to("cpu", torch.float64)
        prior = bits.prior.to("cpu", torch.float64)
        summed = (("vb", terms), ("x0_mse", bits.x0_mse), ("eps_mse", bits.eps_mse))
        totals = {name: values.to("cpu", torch.float64).sum(0).numpy() for name, values in summed}
        return {"bits": torch.stack([prior, terms[:, :-1].sum(1), terms[:, -1]], dim=1).numpy(), **totals}

    once = batches(["likelihood", images.digest, timesteps])
    with Progress("likelihood", count, "image") as progress:
        for start in range(0, count, settings.batch_size):
            rows = np.arange(start, min(start + settings.batch_size, count))
            measured = once(str(start), partial(measure, rows))
            parts.append(torch.from_numpy(measured["bits"]))
            for name in sums:
                sums[name] += torch.from_numpy(measured[name])
            progress.advance(len(rows))
    terms_per_image = torch.cat(parts)
    bits = {
        "bits_per_dim": terms_per_image.sum(1),
        "bits_prior": terms_per_image[:, 0],
        "bits_steps": terms_per_image[:, 1],
        "bits_pixels": terms_per_image[:, 2],
    }
    entries = {name: mean_estimate(value, 0).as_dict() for name, value in bits.items()}
    by_timestep = {"timestep": timesteps} | {name: (total / count).tolist() for name, total in sums.items()}
    if report is not None:
        plot_terms(by_timestep, report / "likelihood.png")
    return entries, by_timestep


def plot_terms(by_timestep: dict[str, list[float]], path: Path) -> None:
    """Draw the terms of the bound and the error of the predicted noise against the timestep, as PNG."""
    figure = new_figure(9, 3.2)
    titles = {"vb": "bound, bits per dimension", "eps_mse": "squared error of the noise"}
    for axis, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        axis.plot(
            by_timestep["timestep"], by_timestep[name], linewidth=1, marker="." if len(by_timestep[name]) < 2 else ""
        )
        axis.set(title=title, xlabel="timestep", yscale="log")
    save_figure(figure, path)
