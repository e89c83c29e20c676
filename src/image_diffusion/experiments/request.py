"""Inputs of a proposal: images, a machine and a budget; and the networks to choose from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from image_diffusion.data.quality.facts import CaptionFacts, Facts
from image_diffusion.data.quality.masks import MaskFacts
from image_diffusion.experiments.start import Start

_LEAST_PER_CLASS = 8
"""Classes of fewer images than this, in the median, are no classes to learn."""
_SIDES = (16, 32, 48, 64, 96, 128, 192, 256)  # multiples of the largest grid
_ENLARGED = 1.25
"""Largest factor by which images are enlarged, so that 28 pixels become 32."""
LARGEST_SIDE = {"cpu": 64, "gpu": 256}


@dataclass(frozen=True)
class Machine:
    """The machine. cores: those that are used. memory_gib: that a training may take, on each GPU or in all. start_s:
    seconds in which a process starts and imports PyTorch."""

    cores: int
    gpus: int
    memory_gib: float
    start_s: float

    @property
    def kind(self) -> str:
        """Return gpu or cpu."""
        return "gpu" if self.gpus else "cpu"


@dataclass(frozen=True)
class Speed:
    """Measured seconds. step_s: of a step of the training; pass_s: of one image in a pass of the network; crop_s: of
    one image file; detector_s: of one example of the detector's training; mask_s: of one of the segmenter's, which
    compares masks; encode_s, decode_s: of one image by the codec. memory_gib: of the training; seconds are 0 where that
    does not fit into the machine."""

    step_s: float
    pass_s: float
    crop_s: float
    detector_s: float
    memory_gib: float
    mask_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0


class Design(NamedTuple):
    """Size of a network and of its batch, and the optimizer. grid: tokens along the shorter side of an image."""

    depth: int
    width: int
    num_heads: int
    grid: int
    batch: int
    optimizer: Literal["adamw", "muon"] = "adamw"

    @property
    def parameters(self) -> int:
        """Return the parameters of the blocks: 4 of attention, 8 of the MLP and 6 of adaLN, times width squared."""
        return 18 * self.depth * self.width**2

    @property
    def operations(self) -> int:
        """Return what an example takes, in units that compare designs."""
        return self.parameters * self.grid**2


DESIGNS = {
    "cpu": (
        Design(4, 128, 4, 4, 64),  # text_demo: 16 tokens
        Design(4, 128, 4, 8, 64),  # cells_demo
        Design(6, 256, 4, 8, 64),
        Design(12, 384, 6, 8, 128),  # DiT-S
    ),
    "gpu": (
        Design(4, 128, 4, 8, 128),
        Design(6, 256, 4, 8, 256),
        Design(12, 384, 6, 16, 256),  # DiT-S; 256 tokens as in JiT, whatever the resolution
        Design(12, 768, 12, 16, 256),  # DiT-B
        Design(24, 1024, 16, 16, 256),  # DiT-L
    ),
}
"""Designs by device, the smallest first. Sizes are those of Peebles and Xie 2023 (table 1) and of the demos."""


@dataclass(frozen=True)
class Request:
    """Images, the name of their data set, the machine, and the budget in seconds. start: weights to train from; unset:
    random ones."""

    facts: Facts
    name: str
    machine: Machine
    budget_s: float
    start: Start | None = None

    @property
    def designs(self) -> tuple[Design, ...]:
        """Return the designs to choose from, the smallest first: that of the weights, if there are some."""
        designs, start = DESIGNS[self.machine.kind], self.start
        if start is None:
            return designs
        return (Design(start.depth, start.width, start.num_heads, start.grid, designs[1].batch),)

    def resolution(self, design: Design) -> int | tuple[int, int]:
        """Return the resolution of the crops: that of the weights, if there are some."""
        if self.start is not None:
            return self.start.resolution
        return resolution_of(self.facts, self.machine, design.grid)


def resolution_of(facts: Facts, machine: Machine, grid: int) -> int | tuple[int, int]:
    """Return the side of the crops, or height and width of those of images that are all upright or all wide.

    A fixed number of tokens makes the cost of a network independent of it (Li and He 2025, arXiv:2511.13720).
    """
    largest = min(facts.short_side * _ENLARGED, LARGEST_SIDE[machine.kind])
    side = max((side for side in _SIDES if side <= largest), default=_SIDES[0])
    low, high = facts.aspect
    ratio = min(2.0, max(0.5, math.sqrt(low * high)))
    if low < 1.25 and high > 0.8:
        return side
    longer = side // grid * round(grid * max(ratio, 1 / ratio))
    return (side, longer) if ratio > 1 else (longer, side)


def classes_of(facts: Facts) -> tuple[int, ...]:
    """Return the images of each class; empty where classes are too small to learn, or fewer than two."""
    per_class = sorted(facts.per_class)
    return facts.per_class if len(per_class) > 1 and per_class[len(per_class) // 2] >= _LEAST_PER_CLASS else ()


def captions_of(facts: Facts) -> CaptionFacts | None:
    """Return the captions; None where fewer than nine in ten images have one, since the others are left out."""
    return facts.captions if facts.captions is not None and facts.captions.count >= 0.9 * facts.num_images else None


def masks_of(facts: Facts) -> MaskFacts | None:
    """Return the masks of pictures; None where fewer than nine in ten images have one, and beside captions."""
    masks = facts.masks if facts.dtype is None and captions_of(facts) is None else None
    return masks if masks is not None and masks.count >= 0.9 * facts.num_images else None


def batch_of(facts: Facts, design: Design) -> int:
    """Return the batch of a design, or the largest power of two that is a quarter of the images at most."""
    return min(design.batch, 1 << int(math.log2(facts.num_images / 4)))


def passes_of(facts: Facts, design: Design, steps: int) -> float:
    """Return how often each training image is seen."""
    return steps * batch_of(facts, design) / facts.num_images
