"""A new kind of system is a page and a line: own network, batch, samples, judgement and headline; no verb knows."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from projects import ROOT, Project, make_project

pytestmark = pytest.mark.slow

EXPERIMENT = {
    "data": {
        "name": "dots",
        "source": {"type": "folder", "path": "images"},
        "resolution": 16,
        "validation_fraction": 0.25,
        "num_shards": 2,
    },
    "system": {"type": "gaussian"},
    "train": {
        "steps": 60,
        "global_batch": 16,
        "optimizer": {"type": "adamw", "lr": 0.05},
        "ema": {"type": "exponential", "rates": [0.5]},
        "flip_probability": 0.0,
        "validate_every_steps": 20,
        "checkpoint": {"every_steps": 20},
    },
    "sample": {"num_samples": 12, "temperature": 0.5},
    "resources": {"cpus_per_process": 1},
}


def with_the_page(folder: Path) -> None:
    """The package and its workflow, with one page more and one line changed."""
    for name in ("Snakefile", "workflow", "src", "envs"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)
    systems = folder / "src" / "image_diffusion" / "systems"
    shutil.copy(ROOT / "tests" / "workflow" / "new_system" / "gaussian.py", systems)
    listed = (systems / "__init__.py").read_text()
    line = "from image_diffusion.systems.gaussian import GaussianSystem\n"
    listed = line + listed.replace("DVAESystem | PriorSystem", "DVAESystem | PriorSystem | GaussianSystem")
    (systems / "__init__.py").write_text(listed)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    package = tmp_path_factory.mktemp("package")
    with_the_page(package)
    project = make_project(tmp_path_factory.mktemp("new") / "project", images=480)
    (project / "config/experiments/micro.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    copied = Project(project.folder, snakefile=package / "Snakefile", cold=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(package / "src"), os.environ.get("PYTHONPATH", "")]))
        copied.run()
        assert copied.planned() == set()
    return copied


def test_it_is_trained_sampled_judged_tracked_and_shown(made: Project) -> None:
    results = made / "results/micro"
    plan = json.loads((results / "config/plan.json").read_text())
    assert (plan["system"], plan["headline"], plan["makes_samples"], plan["detectors"]) == (
        "gaussian",
        "nats",
        True,
        [],
    )
    metrics = json.loads((results / "metrics.json").read_text())
    assert metrics["protocol"]["weights"]["system"] == "gaussian" and metrics["metrics"]["nats"]["interval"]
    assert metrics["metrics"]["nats"]["value"] < 0.9, "it started from a standard normal, 0.92 nats and more a value"
    assert (results / "samples/samples.npz").is_file() and (results / "samples/steps.png").is_file()
    assert not (made / "results/datasets/dots-16/detector").exists(), "nothing that looks at images was trained"
    assert "nats" in (results / "report/index.html").read_text()
    assert "gaussian" in (made / "results/summary.html").read_text()
    assert (results / "tracked.json").is_file()
