"""Descriptions of what is given to others: a model card, a README.md in the format of the Hugging Face Hub, of an
exported model; and an RO-Crate, for repositories and provenance tools, of an experiment.

The profile of the crate is Workflow Run Crate 0.5 (Leo et al. 2024, "Recording provenance of workflow runs with
RO-Crate"): the workflow, its configuration and data, the time of the run, and its results; each file with size and
sha256.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from image_diffusion import __version__
from image_diffusion.core.files.atomic import read_json, write_text
from image_diffusion.core.files.checksums import describe
from image_diffusion.core.journal.reader import logged_stages, read_journal
from image_diffusion.core.resolution import size_text
from image_diffusion.core.texts import table, text
from image_diffusion.data.quality.datasheet import summary
from image_diffusion.systems.base import Model
from image_diffusion.workflow.plans import used_weights


@dataclass(frozen=True)
class CardUse:
    """Text of a model card on the exported folder. task: name on the Hugging Face Hub. code: lines of Python that use
    the folder. pipeline: the class of `library` that the code needs."""

    task: str
    pipeline: str
    code: str
    library: str = "diffusers"


PIPELINE = (
    "# pip install diffusers 'pydantic>=2.10.1'\n"
    'pipeline = DiffusionPipeline.from_pretrained(".", custom_pipeline=".", trust_remote_code=True)\n'
)
"""First lines of the code that uses a folder with its own pipeline.py."""

_USE = """```python
from {library} import {pipeline}

{code}
```"""


def model_card(
    name: str, data: str, model: Model, use: CardUse, measured: Mapping[str, Any] | None, pictures: Mapping[str, str]
) -> str:
    """Return the text of the card: YAML for the Hub, then a description for readers. name: of the experiment. data:
    name of the data set. use: the code that uses the folder. measured: content of metrics.json; None: not evaluated.
    pictures: captions, by path next to the card.
    """
    metrics = [] if measured is None else [(key, e) for key, e in measured["metrics"].items() if e["value"] is not None]
    task = {"type": use.task}
    believed = [(key, entry) for key, entry in metrics if entry.get("doubt") is None]
    results = [{"type": key, "name": key, "value": float(entry["value"])} for key, entry in believed]
    front: dict[str, Any] = {
        "library_name": use.library,
        "pipeline_tag": task["type"],
        "tags": ["image-diffusion", model.system.type],
    }
    if results:
        result = {"task": task, "dataset": {"type": data, "name": data}, "metrics": results}
        front["model-index"] = [{"name": name, "results": [result]}]
    parameters = sum(parameter.numel() for parameter in model.network.parameters())
    facts = {
        "System": model.system.type,
        "Parameters": f"{parameters:,}",
        "Data": data,
        "Works on": f"{model.spec.channels} x {size_text(model.spec.resolution)} values an image",
        "Classes": ", ".join(model.classes) or "none",
        "Trained for": f"{model.step:,} steps, {model.examples_seen:,} examples",
        "SHA-256 of the weights": f"`{model.sha256}`",
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {name}",
        *(f"![{title}]({path})" for path, title in pictures.items()),
        table(("", ""), facts.items()),
        "## Use",
        _USE.format(**vars(use)),
        *_table_of_results(metrics, measured),
        "## Limits",
        "It makes images like those that it was trained on, with their gaps and their bias. Whether and for what it "
        "may be used follows from the licence of those images.",
    ]
    return "\n\n".join(parts) + "\n"


def _table_of_results(metrics: list[tuple[str, dict[str, Any]]], measured: Mapping[str, Any] | None) -> list[str]:
    if measured is None or not metrics:
        return []
    rows, doubt = [], measured.get("doubt")
    for key, entry in metrics:
        interval = " to ".join(f"{bound:.4g}" for bound in entry["interval"] or [])
        own = None if entry.get("doubt") == doubt else entry.get("doubt")
        rows.append((key, f"{entry['value']:.5g}", interval, f"{entry['n']:,}", own or entry["note"]))
    detector = " and ".join(str(detector["name"]) for detector in measured["protocol"].get("detectors", []))
    how = f"Measured with the detector `{detector}`; a metric that is not FID is not called FID." if detector else ""
    doubted = ", ".join(f"`{key}`" for key, entry in metrics if doubt and entry.get("doubt") == doubt)
    doubts = [f"Do not rely on {doubted}: {text(doubt)}."] if doubted else []
    lines = table(("Metric", "Value", "95 % interval", "Images", ""), rows)
    return ["## Results", *doubts, lines, *([how] if how else [])]


RESULTS = {
    "train/weights.safetensors": "Weights of the trained network, averaged",
    "train/model.json": "What rebuilds the network from its weights",
    "sweep/checkpoint/chosen/weights/*": "Weights of the step that was chosen, and what rebuilds the network from them",
    "samples/*": "Images that the network draws, and how they were drawn",
    "metrics.json": "Metrics with their intervals, and how they were measured",
    "evaluation/*.png": "Pictures of the evaluation",
    "sweep/*/curve.*": "Metrics against one setting",
    "report/index.html": "Everything about the experiment on one page",
    "synthetic/*": "Card, scores and description of the synthetic images",
    "diffusers/README.md": "Model card",
    "diffusers/**/*": "The model as diffusers loads it",
}
"""Patterns of files that a run may write into the experiment's folder, with descriptions. The first match applies."""

