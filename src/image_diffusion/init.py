"""Begin a project: a folder with a configuration, examples, and a Snakefile that uses the installed workflow.

    image-diffusion init my-project
    cd my-project
    snakemake

The Snakefile takes the rules as a module, so that rules of your own can stand beside them (docs/module.md).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from image_diffusion.core.command import Parser, run
from image_diffusion.core.files import write_text

_SNAKEFILE = """# The rules of image-diffusion as they are installed, on what config/ says. Your own rules can go below.
from image_diffusion.init import workflow_folder


configfile: "config/config.yaml"


module image_diffusion:
    snakefile:
        f"{workflow_folder()}/Snakefile"
    config:
        config


use rule * from image_diffusion
"""
_IGNORED = "/results/\n/logs/\n/benchmarks/\n/.snakemake/\n/mlflow.db*\n/mlruns/\n"


def workflow_folder() -> Path:
    """The folder of the rules: where the package was installed, or in the clone that it runs from."""
    package = Path(__file__).resolve().parent
    installed = package / "project" / "workflow"
    return installed if installed.is_dir() else package.parents[1] / "workflow"


def begin(folder: Path) -> None:
    """Write a project into a folder that is not there yet, or is empty. Raises ValueError for any other."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder. Name one that does not exist.")
    workflow = workflow_folder()
    shutil.copytree(workflow.parent / "config", folder / "config")
    shutil.copytree(workflow / "profiles" / "default", folder / "profiles" / "default")
    write_text(folder / ".gitignore", _IGNORED)
    write_text(folder / "Snakefile", _SNAKEFILE)


def main() -> None:
    parser = Parser(prog="image-diffusion init", description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the project's folder, which does not exist yet")
    folder = parser.parse_args().folder
    begin(folder)
    print(f"{folder} makes the demo: cd {folder} && snakemake. What it makes, config/README.md tells how to change.")


if __name__ == "__main__":
    run(main)
