"""Size an experiment for a time budget: the largest design, and the numbers of steps and samples. Write its file, with
a reason for each choice.

The same facts, machine, budget and measured speed always give the same file (`choices`).
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from image_diffusion.core.config.yaml12 import in_line
from image_diffusion.core.texts import duration
from image_diffusion.data.quality.facts import Facts
from image_diffusion.experiments.choices import (
    AUGMENTED_PASSES,
    CHECKED,
    PREVIEWS,
    PROMPTS,
    VALIDATIONS,
    Choice,
    choices,
)
from image_diffusion.experiments.experiment import Experiment, parse_experiment
from image_diffusion.experiments.request import (
    DESIGNS,
    Design,
    Machine,
    Request,
    Speed,
    Start,
    batch_of,
    captions_of,
    classes_of,
    held_out_of,
    masks_of,
    passes_of,
)
from image_diffusion.metrics.images.memorization import LEAST_HELD_OUT
from image_diffusion.metrics.images.segmentation import MOST_HELD_OUT
from image_diffusion.metrics.images.segmentation import TRAINING as MASKS

LEAST_IMAGES = 30
"""Minimum number of images: with fewer, too few are held out for any metric."""
_LEAST_STEPS = 200
"""Steps after which the smallest design draws legible digits (config/experiments/speedrun_digits.yaml: 180)."""
_SAMPLES_SHARE = 0.1
_LEAST_SAMPLES, _MOST_SAMPLES = 100, 10_000
_MARGIN = 0.03
"""Share of the budget reserved for costs outside the forecast."""
_STARTS = 12.5
"""Overhead of all stages (processes, tracking, report), in units of the start of a process that imports PyTorch:
measured with digits on one core, 31 s with a start of 2.5 s."""
_EVALUATION_S_PER_IMAGE, _MOST_JUDGED = 4e-4, 10_000
"""Time per image of an evaluation, in the same unit (0.7 ms with digits, 1 ms with 20,000 images of CIFAR-10), and
maximum number of training images that it compares with."""
_DETECTOR_EXAMPLES = (4, 6_000, 200_000)
"""Passes over the training images, and limits of the number of examples, of `DetectorTraining`."""
_WORTH_MUON = 1.5
"""Maximum ratio of step times of Muon and AdamW; Muon needs at most half of AdamW's steps (docs/choosing.md)."""
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_FEW = 5_000
"""Number of images below which the user is warned of copies: five times the number of samples compared with them."""
_FEW_OF_A_CLASS = 10


@dataclass(frozen=True)
class Cost:
    """Forecast in seconds. others_s: of all work except steps and samples. sample_s: of all samples. step_s: of one
    step."""

    others_s: float
    sample_s: float
    step_s: float

    def total(self, steps: int) -> float:
        """Return the seconds of all stages."""
        return self.others_s + self.sample_s + steps * self.step_s


@dataclass(frozen=True)
class Proposal:
    """A proposed experiment. text: its file. files: texts of other files of the project, by path. warnings: for the
    terminal. total_s: forecast of all stages."""

    text: str
    files: dict[str, str]
    warnings: tuple[str, ...]
    design: Design
    steps: int
    num_samples: int
    total_s: float


Measure = Callable[[Experiment], Speed]


