"""Rules that derive the settings of an experiment from facts about the images, a machine and a design.

Each rule states its source, a paper or a measurement of this repository, and each choice its reason, which is written
as a comment in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from image_diffusion.core.resolution import height_width
from image_diffusion.data.masks import MaskFacts, Value
from image_diffusion.data.quality.facts import CaptionFacts, Facts
from image_diffusion.experiments.request import (
    DESIGNS,
    LARGEST_SIDE,
    Design,
    Machine,
    Request,
    Speed,
    batch_of,
    captions_of,
    classes_of,
    held_out_of,
    masks_of,
    passes_of,
)
from image_diffusion.metrics.distances.set_distances import SAMPLES_PER_DIMENSION
from image_diffusion.metrics.features.classifier import FEATURES

_WATCHED_PASSES, AUGMENTED_PASSES = 100, 600
"""Minimum numbers of passes over the images for keeping the best weights and for augmentation: with 500 images,
augmentation lowered the distance at 640 passes, but not at 384 (docs/choosing.md)."""
_AUGMENT = {"probability": 0.25}
"""Twice EDM's probability of 0.12; with 500 images, that halved the number of copies (docs/choosing.md)."""
_INTERVAL_SAMPLES = SAMPLES_PER_DIMENSION * FEATURES
"""Minimum number of samples for an interval of the distance between features of the built-in classifier."""
PREVIEWS, VALIDATIONS, CHECKED = 4, 8, 256
_SHOWN = 5
"""Number of prompts of the previews."""
PROMPTS = "config/prompts.txt"
"""File of the project with captions to sample from."""


class Choice(NamedTuple):
    """Value of a key of the file, and its reason."""

    key: str
    value: Any
    reason: str


def choices(
    request: Request, design: Design, steps: int, num_samples: int, speed: Speed | None = None
) -> dict[str, list[Choice]]:
    """Return the choices by section. speed: None if not measured yet."""
    facts, machine, start = request.facts, request.machine, request.start
    captions, masks = captions_of(facts), masks_of(facts)
    prompts = [] if captions is None else [Choice("prompts", [*captions.prompts[:_SHOWN]], "some of the captions")]
    return {
        "data": [*_data(request, design)],
        **({} if start is None or start.codec["type"] == "rgb" else {"codec": [*_as_started(start.codec)]}),
        **({} if captions is None else {"pairs": [*_captions(captions)]}),
        **({} if masks is None else {"pairs": [*_masks(masks)]}),
        "system": [*(_system(request, design) if start is None else _as_started(start.system_for(_drops(facts))))],
        "train": [*_train(request, design, steps)],
        "preview": [
            Choice("num_samples", 20, ""),
            *prompts,
            Choice("sampler", {"type": "heun", "num_steps": 8}, "coarse: only to follow the training"),
        ],
        "sample": [*_sample(facts, machine, num_samples)],
        "evaluate": [*_evaluate(facts)],
        "resources": [*_resources(machine, request.budget_s, speed)],
    }


def _data(request: Request, design: Design) -> Iterator[Choice]:
    facts, machine, start = request.facts, request.machine, request.start
    source: dict[str, Any] = {"type": facts.source.type, **facts.source.model_dump(exclude_defaults=True)}
    count = len(facts.per_class)
    if facts.per_class and not classes_of(facts):
        source |= {"label_column": None} if facts.source.type == "table" else {"classes": "none"}
        reason = "no classes: only one" if count == 1 else f"no classes: {count:,} with too few images in each"
    else:
        limits = sorted({min(facts.per_class, default=0), max(facts.per_class, default=0)})
        reason = f"{count:,} classes of {' to '.join(f'{limit:,}' for limit in limits)}" if count else "no classes"
    yield Choice("name", request.name, "")
    yield Choice("source", source, f"{facts.num_images:,} images, {reason}")
    resolution = request.resolution(design)
    side = min(height_width(resolution))
    limited = f"; at most {side} on {machine.kind.upper()}s" if side == LARGEST_SIDE[machine.kind] else ""
    yield Choice(
        "resolution",
        list(resolution) if isinstance(resolution, tuple) else resolution,
        f"nine of ten images have a side of {facts.short_side} pixels or more{limited}"
        if start is None
        else f"that of the weights; nine of ten images have a side of {facts.short_side} pixels or more",
    )
    if facts.dtype is not None:
        yield Choice("dtype", facts.dtype, "arrays, which keep their numbers")
        yield Choice("range", "measured", "from the least to the greatest number of each channel, but for outliers")
    if start is not None and facts.dtype is None:
        if start.channels != 3:
            yield Choice("channels", start.channels, "that of the weights")
    elif facts.dtype is not None or facts.channels != 3:
        channels = [*facts.names] if facts.names else facts.channels
        yield Choice("channels", channels, "as in the files" if facts.dtype else "all images that were read are grey")
    if facts.transparent:
        yield Choice("background", [255, 255, 255], "white, as all images have an alpha channel")
    if facts.deep:
        yield Choice("range", "file", "65,535 is white in pictures of 16 bits")
    if facts.several_pages:
        yield Choice("pages", "first", "the first page of files that hold several")
    yield Choice(
        "validation_fraction", held_out_of(facts), "held out: the floor of the metrics, and the loss on unseen images"
    )
    yield Choice("num_shards", 4 if facts.num_images < 10_000 else 16, "")


