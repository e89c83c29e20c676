"""The tutorials run unchanged but for fewer steps: scripts, files and commands are taken from the pages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from projects import ROOT

from image_diffusion.core.config.base import changed, merged, to_yaml
from image_diffusion.core.config.yaml12 import from_text
from warm import warm_python

pytestmark = pytest.mark.slow

SHORT = ["train.steps=12", "train.schedule.warmup_steps=2", "sample.num_samples=20", "sample.batch_size=20"]


def blocks(page: str, kind: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)


def run(folder: Path, *command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [warm_python(), "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("page", "files"),
    [
        ("tutorial_cells", ["samples.npz", "samples.ome.tif"]),
        pytest.param("tutorial_tiles", ["samples.npz"], marks=pytest.mark.long),
    ],
)
def test_tutorial_with_folder_and_budget_runs(tmp_path: Path, page: str, files: list[str]) -> None:
    subprocess.run([sys.executable, "-c", blocks(page, "python")[0]], cwd=tmp_path, check=True)
    words, shown = blocks(page, "bash")[0].split()[1:], from_text(blocks(page, "yaml")[0])
    run(tmp_path, "image_diffusion", *words, "--cores", "1")
    project = tmp_path / words[1]
    path = project / "config" / "experiments" / "mine.yaml"
    proposed = from_text(path.read_text())
    # The page on cells shows the proposed settings, the page on tiles changed ones.
    assert (merged(proposed, shown) == proposed) is (page == "tutorial_cells")
    path.write_text(to_yaml(changed(merged(proposed, shown), SHORT)))
    run(project, "snakemake", "--cores", "1")
    results = project / "results" / "mine"
    assert all((results / "samples" / name).is_file() for name in files)
    assert (results / "report" / "index.html").is_file()
    assert {"inpipe_fd", "copies"} <= json.loads((results / "metrics.json").read_text())["metrics"].keys()


def test_photograph_tutorial_runs(tmp_path: Path) -> None:
    run(tmp_path, "image_diffusion", "init", "project")
    project, shapes = tmp_path / "project", from_text(blocks("tutorial", "yaml")[0])
    subprocess.run([sys.executable, "-c", blocks("tutorial", "python")[0]], cwd=project, check=True)
    experiments = project / "config" / "experiments"
    codec = {"data": {key: shapes["data"][key] for key in ("name", "source")}}
    for demo, written in {"demo_codec": codec, "demo": shapes}.items():
        settings = SHORT if demo == "demo" else SHORT[:2]
        text = to_yaml(changed(merged(from_text((experiments / f"{demo}.yaml").read_text()), written), settings))
        (experiments / f"{demo.replace('demo', 'shapes')}.yaml").write_text(text)
    run(project, "snakemake", "--cores", "1", "--config", "experiments=[shapes]")
    assert (project / "results" / "shapes" / "report" / "index.html").is_file()
