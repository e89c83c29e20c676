"""Measure one experiment for the leaderboard: writes an entry, and docs/leaderboard.md from all entries.

    make entry TRACK=digits EXPERIMENT=speedrun_digits NOTE="four tokens an image"
    make entry TRACK=cifar10 EXPERIMENT=mine NOTE="pixels" IMAGES=cifar10-20k

Snakemake makes what the training reads, and the judge: the classifier of the data set's classes that the stage `detect`
trains. The experiment is then trained with each seed on one thread, and the judge looks at images of its weights. CPU
seconds are those of this process from the first weight to the last step.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.run import processor, row, wrapped
from torch import Tensor

from image_diffusion.core import levels
from image_diffusion.core.config.base import changed, dump, read_inherited, to_yaml
from image_diffusion.core.files.atomic import digest, read_json, sha256_file, write_json, write_text
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.experiments.experiment import Experiment, parse_experiment
from image_diffusion.experiments.resolve import train_stage
from image_diffusion.metrics.distances.set_distances import frechet_between
from image_diffusion.metrics.features.classifier import Classifier, load_detector
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.diffusion.base import DiffusionSystem
from image_diffusion.systems.diffusion.generator import Generator
from image_diffusion.training.load_model import load_model
from image_diffusion.training.session import run

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "config" / "experiments"
ENTRIES = ROOT / "docs" / "leaderboard"
PAGE = ROOT / "docs" / "leaderboard.md"

CODE = ("src", "workflow", "config", "tests/bench", "envs")
"""What the numbers of an entry depend on, in git."""

Entry = dict[str, Any]
"""A file of docs/leaderboard."""


@dataclass(frozen=True)
class Track:
    """One race. rule: its text on the page. images: how many are judged. score: of the runs of an entry, less is
    better. fault: what keeps an entry out, or nothing. data: what its files must say of the images. counts_codec: the
    training of a codec is part of the cost."""

    title: str
    rule: str
    images: int
    column: str
    score: Callable[[Entry], float]
    fault: Callable[[Entry], str | None]
    data: dict[str, Any]
    counts_codec: bool = True


def mean(entry: Entry, key: str) -> float:
    """The mean of a number over the seeds."""
    return statistics.mean(run[key] for run in entry["runs"])


def _below_95(entry: Entry) -> str | None:
    worst = min(run["agreement"] for run in entry["runs"])
    return f"a seed has {worst:.1%} agreement, less than 95 %" if worst < 0.95 else None


def _over_30_minutes(entry: Entry) -> str | None:
    longest = max(run["cpu_s"] for run in entry["runs"]) + entry["codec_cpu_s"]
    return f"a seed has taken {longest:,.0f} CPU seconds, more than 1,800" if longest > 1800 else None


TRACKS = {
    "digits": Track(
        "Digits to 95 % on one core",
        """CPU seconds of a training after which the judge recognises the digit that was asked for in 95 % of 500
        images, with each of three seeds. The codec `demo_codec` is free.""",
        500,
        "Score: CPU seconds",
        lambda entry: mean(entry, "cpu_s"),
        _below_95,
        {"source": {"type": "digits"}, "resolution": 32, "validation_fraction": 0.2},
        counts_codec=False,
    ),
    "cifar10": Track(
        "CIFAR-10 in 30 CPU minutes",
        """Fréchet distance between 2,000 images and those of training, in the features of the judge, after at most
        1,800 CPU seconds with each of three seeds. The training of a codec counts. The data set is 20,000 images of
        CIFAR-10, 2,000 of each class, a tenth of them held out.""",
        2000,
        "Score: distance",
        lambda entry: mean(entry, "distance"),
        _over_30_minutes,
        {"resolution": 32, "validation_fraction": 0.1},
    ),
}
OPEN = """## Open tracks

