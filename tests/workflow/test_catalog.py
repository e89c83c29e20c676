"""Requirements of Snakemake's workflow catalog: standard layout, described rules, a page on configuration."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from projects import ROOT, Project

from image_diffusion.experiments.experiment import parse_experiment
from warm import warm_python


def test_every_rule_has_description() -> None:
    described = re.compile(r'^rule (\w+):\n    "(.+)"$', re.MULTILINE)
    for path in (ROOT / "Snakefile", ROOT / "workflow/Snakefile", *(ROOT / "workflow/rules").glob("*.smk")):
        text = path.read_text()
        assert re.findall(r"^rule (\w+):", text, re.MULTILINE) == [name for name, _ in described.findall(text)], path


def test_configuration_page_names_every_key() -> None:
    page = (ROOT / "config/README.md").read_text()
    schema = json.loads((ROOT / "workflow/schemas/config.schema.json").read_text())
    for key in schema["properties"]:
        assert f"`{key}`" in page, key
    shown = page.split("```yaml\n")[1].split("```")[0]
    parse_experiment(yaml.safe_load(shown), "config/README.md")


def test_files_for_snakemake_catalog_exist() -> None:
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert usage["mandatory-flags"].keys() == {"desc", "flags"}
    assert usage["software-stack-deployment"]["conda"] is True and usage["report"] is True
    for path in ("LICENSE", "README.md", "config/README.md", "workflow/Snakefile", "workflow/report/workflow.rst"):
        assert (ROOT / path).is_file(), path


@pytest.mark.slow
def test_both_snakefiles_plan_the_smallest_run(tmp_path: Path) -> None:
    """With the default profile next to workflow/Snakefile, without any option."""
    shutil.copytree(ROOT / ".test/config", tmp_path / "config")
    by_root = Project(tmp_path).planned()
    assert {"crop", "train", "sample", "evaluate", "report", "track"} <= by_root
    command = [warm_python(), "-m", "snakemake", "--snakefile", str(ROOT / "workflow/Snakefile"), "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {*re.findall(r"^(?:local)?rule (\w+):", done.stdout, re.MULTILINE)} - {"all"} == by_root
