"""What the full-sized recipes say they cost is what their operations, counted, take at the share they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from image_diffusion.core.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.experiment import load_experiment
from image_diffusion.training.counted import counted
from image_diffusion.training.parts import Task

ROOT = Path(__file__).parents[2]
PEAK = 790e12
"""Operations a second of a large bf16 product on an H200, measured (769 to 798)."""
FULL = [
    path
    for path in sorted((ROOT / "config/experiments").glob("*.yaml"))
    if load_experiment(path).resources.gpus_per_node
]
COST = re.compile(
    r"Cost: (?:.*, )?([\d,.]+) GFLOP an? (?:image|pair) in training.*? ([\d,]+) steps of ([\d,]+) (?:images|pairs) are "
    r"([\d.e]+) operations: ([\d,.]+) hours of one H200 at (\d+) % of its bf16 peak"
)


def operations_of(path: Path) -> int:
    """Of the loss of one example and of its gradient."""
    experiment = load_experiment(path)
    system: Any = experiment.system
    data, is_pairs = experiment.data, "pairs" in system.reads
    images = DataSpec(channels=data.channels, resolution=data.resolution, num_classes=1000)
    spec = DataSpec(channels=768, resolution=1) if is_pairs else experiment.codec.spec(images, None)
    codec = experiment.codec.build(None, None, torch.device("cpu"), torch.float32)
    moments = (2, spec.channels, spec.resolution, spec.resolution)

    class Stored:
        num_samples, labels, beside = 1, np.zeros(1, dtype=np.int64), None
        shape = (2, 768) if is_pairs else moments if experiment.codec.type != "rgb" else moments[1:]
        dtype = torch.uint8 if shape == moments[1:] else torch.float16

    def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
        batch: Batch = system.batch(stored, label, streams, spec, codec)
        return batch

    def task(network: nn.Module) -> Task:
        return Task(network, system.build_objective(spec), prepare, Stored())  # type: ignore[arg-type]

    one = experiment.train.model_copy(update={"global_batch": 1, "microbatch": None, "weights": "raw"})
    return counted(lambda: system.build_network(spec), task, one, 1).operations


@pytest.mark.slow
@pytest.mark.parametrize("path", FULL, ids=lambda path: path.stem)
def test_a_recipe_costs_what_it_says(path: Path) -> None:
    text = " ".join(line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#"))
    found = COST.search(text)
    assert found, f"{path.stem} does not say its cost as the others do: {COST.pattern}"
    gflop, steps, batch, total, hours, percent = (float(number.replace(",", "")) for number in found.groups())
    train = load_experiment(path).train
    assert (steps, batch) == (train.steps, train.global_batch)
    operations = operations_of(path)
    counted_hours = operations * steps * batch / (PEAK * percent / 100) / 3600
    assert gflop == pytest.approx(operations / 1e9, rel=0.01)
    assert total == pytest.approx(operations * steps * batch, rel=0.05)
    assert hours == pytest.approx(counted_hours, rel=0.05)


@pytest.mark.parametrize("path", FULL, ids=lambda path: path.stem)
def test_a_recipe_for_gpus_computes_as_gpus_do_best(path: Path) -> None:
    train = load_experiment(path).train
    assert (train.precision, train.tf32, train.compile) == ("bf16", True, True)
