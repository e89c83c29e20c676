"""Reconstructions of a codec: their pictures and metrics, of one batch; of many images, at intervals during training;
and of all held-out images, in metrics.json and the report. A served codec reconstructs the images of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from image_diffusion.codecs.base import Codec, from_uint8, to_uint8
from image_diffusion.core.config.base import dump
from image_diffusion.core.devices import best_device
from image_diffusion.core.files.atomic import digest
from image_diffusion.core.files.partial_results import Arrays, batches, gathered, share
from image_diffusion.core.pictures import image_grid, new_figure, save_figure, save_picture
from image_diffusion.core.process.progress import Progress
from image_diffusion.core.types import DataSpec
from image_diffusion.metrics.compute import doubts_of, named_by_detector, with_floor
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.distances.class_metrics import agreement
from image_diffusion.metrics.distances.jackknife import Estimate, mean_estimate
from image_diffusion.metrics.distances.moments import NUM_BLOCKS, block_of_each, check_finite
from image_diffusion.metrics.distances.set_distances import frechet_between
from image_diffusion.metrics.evaluate_samples import RealImages
from image_diffusion.metrics.features.base import (
    AT_ONCE,
    Detected,
    Detector,
    ImageSet,
    detect_each,
    packed,
    padded_batches,
    storage_groups,
    unpacked,
)
from image_diffusion.metrics.images.reconstruction import (
    Lpips,
    codebook_estimates,
    codebook_use,
    psnr,
    reconstruction_estimates,
    ssim,
)
from image_diffusion.metrics.sanity_check import run_self_test
from image_diffusion.networks.autoencoder import Autoencoder
from image_diffusion.networks.dvae import DVAE
from image_diffusion.systems.base import on_best_device
from image_diffusion.systems.evaluation import EvaluationInputs, ImageEvaluation
from image_diffusion.systems.interface import TrainedNetwork
from image_diffusion.systems.sampling import Embed, Predict, Preview, PreviewInputs, Sampling, Served

_SHOWN = 16
_SMALLEST_SSIM = 11  # pixels of its window


@dataclass(frozen=True)
class Reconstruction:
    """Reconstructions of a batch by a codec.

    images: [B, C, H, W], uint8 or float32 from 0 to 255. decoded: the same shape, for each decoding mode of the network
    ("mean" of the posterior; "soft" and "hard" tokens). tokens: the most probable tokens, int64 [B, h, w]; None without
    a codebook.
    """

    images: Tensor
    decoded: dict[str, Tensor]
    tokens: Tensor | None

    def quality(self) -> dict[str, Tensor]:
        """Return the quality of each image, float64 [B], for each decoding mode: "psnr_…" in dB and, if both edges have
        11 pixels or more, "ssim_…"."""
        values = {f"psnr_{way}": psnr(self.images, decoded) for way, decoded in self.decoded.items()}
        if min(self.images.shape[2:]) >= _SMALLEST_SSIM:
            values |= {f"ssim_{way}": ssim(self.images, decoded) for way, decoded in self.decoded.items()}
        return values

    def picture(self) -> Image.Image:
        """Return a picture with a row of images, and a row for each decoding mode below."""
        return image_grid(torch.cat([self.images, *self.decoded.values()]).cpu(), columns=len(self.images))


@torch.no_grad()
def reconstruct(network: nn.Module, images: Tensor) -> Reconstruction:
    """Encode and decode images [B, C, H, W], on the network's device: pictures, uint8, or arrays as float32 from 0 to
    255."""
    assert isinstance(network, Autoencoder | DVAE)
    images = images.to(next(network.parameters()).device)
    reconstructions, tokens = network.reconstructions(from_uint8(images))
    decoded = {
        way: (values.float().clamp(-1, 1) + 1) * 127.5 if images.is_floating_point() else to_uint8(values)
        for way, values in reconstructions.items()
    }
    return Reconstruction(images, decoded, tokens)


def show_reconstructions(
    network: nn.Module, images: Tensor, batch_size: int, folder: Path, step: int
) -> dict[str, Path | float]:
    """Encode and decode images, [N, C, H, W] as `reconstruct` takes them, and return the measures of their
    reconstructions, by name.

    "reconstructions": a picture with a row of the first images, and a row for each decoding mode below. "psnr_…" in dB
    and "ssim_…" of each decoding mode: means over the images. For a discrete VAE also "codebook": a picture of how
    often each token is the most probable one; "codebook_usage": the share of tokens that are used; "dead_codes": the
    number of unused tokens; and "codebook_perplexity". Pictures are written into the folder.
    """
    sums: dict[str, Tensor] = {}
    counts: Tensor | None = None
    for start in range(0, len(images), batch_size):
        reconstruction = reconstruct(network, images[start : start + batch_size])
        for name, value in reconstruction.quality().items():
            sums[name] = sums.get(name, value.new_zeros(())) + value.sum()
        if isinstance(network, DVAE) and reconstruction.tokens is not None:
            counted = reconstruction.tokens.flatten().bincount(minlength=network.codebook.num_embeddings)
            counts = counted if counts is None else counts + counted
    result: dict[str, Path | float] = {name: float(total) / len(images) for name, total in sums.items()}
    path = folder / f"reconstructions-{step:07d}.png"
    first = [reconstruct(network, part) for part in images[:_SHOWN].split(batch_size)]
    decoded = {way: torch.cat([part.decoded[way] for part in first]) for way in first[0].decoded}
    save_picture(Reconstruction(torch.cat([part.images for part in first]), decoded, None).picture(), path)
    result["reconstructions"] = path
    if counts is not None:
        result |= codebook_use(counts)
        plot = folder / f"codebook-{step:07d}.png"
        plot_codebook(counts, plot)
        result["codebook"] = plot
    return result


@dataclass(frozen=True)
class CodecSampling(Sampling):
    """Previews and serving of a codec, which reconstructs images. decoded: the main decoding mode."""

    decoded: str

    def preview(self, inputs: PreviewInputs) -> Preview:
        """Return the function that reconstructs held-out images, as many as a validation uses."""

        def draw(network: nn.Module, step: int, folder: Path) -> dict[str, Path | float]:
            images = inputs.held_out.gather(np.arange(min(inputs.held_out.num_samples, inputs.num_samples)))
            return show_reconstructions(network, inputs.spec.shown(images), inputs.settings.batch_size, folder, step)

        return draw

    def served(
        self, spec: DataSpec, classes: list[str], pairs: Mapping[str, Any] | None = None, embeds: bool = False
    ) -> Served:
        return Served(images=(*spec.size, spec.channels), dtype="uint8" if spec.levels is None else spec.levels.dtype)

    def predictor(
        self,
        model: TrainedNetwork,
        settings: Any,
        codec: Callable[[], Codec],
        weaker: TrainedNetwork | None,
        embed: Embed | None = None,
    ) -> Predict:
        network = on_best_device(model)

        def predict(images: NDArray[Any]) -> NDArray[Any]:
            """Return the images, [N, H, W, C], decoded from their latents."""
            shown = model.spec.shown(torch.tensor(images).permute(0, 3, 1, 2))
            decoded = reconstruct(network, shown).decoded[self.decoded]
            if model.spec.levels is not None:
                decoded = model.spec.levels.restore(from_uint8(decoded))
            return decoded.permute(0, 2, 3, 1).cpu().contiguous().numpy()

        return predict


def plot_codebook(counts: Tensor, path: Path) -> None:
    """Write how often each token is used as PNG, the most frequent first. counts: [K]."""
    shares = counts.cpu().sort(descending=True).values.double() / counts.sum().cpu()
    perplexity = codebook_use(counts)["codebook_perplexity"]
    figure = new_figure(8, 4)
    axis = figure.subplots()
    axis.fill_between(range(len(shares)), shares.numpy(), step="mid", color="#4878a8")
    used = int((counts > 0).sum())
    axis.set(title=f"{used:,} of {len(counts):,} tokens used, perplexity {perplexity:,.1f}")
    axis.set(xlabel="token, most frequent first", ylabel="share of the positions", xlim=(0, len(shares) - 1))
    save_figure(figure, path)


@dataclass(frozen=True)
class CodecEvaluation(ImageEvaluation):
    """Evaluation of a codec's reconstructions. decoded: the main decoding mode."""

    decoded: str

    def headline(self, settings: EvaluateConfig) -> str:
        return f"{settings.detectors[0].metric_name('reconstruction_fd')}_{self.decoded}"

    def reads_splits(self, settings: EvaluateConfig) -> bool:
        return False

    def evaluate(self, inputs: EvaluationInputs) -> dict[str, Any]:
        assert inputs.model is not None
        settings: EvaluateConfig = inputs.settings
        train = inputs.splits["train"]
        data = RealImages(train, inputs.splits["validation"], train.levels)
        detectors = [detector.build(inputs.detector, str(best_device())) for detector in settings.detectors]
        return evaluate_codec(on_best_device(inputs.model), data, detectors, settings, inputs.report)


