"""Create a project: a folder with a configuration, examples, and a Snakefile that uses the installed workflow.

    image-diffusion init my-project
    cd my-project
    snakemake

The Snakefile takes the rules as a module, so that rules of your own can stand beside them (docs/module.md).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from image_diffusion.core.files.atomic import write_text
from image_diffusion.core.process.command import Parser, run

_SNAKEFILE = """# The rules of image-diffusion as they are installed, on what config/ says. Your own rules can go below.
from image_diffusion.tools.init import workflow_folder


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
    """Return the folder of the rules: where the package was installed, or in the clone that it runs from."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "project" / "workflow"
    return installed if installed.is_dir() else package.parents[1] / "workflow"


def begin(folder: Path) -> None:
    """Write a project into a folder that does not exist yet, or is empty. Raises ValueError for any other."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder. Name a new folder.")
    workflow = workflow_folder()
    shutil.copytree(workflow.parent / "config", folder / "config")
    shutil.copytree(workflow / "profiles" / "default", folder / "profiles" / "default")
    write_text(folder / ".gitignore", _IGNORED)
    write_text(folder / "Snakefile", _SNAKEFILE)


def main() -> None:
    parser = Parser(prog="image-diffusion init", description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the new project")
    folder = parser.parse_args().folder
    begin(folder)
    print(f"Created {folder}. Run the demo with: cd {folder} && snakemake. See config/README.md for your own data.")


if __name__ == "__main__":
    run(main)
