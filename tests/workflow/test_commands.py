"""Every command in README and docs is run unchanged in a small project, or checked as far as this machine allows.

Both code blocks and commands inside sentences are run. Names that a reader replaces by his own are replaced here by
the experiment `micro`. A command that cannot run has an entry in one of the tables, with the reason.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from projects import ROOT, Project, warm_python

from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit import DiTConfig
from tiny_autoencoders import write_autoencoder

pytestmark = pytest.mark.slow

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "config/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^ *```([^\s`]*)[^\n`]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELL = {"bash", "console", "sh"}
PROGRAMS = {"snakemake", "make", "python", "image-diffusion", "tests/slurm/local_slurm.sh"}
SHIPPED = {path.stem for path in (ROOT / "config/experiments").glob("*.yaml")}

OF_OTHERS = {
    "cd": "changes the folder",
    "source": "activates the environment",
    "git": "needs a network",
    "pip": "installs packages",
    "apt-get": "needs a package registry and root",
    "eval": "sets variables for a cluster that tests/slurm starts",
    "export": "sets a variable",
    "mlflow": "serves a model, as tests/unit/test_track_models.py does",
    "curl": "asks the model that is served",
    "sky": "needs an account of a cloud; tests/unit/test_cloud.py reads the task",
    "podman": "needs a builder and a registry; tests/unit/test_cloud.py reads the recipe",
    "kubectl": "needs a cluster; tests/unit/test_cloud.py reads the pod",
}
"""Programs in code blocks that are not part of this package, and why they are not run."""

ELSEWHERE = {
    "snakemake --cores all gallery.html": ("tests/workflow/test_workflow_elsewhere.py", "gallery.html"),
    "snakemake --cores all diffusion_all": ("tests/workflow/test_workflow_elsewhere.py", "diffusion_all"),
    "image-diffusion sample mine --num 12 --set 'sample.conditions={age: [20, 40, 60], dose: [0.5, 1]}'": (
        "tests/workflow/test_workflow_numbers.py",
        "sample.conditions={angle: [2, 4, 6], dose: [0.5, 1]}",
    ),
    "image-diffusion init my-flowers --data data/flowers --budget 6h": (
        "tests/workflow/test_workflow_proposal.py",
        '"init", "mine", "--data", "images"',
    ),
    "image-diffusion init FOLDER --data IMAGES --budget 6h": (
        "tests/workflow/test_workflow_proposal.py",
        '"init", "mine", "--data", "images"',
    ),
    "image-diffusion init my-flowers --data data/flowers --budget 2h --weights results/dit/train": (
        "tests/workflow/test_workflow_proposal.py",
        '"init", "finer"',
    ),
    **{
        f"image-diffusion init {name} --data data/{name} --budget 8min": (
            "tests/workflow/test_workflow_tutorials.py",
            f'"tutorial_{name}"',
        )
        for name in ("cells", "tiles")
    },
    "image-diffusion sample mine --num 12 --label a --set sample.small_images=my_masks": (
        "tests/workflow/test_workflow_masks.py",
        "sample.small_images=masks",
    ),
    "image-diffusion sample mine --num 12 --set "
    "'sample.conditions={label: [a, b], image: [masks/01.png, masks/02.png]}'": (
        "tests/workflow/test_workflow_masks.py",
        "sample.conditions={{label: [dark, light], image: [",
    ),
    "snakemake --cores all --config study=digits": ("tests/workflow/test_workflow_study.py", '"study=digits"'),
    "tests/slurm/local_slurm.sh up": ("tests/slurm/local_slurm.sh", "up)"),
    "tests/slurm/local_slurm.sh down": ("tests/slurm/local_slurm.sh", "down)"),
}
"""Commands that another test file runs, and the text that this file must contain."""

PLANNED = {
    "snakemake --cores all --profile slurm": "needs Slurm; tests/slurm/test_slurm_literal.py runs it",
    "snakemake --cores all --forcerun sample": "makes again what test_workflow_reruns.py makes again",
    "snakemake --cores all --config 'experiments=[mine]' results=/scratch/me": "makes everything a second time",
}
"""Commands for which a dry run is enough, and why."""

REFUSED = {
    "image-diffusion mirror": "No mirror is set",
    "image-diffusion mirror --prune": "No mirror is set",
    "python -m image_diffusion export --read prior_aes_finetune.pth --output results/laion/train": (
        "error: prior_aes_finetune.pth does not exist"
    ),
}
"""Commands that need a bucket or files from elsewhere, and the error they end with here. Their options are parsed."""


def commands(text: str) -> list[str]:
    """Return the commands of a page, one line each."""
    found = []
    for language, body in FENCE.findall(text):
        lines = body.replace("\\\n", " ").splitlines() if language in SHELL else []
        found += [part for line in lines for part in re.sub(r"(^|\s+)#.*", "", line).split(" && ")]
    inside = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    found += [code for code in inside if " " in code.strip() and code.split()[0] in PROGRAMS]
    return [" ".join(command.split()) for command in found if command.strip()]


SHOWN = list(dict.fromkeys(command for page in PAGES for command in commands(page.read_text())))


def standing_in(command: str) -> str:
    """Return the command with names that exist here: the reader's experiment is `micro`, the machine has two cores."""
    mine = rf"experiments=\[(?!({'|'.join(SHIPPED)})\])[\w-]+\]"
    command = re.sub(mine, "experiments=[micro]", command)
    command = re.sub(r"^(snakemake --cores all|image-diffusion sample) mine\b", r"\1 micro", command)
    command = re.sub(r"(?<!--output )\bresults/(mine|demo|shapes|x|<experiment>)/", "results/micro/", command)
    for shown, here in {
        "/path/to/image-diffusion": str(ROOT),
        "/path/to/mine": ".",
        "/scratch/me": "elsewhere",
        "/models/sd-vae-ft-ema": "vae",
        "--average 0.999 ": "--average 0.9999 ",
        "--config train.yaml": "--config results/micro/config/train.yaml",
        "--data manifest.json": "--data results/datasets/dots-16/crops/manifest.json",
        "--cores all": "--cores 2",
        " …": " --help",
    }.items():
        command = command.replace(shown, here)
    return re.sub(r"^(python -m image_diffusion\.\w+)( --read)?$", r"\1 --help", command)


