"""The stated costs of full-sized recipes match their counted operations at the stated utilization."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from image_diffusion.experiments.experiment import load_experiment
from image_diffusion.experiments.study import operations_of
from recipes import FULL

PEAK = 790e12
"""Operations per second of a large bf16 product on an H200, measured (757e12 to 798e12)."""
RECORDED = {"cifar10", "dit_xl2_imagenet256", "sit_xl2_imagenet256", "speedrun_imagenet256"}
"""Recipes with so little work per GPU that it waits for launches: measured (docs/gpu.md), except the last one, a
smaller network than the one before with the same batch."""
COST = re.compile(
    r"Cost: (?:.*, )?([\d,.]+) GFLOP an? (?:image|pair) in training.*? ([\d,]+) steps of ([\d,]+) (?:images|pairs) are "
    r"([\d.e]+) operations: ([\d,.]+) hours of one H200 at (\d+) % of its bf16 peak"
)


def marks(path: Path) -> Any:
    """Return the marks of a recipe's case: one recipe of each system always runs."""
    always = {"dit_xl2_imagenet256", "iddpm_cifar10", "rin_imagenet64", "dvae_imagenet256", "prior_laion_vitl14"}
    return () if path.stem in always else pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize("path", [pytest.param(path, marks=marks(path), id=path.stem) for path in FULL])
def test_stated_recipe_costs_match_counted_operations(path: Path) -> None:
    text = " ".join(line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#"))
    found = COST.search(text)
    assert found, f"{path.stem} does not say its cost as the others do: {COST.pattern}"
    gflop, steps, batch, total, hours, percent = (float(number.replace(",", "")) for number in found.groups())
    train = load_experiment(path).train
    assert (steps, batch) == (train.steps, train.global_batch)
    operations = operations_of(load_experiment(path))
    counted_hours = operations * steps * batch / (PEAK * percent / 100) / 3600
    assert gflop == pytest.approx(operations / 1e9, rel=0.01)
    assert total == pytest.approx(operations * steps * batch, rel=0.05)
    assert hours == pytest.approx(counted_hours, rel=0.05)


@pytest.mark.parametrize("path", FULL, ids=lambda path: path.stem)
def test_gpu_recipes_use_bf16_tf32_and_compilation(path: Path) -> None:
    train = load_experiment(path).train
    waits_for_launches = path.stem in RECORDED
    assert (train.precision, train.tf32) == ("bf16", True)
    assert train.compile == ("cuda_graphs" if waits_for_launches else True)
