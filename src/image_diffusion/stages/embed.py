"""Embed crops and captions as shards of pairs, or import embeddings.

    python -m image_diffusion embed --config embed.yaml --data crops/manifest.json --detector detector \\
        --output pairs-hashed/manifest.json

pairs.type determines whether --data and --detector are needed. Shards that are up to date are kept, and so is the state
of a training: after an interruption, the same command resumes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from image_diffusion.core.config.base import dump, load
from image_diffusion.core.devices import best_device
from image_diffusion.core.files.partial_results import resumable
from image_diffusion.core.journal.writer import open_journal
from image_diffusion.core.process import command
from image_diffusion.data.encoded.pairs import PairSet, write_pairs
from image_diffusion.experiments.experiment import EmbedStage
from image_diffusion.systems.pairs.inputs import PairInputs


def embed(
    stage: EmbedStage, crops: Path | None, detector: Path | None, folder: Path
) -> tuple[PairSet, dict[str, Any], int]:
    """Write the shards of a set of pairs into a folder; returns the set, its manifest and how many shards were written.
    crops, detector: their folders. Raises ValueError for missing inputs."""
    device = best_device()
    inputs = PairInputs(crops, stage.source, stage.num_shards, detector, device, folder, stage.data)
    pairs = stage.pairs.build(inputs)
    splits, dtype = stage.pairs.splits, stage.pairs.dtype
    return pairs, *write_pairs(pairs, stage.name, splits, dtype, folder, stage.max_bad_fraction)


def main() -> None:
    parser = command.Parser(
        prog="image-diffusion embed", description="Embed crops and captions as shards of pairs, or import embeddings."
    )
    parser.add_config("the stage's configuration, YAML")
    parser.add_path("--data", "manifest.json of the crops, for pairs made from images")
    parser.add_path("--detector", "folder of detect, for pairs.type hashed")
    parser.add_path("--output", "manifest.json to write", required=True)
    parser.add_path("--journal", "folder of the journal")
    arguments = parser.parse_args()

    stage = load(EmbedStage, arguments.config, arguments.changes)
    crops = arguments.data.parent if arguments.data else None
    with resumable(arguments.output, dump(stage)), open_journal(arguments.journal, "embed") as journal:
        journal.params(dump(stage))
        pairs, manifest, written = embed(stage, crops, arguments.detector, arguments.output.parent)
        journal.metrics({"pairs": manifest["num_samples"], "pairs_quarantined": manifest["quarantined"]}, step=0)
        journal.artifact(arguments.output.parent / "quarantine.csv")
    sides = " x ".join(map(str, pairs.shape))
    what = f"rows of {pairs.shape[0]} columns" if pairs.kind == "numbers" else f"{pairs.kind} of {sides} numbers"
    print(
        f"embed: {manifest['num_samples']:,} {what} in "
        f"{len(manifest['shards'])} shards ({written} written), {manifest['quarantined']:,} quarantined"
    )
