"""Quality against training: the previews that training kept, judged like the samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from image_diffusion.core.figures import new_figure, save_figure
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.features import Detector, detect
from image_diffusion.metrics.panel import Reference, measure
from image_diffusion.metrics.samples import Samples, read_samples

CURVES = ("kd", "fd", "agreement")
"""The metrics that are followed. Of few images the kernel distance is the one without bias."""


def read_previews(folder: Path, classes: list[str], num_steps: int) -> dict[int, Samples]:
    """The previews of a run of so many steps, step-0000200.npz and so on, by step; none without the folder."""
    paths = {int(path.stem.removeprefix("step-")): path for path in sorted(folder.glob("step-*.npz"))}
    return {step: read_samples(path, classes) for step, path in paths.items() if step <= num_steps}


def measure_previews(
    previews: Mapping[int, Samples],
    detector: Detector,
    reference: Reference,
    classes: list[str],
    settings: EvaluateConfig,
) -> list[dict[str, Any]]:
    """For each step: {"step", "num_samples", and the value of each of `CURVES` that can be had}, plain data."""
    light = settings.model_copy(update={"two_sample": False, "infinity": False})
    curve = []
    for step, samples in previews.items():
        if samples.num_samples <= settings.neighbours + 1:
            continue
        labels = torch.from_numpy(samples.labels) if classes and samples.has_labels else None
        seen = detect(detector, samples, settings.batch_size, f"features of the preview of step {step:,}")
        found = measure(seen, labels, reference, classes, light)
        values = {detector.metric_name(name): found[name].value for name in CURVES if name in found}
        curve.append({"step": step, "num_samples": samples.num_samples, **values})
    return curve


def plot_curve(curve: list[dict[str, Any]], path: Path) -> None:
    """Draw each metric against the step, as PNG. curve: two points or more."""
    names = [name for name in curve[0] if name not in ("step", "num_samples")]
    figure = new_figure(4 * len(names), 3)
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False).flat, names, strict=True):
        axis.plot([point["step"] for point in curve], [point[name] for point in curve], marker="o", markersize=3)
        axis.set(title=name, xlabel="step")
        axis.set_ylim(bottom=0)
    save_figure(figure, path)
