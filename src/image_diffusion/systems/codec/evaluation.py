"""A trained codec and a data set -> metrics.json and the pictures of the report: what is left of held-out images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from image_diffusion.core.config import dump
from image_diffusion.core.devices import best_device
from image_diffusion.core.files import digest
from image_diffusion.core.halfway import Arrays, batches
from image_diffusion.core.pictures import save_picture
from image_diffusion.core.progress import Progress
from image_diffusion.core.together import gathered, share
from image_diffusion.data.shards import open_shards
from image_diffusion.metrics.classes import agreement
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.doubt import doubts_of
from image_diffusion.metrics.evaluation import RealImages
from image_diffusion.metrics.features import (
    AT_ONCE,
    Detected,
    Detector,
    ImageSet,
    at_once,
    detect_each,
    kept_together,
    packed,
    unpacked,
)
from image_diffusion.metrics.frechet import frechet_between
from image_diffusion.metrics.intervals import Estimate, mean_estimate
from image_diffusion.metrics.lpips import Lpips
from image_diffusion.metrics.moments import NUM_BLOCKS, block_of_each, check_finite
from image_diffusion.metrics.panel import judged, with_floor
from image_diffusion.metrics.reconstruction import codebook_estimates, reconstruction_estimates
from image_diffusion.metrics.self_test import look_and_test
from image_diffusion.networks.autoencoder import Autoencoder
from image_diffusion.networks.dvae import DVAE
from image_diffusion.systems.codec.reconstruction import plot_codebook, reconstruct
from image_diffusion.systems.given import ToJudge
from image_diffusion.systems.system import on_best_device

_SHOWN = 16


def judge_codec(given: ToJudge) -> dict[str, Any]:
    """What metrics.json holds. Raises ValueError for what does not fit."""
    assert given.model is not None
    settings: EvaluateConfig = given.sections["evaluate"]
    data = RealImages(open_shards(given.data, "train"), open_shards(given.data, "validation"))
    detectors = [each.build(given.detector, str(best_device())) for each in settings.detectors]
    return evaluate_codec(on_best_device(given.model), data, detectors, settings, given.report)


def evaluate_codec(
    network: nn.Module,
    data: RealImages,
    detectors: Sequence[Detector],
    settings: EvaluateConfig,
    report: Path | None = None,
) -> dict[str, Any]:
    """Judge the reconstructions of the held-out images. Returns plain data of the form of `evaluate_samples`.

    Of each way to decode ("mean" of a KL autoencoder, "soft" and "hard" of a discrete VAE): psnr, ssim, lpips where its
    weights are at hand, reconstruction_fd, same_class and, where the detector knows the data's classes, agreement with
    the labels. Their floors are what real images score: the Fréchet distance of as many training images, the agreement
    of the originals. Of a codebook its usage, perplexity and dead codes. report: a folder for reconstructions.png,
    worst.png (originals above, lowest PSNR first) and codebook.png. Raises ValueError, before any long computation, for
    what does not fit.
    """
    split = "validation" if data.validation.num_samples > 1 else "train"
    images = data.split(split)
    _check(network, images)
    looks = settings.lpips.build(next(network.parameters()).device) if settings.lpips is not None else None
    identities = [each.identity for each in detectors]
    known = [identities, settings.lpips.identity if settings.lpips is not None else None, images.digest]
    quality, seen, counts = _measure(network, images, detectors, looks, known)
    n, block = images.num_samples, block_of_each(images.num_samples)
    tested = look_and_test(detectors, images)
    real: list[Detected] | None = None
    if split == "validation" and data.train.num_samples > 1:
        real = detect_each(detectors, data.train, "features of training images", limit=n)
    limits = {"psnr": (0.0, float("inf")), "ssim": (-1.0, 1.0), "lpips": (0.0, float("inf"))}
    found = {name: mean_estimate(each, block, *limits[name.split("_")[0]]) for name, each in quality.items()}
    if counts is not None:
        found |= codebook_estimates(counts, n)
    entries = with_floor(found, found, {})
    for i, detector in enumerate(detectors):
        views = {way: each[i] for way, each in seen.items()}
        entries |= _panel(detector, views, images, None if real is None else real[i])

    if report is not None:
        _draw(network, images, quality, counts, report)
    described = {"split": split, "data": images.digest, "num_images": n}
    how: dict[str, Any] = {"detectors": identities, "reference": described, "settings": dump(settings)}
    if settings.lpips is not None:
        how["lpips"] = settings.lpips.identity
    return {
        "metrics": entries,
        **doubts_of(detectors),
        "self_test": tested,
        "curve": [],
        "classes": {},
        "protocol": {**how, "digest": digest(how), "num_samples": n},
    }


def _panel(
    detector: Detector, seen: Mapping[str, Detected], images: ImageSet, real: Detected | None
) -> dict[str, dict[str, Any]]:
    """The entries of one detector. seen: in the originals and in what each way decodes; real: in other real images."""
    original = seen["original"]
    floor: dict[str, Estimate] = {}
    if real is not None:
        floor["reconstruction_fd"] = frechet_between(real.features, original.features)
    labels = torch.from_numpy(np.asarray(images.labels)) if detector.classes else None
    if labels is not None and original.logits is not None:
        floor["agreement"] = agreement(original.logits.argmax(dim=1), labels)
    entries: dict[str, dict[str, Any]] = {}
    for way, decoded in seen.items():
        if way == "original":
            continue
        estimates = reconstruction_estimates(original, decoded)
        if labels is not None and decoded.logits is not None:
            estimates["agreement"] = agreement(decoded.logits.argmax(dim=1), labels)
        entries |= judged(with_floor(estimates, estimates, floor), detector, f"_{way}")
    return entries


def _measure(
    network: nn.Module, images: ImageSet, detectors: Sequence[Detector], looks: Lpips | None, known: Any
) -> tuple[dict[str, Tensor], dict[str, list[Detected]], Tensor | None]:
    """The quality of each image [N] by name; what the detectors see in the originals and in what each way decodes;
    how often each token is used by each block of images, int64 [blocks, K]. known: what tells detectors and images from
    others."""
    block = block_of_each(images.num_samples)
    num_tokens = network.codebook.num_embeddings if isinstance(network, DVAE) else 0

    def measure(places: NDArray[np.int64]) -> Arrays:
        rows: dict[str, list[NDArray[Any]]] = {}
        for count, chosen in at_once(places):
            found = reconstruct(network, images.gather(chosen))
            distances = {f"lpips_{way}": looks(found.images, y) for way, y in found.decoded.items()} if looks else {}
            told = {f"quality {name}": each.cpu().numpy() for name, each in (found.quality() | distances).items()}
            for way, pictures in {"original": found.images, **found.decoded}.items():
                seen = [detector(pictures) for detector in detectors]
                for each in seen:
                    check_finite(each.features)
                told |= {f"seen {way} {name}": array for name, array in packed(seen).items()}
            if found.tokens is not None:
                tokens = found.tokens.flatten(1).cpu() + num_tokens * block[torch.from_numpy(chosen)].unsqueeze(1)
                told["tokens"] = tokens.numpy()
            for name, array in told.items():
                rows.setdefault(name, []).append(array[:count])
            progress.advance(count)
        of_all = {name: np.concatenate(arrays) for name, arrays in rows.items()}
        if num_tokens:
            of_all["counts"] = np.bincount(of_all.pop("tokens").ravel(), minlength=NUM_BLOCKS * num_tokens)[None]
        return of_all

    mine, once = share(np.arange(images.num_samples), AT_ONCE), batches(["reconstructions", known])
    with torch.inference_mode(), Progress("reconstructions", len(mine), "image") as progress:
        parts = []
        for some in kept_together(mine):
            parts.append(once(f"{some[0]}-{some[-1] + 1}", partial(measure, some)))
            progress.reach(int(some[-1] - mine[0]) + 1)
    every = [part for each in gathered(parts) for part in each]
    of_each = {name: np.concatenate([part[name] for part in every]) for name in every[0]}

    def named(kind: str) -> dict[str, NDArray[Any]]:
        return {name.removeprefix(kind): each for name, each in of_each.items() if name.startswith(kind)}

    quality = {name: torch.from_numpy(each) for name, each in named("quality ").items()}
    ways = dict.fromkeys(name.split()[0] for name in named("seen "))
    seen_in = {way: unpacked(named(f"seen {way} "), len(detectors)) for way in ways}
    counts = torch.from_numpy(of_each["counts"].sum(0)).view(NUM_BLOCKS, num_tokens) if num_tokens else None
    return quality, seen_in, counts


def _check(network: nn.Module, images: ImageSet) -> None:
    if images.num_samples < 2:
        raise ValueError(f"The data set has {images.num_samples} images. A codec is judged on at least 2.")
    built_for = network.image_shape if isinstance(network, DVAE | Autoencoder) else images.shape
    if tuple(images.shape) != tuple(built_for):
        raise ValueError(
            f"The images have shape {list(images.shape)} but the network was built for {list(built_for)} "
            "(channels, height, width). Evaluate on the data set it was trained on."
        )


def _draw(
    network: nn.Module, images: ImageSet, quality: dict[str, Tensor], counts: Tensor | None, report: Path
) -> None:
    spread = np.linspace(0, images.num_samples - 1, min(_SHOWN, images.num_samples)).astype(np.int64)
    save_picture(reconstruct(network, images.gather(spread)).picture(), report / "reconstructions.png")
    last_way = [each for name, each in quality.items() if name.startswith("psnr_")][-1]
    worst = last_way.argsort(stable=True)[: len(spread)].numpy()
    save_picture(reconstruct(network, images.gather(worst)).picture(), report / "worst.png")
    if counts is not None:
        plot_codebook(counts.sum(dim=0), report / "codebook.png")