Nobody has run these yet. *ImageNet-64* and *ImageNet-256 on one H100 in 24 hours*: FID of 50,000 images against
those of training, by the pipeline's own `evaluate`, after at most 24 hours of training on one H100. The codec of Stable
Diffusion is free. `speedrun_imagenet256` is a recipe to begin with.
"""


@dataclass(frozen=True)
class Prepared:
    """What is made once for all seeds. pairs: manifests of what is read beside the data. codec_cpu_s: CPU seconds of
    its training as Snakemake samples them, every 30 s at most."""

    data: Path
    manifest: Path
    pairs: list[Path]
    codec_weights: Path | None
    codec_cpu_s: float


def snakemake(folder: Path, name: str, targets: Sequence[str], *options: str) -> None:
    line = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "1", *targets]
    settings = ["--configfile", str(ROOT / "config" / "config.yaml"), "--config", f"experiments=[{name}]"]
    subprocess.run([*line, *options, *settings], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def prepared(folder: Path, name: str, raw: dict[str, Any], images: str | None) -> Prepared:
    """Make the crops, the judge and what the training of an experiment reads."""
    own = folder / "config" / "experiments"
    own.mkdir(parents=True, exist_ok=True)
    for path in EXPERIMENTS.glob("*.yaml"):
        other = raw if path.stem == name else with_images(read_inherited(path)[0], images, raw["data"]["name"])
        (own / path.name).write_text(to_yaml(other))
    (own / f"{name}.yaml").write_text(to_yaml(raw))
    snakemake(folder, name, [], "--dry-run", "--quiet")
    plan = read_json(folder / "results" / name / "config" / "plan.json")
    data, codec = Path("results", "datasets", plan["dataset"]), plan["codec_experiment"]
    parts = [plan["codec"] or "crops", *plan["pairs"]]
    manifests = [data / part / "manifest.json" for part in parts]
    snakemake(folder, name, [*map(str, manifests), str(data / "detector" / "detector.json")])
    spent = 0.0
    if codec:
        with (folder / "benchmarks" / codec / "train.tsv").open(newline="") as file:
            spent = float([row["cpu_time"] for row in csv.DictReader(file, delimiter="\t")][-1])
    weights = folder / "results" / codec / "train" / "weights.safetensors" if codec else None
    manifest, *pairs = (folder / path for path in manifests)
    return Prepared(folder / data, manifest, pairs, weights, spent)


def with_images(raw: dict[str, Any], images: str | None, name: str) -> dict[str, Any]:
    """An experiment file with its images from a folder, where it is one of this data set."""
    if images is None or raw["data"]["name"] != name:
        return raw
    return {**raw, "data": {**raw["data"], "source": {"type": "folder", "path": str(Path(images).resolve())}}}


def features(judge: Classifier, crops: Shards) -> Tensor:
    """The judge's features of all crops. Float32 [N, C]."""
    with torch.no_grad():
        parts = np.array_split(np.arange(crops.num_samples), 1 + crops.num_samples // 500)
        return torch.cat([judge(crops.gather(part)).features for part in parts])


def measured(experiment: Experiment, inputs: Prepared, images: int, judge: Classifier, real: Tensor) -> dict[str, Any]:
    """One seed: its training, and what the judge sees in images of its weights."""
    with tempfile.TemporaryDirectory() as temporary:
        config, output = Path(temporary) / "train.yaml", Path(temporary) / "train"
        plain = dump(train_stage("leaderboard", experiment))
        quiet = {"validate_every_steps": None, "grid_every_steps": None, "checkpoint": {"every_steps": 10**6}}
        config.write_text(to_yaml({**plain, "train": plain["train"] | quiet}))
        training = prepare_training(config, inputs.manifest, inputs.codec_weights, inputs.pairs)
        began = time.process_time()
        run(training.build, training.stage.train, training.model, training.data, output)
        cpu_s = time.process_time() - began
        model, settings = load_model(output), experiment.section("sample")
        generator: Any = Generator(model.network, model.system.reading, model.spec, training.decoder(), settings)  # type: ignore[arg-type, attr-defined]
        seeds = torch.arange(images)
        labels = seeds % model.spec.num_classes if model.spec.num_classes else None
        parts = [generator(some, None if labels is None else labels[some]) for some in seeds.split(100)]
        with torch.no_grad():
            seen = judge(levels.rendered(torch.cat(parts), model.spec.levels))
        return {
            "parameters": sum(each.numel() for each in model.network.parameters()),
            "steps": model.step,
            "images_seen": model.examples_seen,
            "cpu_s": round(cpu_s, 1),
            "agreement": None if labels is None else float((seen.logits.argmax(dim=1) == labels).double().mean()),
            "distance": frechet_between(seen.features, real).value,
            "weights_sha256": sha256_file(output / "weights.safetensors"),
        }


def entry_of(track: Track, arguments: argparse.Namespace, folder: Path) -> Entry:
    """Measure an experiment with each seed. Exits where its images are not those of the track."""
    name, images = arguments.experiment, arguments.images
    raw = changed(read_inherited(EXPERIMENTS / f"{name}.yaml")[0], arguments.changes)
    raw = with_images(raw, images, raw["data"]["name"])
    experiment = parse_experiment(raw, name)
    if not isinstance(experiment.system, DiffusionSystem):
        sys.exit(f"error: {name} is a {experiment.system.type}. Give an experiment of a diffusion system.")
    wrong = {key: dump(experiment.data)[key] for key in track.data if raw["data"].get(key) != track.data[key]}
    if wrong:
        sys.exit(f"error: data of {name} has {wrong}. The track wants {track.data}.")
    inputs = prepared(folder, name, raw, images)
    judge, crops = load_detector(inputs.data / "detector"), open_shards(inputs.data / "crops", "train")
    real = features(judge, crops)
    commit = git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain", "--", *CODE) else "")
    runs = []
    for seed in arguments.seeds:
        seeded = parse_experiment(changed(raw, [f"train.seed={seed}", f"sample.seed={seed}"]), name)
        runs.append({"seed": seed, **measured(seeded, inputs, track.images, judge, real)})
        print(runs[-1], flush=True)
    return {
        "track": arguments.track,
        "note": arguments.note,
        "date": f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}",
        "commit": commit,
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "images": digest([shard["sha256"] for shard in crops.manifest["shards"]]),
        "judge": sha256_file(inputs.data / "detector" / "detector.safetensors"),
        "codec_cpu_s": inputs.codec_cpu_s if track.counts_codec else 0.0,
        "experiment": {key: value for key, value in raw.items() if key != "data"},
        "runs": runs,
    }


