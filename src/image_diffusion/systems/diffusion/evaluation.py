"""How a diffusion is judged: its samples beside real images, and the likelihood that it gives to those."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from image_diffusion.codecs import CodecConfig
from image_diffusion.core.config import dump, parse
from image_diffusion.core.devices import best_device
from image_diffusion.data.shards import open_shards
from image_diffusion.metrics.cited import beside
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.curve import read_previews
from image_diffusion.metrics.evaluation import NoImages, RealImages, evaluate_samples
from image_diffusion.metrics.likelihood import LikelihoodConfig, measure_likelihood
from image_diffusion.metrics.painted import evaluate_painted
from image_diffusion.metrics.prompted import check_prompted, evaluate_prompted
from image_diffusion.metrics.samples import Samples
from image_diffusion.systems.diffusion.enlarging_evaluation import evaluate_enlarging
from image_diffusion.systems.diffusion.likelihood import ImageBound, told_label
from image_diffusion.systems.given import Model, ToJudge
from image_diffusion.systems.system import on_best_device


def judge_diffusion(given: ToJudge) -> dict[str, Any]:
    """What metrics.json holds, of samples where there are any, and of the likelihood where it is asked for.

    Without a model, samples from anywhere are judged. Raises ValueError for what is missing or does not fit.
    """
    settings: EvaluateConfig = given.sections["evaluate"]
    data = real_images(given.data)
    if given.samples is None and settings.likelihood is None:
        raise ValueError("A diffusion model is judged by its samples. Name them: --samples samples.npz.")
    result: dict[str, Any] = {"metrics": {}, "doubt": None, "curve": [], "classes": {}, "protocol": {}}
    if given.samples is not None:
        if settings.against is not None and given.reference is None:
            raise ValueError("evaluate.against is set. Name the .npz that samples are compared with: --reference.")
        detectors = [each.build(given.detector, str(best_device())) for each in settings.detectors]
        samples = given.read(given.samples, data.train.classes)
        both = None
        if settings.prompts is not None:
            check_prompted(samples)
            both = settings.prompts.build_both(str(best_device()))
        previews, left_out = dict[int, Samples](), list[str]()
        if given.previews is not None and given.model is not None:
            run = given.previews / given.model.fingerprint
            previews, left_out = read_previews(run, data.train.classes, given.model.num_steps)
        result = evaluate_samples(
            samples, data, detectors, settings, given.report, given.reference, previews, given.references
        )
        for sentence in left_out:
            print(f"warning: {sentence}", file=sys.stderr, flush=True)
        if left_out:
            result["protocol"]["left_out"] = left_out
        if settings.attributes is not None:
            result["metrics"] |= evaluate_painted(samples, detectors)
        if both is not None:
            result["metrics"] |= evaluate_prompted(samples, both)
            result["protocol"]["prompts"] = both.images.identity
        result["metrics"] |= evaluate_enlarging(samples, data.validation, given.report)
    if settings.likelihood is not None:
        bits, result["likelihood"] = _likelihood(given.model, data, settings.likelihood, given.report)
        result["metrics"] |= bits
        result["protocol"]["likelihood"] = {"settings": dump(settings.likelihood), "data": data.train.digest}
    if settings.published:
        result["published"] = beside(settings.published, result["metrics"])
    return result


def real_images(folder: Path | str) -> RealImages:
    """The two splits of a folder of crops; of latents that others have encoded, no image."""
    train, validation = open_shards(folder, "train"), open_shards(folder, "validation")
    if train.manifest["kind"] != "latents":
        return RealImages(train, validation)
    none = NoImages(train.classes)
    return RealImages(none, none)


def _likelihood(
    model: Model | None, data: RealImages, settings: LikelihoodConfig, report: Path | None
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The bits per dimension of real images, and their terms by timestep."""
    if model is None:
        raise ValueError("evaluate.likelihood needs the network. Name it: --weights weights.safetensors.")
    spec, shape, num_classes = model.spec, data.train.shape, len(data.train.classes)
    trained_on = f"The network was trained on images of {[spec.channels, spec.resolution, spec.resolution]}"
    if shape != (spec.channels, spec.resolution, spec.resolution):
        raise ValueError(f"{trained_on}, but --data holds {list(shape)}. Name images of that size.")
    label = told_label(model, settings.label)
    if label is None and spec.num_classes not in (0, num_classes):
        raise ValueError(
            f"{trained_on} with {spec.num_classes} classes, but --data holds {num_classes}. Name images like its own, "
            f"or with evaluate.likelihood.label the class that it is told of all of them."
        )
    codec = parse(CodecConfig, model.codec["config"], "model.json: codec")
    system: Any = model.system
    bound = ImageBound(on_best_device(model), system, model.spec, codec, settings, label)
    return measure_likelihood(bound, bound.timesteps, data.split(settings.split), settings, report)
