"""The shipped experiments that need a GPU."""

from pathlib import Path

from image_diffusion.experiments.experiment import load_experiment

ROOT = Path(__file__).parents[1]
FULL = [
    path
    for path in sorted((ROOT / "config/experiments").glob("*.yaml"))
    if load_experiment(path).resources.gpus_per_node
]
"""Paths of these experiments. Reading all experiments takes half a second."""
