"""Model card of an exported model: a README.md in the format of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from image_diffusion.core.resolution import size_text
from image_diffusion.core.texts import table, text
from image_diffusion.systems.base import Model


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
        *_results(metrics, measured),
        "## Limits",
        "It makes images like those that it was trained on, with their gaps and their bias. Whether and for what it "
        "may be used follows from the licence of those images.",
    ]
    return "\n\n".join(parts) + "\n"


def _results(metrics: list[tuple[str, dict[str, Any]]], measured: Mapping[str, Any] | None) -> list[str]:
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
