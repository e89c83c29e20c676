"""Inputs of a proposal: images, a machine, a budget and weights to start from; and the networks to choose from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from image_diffusion.codecs import CodecConfig
from image_diffusion.codecs.base import CodecSettings
from image_diffusion.core.config.base import parse, shortest
from image_diffusion.core.files.weights import read_model
from image_diffusion.core.resolution import Size
from image_diffusion.core.resolution import resolution_of as size_of
from image_diffusion.core.types import DataSpec
from image_diffusion.data.masks import MaskFacts
from image_diffusion.data.quality.facts import CaptionFacts, Facts
from image_diffusion.experiments.experiment import train_of
from image_diffusion.systems import AnySystem
from image_diffusion.systems.base import System

_LEAST_PER_CLASS = 8
"""Minimum median number of images per class for training with classes."""
_SIDES = (16, 32, 48, 64, 96, 128, 192, 256)  # multiples of the largest grid's side
_ENLARGED = 1.25
"""Largest factor by which images are enlarged, such as from 28 to 32 pixels."""
LARGEST_SIDE = {"cpu": 64, "gpu": 256}
_DOWNSAMPLINGS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Machine:
    """The machine. cores: number of cores to use. memory_gib: available to a training, on each GPU or in total.
    start_s: seconds for starting a process that imports PyTorch."""

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
    """Measured seconds. step_s: per training step; pass_s: per image in a pass of the network; crop_s: per image file;
    detector_s, mask_s: per example of the detector's and of the segmenter's training; encode_s, decode_s: per image of
    the codec. memory_gib: of the training; if it does not fit into the machine, all seconds are 0."""

    step_s: float
    pass_s: float
    crop_s: float
    detector_s: float
    memory_gib: float
    mask_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0


class Design(NamedTuple):
    """Size of a network, batch size and optimizer. grid: tokens along the shorter side of an image."""

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
        """Return the relative cost of an example, for comparing designs."""
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
        Design(12, 384, 6, 16, 256),  # DiT-S; 256 tokens as in JiT, at any resolution
        Design(12, 768, 12, 16, 256),  # DiT-B
        Design(24, 1024, 16, 16, 256),  # DiT-L
    ),
}
"""Designs by device, the smallest first. Sizes are from Peebles and Xie 2023 (table 1) and the demos."""


@dataclass(frozen=True)
class Start:
    """Weights to start from. folder, step: of the weights. system, codec, optimizer: these sections; the optimizer is
    None for imported weights. depth, width, num_heads, grid: of the network. resolution, channels: of the images."""

    folder: Path
    step: int
    system: dict[str, Any]
    codec: dict[str, Any]
    optimizer: dict[str, Any] | None
    depth: int
    width: int
    num_heads: int
    grid: int
    resolution: int | Size
    channels: int

    def system_for(self, drops: float) -> dict[str, Any]:
        """Return the section `system`, with the share of examples whose label is dropped."""
        return self.system | {"objective": self.system.get("objective", {}) | {"label_drop_probability": drops}}


@dataclass(frozen=True)
class Request:
    """Facts about the images, the name of the data set, the machine, and the budget in seconds. start: weights to train
    from; unset: random weights."""

    facts: Facts
    name: str
    machine: Machine
    budget_s: float
    start: Start | None = None

    @property
    def designs(self) -> tuple[Design, ...]:
        """Return the designs to choose from, the smallest first; only the design of the weights, if set."""
        designs, start = DESIGNS[self.machine.kind], self.start
        if start is None:
            return designs
        return (Design(start.depth, start.width, start.num_heads, start.grid, designs[1].batch),)

    def resolution(self, design: Design) -> int | tuple[int, int]:
        """Return the resolution of the crops: that of the weights, if set."""
        if self.start is not None:
            return self.start.resolution
        return resolution_of(self.facts, self.machine, design.grid)


def resolution_of(facts: Facts, machine: Machine, grid: int) -> int | tuple[int, int]:
    """Return the side of the crops, or height and width if all images are upright or all are wide.

    With a fixed number of tokens, the cost of a network is independent of the resolution (Li and He 2025,
    arXiv:2511.13720).
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
    """Return the number of images of each class; empty if classes are too small to learn, or fewer than two."""
    per_class = sorted(facts.per_class)
    return facts.per_class if len(per_class) > 1 and per_class[len(per_class) // 2] >= _LEAST_PER_CLASS else ()


def captions_of(facts: Facts) -> CaptionFacts | None:
    """Return the captions; None if less than 90 % of the images have one, since images without one are left out."""
    return facts.captions if facts.captions is not None and facts.captions.count >= 0.9 * facts.num_images else None


def masks_of(facts: Facts) -> MaskFacts | None:
    """Return the masks of pictures; None if less than 90 % of the images have one, or if captions are used."""
    masks = facts.masks if facts.dtype is None and captions_of(facts) is None else None
    return masks if masks is not None and masks.count >= 0.9 * facts.num_images else None


def held_out_of(facts: Facts) -> float:
    """Return the share of images that is held out; it is larger for few images, since metrics need a minimum number."""
    return 0.2 if facts.num_images < 1000 else 0.1 if facts.num_images < 50_000 else 0.05


def batch_of(facts: Facts, design: Design) -> int:
    """Return the batch size of a design, at most the largest power of two up to a quarter of the number of images."""
    return min(design.batch, 1 << int(math.log2(facts.num_images / 4)))


def passes_of(facts: Facts, design: Design, steps: int) -> float:
    """Return the number of passes over the training images."""
    return steps * batch_of(facts, design) / facts.num_images


def start_of(folder: Path) -> Start:
    """Return the settings fixed by the weights in a folder. Raises ValueError for weights that no proposal can start
    from."""
    model, where = read_model(folder), f"{folder}/model.json"
    system: System = parse(AnySystem, model["system"], where)
    spec: DataSpec = parse(DataSpec, model["spec"], where)
    codec: CodecSettings = parse(CodecConfig, model["codec"]["config"], where)
    try:
        depth, width, num_heads, patch = system.started_shape()
    except ValueError as error:
        raise _unfit(folder, f"{error}, but a proposal starts from a dit with classes or none") from None
    if codec.trained_by is not None:
        raise _unfit(folder, f"are on the latents of the experiment {codec.trained_by}, which a new project lacks")
    train = train_of(type(system)).model_fields["optimizer"]
    images = _images(folder, spec, codec)
    return Start(
        folder.resolve(),
        model["step"],
        shortest(system.model_copy(update={"alignment": None})),
        shortest(codec),
        shortest(parse(train.annotation, model["train"]["optimizer"], where), train.default)
        if "train" in model
        else None,
        depth,
        width,
        num_heads,
        min(spec.size) // patch,
        images.resolution,
        images.channels,
    )


def _images(folder: Path, x: DataSpec, codec: CodecSettings) -> DataSpec:
    """Return the shape of the images that are encoded to this shape."""
    if codec.name is None:
        return x
    for factor in _DOWNSAMPLINGS:
        images = DataSpec(channels=3, resolution=size_of(x.size[0] * factor, x.size[1] * factor))
        try:
            if codec.spec(images, None).size == x.size:
                return images
        except ValueError:  # a side that is not a multiple of the autoencoder's factor
            continue
    raise _unfit(folder, f"are on latents of the codec {codec.name}, of which no size of images is known")


def _unfit(folder: Path, reason: str) -> ValueError:
    return ValueError(
        f"The weights in {folder} {reason}. Write train.init_from into an experiment of your own (docs/finetuning.md)."
    )
