"""Evaluation of a diffusion model: its samples compared with real images, and the likelihood of real images."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from image_diffusion.codecs import CodecConfig
from image_diffusion.codecs.base import from_uint8
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.classes import ClassLabel, class_number
from image_diffusion.core.config.base import Config, dump, parse
from image_diffusion.core.devices import best_device
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec, Network
from image_diffusion.data.shards.reader import Shards, Split, open_shards
from image_diffusion.metrics.config import EvaluateConfig, compare_with_published
from image_diffusion.metrics.evaluate_samples import RealImages, evaluate_samples
from image_diffusion.metrics.images.channels import evaluate_channels
from image_diffusion.metrics.images.drawn_digits import evaluate_drawn, evaluate_painted
from image_diffusion.metrics.images.likelihood import LikelihoodConfig, measure_likelihood
from image_diffusion.metrics.images.prompt_alignment import check_prompted, evaluate_prompted
from image_diffusion.metrics.learning_curve import read_previews
from image_diffusion.metrics.samples import Samples
from image_diffusion.process import Process
from image_diffusion.process.denoiser import NetworkDenoiser, clamp
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.likelihood import BitsPerDim, bits_per_dim
from image_diffusion.systems.base import on_best_device
from image_diffusion.systems.diffusion.conditions.image import ImagePart
from image_diffusion.systems.diffusion.paired_images import evaluate_paired
from image_diffusion.systems.diffusion.reading import Reading
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
        data = real_images(inputs.data)
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


def real_images(folder: Path | str) -> RealImages:
    """Return the two splits of a folder of crops; imported latents have splits without images."""
    train, validation = (open_shards(folder, split, renders=True) for split in ("train", "validation"))
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
