"""Create a project: a folder with a configuration, examples, and a Snakefile that uses the installed workflow.

    image-diffusion init my-project --data flowers --budget 6h
    cd my-project
    snakemake --cores all

With --data and --budget, the project has an experiment that is sized for these images, this machine and this time:
config/experiments/mine.yaml, with a reason for each choice. Measuring the machine takes about a minute.
Without them, the project starts with the demo.

The Snakefile includes the rules, and you can add your own rules to it (docs/module.md).
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from image_diffusion.core.files.atomic import write_text
from image_diffusion.core.process.command import Parser
from image_diffusion.core.process.errors import log_line
from image_diffusion.core.texts import duration

_SNAKEFILE = """# The rules of image-diffusion as they are installed, on what config/ says. Your own rules can go below.
from image_diffusion.tools.init import workflow_folder


configfile: "config/config.yaml"


include: f"{workflow_folder()}/rules/workflow.smk"


rule all:
    input:
        files.everything,
"""
_EXPERIMENT, _DEMO = "mine", "experiments: [demo]"
_LINK_TO_PAGE = re.compile(r"\[[^]]+\]\(\.\./(docs/[^)#]+)[^)]*\)")
_IGNORED = "/results/\n/logs/\n/benchmarks/\n/.snakemake/\n/mlflow.db*\n/mlruns/\n"


def workflow_folder() -> Path:
    """Return the folder of the rules: in the installed package, or in the clone."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "project" / "workflow"
    return installed if installed.is_dir() else package.parents[1] / "workflow"


def check_new(folder: Path) -> None:
    """Raise ValueError for a folder that exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder. Name a new folder.")


def begin(folder: Path, experiment: str | None = None, files: Mapping[str, str] | None = None) -> None:
    """Write a project into a new or empty folder. Raises ValueError for any other folder.

    experiment: text of the file of the experiment `mine`; unset: the project runs the demo. files: texts of other
    files, by path.
    """
    check_new(folder)
    workflow = workflow_folder()
    shutil.copytree(workflow.parent / "config", folder / "config")
    readme = folder / "config" / "README.md"  # links to pages that are not in the project
    text = _LINK_TO_PAGE.sub(r"`\1`", readme.read_text(encoding="utf-8"))
    write_text(readme, f"{text}\nPages in `docs/` are in the repository of image-diffusion.\n")
    shutil.copytree(workflow / "profiles" / "default", folder / "profiles" / "default")
    shutil.copytree(workflow / "profiles" / "slurm", folder / "slurm")
    write_text(folder / ".gitignore", _IGNORED)
    write_text(folder / "Snakefile", _SNAKEFILE)
    if experiment is not None:
        settings = folder / "config" / "config.yaml"
        write_text(folder / "config" / "experiments" / f"{_EXPERIMENT}.yaml", experiment)
        write_text(settings, settings.read_text(encoding="utf-8").replace(_DEMO, f"experiments: [{_EXPERIMENT}]"))
    for path, text in (files or {}).items():
        write_text(folder / path, text)


def main() -> None:
    parser = Parser(prog="image-diffusion init", description=str(__doc__).partition("\n")[0])
    parser.add_path("folder", "folder of the new project")
    parser.add_path("--data", "folder, zip or table of your images, to size an experiment for them")
    parser.add_argument("--budget", help="time for all its stages on this machine: 10min, 6h or 2d")
    parser.add_path("--weights", "folder of trained weights to start from, with a model.json")
    parser.add_argument("--cores", type=int, help="number of CPU cores to use (default: all)")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if (arguments.data is None) != (arguments.budget is None):
        parser.error("--data and --budget belong together: give the images and the time, or neither")
    if arguments.cores is not None and (arguments.data is None or arguments.cores < 1):
        parser.error("--cores is a number from 1, and belongs to --data and --budget")
    if arguments.weights is not None and arguments.data is None:
        parser.error("--weights belongs to --data and --budget")
    check_new(folder)
    enter = f"cd {'-- ' if str(folder).startswith('-') else ''}{shlex.quote(str(folder))}"
    if arguments.data is None:
        begin(folder)
        print(f"Created {folder}. Run the demo with: {enter} && snakemake. See config/README.md for your own data.")
        return
    # Imported here, because they import PyTorch, which a project without an experiment does not need.
    from image_diffusion.data.quality.facts import source_of
    from image_diffusion.data.sources.folder import Folder, reads_below
    from image_diffusion.tools.budget import propose_for

    source = source_of(arguments.data)
    if isinstance(source, Folder) and reads_below(source.path, folder):
        parser.error(
            f"{folder} lies inside the images, {arguments.data}. Name a folder outside of it, or results become images"
        )
    proposal = propose_for(arguments.data, arguments.budget, arguments.cores, arguments.weights)
    begin(folder, proposal.text, proposal.files)
    for sentence in proposal.warnings:
        log_line(f"warning: {sentence}")
    print(
        f"Created {folder} with config/experiments/{_EXPERIMENT}.yaml: {proposal.steps:,} steps and "
        f"{proposal.num_samples:,} samples in about {duration(proposal.total_s)}. Run it with: {enter} && "
        f"snakemake --cores {arguments.cores or 'all'}"
    )