_FORMATS = {
    ".json": "application/json",
    ".yaml": "application/yaml",
    ".md": "text/markdown",
    ".html": "text/html",
    ".png": "image/png",
    ".npz": "application/zip",
}
_PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": ("Process Run Crate", "0.5"),
    "https://w3id.org/ro/wfrun/workflow/0.5": ("Workflow Run Crate", "0.5"),
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": ("Workflow RO-Crate", "1.0"),
}
_SNAKEMAKE = "https://w3id.org/workflowhub/workflow-ro-crate#snakemake"
_RUN, _LICENCE = "#run", "#licence"
_WORKFLOW, _DATASHEET = "crate/Snakefile", "crate/datasheet.md"

Entity = dict[str, Any]


def crate(folder: Path, inputs: Sequence[str], manifest: str) -> Entity:
    """Return the metadata of a crate whose root is the folder of a finished experiment. inputs: input files of the run;
    manifest: the input that describes the images, as crate/datasheet.md does. All paths are relative to the folder.
    Raises ValueError if no stage left a journal.
    """
    plan, card = read_json(folder / "config" / "plan.json"), "diffusers/README.md"
    names = _results(folder)
    input_names, output_names = sorted({*inputs}), sorted(names)
    hashes = describe(folder, [folder / name for name in (_WORKFLOW, _DATASHEET, *input_names, *output_names)])
    files = {name: _file(folder, name, names.get(name, "Input of the run"), hashes[name]) for name in hashes}
    files[_WORKFLOW] |= {
        "@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow"],
        "name": "image-diffusion: from a folder of images to a scored, tracked image diffusion model",
        "programmingLanguage": {"@id": _SNAKEMAKE},
        "version": __version__,
        "license": "https://spdx.org/licenses/MIT",
    }
    files[_DATASHEET] |= {"name": "Datasheet of the images", "about": {"@id": quote(manifest)}}
    if card in files:
        files[card] |= {"about": {"@id": f"{used_weights(folder).relative_to(folder)}/weights.safetensors"}}
    started, ended = _times(folder)
    root: Entity = {
        "@id": "./",
        "@type": "Dataset",
        "name": f"{folder.name}: {plan['system']} on {plan['dataset']}",
        "description": f"A run of image-diffusion: a model of type {plan['system']}, trained on {plan['dataset']}.",
        "datePublished": ended,
        "license": {"@id": _LICENCE},
        "conformsTo": _references(_PROFILES),
        "hasPart": _references(files),
        "mainEntity": {"@id": _WORKFLOW},
        "mentions": {"@id": _RUN},
    }
    run: Entity = {
        "@id": _RUN,
        "@type": "CreateAction",
        "name": f"Run of the experiment {folder.name}",
        "instrument": {"@id": _WORKFLOW},
        "object": _references(input_names),
        "result": _references(output_names),
        "startTime": started,
        "endTime": ended,
        "description": "Every stage of the experiment, by Snakemake: from the images to the report.",
        "actionStatus": "http://schema.org/CompletedActionStatus",
    }
    descriptor: Entity = {
        "@id": "ro-crate-metadata.json",
        "@type": "CreativeWork",
        "about": {"@id": "./"},
        "conformsTo": [{"@id": "https://w3id.org/ro/crate/1.1"}, {"@id": [*_PROFILES][-1]}],
    }
    snakemake: Entity = {
        "@id": _SNAKEMAKE,
        "@type": "ComputerLanguage",
        "name": "Snakemake",
        "identifier": {"@id": "https://doi.org/10.1093/bioinformatics/bts480"},
        "url": {"@id": "https://snakemake.readthedocs.io"},
    }
    licence: Entity = {
        "@id": _LICENCE,
        "@type": "CreativeWork",
        "name": "Not stated",
        "description": "Whether and for what this may be used follows from the licence of the images.",
    }
    profiles = [
        {"@id": address, "@type": "CreativeWork", "name": name, "version": version}
        for address, (name, version) in _PROFILES.items()
    ]
    return {
        "@context": ["https://w3id.org/ro/crate/1.1/context", "https://w3id.org/ro/terms/workflow-run/context"],
        "@graph": [descriptor, root, *files.values(), run, snakemake, licence, *profiles],
    }