def seconds_of(budget: str) -> float:
    """ "6h" -> 21600.0. Raises ValueError for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|d)", budget.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"The budget {budget!r} is not a duration. Give a number and a unit: 10min, 6h or 2d.")
    return float(match[1]) * _UNITS[match[2]]


def least_steps(designs: tuple[Design, ...], number: int) -> int:
    """Return the number of steps that a design needs to be better than smaller ones.

    The best number of examples grows with the compute C as C^0.4319, that of parameters as C^0.5681 (Liang et al. 2024,
    "Scaling laws for diffusion transformers", arXiv:2410.08184): the first is the second to the power of 0.76. The
    scale is set by the 1,500 steps of cells_demo.
    """
    if number == 0:
        return _LEAST_STEPS
    return round(1500 * math.pow(designs[number].parameters / DESIGNS["cpu"][1].parameters, 0.76))


def propose(
    facts: Facts, name: str, machine: Machine, budget: str, measure: Measure, start: Start | None = None
) -> Proposal:
    """Return the experiment that trains, samples and evaluates within a budget.

    name: of the data set. measure: returns the speed of an experiment on this machine. start: weights to train from,
    which fix the network and the size of images; unset: random weights. Raises ValueError for too few images, for
    images that do not fit the weights, for too little memory, and for a budget that is too small or not a duration.
    """
    if start is not None:
        if facts.dtype is not None and facts.channels != start.channels:
            raise ValueError(
                f"The images are arrays of {facts.channels} channels, but the weights in {start.folder} are of images "
                f"with {start.channels}. Give other weights, or none."
            )
        facts = replace(facts, captions=None, masks=None)  # conditions that the network does not have
    request = Request(facts, name, machine, seconds_of(budget), start)
    if facts.num_images < LEAST_IMAGES:
        raise ValueError(
            f"{facts.num_images} image{'s are' if facts.num_images > 1 else ' is'} too few to train on and to hold "
            f"some out. Give at least {LEAST_IMAGES}."
        )
    design, speed = _largest(request, measure)
    if start is None:
        design, speed = _faster_learning(request, design, speed, measure)
    cost = _cost(request, design, _LEAST_STEPS, _LEAST_SAMPLES, speed)
    steps = affordable(request, cost, cost.step_s)
    if steps < _LEAST_STEPS:
        raise ValueError(_too_small(budget, facts, cost, machine))
    num_samples = _num_samples(request, cost)
    cost = _cost(request, design, steps, num_samples, speed)
    total_s = cost.total(steps)
    warnings = tuple(warnings_of(facts, design, steps))
    head = [
        f"Proposed for {images_in_words(facts)}, on {machine_in_words(machine)}, and a budget of {budget}.",
        f"Forecast: {duration(total_s)}, of which {duration(steps * cost.step_s)} for {steps:,} steps of "
        f"{duration(cost.step_s)}, {duration(cost.sample_s)} for {num_samples:,} samples, and "
        f"{duration(cost.others_s)} for crops, the classifier that judges samples, evaluation, tracking and report.",
        *(f"Warning: {sentence}" for sentence in warnings),
    ]
    text = text_of(head, choices(request, design, steps, num_samples, speed))
    captions = captions_of(facts)
    files = {} if captions is None else {PROMPTS: "".join(f"{prompt}\n" for prompt in captions.prompts)}
    return Proposal(text, files, warnings, design, steps, num_samples, total_s)


def _largest(request: Request, measure: Measure) -> tuple[Design, Speed]:
    """Return the largest design for which budget and memory suffice, or else the smallest design, and its speed."""
    designs = request.designs
    best = designs[0], _speed(request, designs[0], _LEAST_STEPS, measure)
    if (memory := best[1].memory_gib) > request.machine.memory_gib:
        raise ValueError(
            f"A step of the smallest network takes {memory:.1f} GiB of memory, but {request.machine.memory_gib:.1f} "
            "GiB may be used. Take another machine."
        )
    for number, design in enumerate(designs[1:], start=1):
        least, (smaller, speed) = least_steps(designs, number), best
        factor = design.operations * batch_of(request.facts, design)
        step_s = speed.step_s * factor / (smaller.operations * batch_of(request.facts, smaller))
        if affordable(request, _cost(request, smaller, least, _LEAST_SAMPLES, speed), step_s) < least / 2:
            break
        speed = _speed(request, design, least, measure)
        cost = _cost(request, design, least, _LEAST_SAMPLES, speed)
        if speed.memory_gib > request.machine.memory_gib or affordable(request, cost, cost.step_s) < least:
            break
        best = design, speed
    return best


def _faster_learning(request: Request, design: Design, speed: Speed, measure: Measure) -> tuple[Design, Speed]:
    """Return the design with Muon and its speed, if a step does not take much longer and the budget allows enough
    steps. GPUs are excluded, as the learning rates of Muon were not measured there."""
    steps = affordable(request, _cost(request, design, _LEAST_STEPS, _LEAST_SAMPLES, speed), speed.step_s)
    if request.machine.kind == "gpu" or steps < _LEAST_STEPS:
        return design, speed
    other = design._replace(optimizer="muon")
    slower = measure(parsed(choices(request, other, steps, _LEAST_SAMPLES)))
    if slower.memory_gib > request.machine.memory_gib or slower.step_s > _WORTH_MUON * speed.step_s:
        return design, speed
    cost = _cost(request, other, _LEAST_STEPS, _LEAST_SAMPLES, slower)
    return (other, slower) if affordable(request, cost, slower.step_s) >= _LEAST_STEPS else (design, speed)


def _speed(request: Request, design: Design, least: int, measure: Measure) -> Speed:
    """Measure a design; measure it again, with augmentation, if the budget allows enough steps for that."""

    def at(steps: int) -> Speed:
        return measure(parsed(choices(request, design, steps, _LEAST_SAMPLES)))

    speed = at(least)
    if speed.memory_gib > request.machine.memory_gib:
        return speed
    cost = _cost(request, design, least, _LEAST_SAMPLES, speed)
    steps = affordable(request, cost, cost.step_s)
    is_augmented = [passes_of(request.facts, design, number) >= AUGMENTED_PASSES for number in (least, steps)]
    return at(steps) if is_augmented == [False, True] else speed


def _cost(request: Request, design: Design, steps: int, num_samples: int, speed: Speed) -> Cost:
    """Return the forecast of the time of an experiment at a measured speed."""
    experiment = parsed(choices(request, design, steps, num_samples))
    facts, machine = request.facts, request.machine
    held_out = facts.num_images * experiment.data.validation_fraction
    passes, least, most = _DETECTOR_EXAMPLES
    examples = min(most, max(least, passes * (facts.num_images - held_out)))
    forward_s = speed.detector_s / 3  # a backward pass takes twice the operations of the forward pass
    seen = facts.num_images + 8 * min(5000.0, held_out)  # by the reference; the detector is tested eight times
    learnt = min(MASKS.most_examples, max(MASKS.least_examples, MASKS.epochs * (facts.num_images - held_out)))
    samples, preview, sampling = experiment.sample, experiment.preview, experiment.system.sampling()
    compared = 8 * min(MOST_HELD_OUT, held_out) + held_out + samples.num_samples
    judged_s = _EVALUATION_S_PER_IMAGE * machine.start_s
    per_sample_s = sampling.num_evaluations(samples) * speed.pass_s + speed.decode_s + forward_s + judged_s
    per_preview_s = sampling.num_evaluations(preview) * speed.pass_s + speed.decode_s
    others = (
        (_STARTS + len(experiment.pair_sets)) * machine.start_s,
        facts.num_images * (speed.crop_s / machine.cores + speed.encode_s),
        examples * speed.detector_s + seen * forward_s,
        (held_out + min(_MOST_JUDGED, facts.num_images)) * judged_s,
        PREVIEWS * preview.num_samples * per_preview_s,
        VALIDATIONS * min(held_out, CHECKED) * speed.pass_s,
        speed.mask_s * (learnt + compared / 3),
    )
    return Cost(sum(others), samples.num_samples * per_sample_s, speed.step_s)


def affordable(request: Request, cost: Cost, step_s: float) -> int:
    """Return the number of steps that the budget allows. Samples take a tenth of it, within the times of the smallest
    and largest numbers of samples. cost: with the smallest number of samples."""
    most_s, budget_s = cost.sample_s * _most_samples(request.facts) / _LEAST_SAMPLES, request.budget_s
    samples_s = max(cost.sample_s, min(most_s, _SAMPLES_SHARE * budget_s))
    return max(0, math.floor((budget_s * (1 - _MARGIN) - cost.others_s - samples_s) / step_s))


def _num_samples(request: Request, cost: Cost) -> int:
    """Return the number of samples that a tenth of the budget allows, equal for each class. cost: with the smallest
    number.

    An evaluation of the 128 features of the classifier needs 640 for an interval; 10,000 are usual for small images.
    """
    number = _LEAST_SAMPLES * _SAMPLES_SHARE * request.budget_s / cost.sample_s
    number = min(_most_samples(request.facts), max(_LEAST_SAMPLES, number))
    unit = max(10, len(classes_of(request.facts)))
    return max(_LEAST_SAMPLES, int(number / unit) * unit)


def _most_samples(facts: Facts) -> int:
    return min(_MOST_SAMPLES, max(1000, facts.num_images))


def _too_small(budget: str, facts: Facts, cost: Cost, machine: Machine) -> str:
    rest_s = cost.others_s + _LEAST_STEPS * cost.step_s
    least_s = max((rest_s + cost.sample_s) / (1 - _MARGIN), rest_s / (1 - _MARGIN - _SAMPLES_SHARE))
    unit = "min" if least_s < 2 * _UNITS["h"] else "h"
    return (
        f"The budget {budget} is too small for {facts.num_images:,} images on {machine_in_words(machine)}. Crops, "
        f"{_LEAST_STEPS} steps of the smallest network, {_LEAST_SAMPLES} samples and their evaluation take "
        f"{duration(least_s)}. Give at least {math.ceil(least_s / _UNITS[unit])}{unit}."
    )


def warnings_of(facts: Facts, design: Design, steps: int) -> Iterator[str]:
    """Yield a warning for each critical property of the images."""
    passes = passes_of(facts, design, steps)
    if facts.num_images < _FEW:
        where = "See `copies` in metrics.json."
        if facts.num_images * (1 - held_out_of(facts)) < LEAST_HELD_OUT:
            where = f"Look at evaluation/nearest.png: `copies` takes {LEAST_HELD_OUT} images."
        yield (
            f"{facts.num_images:,} images are few, and each is seen {passes:,.0f} times: samples may be copies of "
            f"them. {where}"
        )
    if facts.captions is not None and captions_of(facts) is None:
        yield f"{facts.captions.count:,} images have a caption. Captions are used if nine of ten images have one."
    if facts.masks is not None and facts.dtype is not None:
        cure = " For grey images, delete data.dtype, set data.range: [low, high] and name them in pairs."
        yield (
            f"{facts.masks.count:,} images have a mask, which is not used: masks are for pictures of 8 bits."
            f"{cure if facts.channels == 1 else ''}"
        )
    elif facts.masks is not None and captions_of(facts) is not None:
        yield (
            f"{facts.masks.count:,} images have a mask, which is not used: the captions are the condition. Add the "
            "masks to pairs and system.condition (docs/conditions.md#parts-of-a-condition) to use both."
        )
    elif facts.masks is not None and masks_of(facts) is None:
        yield f"{facts.masks.count:,} images have a mask. Masks of pictures are used if nine of ten images have one."
    if classes_of(facts) and (least := min(facts.per_class)) < _FEW_OF_A_CLASS:
        yield f"The smallest class has {least} image{'s' * (least != 1)}: samples of it may be copies."
    yield from facts.notices


def images_in_words(facts: Facts) -> str:
    """Return a description of the images."""
    pictures = "grey pictures" if facts.channels == 1 else "RGB pictures"
    kind = (
        f"arrays of {facts.dtype} with {facts.channels} channel{'s' * (facts.channels != 1)}"
        if facts.dtype
        else pictures
    )
    count = len(facts.per_class)
    classes = f"{count:,} class{'es' * (count != 1)}" if count else "no classes"
    low, high = facts.aspect
    shape = "squares" if low == high == 1 else f"width over height {low:g} to {high:g}"
    captions = ", captions" if captions_of(facts) else ""
    masks = f", masks of {len(facts.masks.values)} labels" if facts.masks is not None and masks_of(facts) else ""
    return f"{facts.num_images:,} {kind}, {classes}{captions}{masks}, {facts.short_side} pixels, {shape}"


def text_of(head: list[str], sections: dict[str, list[Choice]]) -> str:
    """Return the text of the file: comments at the top, and each choice with its reason."""
    lines = [line for sentence in head for line in textwrap.wrap(sentence, 118)]
    text = "".join(f"# {line}\n" for line in lines)
    for section, rows in sections.items():
        text += f"{section}:\n"
        for key, value, reason in rows:
            line = f"  {key}: {in_line(value)}"
            if reason and len(line) + len(reason) + 4 <= 120:
                text += f"{line}  # {reason}\n"
            else:
                text += "".join(f"  # {part}\n" for part in textwrap.wrap(reason, 116)) + f"{line}\n"
    return text


def parsed(sections: dict[str, list[Choice]]) -> Experiment:
    return parse_experiment(
        {section: {row.key: row.value for row in rows} for section, rows in sections.items()}, "the proposal"
    )


def machine_in_words(machine: Machine) -> str:
    names = {"cpu": (machine.cores, "CPU core"), "gpu": (machine.gpus, "GPU")}
    count, name = names[machine.kind]
    return f"{count} {name}{'s' * (count != 1)}"
