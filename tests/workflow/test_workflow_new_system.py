"""A new system with its own network, batch, samples, evaluation and headline metric needs one file and one changed
line. The parts in docs/extending.md need as little; one experiment uses all of them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from projects import ROOT, Project, make_project

pytestmark = pytest.mark.slow

EXPERIMENT: dict[str, Any] = {
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
PARTS = {
    "samplers/midpoint.py": ("Midpoint", "Ddpm"),
    "objectives/absolute.py": ("Absolute", "Denoising"),
    "codecs/grey.py": ("Grey", "Rgb"),
    "metrics/thumbnails.py": ("Thumbnails", "InPipe"),
    "networks/mixer.py": None,
    "systems/mixer.py": ("MixerSystem", "DiTSystem"),
}
"""Files of docs/extending.md in its order; the class that each adds to a union, and a class that is already in it."""
OF_PARTS = EXPERIMENT | {
    "data": EXPERIMENT["data"] | {"name": "spots"},
    "codec": {"type": "grey"},
    "system": {"type": "mixer", "objective": {"type": "absolute"}},
    "sample": {"num_samples": 12, "sampler": {"type": "midpoint", "num_steps": 2}},
    "evaluate": {"detectors": ["inpipe", "thumbnails"]},
    "sweep": {"sampler": ["midpoint"], "num_steps": [2], "num_samples": 8},
}


def with_the_page(folder: Path) -> None:
    """Copy the package and its workflow, with one added file, one changed line and the parts in docs/extending.md."""
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
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
    for (name, added), block in zip(PARTS.items(), blocks, strict=True):
        path = systems.parent / name
        path.write_text(block)
        if added is not None:
            union, (kind, known) = path.with_name("__init__.py"), added
            imported = f"from image_diffusion.{path.parent.name}.{path.stem} import {kind}\n"
            field = "from pydantic import Field\n\n"
            text = re.sub(rf"(?<=[\[ ]){known} \|", f"{known} | {kind} |", union.read_text(), count=1)
            union.write_text(text.replace(field, field + imported))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    package = tmp_path_factory.mktemp("package")
    with_the_page(package)
    project = make_project(tmp_path_factory.mktemp("new") / "project", images=480)
    for name, experiment in {"micro": EXPERIMENT, "parts": OF_PARTS}.items():
        (project / f"config/experiments/{name}.yaml").write_text(yaml.safe_dump(experiment))
    settings = project / "config/config.yaml"
    settings.write_text(settings.read_text().replace("experiments: [micro]", "experiments: [micro, parts]"))
    copied = Project(project.folder, snakefile=package / "Snakefile", cold=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(package / "src"), os.environ.get("PYTHONPATH", "")]))
        copied.run()
        assert copied.planned() == set()
    return copied


def test_new_system_runs_through_every_stage(made: Project) -> None:
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


def test_parts_of_extending_page_run_through_every_stage(made: Project) -> None:
    results = made / "results/parts"
    model = json.loads((results / "train/model.json").read_text())
    assert model["system"]["objective"]["type"] == "absolute" and "grey" in json.dumps(model["codec"])
    metrics = json.loads((results / "metrics.json").read_text())["metrics"]
    assert {"inpipe_fd", "fd_thumbnails", "precision_thumbnails"} <= metrics.keys()
    assert "fd_thumbnails" in json.loads((results / "sweep/sampler/midpoint/metrics.json").read_text())["metrics"]
    assert "fd_thumbnails" in (results / "report/index.html").read_text()