def _results(folder: Path) -> dict[str, str]:
    """Return the descriptions of a run's files, by their paths relative to the folder."""
    descriptions: dict[str, str] = {}
    for pattern, description in RESULTS.items():
        for path in sorted(folder.glob(pattern)):
            name = path.relative_to(folder)
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                descriptions.setdefault(name.as_posix(), description)
    return descriptions


def _file(folder: Path, name: str, description: str, sha256: str) -> Entity:
    path = folder / name
    entity = {"@id": quote(name), "@type": "File", "name": path.name, "description": description, "sha256": sha256}
    return entity | {
        "contentSize": str(path.stat().st_size),
        "encodingFormat": _FORMATS.get(path.suffix, "application/octet-stream" if path.suffix else "text/plain"),
    }


def _references(names: Iterable[str]) -> list[Entity]:
    return [{"@id": name if ":" in name else quote(name)} for name in names]


def _times(folder: Path) -> tuple[str, str]:
    """Return the start of the training and the end of the last stage, as the journals record them."""
    histories = [read_journal(path) for path in logged_stages(folder / "journal")]
    runs = [history for history in histories if history is not None]
    if not runs:
        raise ValueError(
            f"{folder / 'journal'} holds no run. Run the experiment first: snakemake {folder}/metrics.json"
        )
    begun = min(start for run in runs for start in run.starts)
    ended = max(run.ended or max(run.starts) for run in runs)
    first, last = (datetime.fromtimestamp(time / 1000, UTC).isoformat(timespec="seconds") for time in (begun, ended))
    return first, last


def write_crate(folder: Path, snakefile: Path, inputs: Sequence[Path]) -> None:
    """Write ro-crate-metadata.json into the folder of a finished experiment. Files from elsewhere are copied into its
    folder `crate`, with a datasheet. snakefile: of the workflow. inputs: the configurations and manifests that the run
    read. Raises ValueError if they name no manifest.json, or if no stage left a journal.
    """
    manifest = next((path for path in inputs if path.name == "manifest.json"), None)
    if manifest is None:
        raise ValueError("--inputs names no manifest.json. Add that of the images' shards.")
    copies = folder / "crate"
    # RO-Crate refers to files inside its own folder only, so the workflow and inputs from outside are copied.
    shutil.rmtree(copies, ignore_errors=True)
    copies.mkdir(parents=True)
    names = {}
    for path in inputs:
        inside = path.is_relative_to(folder)
        goal = path if inside else copies / f"{path.parent.name}-{path.name}"
        if not inside:
            shutil.copyfile(path, goal)
        names[path] = goal.relative_to(folder).as_posix()
    shutil.copyfile(snakefile, folder / _WORKFLOW)
    source = read_json(folder / "config" / "plan.json")["source"]
    write_text(folder / _DATASHEET, summary(read_json(manifest), source))
    metadata = crate(folder, list(names.values()), names[manifest])
    write_text(folder / "ro-crate-metadata.json", f"{json.dumps(metadata, indent=2, ensure_ascii=False)}\n")