def evaluate_codec(
    network: nn.Module,
    data: RealImages,
    detectors: Sequence[Detector],
    settings: EvaluateConfig,
    report: Path | None = None,
) -> dict[str, Any]:
    """Evaluate the reconstructions of the held-out images. Returns plain data of the form of `evaluate_samples`.

    Metrics of each decoding mode ("mean" of a KL autoencoder, "soft" and "hard" of a discrete VAE): psnr, ssim, lpips
    if its weights are available, reconstruction_fd, same_class and, where the detector knows the data's classes,
    agreement with the labels. Their floors are the values of real images: the Fréchet distance of the same number of
    training images, the agreement of the originals. For a codebook also usage, perplexity and dead codes. report: a
    folder for reconstructions.png, worst.png (originals above, lowest PSNR first) and codebook.png. Raises ValueError
    for inputs that do not fit, before any long computation.
    """
    split = "validation" if data.validation.num_samples > 1 else "train"
    images = data.split(split)
    _check(network, images)
    looks = settings.lpips.build(next(network.parameters()).device) if settings.lpips is not None else None
    identities = [detector.identity for detector in detectors]
    identity = [identities, settings.lpips.identity if settings.lpips is not None else None, images.digest]
    quality, features, counts = _measure(network, images, detectors, looks, identity)
    n = images.num_samples
    tested = run_self_test(detectors, images)
    real: list[Detected] | None = None
    if split == "validation" and data.train.num_samples > 1:
        real = detect_each(detectors, data.train, "features of training images", limit=n)
    limits = {"psnr": (0.0, float("inf")), "ssim": (-1.0, 1.0), "lpips": (0.0, float("inf"))}
    estimates = {name: mean_estimate(values, *limits[name.split("_")[0]]) for name, values in quality.items()}
    if counts is not None:
        estimates |= codebook_estimates(counts, n)
    entries = with_floor(estimates, estimates, {})
    for i, detector in enumerate(detectors):
        views = {way: of_detectors[i] for way, of_detectors in features.items()}
        entries |= _entries_of_detector(detector, views, images, None if real is None else real[i])

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


