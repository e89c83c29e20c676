"""Files for cloud machines: a SkyPilot task, a container recipe and a pod, checked without starting them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from image_diffusion.tools.init import begin

ROOT = Path(__file__).resolve().parents[2]
TASK = yaml.safe_load((ROOT / "config/cloud/sky.yaml").read_text())
POD = yaml.safe_load((ROOT / "config/cloud/pod.yaml").read_text())
RECIPE = (ROOT / "envs/Containerfile").read_text()
KNOWN = json.loads(Path(__file__).with_name("skypilot_keys.json").read_text())
"""Keys of a SkyPilot task, from SkyPilot's schema."""


def locked_python() -> str:
    """Return the Python version of the environments."""
    (line,) = [
        line
        for line in yaml.safe_load((ROOT / "envs/image-diffusion.yaml").read_text())["dependencies"]
        if isinstance(line, str) and line.startswith("python=")
    ]
    return str(line.partition("=")[2])


def bash(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"} | variables
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def stand_in(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def test_skypilot_knows_every_key_of_the_task() -> None:
    assert TASK.keys() <= {*KNOWN["task"]} and TASK["resources"].keys() <= {*KNOWN["resources"]}
    assert TASK["resources"]["use_spot"] is True
    assert set(TASK["resources"]["accelerators"].values()) == {1}
    assert TASK["envs"]["MIRROR"] is None, "SkyPilot asks for it"


def test_new_project_has_the_cloud_files_of_the_clone(tmp_path: Path) -> None:
    begin(tmp_path / "mine")
    page = (tmp_path / "mine/config/README.md").read_text()
    for path in (tmp_path / "mine/config").glob("*.*"):  # only a text about a clone mentions `make`
        text = path.read_text()
        assert ("`make" in text) == ("clone" in text), path
    assert "mlflow ui --backend-store-uri sqlite:///mlflow.db" in (tmp_path / "mine/config/config.yaml").read_text()
    assert "](../" not in page and "pod for Kubernetes (`docs/cloud.md`)." in page
    for name in ("config/cloud/sky.yaml", "config/cloud/pod.yaml"):
        assert (tmp_path / "mine" / name).read_text() == (ROOT / name).read_text()


def test_the_task_runs_snakemake_on_the_gpus_of_the_machine_with_a_mirror(tmp_path: Path) -> None:
    stand_in(tmp_path / ".venv/bin/activate", "")
    stand_in(tmp_path / "bin/snakemake", "printf '%s\\n' \"$@\"")
    given = {"MIRROR": "s3://bucket/prefix", "EXPERIMENT": "mine", "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    done = bash(TASK["run"], tmp_path, **given)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [
        *("--cores", "all", "--config", "experiments=[mine]", "mirror=s3://bucket/prefix"),
        *("gpus_per_node=2", "processes_per_node=2"),
    ]
    assert bash(TASK["run"], tmp_path, EXPERIMENT="mine").returncode != 0, "a machine without a mirror"


@pytest.mark.parametrize("kind", ["clone", "project"])
def test_task_installs_locked_requirements(kind: str, tmp_path: Path) -> None:
    """Stand-ins for Python and make log their arguments."""
    log = tmp_path / "log"
    python = 'echo "$@" >>"$LOG"; [[ "$*" != *"uv python find"* ]] || echo "$PWD/bin/python3"'
    venv = '[[ "$*" != "-m venv .venv" ]] || { mkdir -p .venv/bin; cp bin/python3 .venv/bin/python; }'
    stand_in(tmp_path / "bin/python3", f"{python}\n{venv}")
    stand_in(tmp_path / "bin/make", 'echo "make $@" >>"$LOG"; python3 -m venv .venv')
    if kind == "clone":
        (tmp_path / "Makefile").touch()
    done = bash(TASK["setup"], tmp_path, LOG=str(log), PACKAGE="package.whl")
    assert done.returncode == 0, done.stderr
    asked = log.read_text()
    assert f"uv python find {locked_python()}" in asked
    locked = "--require-hashes --requirement"
    path = f".venv/lib/python{locked_python()}/site-packages/image_diffusion/project/envs/requirements.lock"
    if kind == "clone":
        assert f"make PYTHON={tmp_path}/bin/python3 .venv/.ready" in asked and locked not in asked
        assert re.search(r"^\.venv/\.ready: envs/requirements\.lock", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        unnamed = bash(TASK["setup"], tmp_path, LOG=str(log), PACKAGE="")
        assert unnamed.returncode != 0 and "PACKAGE: is needed in a project" in unnamed.stderr
        assert "--no-deps package.whl" in asked and f"{locked} {path}" in asked
        assert '"envs"' in (ROOT / "setup.py").read_text() and (ROOT / "envs/requirements.lock").is_file()


def test_the_pod_runs_the_image_with_its_gpu_on_a_volume() -> None:
    pod = POD["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (entry,) = [words for name, words in instructions(RECIPE) if name == "ENTRYPOINT"]
    assert json.loads(entry) == ["snakemake"] and "command" not in container
    number = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert {f"gpus_per_node={number}", f"processes_per_node={number}"} <= {*container["args"]}
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    (user,) = [words for name, words in instructions(RECIPE) if name == "USER"]
    assert pod["securityContext"]["fsGroup"] == int(user)


def instructions(recipe: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a container recipe, each on one line."""
    text = re.sub(r"^ *#.*\n", "", recipe, flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, words = line.partition(" ")
        yield name, " ".join(words.split())


def faults(recipe: str) -> list[str]:
    """Return the faults of a recipe."""
    found, steps = [], [*instructions(recipe)]
    copied = [source for name, words in steps if name == "COPY" for source in words.split()[:-1]]
    found += [f"no {source} to copy" for source in copied if not (ROOT / source).exists()]
    (folders,) = re.findall(r"^FOLDERS = \((.*)\)", (ROOT / "setup.py").read_text(), re.MULTILINE)
    needed = {"src", "setup.py", "pyproject.toml", "envs/requirements.lock", *re.findall(r'"(\w+)"', folders)}
    found += [f"{each} is not copied" for each in sorted(needed - {*copied})]
    for image in (words.split()[0] for name, words in steps if name == "FROM"):
        tag = image.rpartition("/")[2].partition(":")[2]
        if not tag.startswith(f"{locked_python()}-"):
            found.append(f"{image} is not Python {locked_python()}")
    installs = [words for name, words in steps if name == "RUN" and "pip install" in words]
    if not any("--require-hashes" in words and "requirements.lock" in words for words in installs):
        found.append("the lock is not installed by its hashes")
    users = [words for name, words in steps if name == "USER"]
    if not users or users[-1] in ("root", "0"):
        found.append("runs as root")
    return found


def test_the_container_is_built_from_the_lock() -> None:
    assert faults(RECIPE) == []
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["python_version"]
    assert required == locked_python()


@pytest.mark.parametrize(
    ("line", "other", "fault"),
    [
        ("COPY workflow ", "COPY flow ", ["no flow to copy", "workflow is not copied"]),
        ("python:3.11-slim-bookworm", "python:latest", ["docker.io/library/python:latest is not Python 3.11"]),
        ("python:3.11-slim-bookworm", "python", ["docker.io/library/python is not Python 3.11"]),
        ("--require-hashes ", "", ["the lock is not installed by its hashes"]),
        ("USER 1000", "USER root", ["runs as root"]),
    ],
)
def test_faulty_container_recipes_are_detected(line: str, other: str, fault: list[str]) -> None:
    assert line in RECIPE
    assert faults(RECIPE.replace(line, other)) == fault
