"""Collect the packages that a machine with PyTorch and without a network needs, as the lock pins them.

    make wheels                                       # for this Python, into wheels/
    make wheels FOR=3.12 HAVE=pip-freeze.txt          # for another, without what `pip freeze` printed there

On that machine, in the environment that has PyTorch:

    python -m pip install --no-index --find-links wheels image-diffusion pytest pytest-xdist hypothesis

PyTorch, torchvision, Triton and CUDA are left out: they have to fit one another and the driver. So is what PyTorch
itself needs.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "envs/requirements.lock"
FOR_TESTS = ("pytest", "pytest-xdist", "hypothesis")
"""Packages that `make first-gpu` needs beside this one."""
WITHOUT_WHEEL = {"connection-pool"}
"""Packages in pure Python that are published as sources alone: their wheels are built here."""
_OF_PYTORCH = re.compile(r"torch|torchvision|triton|(nvidia-(?!ml-py)|cuda-).*|sympy|mpmath|networkx")
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(?:.*\\\n)*.*$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".".join(platform.python_version_tuple()[:2]), help="version there, 3.12")
    parser.add_argument("--have", type=Path, help="what `pip freeze` printed there, which is left out")
    parser.add_argument("--extra", action="append", default=[], help="also these extras of the package: workflow")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    present = names(options.have.read_text()) if options.have else set()
    with tempfile.TemporaryDirectory() as folder:
        wheels, sources = Path(folder, "wheels.txt"), Path(folder, "sources.txt")
        pinned = kept(compiled(Path(folder, "wanted.in"), options.python, options.extra), present)
        wheels.write_text("\n".join(text for name, text in pinned.items() if name not in WITHOUT_WHEEL) + "\n")
        sources.write_text("\n".join(text for name, text in pinned.items() if name in WITHOUT_WHEEL) + "\n")
        download(wheels, options.python, options.output)
        build(options.output, "--require-hashes", "--requirement", str(sources))
    build(options.output, "--no-build-isolation", str(ROOT))
    files = sorted(options.output.glob("*.whl"), key=lambda file: -file.stat().st_size)
    for file in files[:5]:
        print(f"{file.stat().st_size / 2**20:6.1f} MiB  {file.name}")
    total = sum(file.stat().st_size for file in files) / 2**20
    print(f"{total:6.1f} MiB  in {len(files)} wheels for Python {options.python}: {options.output}")


def names(freeze: str) -> set[str]:
    """The normalised names of the packages that `pip freeze` lists, by version or by place."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:==| @ )", freeze, re.MULTILINE)
    return {normalised(name) for name in found}


def normalised(name: str) -> str:
    """The name as the Python packaging guide compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def compiled(wanted: Path, python: str, extras: list[str]) -> str:
    """Every package that is needed, with the lock's version and hashes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    more = [line for extra in extras for line in project["optional-dependencies"][extra]]
    wanted.write_text("\n".join([*project["dependencies"], *more, *FOR_TESTS]) + "\n")
    line = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
    line += ["--python-version", python, "--constraint", str(LOCK), str(wanted)]
    return subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout


def kept(text: str, present: set[str]) -> dict[str, str]:
    """The pinned packages by name, without PyTorch's and without what is present."""
    pinned = {normalised(match[1]): match[0] for match in _PINNED.finditer(text)}
    return {name: text for name, text in pinned.items() if name not in present and not _OF_PYTORCH.fullmatch(name)}


def download(listed: Path, python: str, output: Path) -> None:
    """Fetch the wheels of a list, whose hashes are checked."""
    line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    line += ["--python-version", python, "--implementation", "cp", "--dest", str(output), "--requirement", str(listed)]
    for version in ("2_28", "2_27", "2_24", "2_17", "2014", "2_12", "2_5"):
        line += ["--platform", f"manylinux{'' if version == '2014' else '_'}{version}_{platform.machine()}"]
    subprocess.run(line, check=True)


def build(output: Path, *what: str) -> None:
    """Build wheels of what pip's arguments name, for any version of Python: the package itself is compiled for this
    kind of processor."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(output), *what], check=True
    )


if __name__ == "__main__":
    main()
