"""Requirements, lock file and conda environment agree."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from image_diffusion.core.process import command
from image_diffusion.export.descriptions import PIPELINE

ROOT = Path(__file__).parents[2]
OF_CONDA = {"matplotlib-base": "matplotlib", "pytorch": "torch"}
OF_ANY_VERSION = {"matplotlib", "nvidia-ml-py", "psutil", "pyyaml", "tifffile", "tqdm"}
"""Packages for which pyproject.toml states no lower bound, so that an installed version is kept."""

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORTED_AS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
BROUGHT = {"pydantic_core": "pydantic", "huggingface_hub": "diffusers", "fsspec": "torch", "triton": "torch"}
"""Packages that are installed as dependencies of others."""
CHOSEN = {
    "bitsandbytes",
    "lmdb",
    "nibabel",
    "pandas",
    "peft",
    "pyarrow",
    "pydicom",
    "torch_fidelity",
    "torchvision",
    "transformers",
}
"""Optional packages of experiments; commands report those that are missing."""

sys.path.insert(0, str(ROOT / "workflow/scripts"))
import wheels  # noqa: E402 - a script beside the rules


def required(*lines: str) -> set[str]:
    return {Requirement(line).name for line in lines}


def test_package_requires_all_imported_packages() -> None:
    """Except for the workflow and the tracking, which have their own extras."""
    needed = required(*PROJECT["dependencies"])
    package = ROOT / "src/image_diffusion"
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] in ("workflow", "tracking"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            for name in {name.partition(".")[0] for name in names} - {"image_diffusion", *sys.stdlib_module_names}:
                required_as = BROUGHT.get(name, IMPORTED_AS.get(name, name))
                assert required_as in needed or name in CHOSEN, f"{path}: {name}"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("pyarrow.lib", "The package pyarrow is needed and not installed. Install it: pip install pyarrow"),
        ("image_diffusion.nothing", None),
        ("json.nothing", None),
    ],
)
def test_missing_package_is_a_one_line_error(name: str, told: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    def importing() -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    with pytest.raises(SystemExit):
        command.run(importing)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"error: {told}"] if told else "Traceback" in lines[0]


def test_pytorch_bounds_agree_in_all_environments() -> None:
    conda = yaml.safe_load((ROOT / "envs/image-diffusion.yaml").read_text())["dependencies"]
    (bounds,) = [Requirement(line).specifier for line in PROJECT["dependencies"] if Requirement(line).name == "torch"]
    inputs = (ROOT / "envs/requirements.in").read_text().splitlines()
    written = [line for line in (*conda, *inputs) if re.match(r"(py)?torch[<>=]", line)]
    assert [Requirement(line).specifier for line in written] == [bounds, bounds]


def test_wheels_exclude_pytorch_and_installed_packages() -> None:
    lock = (ROOT / "envs/requirements.lock").read_text()
    present = wheels.names("numpy==2.2.6\nScikit_Learn==1.7\npillow @ file:///builds/pillow\n# a remark\n")
    assert present == {"numpy", "scikit-learn", "pillow"}
    pinned = wheels.kept(lock, present)
    assert {"pydantic", "diffusers", "scipy", "nvidia-ml-py"} <= pinned.keys()
    assert not pinned.keys() & (present | {"torch", "torchvision", "triton", "nvidia-cublas", "cuda-toolkit", "sympy"})
    for name, text in pinned.items():
        assert text.startswith(f"{name}==") and "--hash=sha256:" in text


def test_workflow_packages_without_wheels_are_built_from_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: dict[str, str] = {}

    def fetch(listed: Path, python: str, output: Path) -> None:
        fetched["wheels"] = listed.read_text()

    def build(output: Path, *what: str) -> None:
        if "--requirement" in what:
            fetched["sources"] = Path(what[-1]).read_text()

    lock = (ROOT / "envs/requirements.lock").read_text()
    monkeypatch.setattr(wheels, "compiled", lambda *_: lock)
    monkeypatch.setattr(wheels, "download", fetch)
    monkeypatch.setattr(wheels, "build", build)
    monkeypatch.setattr(sys, "argv", ["wheels.py", "--extra", "workflow", "--output", str(tmp_path)])
    wheels.main()
    assert re.findall(r"^[a-z0-9-]+(?===)", fetched["sources"], re.MULTILINE) == sorted(wheels.WITHOUT_WHEEL)
    assert "snakemake==" in fetched["wheels"] and "connection-pool==" not in fetched["wheels"]


def of_conda() -> dict[str, Requirement]:
    """Requirements of the conda environment except Python and pip, by their PyPI names."""
    lines = yaml.safe_load((ROOT / "envs/image-diffusion.yaml").read_text())["dependencies"]
    asked = [Requirement(re.sub(r"(?<![<>=])=(?=\d)(.*)", r"==\1.*", line)) for line in lines if line != "pip"]
    return {OF_CONDA.get(each.name, each.name): each for each in asked if each.name != "python"}


def test_conda_environment_contains_all_requirements() -> None:
    assert required(*PROJECT["dependencies"]) <= of_conda().keys()


def test_lower_bounds_agree_in_all_environments() -> None:
    inputs = [line for line in (ROOT / "envs/requirements.in").read_text().splitlines() if line[0] != "#"]
    asked = {line.name: line for line in map(Requirement, inputs)}
    for line in map(Requirement, PROJECT["dependencies"]):
        bounds = {lower_bound(each) for each in (line, asked[line.name], of_conda()[line.name])}
        assert len(bounds) == 1 or line.name in OF_ANY_VERSION, (line.name, bounds)
        assert line.name != "pydantic" or f"'pydantic{bounds.pop()}'" in PIPELINE


def lower_bound(asked: Requirement) -> str | None:
    return next((str(each) for each in asked.specifier if each.operator == ">="), None)


def test_conda_environment_allows_locked_versions_and_has_upper_bounds() -> None:
    locked = dict(re.findall(r"^([a-z0-9-]+)==([\d.]+)", (ROOT / "envs/requirements.lock").read_text(), re.MULTILINE))
    for name, asked in of_conda().items():
        assert locked[name] in asked.specifier, (asked, locked[name])
        assert name == "setuptools" or "999" not in asked.specifier, f"{asked} has no upper bound"


@pytest.mark.parametrize("root", ["clone", "base/image_diffusion/project"])
def test_conda_environment_finds_the_package_in_the_clone_or_installation(root: str, tmp_path: Path) -> None:
    """Other packages of Snakemake's environment, possibly of another Python version, are not added."""
    scripts, conda = tmp_path / root / "workflow/scripts", tmp_path / "conda"
    shutil.copytree(ROOT / "workflow/scripts", scripts)
    (tmp_path / "base/image_diffusion-1.2.3.dist-info").mkdir(parents=True)
    conda.mkdir()
    (conda / "python").write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {conda} || echo "$@"\n')
    (conda / "python").chmod(0o755)
    environment = {"PATH": f"{conda}:{scripts}:{os.environ['PATH']}"}
    run = partial(subprocess.run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    installed = run(["bash", ROOT / "envs/image-diffusion.post-deploy.sh"]).stdout
    path = run(["logged", "log", "sh", "-c", 'echo "$PYTHONPATH"']).stdout
    if root == "clone":
        assert installed.startswith("-m pip install") and installed.endswith(f"--editable {tmp_path / root}\n")
        assert path == f"{tmp_path / root}/src\n" and len(list(conda.iterdir())) == 1
    else:
        assert installed == "" and path == "\n"
        assert (conda / "image_diffusion/project").is_dir() and (conda / "image_diffusion-1.2.3.dist-info").is_dir()


def test_environments_contain_no_urls() -> None:
    """Packages are installed from the index that the machine is configured for."""
    for path in (ROOT / "envs").iterdir():
        assert "://" not in path.read_text(), path


def test_missing_package_errors_name_an_extra_that_contains_it() -> None:
    """One helper writes the end of such messages."""
    extras = PROJECT["optional-dependencies"]
    for path in (ROOT / "src/image_diffusion").rglob("*.py"):
        text = path.read_text()
        assert "pip install '" not in text or path.name in ("errors.py", "start.py"), path
        for name, extra in re.findall(r"\{package\('([^']+)', '([^']+)'\)\}", text):
            assert name in required(*extras[extra]), path