def _captions(captions: CaptionFacts) -> Iterator[Choice]:
    source: dict[str, Any] = {"type": "beside"} | ({} if captions.column == "caption" else {"column": captions.column})
    number = "a caption" if captions.per_image < 2 else f"{captions.per_image} captions"
    yield Choice("type", "captions", "")
    yield Choice("captions", source, f"{captions.count:,} images have {number}")
    yield Choice(
        "encoder", {"type": "hashed"}, "knows words and no language; clip, siglip and t5 need weights (docs/text.md)"
    )
    tokens = min(64, 8 * math.ceil(captions.words / 8))
    yield Choice("num_tokens", tokens, f"nineteen of twenty captions have {captions.words} words at most")
    yield Choice("num_captions", min(4, captions.per_image), "")


def _masks(masks: MaskFacts) -> Iterator[Choice]:
    yield Choice("type", "images", "")
    yield Choice("path", masks.path, f"{masks.count:,} images have a mask")
    labels: int | dict[str, Any] = len(masks.values)
    if masks.values != (*range(len(masks.values)),):
        labels = {_label_name(value): value if isinstance(value, int) else [*value] for value in masks.values}
    yield Choice("labels", labels, "the values in the masks; you can rename the labels")


def _label_name(value: Value) -> str:
    return f"value_{value}" if isinstance(value, int) else f"colour_{bytes(value).hex()}"


def _as_started(section: dict[str, Any]) -> Iterator[Choice]:
    for key, value in section.items():
        yield Choice(key, value, "as the weights were trained" if key == "type" else "")


def _drops(facts: Facts) -> float:
    """Return the share of training examples whose condition is dropped."""
    return 0.1 if classes_of(facts) or captions_of(facts) or masks_of(facts) else 0.0


