"""Quality during training: previews are evaluated like samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from image_diffusion.core.files.atomic import sha256_file
from image_diffusion.core.files.checksums import read_listing
from image_diffusion.core.levels import Levels
from image_diffusion.core.pictures import new_figure, save_figure
from image_diffusion.metrics.compute import Reference, measure_preview
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.features.base import Detector, detect
from image_diffusion.metrics.samples import Samples, read_samples


def read_previews(
    folder: Path, classes: list[str], num_steps: int, levels: Levels | None = None
) -> tuple[dict[int, Samples], list[str]]:
    """Read the previews of a run by step (step-0000200.npz, …); empty if the folder is missing. Also return a sentence
    for each damaged or missing preview, which is skipped because only the training could sample it again.
    """
    names = {path.name for path in folder.glob("step-*.npz")}
    previews, left_out = dict[int, Samples](), list[str]()
    try:
        described = {name: sha256 for name, sha256 in read_listing(folder).items() if name.endswith(".npz")}
    except ValueError as error:
        described = {}
        left_out.append(f"A preview that is missing is not noticed: {error}")
    for name in sorted({*names, *described}):
        step, path = int(name[len("step-") : -len(".npz")]), folder / name
        if step > num_steps:
            continue
        try:
            if not path.is_file():
                raise ValueError(f"{path} is missing.")
            if name in described and sha256_file(path) != described[name]:
                raise ValueError(f"{path} is not what was drawn.")
            previews[step] = read_samples(path, classes, levels)
        except ValueError as error:
            left_out.append(f"The preview of step {step:,} is left out of the curve: {error}")
    return previews, left_out


def measure_previews(
    previews: Mapping[int, Samples],
    detector: Detector,
    reference_for: Callable[[Samples], Reference],
    classes: list[str],
    settings: EvaluateConfig,
) -> list[dict[str, Any]]:
    """Return for each step {"step", "num_samples", and the value of each metric of `measure_preview`}, plain data.

    reference_for: returns the reference of a preview, which depends on its labels alone.
    """
    curve, references = [], dict[bytes, Reference]()
    for step, samples in previews.items():
        if samples.num_samples <= settings.neighbours + 1:
            continue
        labels = torch.from_numpy(samples.labels) if classes and samples.has_labels else None
        features = detect(detector, samples, f"features of the preview of step {step:,}")
        key = samples.labels.tobytes()
        if key not in references:
            references[key] = reference_for(samples)
        estimates = measure_preview(features, labels, references[key], settings.neighbour_references)
        values = {detector.metric_name(name): estimate.value for name, estimate in estimates.items()}
        curve.append({"step": step, "num_samples": samples.num_samples, **values})
    return curve


def plot_curve(curve: list[dict[str, Any]], path: Path) -> None:
    """Draw each metric against the step, as PNG. curve: two points or more."""
    names = [name for name in curve[0] if name not in ("step", "num_samples")]
    figure = new_figure(4 * len(names), 3)
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False).flat, names, strict=True):
        values = [point[name] for point in curve]
        axis.plot([point["step"] for point in curve], values, marker="o", markersize=3)
        axis.set(title=name, xlabel="step")
        if min(values) >= 0:  # a kernel distance may be negative
            axis.set_ylim(bottom=0)
    save_figure(figure, path)
