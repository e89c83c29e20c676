"""File of a proposal, with a reason for each choice, and a description of its images and machine."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from image_diffusion.core.config.yaml12 import in_line
from image_diffusion.data.quality.facts import Facts
from image_diffusion.experiments.experiment import Experiment, parse_experiment
from image_diffusion.experiments.request import (
    Design,
    Machine,
    captions_of,
    classes_of,
    held_out_of,
    masks_of,
    passes_of,
)
from image_diffusion.metrics.images.memorization import LEAST_HELD_OUT

_FEW = 5_000
"""Number of images below which the user is warned of copies: five times the number of samples compared with them."""
_FEW_OF_A_CLASS = 10


class Choice(NamedTuple):
    """Value of a key of the file, and its reason."""

    key: str
    value: Any
    reason: str


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
