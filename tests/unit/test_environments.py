"""The environments say the same: what conda installs may be what the lock holds."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OF_CONDA = {"matplotlib-base": "matplotlib", "pytorch": "torch"}


def test_the_conda_environment_allows_what_is_locked_and_nothing_after_it() -> None:
    locked = dict(re.findall(r"^([a-z0-9-]+)==([\d.]+)", (ROOT / "envs/requirements.lock").read_text(), re.MULTILINE))
    for line in yaml.safe_load((ROOT / "envs/image-diffusion.yaml").read_text())["dependencies"]:
        if line.startswith(("python=", "pip")):
            continue
        named = Requirement(re.sub(r"(?<![<>=])=(?=\d)(.*)", r"==\1.*", line))
        version = locked[OF_CONDA.get(named.name, named.name)]
        assert version in named.specifier, (line, version)
        assert named.name == "setuptools" or "999" not in named.specifier, f"{line} has no upper bound"


def test_the_lock_names_no_place() -> None:
    """It installs from wherever a machine gets its packages."""
    for path in (ROOT / "envs").iterdir():
        assert "://" not in path.read_text(), path
