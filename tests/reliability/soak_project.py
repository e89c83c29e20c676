"""The project of the soak: every system on a handful of images, in configurations between which it is edited.

`python soak_project.py dit rin`, in the folder of a project, prints `found` of these experiments as JSON.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
import sqlite3
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.journal.reader import Point, history_for_weights, read_journal
from image_diffusion.tracking.run_summary import shown_points

ROOT = Path(__file__).resolve().parents[2]
IMAGES = 24

DATA = {
    "name": "dots",
    "source": {"type": "folder", "path": "images"},
    "resolution": 16,
    "num_shards": 2,
    "validation_fraction": 0.25,
}
TRAIN = {
    "steps": 8,
    "global_batch": 4,
    "checkpoint": {"every_steps": 2},
    "log_every_steps": 2,
    "validate_every_steps": 4,
    "validation_samples": 4,
    "grid_every_steps": None,
}
SAMPLE = {"num_samples": 8, "sampler": {"type": "ddim", "num_steps": 2}, "batch_size": 4}
RESOURCES = {"cpus_per_process": 1, "memory_mb": 2000, "runtime_min": 10}
DIT = {"depth": 1, "width": 32, "num_heads": 2, "patch": 4}
RIN = {"width": 8, "patch": 4, "depth": 1, "num_latents": 4, "latent_width": 8, "latent_depth": 1, "head_width": 8}
DVAE = {"num_tokens": 8, "codebook_dim": 4, "num_layers": 2, "num_resnet_blocks": 0, "hidden_dim": 8}
UNET = {
    "channels": 32,
    "multipliers": [1, 1],
    "num_res_blocks": 1,
    "attention_resolutions": [],
    "num_heads": 1,
}
PREVIEW = {"num_samples": 4, "sampler": {"type": "ddim", "num_steps": 2}}

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "dit": {
        "system": {"type": "dit", "network": DIT},
        "train": TRAIN | {"grid_every_steps": 4},
        "preview": PREVIEW,
        "sample": SAMPLE | {"images_per_job": 4},
        "resources": RESOURCES | {"processes_per_node": 2},
    },
    "iddpm": {"system": {"type": "iddpm", "network": UNET}, "train": TRAIN, "sample": SAMPLE},
    "rin": {"system": {"type": "rin", "network": RIN}, "train": TRAIN, "sample": SAMPLE},
    "autoencoder": {
        "system": {"type": "autoencoder", "network": {"block_channels": [8, 8], "norm_groups": 4}},
        "train": TRAIN,
        "export": {"format": "diffusers"},
    },
    "latent": {
        "codec": {"type": "trained", "experiment": "autoencoder"},
        "system": {"type": "dit", "network": DIT | {"patch": 2}},
        "train": TRAIN,
        "sample": SAMPLE,
        "export": {"format": "diffusers"},
    },
    "dvae": {"system": {"type": "dvae", "network": DVAE}, "encode": {"tokens": True}, "train": TRAIN},
    "prior": {
        "pairs": {"type": "hashed", "splits": {"train": 0.6, "validation": 0.2, "test": 0.2}, "num_tokens": 5},
        "system": {
            "type": "prior",
            "network": {"depth": 1, "num_heads": 2, "head_width": 8, "max_text_len": 5, "ff_mult": 1},
        },
        "train": TRAIN | {"flip_probability": 0, "weights": "best", "keep_raw": True},
        "prediction": {"num_steps": [2, 3], "num_candidates": 1},
    },
}
NEEDS = {"latent": ["autoencoder"]}
"""Experiments with the other experiments whose codecs they use."""
DATA_OF = {
    "dit": {"detector", "references"},
    "iddpm": {"detector", "references"},
    "rin": {"detector", "references"},
    "latent": {"detector", "references", "autoencoder"},
    "dvae": {"dvae-tokens"},
    "prior": {"detector", "pairs-hashed"},
}
"""Parts of a data set that experiments use in addition to its crops."""

# Changes that edits write to an experiment's file, by section.
EDITS: list[dict[str, dict[str, Any]]] = [
    {},
    {"train": {"steps": 6}},
    {"sample": {"num_samples": 12}},
]
NOT_COMPARED = {"journal", ".journal", "state", "tracked.json", "source.json", "owner.json"}
"""Files with times, paths or ids of runs; journals are compared by their content."""


LOGGED = ("train", "sample", "evaluate")
"""Stages that write a journal."""
TOLD = "told: "
"""Prefix for a journal that says itself that it is incomplete."""
UNKNOWN = "unknown: "
"""Prefix for a journal without an end that does not say so: wrong for a stage that has ended."""


@dataclass(frozen=True)
class Choice:
    """One configuration. images: state of the images. edits: index into `EDITS` of each experiment."""

    images: int
    edits: Mapping[str, int] = field(hash=False)

    def only(self, name: str) -> Choice:
        """Return the part that one experiment's results depend on."""
        return Choice(self.images, {each: self.edits[each] for each in [*NEEDS.get(name, []), name]})

    def __str__(self) -> str:
        told = ", ".join(f"{name} {edit}" for name, edit in self.edits.items())
        return f"images {self.images}, {told}"


