"""Evaluation of a diffusion model: its samples compared with real images, and with the images or masks behind their
conditions; and the likelihood of real images.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from image_diffusion.codecs import CodecConfig
from image_diffusion.codecs.base import from_uint8, to_uint8
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.classes import ClassLabel, class_number
from image_diffusion.core.config.base import Config, dump, parse
from image_diffusion.core.devices import best_device
from image_diffusion.core.pictures import image_grid, save_picture
from image_diffusion.core.random.streams import Streams, image_streams
from image_diffusion.core.types import DataSpec, Network
from image_diffusion.data.shards.reader import Shards, Split, open_shards
from image_diffusion.metrics.config import EvaluateConfig, compare_with_published
from image_diffusion.metrics.curves import read_previews
from image_diffusion.metrics.distances.jackknife import mean_estimate
from image_diffusion.metrics.evaluate_samples import RealImages, evaluate_samples
from image_diffusion.metrics.features.base import AT_ONCE
from image_diffusion.metrics.images.channels import evaluate_channels
from image_diffusion.metrics.images.drawn_digits import evaluate_drawn, evaluate_painted
from image_diffusion.metrics.images.embedding_similarity import check_prompted, evaluate_prompted
from image_diffusion.metrics.images.likelihood import LikelihoodConfig, measure_likelihood
from image_diffusion.metrics.images.reconstruction import psnr
from image_diffusion.metrics.images.segmentation import evaluate_masks
from image_diffusion.metrics.samples import Samples
from image_diffusion.process import Process
from image_diffusion.process.denoiser import NetworkDenoiser, clamp
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.likelihood import BitsPerDim, bits_per_dim
from image_diffusion.systems.base import on_best_device
from image_diffusion.systems.diffusion.conditioning import AnyImage
from image_diffusion.systems.diffusion.conditions.image import ImagePart, condition_pictures
from image_diffusion.systems.diffusion.conditions.paired_image import mask_picture
from image_diffusion.systems.diffusion.generator import Reading
from image_diffusion.systems.evaluation import EvaluationInputs, ImageEvaluation
from image_diffusion.systems.interface import TrainedNetwork

_ATTRIBUTES = {"painted_digits": evaluate_painted, "slanted_digits": evaluate_drawn}


@dataclass(frozen=True)
class DiffusionEvaluation(ImageEvaluation):
    """Evaluation of samples against real images, if there are any, and of the likelihood, if it is configured. Without
    a model, samples of any origin are evaluated. reading, image: of the system, for the likelihood.
    """

    reading: Reading | None = None
    image: ImagePart | None = None

    @property
    def reads_pairs(self) -> bool:
        return self.image is not None and self.image.reads is not None

    def evaluate(self, inputs: EvaluationInputs) -> dict[str, Any]:
        settings: EvaluateConfig = inputs.settings
        data = real_images(inputs.splits["train"], inputs.splits["validation"])
        if inputs.samples is None and settings.likelihood is None:
            raise ValueError("The evaluation of a diffusion model needs its samples. Name them: --samples samples.npz.")
        result: dict[str, Any] = {"metrics": {}, "doubt": None, "curve": [], "classes": {}, "protocol": {}}
        if inputs.samples is not None:
            result = _judged_samples(inputs, inputs.samples, data)
        if settings.likelihood is not None:
            bits, result["likelihood"] = self._likelihood(inputs, data)
            result["metrics"] |= bits
            result["protocol"]["likelihood"] = {"settings": dump(settings.likelihood), "data": data.train.digest}
        if settings.published:
            result["published"] = compare_with_published(settings.published, result["metrics"])
        return result

    def _likelihood(self, inputs: EvaluationInputs, data: RealImages) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """Return the bits per dimension of real images, and their terms by timestep."""
        model, reading, settings = inputs.model, self.reading, inputs.settings.likelihood
        if model is None or reading is None:
            raise ValueError("evaluate.likelihood needs the network. Name it: --weights weights.safetensors.")
        spec, shape, num_classes = model.spec, data.train.shape, len(data.train.classes)
        trained_on = f"The network was trained on images of {[spec.channels, *spec.size]}"
        if shape != (spec.channels, *spec.size):
            raise ValueError(f"{trained_on}, but --data holds {list(shape)}. Name images of that size.")
        label = likelihood_label(model, reading.drops_labels, settings.label)
        if label is None and spec.num_classes not in (0, num_classes):
            raise ValueError(
                f"{trained_on} with {spec.num_classes} classes, but --data has {num_classes}. Use images of its own "
                f"classes, or set evaluate.likelihood.label to one class for all images."
            )
        codec = parse(CodecConfig, model.codec["config"], "model.json: codec")
        bound = ImageBound(on_best_device(model), reading, spec, codec, settings, label, self.image)
        return measure_likelihood(bound, bound.timesteps, data.split(settings.split), settings, inputs.report)


def _judged_samples(inputs: EvaluationInputs, path: Path, data: RealImages) -> dict[str, Any]:
    """Return the content of metrics.json for the samples in a file or a folder."""
    settings: EvaluateConfig = inputs.settings
    if settings.against is not None and inputs.reference is None:
        raise ValueError("evaluate.against is set. Name the .npz that samples are compared with: --reference.")
    detectors = [detector.build(inputs.detector, str(best_device())) for detector in settings.detectors]
    samples = inputs.read(path, data.train.classes, data.levels)
    both = None
    if settings.prompts is not None:
        check_prompted(samples)
        both = settings.prompts.build_both(str(best_device()))
    previews, left_out = dict[int, Samples](), list[str]()
    if inputs.previews is not None and inputs.model is not None:
        run = inputs.previews / inputs.model.fingerprint
        previews, left_out = read_previews(run, data.train.classes, inputs.model.num_steps, data.levels)
    result = evaluate_samples(
        samples, data, detectors, settings, inputs.report, inputs.reference, previews, inputs.references
    )
    for sentence in left_out:
        print(f"warning: {sentence}", file=sys.stderr, flush=True)
    if left_out:
        result["protocol"]["left_out"] = left_out
    if settings.attributes is not None:
        result["metrics"] |= _ATTRIBUTES[settings.attributes](samples, detectors)
    if both is not None:
        result["metrics"] |= evaluate_prompted(samples, both)
        result["protocol"]["prompts"] = both.images.identity
    train, held_out = (joined(inputs.data, split, inputs.pairs) for split in ("train", "validation"))
    result["metrics"] |= evaluate_paired(samples, held_out, inputs.report, train)
    if data.levels is not None:
        other = data.split("validation" if settings.reference == "train" else "train")
        channels, result["channels"] = evaluate_channels(
            samples, data.split(settings.reference), other, data.levels.channels
        )
        result["metrics"] |= channels
    return result


def real_images(train: Shards, validation: Shards) -> RealImages:
    """Return the images of the two splits of a set of crops; imported latents have splits without images."""
    if train.manifest["kind"] != "latents":
        return RealImages(train, validation, train.levels)
    none = Samples(np.empty((0, 0, 0, 0), np.uint8), np.empty(0, np.int64), train.classes)
    return RealImages(none, none)


def joined(folder: Path | str, split: Split, pairs: Sequence[Path]) -> Shards:
    """Return a split of a folder of crops, joined with additional sets. pairs: the folders of the sets."""
    images = open_shards(folder, split, renders=True)
    for other in pairs:
        images.join(open_shards(other, "all"))
    return images


def check_likelihood(process: Process, codec: Config, settings: LikelihoodConfig) -> Discrete:
    """Return the process. Raises ValueError for one without a likelihood of images.

    It takes a chain of steps x_t -> x_s, each a Gaussian p(x_s | x_t) given x_t alone, that ends at pixels: a discrete
    process on pixels, with any prediction and any variance. A flow or a continuous process has no steps of its own,
    self-conditioning makes p depend on more than x_t, and the decoder of latents does not define the probability of a
    pixel.
    """
    advice = "Leave out evaluate.likelihood."
    if not isinstance(codec, Rgb):
        raise ValueError(
            f"evaluate.likelihood: the network works on latents, from which no pixel has a probability. {advice}"
        )
    if not isinstance(process, Discrete):
        raise ValueError(
            f"evaluate.likelihood: the process {process.type} has no steps of which the bound could consist; "
            f"only a discrete process has. {advice}"
        )
    process.build().grid(settings.timesteps or None)  # raises for an impossible respacing
    return process


def likelihood_label(model: TrainedNetwork, drops_labels: bool, label: ClassLabel | None) -> int | None:
    """Return the number of the class that all images are conditioned on; None: each image's own class.

    drops_labels: whether labels were dropped in training. label: of `LikelihoodConfig`. Raises ValueError for a class
    that the network does not have.
    """
    if label is None:
        return None
    num_classes = model.spec.num_classes
    if not num_classes:
        raise ValueError("evaluate.likelihood.label is set, but the network has no classes. Leave it out.")
    if label == "none" and label not in model.classes:
        if not drops_labels:
            raise ValueError(
                "evaluate.likelihood.label is none, but the network never learned to do without a label. Name a class."
            )
        return num_classes
    return class_number("evaluate.likelihood.label", label, model.classes or list(map(str, range(num_classes))))


class ImageBound:
    """Bound on the likelihood of images, on the device of the network. The conditions are derived from the images by
    the part `image`; of a class-conditional network they are the images' labels, or one label for all.

    timesteps: of the process's schedule, from most noise to least. Raises ValueError as `check_likelihood` does.
    """

    def __init__(
        self,
        network: nn.Module,
        reading: Reading,
        spec: DataSpec,
        codec: Config,
        settings: LikelihoodConfig,
        label: int | None = None,
        image: ImagePart | None = None,
    ) -> None:
        process = check_likelihood(reading.process, codec, settings).build()
        self._process = process.respaced(settings.timesteps) if settings.timesteps else process
        self.timesteps: list[int] = self._process.timestep_map.flip(0).tolist()
        self._network, self._reading, self._spec, self._settings = network, reading, spec, settings
        self._label, self._image = label, image
        self._device = next(network.parameters()).device

    @torch.no_grad()
    def __call__(self, images: Tensor, labels: Tensor, numbers: Tensor) -> BitsPerDim:
        """Return the bounds of uint8 images [B, C, H, W] with labels, int64 [B]. numbers: int64 [B], which key the
        noise."""
        x0, reading, grid = from_uint8(images.to(self._device)), self._reading, self._process.grid()
        labels = labels if self._label is None else torch.full_like(labels, self._label)
        cond = {"label": labels.to(self._device)} if self._spec.num_classes else {}
        sample = numbers.to(self._device)
        if self._image is not None:
            cond |= self._image.degraded(x0, Streams(self._settings.seed, torch.zeros_like(sample), sample))
        denoiser = NetworkDenoiser(
            cast("Network", self._network),
            self._process,
            grid,
            reading.prediction,
            reading.variance,
            cond,
            clamp if self._settings.clip_denoised else None,
        )

        def noise(i: int) -> Tensor:
            streams = Streams(self._settings.seed, torch.full_like(sample, i), sample)
            return streams.normal("likelihood", tuple(x0.shape[1:]))

        return bits_per_dim(
            denoiser, grid, x0, noise, "fixed_large" if reading.variance == "fixed_large" else "fixed_small"
        )


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