def started(command: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run a command with this Python and this workflow. Its stdout includes stderr."""
    program, *arguments = [*shlex.split(standing_in(command)), *more]
    if program == "snakemake" and "--snakefile" not in arguments and not (folder / "Snakefile").exists():
        arguments = ["--snakefile", str(ROOT / "Snakefile"), *arguments]
    if program in ("snakemake", "image-diffusion"):
        arguments = ["-m", program.replace("-", "_"), *arguments]
    is_ours = arguments[0] == "-m" and not (folder / "Snakefile").exists()
    return subprocess.run(
        [warm_python() if is_ours else sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def project(made: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished project with the files that commands name."""
    folder = tmp_path_factory.mktemp("commands") / "project"
    subprocess.run(["cp", "--archive", made.folder, folder], check=True)
    (folder / "slurm").symlink_to(ROOT / "workflow/profiles/slurm")
    (folder / "workflow/schemas").mkdir(parents=True)
    # Published weights of the smallest size, and an autoencoder for them.
    torch.manual_seed(0)
    network = DiTConfig(depth=1, width=384, num_heads=6, patch=2, time_frequencies="dit")
    built = network.build(DataSpec(channels=4, resolution=4, num_classes=1000), learned_variance=True)
    torch.save(built.state_dict(), folder / "DiT-XL-2-256x256.pt")
    write_autoencoder("sd", folder / "vae")
    published = yaml.safe_load((ROOT / "config/published/dit_xl2_imagenet256.yaml").read_text())
    published["codec"] = str(folder / "vae")
    published["sample"] |= {"num_samples": 2, "sampler": {"type": "ddpm", "num_steps": 2}}
    (folder / "holes").mkdir()
    Image.new("RGB", (20, 16), "teal").save(folder / "holes/a.png")
    mask = Image.new("L", (20, 16))
    mask.paste(255, (0, 0, 10, 16))
    mask.save(folder / "mask.png")
    path = folder / "config/published/dit_xl2_imagenet256.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(published))
    return folder


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Output of one dry run of all shipped experiments that commands name."""
    folder = tmp_path_factory.mktemp("shipped")
    shutil.copytree(ROOT / "config", folder / "config")
    named = sorted({name for command in SHOWN for name in re.findall(r"experiments=\[(\w+)\]", command)} & SHIPPED)
    done = started(f"snakemake --cores all --dry-run --config 'experiments={[*named]}'", folder)
    assert done.returncode == 0, done.stdout
    return lambda name: done.stdout if name in named else ""


@pytest.mark.parametrize("command", SHOWN)
def test_documented_command_works(command: str, request: pytest.FixtureRequest) -> None:
    program = command.split()[0]
    if program in OF_OTHERS:
        return
    assert program in PROGRAMS, f"{command}: neither a program of ours nor one of OF_OTHERS"
    if program == "make":  # each target is a part of .ci/run, or needs a GPU, a cluster or hours
        asked = subprocess.run(
            [*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert asked.returncode == 0, asked.stderr
        return
    if command in ELSEWHERE:
        file, text = ELSEWHERE[command]
        assert text in (ROOT / file).read_text()
        return
    named = re.findall(r"experiments=\[(\w+)\]", command)
    if set(named) & SHIPPED:  # a run takes minutes: the experiment's file states how many
        assert f"results/{named[0]}/" in request.getfixturevalue("shipped")(named[0])
        return
    project: Path = request.getfixturevalue("project")
    if command == "snakemake":  # shown after `image-diffusion init mine`: runs the demo
        assert started("image-diffusion init begun", project).returncode == 0
        done = started(command, project / "begun", "--cores", "2", "--dry-run")
        assert done.returncode == 0, done.stdout
        return
    if command in REFUSED:
        done = started(command, project)
        assert done.returncode == 1 and REFUSED[command] in done.stdout, done.stdout
        return
    done = started(command, project, *(["--dry-run"] if command in PLANNED else []))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_code_block_names_its_language(page: Path) -> None:
    """The language is bash, yaml, python or text. Blocks of bash are run."""
    assert [body for language, body in FENCE.findall(page.read_text()) if not language] == []


def test_tables_name_only_documented_commands() -> None:
    assert not [command for table in (ELSEWHERE, PLANNED, REFUSED) for command in table if command not in SHOWN]
    assert not OF_OTHERS.keys() - {command.split()[0] for command in SHOWN}


def test_help_works_without_unicode_and_without_reader() -> None:
    """As in `PYTHONIOENCODING=ascii image-diffusion --help | true`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "image_diffusion", "--help"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert done.stdout.startswith(b"usage: image-diffusion COMMAND ...") and b"\n  train " in done.stdout


def test_make_bench_runs_benchmarks_without_required_arguments() -> None:
    line = re.search(r"^with_arguments := .*,(.*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    needs = r"add_argument\(\"[a-z]|required=True"
    files = {path.stem for path in ROOT.glob("tests/bench/bench_*.py") if re.search(needs, path.read_text())}
    assert line is not None and files == {f"bench_{name}" for name in line[1].split()}