def _entries_of_detector(
    detector: Detector, features: Mapping[str, Detected], images: ImageSet, real: Detected | None
) -> dict[str, dict[str, Any]]:
    """Return the entries of one detector.

    features: of the originals and of the reconstructions of each decoding mode. real: of other real images.
    """
    original = features["original"]
    floor: dict[str, Estimate] = {}
    if real is not None:
        floor["reconstruction_fd"] = frechet_between(real.features, original.features)
    labels = torch.from_numpy(np.asarray(images.labels)) if detector.classes else None
    if labels is not None and original.logits is not None:
        floor["agreement"] = agreement(original.logits.argmax(dim=1), labels)
    entries: dict[str, dict[str, Any]] = {}
    for way, decoded in features.items():
        if way == "original":
            continue
        estimates = reconstruction_estimates(original, decoded)
        if labels is not None and decoded.logits is not None:
            estimates["agreement"] = agreement(decoded.logits.argmax(dim=1), labels)
        entries |= named_by_detector(with_floor(estimates, estimates, floor), detector, f"_{way}")
    return entries


def _measure(
    network: nn.Module, images: ImageSet, detectors: Sequence[Detector], looks: Lpips | None, identity: Any
) -> tuple[dict[str, Tensor], dict[str, list[Detected]], Tensor | None]:
    """Return the quality of each image [N] by name; the detectors' features of the originals and of the reconstructions
    of each decoding mode; and the count of each token in each block of images, int64 [blocks, K]. identity: identifies
    detectors and images."""
    block = block_of_each(images.num_samples)
    num_tokens = network.codebook.num_embeddings if isinstance(network, DVAE) else 0

    def measure(places: NDArray[np.int64]) -> Arrays:
        rows: dict[str, list[NDArray[Any]]] = {}
        for count, chosen in padded_batches(places):
            result = reconstruct(network, images.gather(chosen))
            distances = {f"lpips_{way}": looks(result.images, y) for way, y in result.decoded.items()} if looks else {}
            arrays = {
                f"quality {name}": values.cpu().numpy() for name, values in (result.quality() | distances).items()
            }
            for way, pictures in {"original": result.images, **result.decoded}.items():
                features = [detector(pictures) for detector in detectors]
                for of_detector in features:
                    check_finite(of_detector.features)
                arrays |= {f"seen {way} {name}": array for name, array in packed(features).items()}
            if result.tokens is not None:
                tokens = result.tokens.flatten(1).cpu() + num_tokens * block[torch.from_numpy(chosen)].unsqueeze(1)
                arrays["tokens"] = tokens.numpy()
            for name, array in arrays.items():
                rows.setdefault(name, []).append(array[:count])  # without the padding of the last batch
            progress.advance(count)
        of_all = {name: np.concatenate(arrays) for name, arrays in rows.items()}
        if num_tokens:
            of_all["counts"] = np.bincount(of_all.pop("tokens").ravel(), minlength=NUM_BLOCKS * num_tokens)[None]
        return of_all

    shared, once = share(np.arange(images.num_samples), AT_ONCE), batches(["reconstructions", identity])
    with torch.inference_mode(), Progress("reconstructions", len(shared), "image") as progress:
        parts = []
        for some in storage_groups(shared):
            parts.append(once(f"{some[0]}-{some[-1] + 1}", partial(measure, some)))
            progress.reach(int(some[-1] - shared[0]) + 1)
    every = [part for parts_of_rank in gathered(parts) for part in parts_of_rank]
    of_each = {name: np.concatenate([part[name] for part in every]) for name in every[0]}

    def named(kind: str) -> dict[str, NDArray[Any]]:
        return {name.removeprefix(kind): array for name, array in of_each.items() if name.startswith(kind)}

    quality = {name: torch.from_numpy(array) for name, array in named("quality ").items()}
    ways = dict.fromkeys(name.split()[0] for name in named("seen "))
    seen_in = {way: unpacked(named(f"seen {way} "), len(detectors)) for way in ways}
    counts = torch.from_numpy(of_each["counts"].sum(0)).view(NUM_BLOCKS, num_tokens) if num_tokens else None
    return quality, seen_in, counts


def _check(network: nn.Module, images: ImageSet) -> None:
    if images.num_samples < 2:
        raise ValueError(f"The data set has {images.num_samples} images. Evaluate a codec on at least 2.")
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
    last_way = [values for name, values in quality.items() if name.startswith("psnr_")][-1]
    worst = last_way.argsort(stable=True)[: len(spread)].numpy()
    save_picture(reconstruct(network, images.gather(worst)).picture(), report / "worst.png")
    if counts is not None:
        plot_codebook(counts.sum(dim=0), report / "codebook.png")
