"""image-diffusion beside its peers: the same work by each, in turn, and docs/peers.md from what was measured.

    make peers                                       # an environment for the peers, then everything: an hour
    python tests/bench/peers/run.py --table judging --rounds 3 --page peers.md

Each variant runs in a process of its own: ours in this environment, the others in that of `envs/peers.lock` (the same
PyTorch and Pillow, one thread). Every round runs all variants of a table one after another, and a ratio is of two
runs of the same round; the page shows the median of the rounds and their range. Of the tables of whole trainings, a
round is a seed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PEERS = ROOT / ".venv" / "peers" / "bin" / "python"
PAGE = ROOT / "docs" / "peers.md"

Found = dict[str, list[dict[str, float | None]]]
"""What each variant printed, a round each."""


@dataclass(frozen=True)
class Measure:
    """A column. title: its head. form: of a number. is_rate: more is better, and ratios are ours over theirs."""

    title: str
    form: str = "{:,.0f}"
    is_rate: bool = False


@dataclass(frozen=True)
class Table:
    """A comparison. text: what is compared. peers: as the script names them, with what a reader must know of each.
    measures: by the script's names; the first decides the order and the ratio. by_seed: the script, in our environment,
    starts the peers itself, is given the number of the round, and needs no round to warm up. is_cifar10: its images are
    those of `--images`, if given."""

    title: str
    text: str
    script: str
    peers: dict[str, str]
    measures: dict[str, Measure]
    arguments: tuple[str, ...] = ()
    by_seed: bool = False
    is_cifar10: bool = False


def run_once(table: Table, peer: str, work: Path, number: int = 0) -> dict[str, float | None]:
    """What one variant measures in one process."""
    is_ours = peer == "ours" or table.by_seed
    line = [sys.executable if is_ours else str(PEERS), str(HERE / f"{table.script}.py"), *table.arguments]
    line += [peer, str(work), *([str(number)] if table.by_seed else [])]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    paths = os.pathsep.join([str(ROOT / "src"), str(HERE.parent)])
    environment = {**kept, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": paths} if is_ours else {})}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {peer} failed at {table.title}:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    found: dict[str, float | None] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measured(table: Table, rounds: int, work: Path) -> Found:
    """Every variant of a table, `rounds` times in turn after one round that warms files up and writes formats."""
    found: Found = {peer: [] for peer in ("ours", *table.peers)}
    for number in range(0 if table.by_seed else -1, rounds):
        for peer, rows in found.items():
            row = run_once(table, peer, work, number)
            print(f"{table.title}, round {number}: {peer} {json.dumps(row)}", flush=True)
            if number >= 0:
                rows.append(row)
    return found


def ratios(found: Found, peer: str, name: str, measure: Measure) -> list[float]:
    """How many times better ours is than a peer, in each round."""
    pairs = [(ours[name], theirs[name]) for ours, theirs in zip(found["ours"], found[peer], strict=True)]
    return [
        (ours / theirs if measure.is_rate else theirs / ours)
        for ours, theirs in pairs
        if ours is not None and theirs is not None
    ]


def cell(rows: Sequence[dict[str, float | None]], name: str, measure: Measure) -> str:
    """The median of a column, or a dash where the variant has no such thing."""
    values = [value for row in rows if (value := row[name]) is not None]
    return measure.form.format(statistics.median(values)) if values else "–"


def rendered(table: Table, found: Found) -> str:
    """A table as Markdown: the fastest first."""
    first = next(iter(table.measures))
    measure = table.measures[first]
    factor = {peer: ratios(found, peer, first, measure) for peer in found}
    order = sorted(found, key=lambda peer: statistics.median(factor[peer]))
    heads = ["", *(each.title for each in table.measures.values()), "Ours against it"]
    lines = [f"## {table.title}", "", wrapped(table.text), "", row(heads), row(["---", *["---:"] * (len(heads) - 1)])]
    for peer in order:
        middle, values = statistics.median(factor[peer]), factor[peer]
        against = "1" if peer == "ours" else f"**{middle:.2f}** ({min(values):.2f} to {max(values):.2f})"
        cells = [cell(found[peer], name, each) for name, each in table.measures.items()]
        name = "**image-diffusion**" if peer == "ours" else f"{peer}{_note(table.peers[peer])}"
        lines.append(row([name, *cells, against]))
    return "\n".join(lines)


def row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _note(text: str) -> str:
    return f": {text}" if text else ""


def versions() -> str:
    """The peers with their versions, from the lock."""
    names = set(re.findall(r"^[\w-]+", (ROOT / "envs" / "peers.in").read_text(), re.MULTILINE))
    locked = re.findall(r"^([\w-]+)(?:\[.*\])?==(\S+)", (ROOT / "envs" / "peers.lock").read_text(), re.MULTILINE)
    return ", ".join(f"{name} {version}" for name, version in locked if name in names)


def processor() -> str:
    """The processor's name, with the cores that this process may use."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    name = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    return f"{len(os.sched_getaffinity(0))} cores of {name.group(1) if name else platform.processor()}"


