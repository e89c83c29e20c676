"""Counted cost of evaluating 50,000 images of 256 pixels by Inception and DINOv2 against all of ImageNet.

    python tests/bench/bench_evaluation.py

Networks are run on tensors without contents: Inception as torchvision lays it out, and torchvision's ViT-L/14 for
DINOv2, whose products are the same. What is compared afterwards in float64, neighbours on the GPU and the rest on the
CPU, is counted by the formulas here, which tests/unit/test_counted_evaluation.py holds against the metrics themselves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import VisionTransformer, inception_v3

from image_diffusion.core.process import command
from image_diffusion.metrics.distances.moments import NUM_BLOCKS
from image_diffusion.metrics.distances.precision_recall import manifold_estimates
from image_diffusion.metrics.features.base import AT_ONCE
from image_diffusion.training.flops import Memory

NEIGHBOURS = ("precision, recall, density, coverage", "copies")
"""Comparisons that run on a GPU."""
ONE_DIRECTION = 1000
"""Directions of MIND."""
PIXELS = 3 * 16 * 16
"""Numbers of an image in the search for copies."""


@dataclass(frozen=True)
class Judge:
    """build: its network. side: of its input images. dimension: of its features; spatial: of its features by position,
    if it has any."""

    build: Callable[[], nn.Module]
    side: int
    dimension: int
    spatial: int = 0


JUDGES = {
    "Inception": Judge(lambda: inception_v3(aux_logits=False, init_weights=False, num_classes=1008), 299, 2048, 2023),
    "DINOv2, ViT-L/14": Judge(
        lambda: VisionTransformer(224, 14, num_layers=24, num_heads=16, hidden_dim=1024, mlp_dim=4096), 224, 1024
    ),
}


@dataclass(frozen=True)
class Sizes:
    """Numbers of images. kept: `evaluate.neighbour_references`."""

    samples: int = 50_000
    train: int = 1_281_167
    held_out: int = 50_000
    kept: int = 10_000


def looked(judge: Judge) -> tuple[int, int]:
    """Return operations per image, and bytes of weights."""
    with torch.device("meta"):
        network = judge.build().eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(torch.empty(AT_ONCE, 3, judge.side, judge.side))
        return counter.get_total_flops() // AT_ONCE, sum(4 * each.numel() for each in network.parameters())


def manifold(samples: int, reference: int, dimension: int) -> int:
    """Return operations of the products in precision, recall, density and coverage."""
    pairs = reference**2 + samples**2 + reference * samples
    return 2 * pairs * dimension + 2 * reference * samples * NUM_BLOCKS


def kernel(samples: int, reference: int, dimension: int) -> int:
    """Return operations of the kernel distance."""
    return 2 * (samples**2 + samples * reference + reference**2) * dimension


def monge(samples: int, reference: int, dimension: int) -> int:
    """Return operations of MIND."""
    return 2 * (samples + reference) * dimension * ONE_DIRECTION


def frechet(samples: int, dimension: int) -> int:
    """Return operations of the covariance and of the 21 distances, without factors and eigenvalues (no products)."""
    return 2 * samples * dimension**2 + 4 * (1 + NUM_BLOCKS) * dimension**3


def copies(queries: int, train: int, dimension: int, views: int) -> int:
    """Return operations of the search for the nearest training images."""
    return 2 * queries * train * dimension * views


def compared(judge: Judge, sizes: Sizes) -> dict[str, int]:
    """Return operations of comparisons with one judge, by metric; all but copies twice, for the floor."""
    dimension, some = judge.dimension, min(sizes.samples, sizes.kept)
    return {
        "Fréchet": 2 * (frechet(sizes.samples, dimension) + frechet(sizes.samples, judge.spatial)),
        "kernel, MIND": 2 * (kernel(some, sizes.kept, dimension) + monge(some, sizes.kept, dimension)),
        NEIGHBOURS[0]: 2 * manifold(sizes.samples, sizes.kept, dimension),
        NEIGHBOURS[1]: copies(some + min(sizes.held_out, sizes.kept), sizes.train, dimension, 1),
    }


def pixels(sizes: Sizes) -> int:
    """Return operations of the search for copies in pixels: of all samples and held-out images, mirrored images too."""
    return copies(sizes.samples + sizes.held_out, sizes.train, PIXELS, 2)


@dataclass(frozen=True)
class Speeds:
    """gpu, float64: what a GPU does at its peak, in float32 and in float64; share: of that, reached. cpu: what a CPU
    reaches in float64. All in TFLOP/s but the share."""

    gpu: float = 67.0
    float64: float = 67.0
    share: float = 0.5
    cpu: float = 0.5

    @property
    def network(self) -> float:
        """Return operations a second of a network."""
        return self.gpu * self.share * 1e12

    def of(self, what: str) -> float:
        """Return operations a second of a comparison."""
        return self.float64 * self.share * 1e12 if what in NEIGHBOURS else self.cpu * 1e12


def evaluation(sizes: Sizes, speeds: Speeds) -> list[tuple[str, int, float]]:
    """Return the parts of one evaluation: operations and seconds."""
    parts = []
    for name, judge in JUDGES.items():
        each, weights = looked(judge)
        count = each * sizes.samples
        told = f"{name} ({weights / 1e6:,.0f} MB) looks at {sizes.samples:,} samples: {each / 1e9:.1f} GFLOP an image"
        parts.append((told, count, count / speeds.network))
        parts += [
            (f"{name}: {what}", operations, operations / speeds.of(what))
            for what, operations in compared(judge, sizes).items()
        ]
    parts.append(("copies in pixels", pixels(sizes), pixels(sizes) / speeds.of("copies")))
    return parts


def held(metric: Callable[[Tensor, Tensor], object], samples: int, others: int, dimension: int) -> float:
    """Bytes that a metric holds at its peak, features included: a plane through what it holds of 2,048 or 4,096 of
    either side, which is what grows: products are cut into slices."""

    def peak(n: int, m: int) -> int:
        made, real = torch.rand(n, dimension), torch.rand(m, dimension)
        with Memory() as memory:
            metric(made, real)
        return memory.peak

    few, more = 2048, 4096
    least = peak(few, few)
    by_sample, by_other = (peak(more, few) - least) / few, (peak(few, more) - least) / few
    return least + (samples - few) * by_sample + (others - few) * by_other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu-tflops", type=float, default=67.0, help="peak of the GPU; H200 in float32: 67")
    parser.add_argument("--share", type=float, default=0.5, help="of that peak")
    parser.add_argument("--float64-tflops", type=float, default=67.0, help="the same in float64; H200: 67")
    parser.add_argument("--cpu-tflops", type=float, default=0.5, help="of the CPU in float64, reached")
    given = parser.parse_args()
    sizes, speeds = Sizes(), Speeds(given.gpu_tflops, given.float64_tflops, given.share, given.cpu_tflops)
    print("| What | Operations | Seconds |\n| --- | --: | --: |")
    for what, operations, took in evaluation(sizes, speeds):
        print(f"| {what} | {operations:.2g} | {took:.0f} |")
    print(f"| one evaluation | | {sum(took for _, _, took in evaluation(sizes, speeds)):.0f} |")
    for name, judge in JUDGES.items():
        each, _ = looked(judge)
        told = f"once for all experiments: {name} looks at {sizes.train:,} real images"
        print(f"| {told} | {each * sizes.train:.2g} | {each * sizes.train / speeds.network:.0f} |")
    wide = JUDGES["Inception"].dimension
    neighbours = held(manifold_estimates, sizes.samples, sizes.kept, wide)
    print(f"\nHeld by the neighbours of Inception's features: {neighbours / 1e9:.1f} GB.")


if __name__ == "__main__":
    command.run(main)