def _system(request: Request, design: Design) -> Iterator[Choice]:
    facts, machine = request.facts, request.machine
    patch = min(height_width(request.resolution(design))) // design.grid
    numbers = patch**2 * facts.channels
    prediction = "velocity" if 2 * numbers <= design.width else "x0"
    network: dict[str, Any] = {
        "depth": design.depth, "width": design.width, "num_heads": design.num_heads, "patch": patch,
        "norm": "rms_norm", "qk_norm": True, "mlp": "swiglu", "rope": True,
    }  # fmt: skip
    if numbers > design.width:
        network["patch_bottleneck"] = min(128, design.width // 2)
    captions, masks = captions_of(facts), masks_of(facts)
    if classes_of(facts) and captions is None and design.width < 384:
        network["label_init_std"] = 0.5
    yield Choice("type", "dit", "on pixels: latents need the weights of a published autoencoder, as codec")
    if captions is not None:
        yield Choice("condition", {"type": "text"}, "the captions")
    if masks is not None:
        image = {"type": "image", "from": "pairs"}
        classes = bool(classes_of(facts))
        yield Choice("condition", [{"type": "label"}, image] if classes else image, "the masks")
    yield Choice(
        "network",
        network,
        f"the largest of {len(DESIGNS[machine.kind])} for which the budget has steps enough (exponents of Liang et al. "
        f"2024); {design.grid} patches along a side; normalisation, MLP and positions of JiT (Li and He 2025)",
    )
    yield Choice("process", {"type": "flow", "times": {"type": "logit_normal"}, "time_scale": 1000}, "as SiT and JiT")
    yield Choice(
        "objective",
        {
            "type": "flow_matching", "prediction": prediction, "loss": "velocity",
            "label_drop_probability": _drops(facts),
        },
        f"the velocity where a patch has at most half as many numbers as the network has channels, else x0: "
        f"{numbers:,} and {design.width:,} (docs/choosing.md)",
    )  # fmt: skip


def _train(request: Request, design: Design, steps: int) -> Iterator[Choice]:
    facts, machine, start = request.facts, request.machine, request.start
    batch = batch_of(facts, design)
    passes = passes_of(facts, design, steps)
    yield Choice("steps", steps, f"fills the budget; {passes:,.0f} passes over the training images")
    full = batch == design.batch
    reason = ("as the demos" if machine.kind == "cpu" else "as DiT") if full else "a quarter of the images at most"
    yield Choice("global_batch", batch, reason)
    if machine.kind == "gpu" and design.width >= 768:
        yield Choice("microbatch", 64, "for memory: changes no result")
    if start is None:
        yield _optimizer(design)
    else:
        yield Choice("init_from", str(start.folder), f"its weights, of step {start.step:,}")
        if start.optimizer is not None:
            yield Choice("optimizer", start.optimizer, "that of the weights")
    warmup = min(1000, max(10, steps // 20))
    yield Choice("schedule", {"type": "cosine", "warmup_steps": warmup}, "a twentieth to warm up; zero when time is up")
    yield Choice("grad_clip", 1.0, "")
    rate = math.pow(0.5, 1 / (0.05 * steps))
    digits = max(2, 2 - math.floor(math.log10(1 - rate)))
    yield Choice(
        "ema",
        {"type": "exponential", "rates": [min(0.9999, round(rate, digits))], "warmup": {"type": "ramp_up"}},
        "a half-life of a twentieth of the steps (EDM: Karras et al. 2022), at most DiT's 0.9999",
    )
    yield Choice("flip_probability", 0.5, "0 for images that must not be mirrored, such as text")
    if masks_of(facts) is None:  # augmentation does not transform masks
        yield _augment(passes, "pixels" if start is None or start.codec["type"] == "rgb" else "latents")
    if passes >= _WATCHED_PASSES:
        yield Choice("weights", "best", "those of the smallest loss on held-out images, before images are learnt")
    yield Choice("validate_every_steps", max(1, math.ceil(steps / VALIDATIONS)), "")
    yield Choice("validation_samples", CHECKED, "")
    yield Choice("grid_every_steps", max(1, math.ceil(steps / PREVIEWS)), "")
    yield Choice("log_every_steps", max(1, math.ceil(steps / 50)), "")
    every = {"every_steps": max(1, math.ceil(steps / PREVIEWS)), "every_seconds": 600}
    yield Choice("checkpoint", every, "a kill loses ten minutes at most")
    if machine.kind == "gpu":
        yield Choice("precision", "bf16", "")
        if steps > 20_000:
            yield Choice("compile", True, "takes a minute at the start")


def _augment(passes: float, on: Literal["pixels", "latents"]) -> Choice:
    if on == "latents" or passes < AUGMENTED_PASSES:
        reason = f"mirroring alone{', as latents allow no more' * (on == 'latents')}; a condition of the network"
        return Choice("augment", {"probability": 0}, reason)
    return Choice("augment", _AUGMENT, f"{AUGMENTED_PASSES} passes or more: twice as often as EDM")


def _optimizer(design: Design) -> Choice:
    at_128, page = {"adamw": (2e-3, "docs/study_digits.md"), "muon": (1e-2, "docs/choosing.md")}[design.optimizer]
    optimizer: dict[str, Any] = {"type": design.optimizer, "lr": float(f"{at_128 * 128 / design.width:.2g}")}
    if design.optimizer == "adamw":
        optimizer["betas"] = [0.9, 0.99]
    inverse = "inverse to the width (Yang et al. 2022, arXiv:2203.03466)"
    return Choice("optimizer", optimizer, f"{at_128:g} at a width of 128 ({page}), {inverse}")


def _sample(facts: Facts, machine: Machine, num_samples: int) -> Iterator[Choice]:
    need = f"fewer than the {_INTERVAL_SAMPLES} of" if num_samples < _INTERVAL_SAMPLES else "enough for"
    yield Choice("num_samples", num_samples, f"a tenth of the budget at most; {need} an interval of the distance")
    steps = 15 if machine.kind == "cpu" else 18
    yield Choice("sampler", {"type": "heun", "num_steps": steps}, "EDM draws CIFAR-10 in 18 steps of Heun's method")
    if captions_of(facts) is not None:
        yield Choice("prompts", PROMPTS, "captions of images that are spread over the set")
        yield Choice("guidance", {"guidance_scale": 2.0}, "as text_demo; docs/sweep.md finds the best")
    elif masks_of(facts) is not None:
        yield Choice("guidance", {"guidance_scale": 2.5}, "as mask_demo; docs/sweep.md finds the best")
    elif classes_of(facts):
        yield Choice("guidance", {"guidance_scale": 1.5}, "as cells_demo; docs/sweep.md finds the best")
    yield Choice("batch_size", 100, "")


def _evaluate(facts: Facts) -> Iterator[Choice]:
    yield Choice("detectors", ["inpipe"], "a classifier that is trained on these images: needs no weights of others")
    yield Choice("two_sample", facts.num_images * held_out_of(facts) >= 50, "needs 50 held-out images to say something")
    yield Choice("copies", True, "the nearest training image of each sample")


def _resources(machine: Machine, budget_s: float, speed: Speed | None) -> Iterator[Choice]:
    if machine.kind == "cpu":
        yield Choice("one_job", True, "on a cluster")
        yield Choice("gpus_per_node", 0, "")
        yield Choice("cpus_per_process", machine.cores, "")
    else:
        yield Choice("processes_per_node", machine.gpus, "")
        yield Choice("gpus_per_node", machine.gpus, "")
        yield Choice("cpus_per_process", max(1, machine.cores // machine.gpus), "")
    memory = 8000 if speed is None or machine.kind == "gpu" else max(2000, round(1.5 * 1024 * speed.memory_gib, -3))
    yield Choice("memory_mb", int(memory), "half as much again as was measured" if machine.kind == "cpu" else "")
    yield Choice("runtime_min", max(10, math.ceil(budget_s * 1.2 / 60)), "a fifth more than the budget")