def experiment(name: str, choice: Choice) -> dict[str, Any]:
    """Return the experiment's file as plain data."""
    data = copy.deepcopy(EXPERIMENTS[name])
    for section, values in EDITS[choice.edits[name]].items():
        if section in data:
            data[section] |= values
    data["data"] = DATA | {"num_shards": 3 if choice.images == 2 else 2}
    return {"resources": RESOURCES} | data


def write_project(folder: Path, choice: Choice, names: Iterable[str], every_s: str = "") -> None:
    """Write or edit the configuration of a project, as a user does. every_s: of the section `tracking`."""
    (folder / "config" / "experiments").mkdir(parents=True, exist_ok=True)
    settings = (ROOT / "config" / "config.yaml").read_text().replace("every_s: 10", f"every_s: {every_s}")
    settings = settings.replace("experiments: [demo]", f"experiments: [{', '.join(names)}]")
    _write(folder / "config" / "config.yaml", settings)
    for name in choice.edits:
        _write(folder / "config" / "experiments" / f"{name}.yaml", yaml.safe_dump(experiment(name, choice)))
    images = make_images(choice.images)
    for path in (folder / "images").rglob("*.png"):
        if str(path.relative_to(folder)) not in images:
            path.unlink()
    for file, pixels in images.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or not np.array_equal(np.asarray(Image.open(path)), pixels):
            Image.fromarray(pixels).save(path)


def make_images(state: int) -> dict[str, Any]:
    """Return the images in one state: the usual ones; one replaced; one more, and more shards; one less."""
    generator = np.random.default_rng(0)
    images = {}
    for number in range(IMAGES + 2):
        lightness = 128 * (number % 2)
        pixels = generator.integers(lightness, 128 + lightness, size=(16, 16, 3), dtype=np.uint8)
        images[f"images/{'light' if number % 2 else 'dark'}/{number:03}.png"] = pixels
    (*_, other), (*_, more) = list(images.items())[-2:]
    usual = dict(list(images.items())[:IMAGES])
    first = next(iter(usual))
    match state:
        case 1:
            return usual | {first: other}
        case 2:
            return usual | {"images/light/more.png": more}
        case 3:
            return {name: pixels for name, pixels in usual.items() if name != first}
    return usual


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def found(folder: Path, name: str) -> dict[str, str]:
    """Return the sha256 of all reproducible results of an experiment and of the data that it uses."""
    results, made = folder / "results", {}
    data = {"crops"} | DATA_OF.get(name, set())
    for path in sorted([*(results / name).rglob("*"), *(results / "datasets").glob("*/*/**/*")]):
        part, *inside = path.relative_to(results).parts
        is_ours = part == name or (part == "datasets" and inside[1] in data)
        if is_ours and path.is_file() and not NOT_COMPARED & {*inside} and not _is_note(path.name):
            said = _listed(path, results / name) if path.name == "listing.json" else path.read_bytes()
            made[str(path.relative_to(results))] = hashlib.sha256(said).hexdigest()
    for stage in LOGGED:
        made[f"{name}: what {stage} logged"] = _logged(folder, name, stage)
        made[f"{name}: what MLflow lacks of {stage}"] = _not_tracked(folder, name, stage)
        made[f"{name}: how {stage} ended in MLflow"] = _ended(folder, name, stage)
    return made


def _listed(listing: Path, experiment: Path) -> bytes:
    """Return the checksums of those previews that a training of this length draws. A training of more steps may have
    left others, and an extended one has a preview of its former end. A damaged listing is returned unchanged, since a
    message reports it."""
    settings = read_json(experiment / "train/model.json")["train"]
    drawn = {settings["steps"], *range(0, settings["steps"], settings["grid_every_steps"])}
    try:
        files = read_json(listing)["files"]
    except ValueError:
        return listing.read_bytes()
    return json.dumps({name: sha256 for name, sha256 in files.items() if int(name[5:12]) in drawn}).encode()


def _is_note(name: str) -> bool:
    """Return whether a file is an internal note or a page with times in it, or comes from other experiments."""
    return name.startswith(".") or name == "index.html"


