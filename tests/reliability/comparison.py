"""Results of a training, to be compared byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from image_diffusion.core.files.atomic import digest
from image_diffusion.core.files.weights import read_model
from image_diffusion.core.journal.reader import read_journal


def results(folder: Path, but: Collection[str] = ()) -> dict[str, str]:
    """Return the sha256 of all results that must be the same: weights, the newest checkpoint's tensors, the journal
    without timings, model.json. but: settings of the training that differ between the compared runs."""
    train = folder / "train"
    model = read_model(train)
    newest = train / "state" / model["fingerprint"] / f"step-{model['train']['steps']:07d}"
    files = [train / "weights.safetensors", *sorted(newest.glob("*.safetensors"))]
    found = {str(path.relative_to(train)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    settings = {key: value for key, value in model["train"].items() if key not in but}
    found["model.json"] = digest({**model, "train": settings})
    return found | {"journal": hashlib.sha256(repr(points(folder)).encode()).hexdigest()}


def points(folder: Path) -> list[tuple[str, int, float]]:
    """Return the merged journal without timings."""
    history = read_journal(folder / "journal" / "train")
    assert history is not None
    assert history.status == "finished"
    return sorted((p.key, p.step, p.value) for p in history.points if not p.key.startswith(("speed/", "system/")))