def page(results: dict[str, Found], rounds: int) -> str:
    """docs/peers.md."""
    machine = f"{processor()}, Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
    date = f"{datetime.datetime.now(tz=datetime.UTC):%-d %B %Y}"
    head = f"""Made by `make peers` on {date}: {machine}, one thread. Each row is a process of its own; in every
        round all rows of a table run one after another. Numbers are medians of {rounds} rounds. The last column says
        how many times better image-diffusion is in the table's first column: the median of the rounds, and their
        range. A peer that is better has a number below 1, and stands above image-diffusion."""
    parts = ["# Measured beside its peers", wrapped(head), wrapped(f"Peers: {versions()}.")]
    parts += [rendered(table, results[table.title]) for table in TABLES if table.title in results]
    return "\n\n".join(parts) + "\n"


def wrapped(text: str) -> str:
    """A paragraph in lines of at most 120 characters."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


READING = {
    "epoch": Measure("Samples a CPU second", is_rate=True),
    "first_batch_s": Measure("First batch (s)", "{:.2f}"),
    "resumed_s": Measure("Resumed in the middle (s)", "{:.2f}"),
    "memory_mib": Measure("Memory (MiB)"),
}
READERS = {
    "litdata": "its chunks",
    "mosaic": "mosaicml-streaming, MDS",
    "spdl": "a file a sample",
    "grain": "ArrayRecord",
    "webdataset": "tars, a buffer of 1,000",
    "torchvision": "a file a sample, `DataLoader`",
}
TRAINERS = {
    "diffusers": "`train_unconditional`",
    "denoising-diffusion-pytorch": "its `Trainer`",
    "rectified-flow-pytorch": "its `Trainer`",
}
REACHED = {
    "cpu_s": Measure("CPU seconds"),
    "distance": Measure("Distance", "{:.1f}"),
    "steps": Measure("Steps"),
}

TABLES = (
    Table(
        "Reading latents",
        """20,000 latents of 4 x 32 x 32 in float16 with a class each, in a shuffled epoch of batches of 256, without
        worker processes. The files are in the page cache. litdata shuffles within its chunks, webdataset within its
        buffer; the others shuffle all samples. A dash: the reader cannot be resumed in the middle of an epoch.
        Memory is what reading adds, with the pages of mapped files.""",
        "loading",
        READERS,
        READING,
        ("latents",),
    ),
    Table(
        "Reading photographs",
        """600 JPEGs of 500 x 375, made from noise with the spectrum of photographs, read at 256 x 256 in shuffled
        epochs of batches of 32. The peers decode, resize and crop in each epoch. image-diffusion decodes once, in
        its stage `crop`, whose resizing is exact and slower, and reads pixels afterwards. The first epoch
        therefore costs more than the peers' best, and all others a fraction.""",
        "loading",
        READERS,
        {
            "ten_epochs": Measure("Images a CPU second, ten epochs", is_rate=True),
            "first_epoch": Measure("First epoch"),
            "epoch": Measure("Later epochs"),
            **{name: measure for name, measure in READING.items() if name != "epoch"},
        },
        ("photographs",),
    ),
    Table(
        "A training step",
        """A DiT of the demo's size (4 blocks, width 128, 4 heads, patch 2, latents of 4 x 8 x 8, 1,000 classes), batch
        32, float32: forward, backward, clipping, optimizer and moving average, as each project's own loop does them.
        The peers train diffusers' `DiTTransformer2DModel` of the same sizes. DiT's own code is no package, so its loop
        is not here: a step of it took 1.14 times as long as ours (`bench_train.py`).""",
        "training",
        {
            "diffusers": "the loop of `train_unconditional`",
            "denoising-diffusion-pytorch": "its `Trainer`'s loop",
            "rectified-flow-pytorch": "its `Trainer`'s loop",
            "azula": "its denoiser's loss, no moving average",
            "monai": "its `DiffusionInferer`, no moving average",
        },
        {"step_ms": Measure("CPU ms a step", "{:.1f}"), "memory_mib": Measure("Memory (MiB)")},
    ),
    Table(
        "Training to a result",
        """The 1,438 training images of `demo`, digits of 32 x 32. image-diffusion trains `speedrun_digits`, a DiT on
        latents of `demo_codec`; the training of this codec counts. A peer trains for twice as many CPU seconds by the
        example of its README: its loop, loss, batch, learning rate, average and optimizer, with the width of its U-Net
        divided by the power of two that brings its weights nearest to ours in number, and a schedule that ends with
        the training. The distance is Fréchet's, between 500 samples and the training images, in the features of the
        classifier that the stage `detect` trains. Sampling is not timed. A round is a seed. Where a peer's distance is
        larger, it has not reached ours, and its CPU seconds and the ratio are lower bounds.""",
        "reaching",
        TRAINERS,
        REACHED,
        ("speedrun_digits",),
        by_seed=True,
    ),
    Table(
        "Training to a result: CIFAR-10",
        """The same for 20,000 images of CIFAR-10, 2,000 of each class, a tenth of them held out. image-diffusion trains
        `speedrun_cifar10`, a DiT on pixels, with its 3,000 steps, its warm-up and the half-life of its average
        shortened to 400/3,000. A longer training of it is in the [leaderboard](leaderboard.md).""",
        "reaching",
        TRAINERS,
        REACHED,
        (
            "speedrun_cifar10",
            "--change=train.steps=400",
            "--change=train.schedule.warmup_steps=13",
            "--change=train.ema.rates=[0.985]",
        ),
        by_seed=True,
        is_cifar10=True,
    ),
    Table(
        "Judging",
        """The Fréchet distance of 4,000 and 3,000 samples of 2,048 features, from features to the number; the network,
        which all share, is left out. The true distance is known in closed form. These covariances are nearly singular:
        image-diffusion finds that eigenvalues would lose digits, and takes singular values; torch-fidelity takes the
        eigenvalues of a matrix that is not symmetric.""",
        "judging",
        {"clean-fid": "", "torch-fidelity": "", "torchmetrics": ""},
        {
            "cpu_s": Measure("CPU seconds", "{:.1f}"),
            "error": Measure("Relative error", "{:.0e}"),
        },
    ),
    Table(
        "Planning",
        """A finished graph of sixteen jobs, asked for again: CPU seconds of the command that finds nothing to do, and
        of the one that finds the jobs behind an edited number. image-diffusion plans the demo, and checks its
        configurations, images and code: most of its time is the start of Snakemake. The peers plan jobs that copy a
        file of one line.""",
        "planning",
        {
            "dvc": "`repro`, `repro --dry`",
            "kedro": "asks whether files exist; an edit is not seen",
            "metaflow": "has no such plan, and runs all steps",
            "zenml": "cached steps; the edited ones run",
        },
        {
            "nothing_cpu_s": Measure("Nothing to do (CPU s)", "{:.1f}"),
            "edit_cpu_s": Measure("An edit (CPU s)", "{:.1f}"),
        },
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each table, after one to warm up (3)")
    parser.add_argument(
        "--table", action="append", help="the tables of a script only: loading, training, reaching, judging, planning"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="what is written (docs/peers.md)")
    parser.add_argument("--images", type=Path, help="CIFAR-10 as a folder of classes (it is downloaded)")
    arguments = parser.parse_args()
    results: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for table in TABLES:
            if arguments.images and table.is_cifar10:
                table = replace(table, arguments=(*table.arguments, "--images", str(arguments.images.resolve())))
            if not arguments.table or table.script in arguments.table:
                results[table.title] = measured(table, arguments.rounds, Path(temporary))
    arguments.page.write_text(page(results, arguments.rounds))
    print(arguments.page)


if __name__ == "__main__":
    main()