def _logged(folder: Path, name: str, stage: str) -> str:
    """Return the digest of a stage's journal, or that it is incomplete."""
    history = read_journal(folder / "results" / name / "journal" / stage)
    if history is None:
        return "nothing"
    if stage == "train":
        history = history_for_weights(history, read_json(folder / "results" / name / "train" / "model.json"))
    if history.damaged or history.loss:
        return f"{TOLD}{history.status}, {history.loss}, {history.damaged}"
    if history.status != "finished":
        return f"{UNKNOWN}{history.status}"
    return hashlib.sha256(json.dumps(_points(folder, name, stage)).encode()).hexdigest()


def _not_tracked(folder: Path, name: str, stage: str) -> str:
    """Return the points of a stage's journal that MLflow lacks, for a training those that its run shows."""
    tracked = read_json(folder / "results" / name / "tracked.json")["runs"]
    with closing(sqlite3.connect(f"file:{folder / 'mlflow.db'}?mode=ro", uri=True)) as database:
        query = "SELECT key, step, value FROM metrics WHERE run_uuid = ?"
        held = {row for run in tracked if run["stage"] == stage for row in database.execute(query, (run["run_id"],))}
    history = read_journal(folder / "results" / name / "journal" / stage)
    points = history.points if history is not None else []
    keys = {point.key for point in (shown_points(points) if stage == "train" else points)}
    return str([point for point in _points(folder, name, stage) if point[0] in keys and point not in held])


def _ended(folder: Path, name: str, stage: str) -> str:
    """Return the status in MLflow of a stage's last run: by attempt numbers if all are known, since clocks may have
    been wrong."""
    runs = [run for run in read_json(folder / "results" / name / "tracked.json")["runs"] if run["stage"] == stage]
    numbers = {}
    for path in (folder / "results" / name / "journal" / stage).glob("attempt-*.jsonl"):
        if begun := re.search(r'"id":"(\w+)"', path.read_text(errors="replace").partition("\n")[0]):
            numbers[begun[1]] = int(path.stem.removeprefix("attempt-"))
    with closing(sqlite3.connect(f"file:{folder / 'mlflow.db'}?mode=ro", uri=True)) as database:
        query = "SELECT value FROM tags WHERE run_uuid = ? AND key = 'image_diffusion.key'"
        keys = [(database.execute(query, (run["run_id"],)).fetchone() or ("",))[0] for run in runs]
        if all(key in numbers for key in keys):
            runs = [run for _, run in sorted(zip(keys, runs, strict=True), key=lambda pair: numbers[pair[0]])]
        query = "SELECT status FROM runs WHERE run_uuid = ?"
        return str([database.execute(query, (run["run_id"],)).fetchone() for run in runs[-1:]])


def sent_files(folder: Path, name: str) -> dict[Path, str]:
    """Return the sha256 of each file of an experiment that was sent to MLflow; nothing if that is unknown now."""
    found = {}
    try:
        for listing in read_json(folder / "results" / name / "tracked.json")["sent"]:
            for file, sha256 in read_json(folder / listing)["files"].items():
                found[(folder / listing).parent / file] = sha256
    except (ValueError, KeyError, OSError):  # removed or damaged by the soak itself
        return {}
    return found


def damaged_artifacts(folder: Path, name: str) -> list[str]:
    """Return the artifacts of an experiment in MLflow that differ from the sent files."""
    wrong = [path for path, sha256 in sent_files(folder, name).items() if _sha256(path) != sha256]
    return [str(path.relative_to(folder)) for path in wrong]


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _points(folder: Path, name: str, stage: str) -> list[tuple[str, int, float]]:
    """Return the points of a stage's journal without timings, and without validations at the former end of an extended
    training."""
    history = read_journal(folder / "results" / name / "journal" / stage)
    if history is None:
        return []
    settings = read_json(folder / "results" / name / "train" / "model.json")["train"]
    ends = {settings["steps"], *range(0, settings["steps"], settings["validate_every_steps"])}

    def is_kept(point: Point) -> bool:
        parts = point.key.split("/")
        return not {"speed", "system"} & {*parts} and (parts[0] != "validation" or point.step in ends)

    return sorted({(p.key, p.step, p.value) for p in history.points if is_kept(p)})


def remove(path: Path) -> None:
    """Remove a folder or a file, if it exists."""
    shutil.rmtree(path, ignore_errors=True)
    if path.is_file():
        path.unlink()


if __name__ == "__main__":
    print(json.dumps({key: value for name in sys.argv[1:] for key, value in found(Path.cwd(), name).items()}))
