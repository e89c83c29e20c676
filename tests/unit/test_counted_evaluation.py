"""Counted cost of evaluating 50,000 images: formulas match the metrics, and limits hold."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from image_diffusion.metrics.distances import precision_recall
from image_diffusion.metrics.distances.moments import Moments
from image_diffusion.metrics.distances.precision_recall import manifold_estimates
from image_diffusion.metrics.distances.set_distances import frechet_between, kernel_distance, monge_distance
from image_diffusion.metrics.images import memorization
from image_diffusion.metrics.images.memorization import find_feature_copies
from image_diffusion.training.flops import Memory

_FILE = Path(__file__).parents[1] / "bench" / "bench_evaluation.py"
N, M, D = 400, 300, 8


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_evaluation", _FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look the module up here
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("metric", "formula"),
    [
        (manifold_estimates, lambda bench: bench.manifold(N, M, D)),
        (kernel_distance, lambda bench: bench.kernel(N, M, D)),
        (monge_distance, lambda bench: bench.monge(N, M, D)),
        (frechet_between, lambda bench: bench.frechet(N, D) + 2 * M * D**2),
        (lambda made, real: find_feature_copies(made, real, made), lambda bench: bench.copies(2 * N, M, D, 1)),
    ],
    ids=["manifold", "kernel", "monge", "frechet", "copies"],
)
def test_formulas_match_counted_flops_of_metrics(
    bench: Any, metric: Callable[..., Any], formula: Callable[[Any], int]
) -> None:
    draw = torch.Generator().manual_seed(0)
    made, real = (torch.randn(count, D, generator=draw) for count in (N, M))
    with FlopCounterMode(display=False) as counter:
        metric(made, real)
    assert counter.get_total_flops() == pytest.approx(formula(bench), rel=0.02)


def test_metrics_of_50_000_images_take_five_minutes_at_half_the_peak_of_an_h200(bench: Any) -> None:
    """67 TFLOP/s in float32, and in float64 on tensor cores."""
    found = {name: bench.looked(judge)[0] for name, judge in bench.JUDGES.items()}
    assert found["Inception"] == pytest.approx(11.4e9, rel=0.01)
    assert found["DINOv2, ViT-L/14"] == pytest.approx(162e9, rel=0.01)
    assert sum(took for _, _, took in bench.evaluation(bench.Sizes(), bench.Speeds())) < 300


def test_neighbours_are_compared_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have a device but no contents: all stays on the GPU until the first value is read."""
    for module in (memorization, precision_recall):
        monkeypatch.setattr(module, "best_device", lambda: torch.device("cuda", 0))
    multiplied = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten.mm:
                multiplied.append(args[0].device.type)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Products():
        made, real = torch.empty(N, D), torch.empty(M, D)
        for compare in (manifold_estimates, lambda made, real: find_feature_copies(made, real, made)):
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                compare(made, real)
    assert len(multiplied) > 3 and {*multiplied} == {"cuda"}


def test_reference_statistics_memory_does_not_grow_with_the_number_of_images() -> None:
    """Far below 4 GB with Inception's 2048 dimensions: features are in a file, and 4,096 rows at a time in memory."""

    def peak(rows: int, dimension: int) -> int:
        features = torch.zeros(rows, dimension)
        with Memory() as memory:
            Moments.from_features(features)
        return memory.peak - features.nbytes  # which are stored in a file

    assert peak(3 * 4096, 64) == peak(6 * 4096, 64)
    at_64, at_128 = peak(3 * 4096, 64), peak(3 * 4096, 128)
    square = (at_128 - 2 * at_64) / (128**2 - 2 * 64**2)  # peak = a D + b D²
    linear = (at_64 - square * 64**2) / 64
    assert linear * 2048 + square * 2048**2 < 1e9
