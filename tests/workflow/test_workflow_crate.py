"""An experiment as an RO-Crate: checked against its profiles and against the files that it describes."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import Any

import pytest
from projects import Project

pytestmark = pytest.mark.slow

CRATE = "results/micro/ro-crate-metadata.json"


def references(value: Any) -> list[str]:
    """Return the ids that a property refers to."""
    if isinstance(value, list):
        return [name for each in value for name in references(each)]
    return [value["@id"]] if isinstance(value, dict) else []


def test_a_run_becomes_a_workflow_run_crate(finished: Project) -> None:
    """The requirements (MUST) of Workflow Run Crate 0.5 and of the profiles that it extends."""
    assert finished.planned(CRATE) == {"crate"}
    finished.run(CRATE)
    metadata = json.loads((finished / CRATE).read_text())
    assert metadata.keys() == {"@context", "@graph"}
    assert metadata["@context"][0] == "https://w3id.org/ro/crate/1.1/context"
    entities = {entity["@id"]: entity for entity in metadata["@graph"]}
    assert len(entities) == len(metadata["@graph"])
    for entity in entities.values():
        assert entity["@type"] and (entity["@id"] == "ro-crate-metadata.json" or entity.get("name"))
        for name in references(list(entity.values())):
            assert name in entities or name.startswith("https://"), name

    descriptor, root = entities["ro-crate-metadata.json"], entities["./"]
    assert (descriptor["@type"], descriptor["about"]) == ("CreativeWork", {"@id": "./"})
    assert "https://w3id.org/ro/crate/1.1" in references(descriptor["conformsTo"])
    assert root["@type"] == "Dataset" and root["description"] and root["license"]
    assert datetime.fromisoformat(root["datePublished"]).tzinfo is not None
    for profile in ("process/0.5", "workflow/0.5"):
        address = f"https://w3id.org/ro/wfrun/{profile}"
        assert address in references(root["conformsTo"]) and entities[address]["@type"] == "CreativeWork"

    workflow = entities[root["mainEntity"]["@id"]]
    assert workflow["@type"] == ["File", "SoftwareSourceCode", "ComputationalWorkflow"]
    assert entities[workflow["programmingLanguage"]["@id"]]["@type"] == "ComputerLanguage"
    (run,) = (entity for entity in entities.values() if entity["@type"] == "CreateAction")
    assert references(root["mentions"]) == [run["@id"]] and run["instrument"] == root["mainEntity"]
    assert datetime.fromisoformat(run["startTime"]) <= datetime.fromisoformat(run["endTime"])
    given, made = references(run["object"]), references(run["result"])
    assert {"config/train.yaml", "crate/config-crop.yaml", "crate/crops-manifest.json"} <= set(given)
    assert {"train/weights.safetensors", "samples/samples.npz", "metrics.json", "report/index.html"} <= set(made)

    parts = references(root["hasPart"])
    assert set(given) | set(made) | {workflow["@id"], "crate/datasheet.md"} == set(parts)
    for name in parts:
        content = (finished / "results/micro" / name).read_bytes()
        assert entities[name]["sha256"] == hashlib.sha256(content).hexdigest(), name
        assert entities[name]["contentSize"] == str(len(content))
    assert entities["crate/datasheet.md"]["about"] == {"@id": "crate/crops-manifest.json"}
    sheet = (finished / "results/micro/crate/datasheet.md").read_text()
    assert "| Examples | 64 |" in sheet and "| Classes | dark (32), light (32) |" in sheet

    assert finished.planned(CRATE) == set()
    assert finished.planned() == set()
    finished.edit(lambda experiment: experiment["sample"].update(num_samples=8))
    assert "crate" in finished.planned(CRATE)