def git(*arguments: str) -> str:
    """What git prints about this checkout."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def rendered(track: Track, entries: Sequence[Entry]) -> str:
    """A track as Markdown: the best first, each with its gain over the next."""
    heads = ["Entry", "Date", "Commit", track.column, "of each seed", "Gain", "Steps", "Images seen"]
    heads += ["CPU seconds", "Agreement", "Distance"]
    lines = [
        f"## {track.title}",
        "",
        wrapped(track.rule),
        "",
        row(heads),
        row(["---"] * 3 + ["---:"] * (len(heads) - 3)),
    ]
    if not entries:
        return "\n".join([*lines[:3], "", "No entry yet."])
    order = sorted(entries, key=track.score)
    for place, entry in enumerate(order):
        runs, score = entry["runs"], track.score(entry)
        better = f"{1 - score / track.score(order[place + 1]):.0%}" if place + 1 < len(order) else ""
        each = ", ".join(f"{track.score({**entry, 'runs': [run]}):#.3g}" for run in runs)
        cells = [entry["note"], entry["date"], f"`{entry['commit']}`", f"{score:#.3g}", each, better]
        cells += [f"{runs[0]['steps']:,}", f"{runs[0]['images_seen']:,}"]
        cells += [f"{mean(entry, 'cpu_s') + entry['codec_cpu_s']:,.0f}", f"{mean(entry, 'agreement'):.1%}"]
        lines.append(row([*cells, f"{mean(entry, 'distance'):.2f}"]))
    return "\n".join(lines)


def page() -> str:
    """docs/leaderboard.md, from the entries."""
    head = """Each row is one experiment, trained with three seeds by one command. Its entry in `docs/leaderboard` holds
        the experiment without its data, every seed's numbers, the processor, and the sha256 of the images, the judge
        and the weights: the same commit on the same processor gives the same weights. The judge is the classifier that
        the stage `detect` trains on the data set's classes. CPU seconds are those of one thread, from the first weight
        to the last step, without validations, previews and checkpoints in between. The gain is over the next row.
        `CONTRIBUTING.md` says how to hand in an entry."""
    entries = [read_json(path) for path in sorted(ENTRIES.glob("*.json"))]
    parts = ["# Leaderboard", wrapped(head)]
    for name, track in TRACKS.items():
        parts.append(rendered(track, [entry for entry in entries if entry["track"] == name]))
    return "\n\n".join([*parts, OPEN])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--track", choices=TRACKS, required=True)
    parser.add_argument("--experiment", required=True, help="name of a file of config/experiments, without .yaml")
    parser.add_argument("--note", required=True, help="what the entry is, in a few words")
    parser.add_argument("--images", help="folder of images, in place of the experiment's own source")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the trainings (0 1 2)")
    parser.add_argument("--set", dest="changes", action="append", default=[], help="KEY=VALUE, of the experiment")
    parser.add_argument("--folder", type=Path, help="keep crops, codec and judge here")
    parser.add_argument("--output", type=Path, help="the entry (docs/leaderboard/TRACK-EXPERIMENT.json)")
    arguments = parser.parse_args()
    track = TRACKS[arguments.track]
    output = arguments.output or ENTRIES / f"{arguments.track}-{arguments.experiment}.json"
    if not (EXPERIMENTS / f"{arguments.experiment}.yaml").is_file():
        parser.error(f"--experiment {arguments.experiment}: config/experiments has no such file")
    if output.exists():
        sys.exit(f"error: {output} exists. Entries are kept: give another --output, as OUTPUT to make.")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        entry = entry_of(track, arguments, (arguments.folder or Path(temporary)).resolve())
    print(f"{track.column}: {track.score(entry):.2f}")
    if (fault := track.fault(entry)) is not None:
        sys.exit(f"error: no entry: {fault}.")
    write_json(output, entry)
    if output.parent == ENTRIES:
        write_text(PAGE, page())
    print(output)


if __name__ == "__main__":
    main()
