"""Encode shards of crops to shards of latents or tokens, or import latents encoded elsewhere (data.source).

    python -m image_diffusion encode --config encode.yaml --data crops/manifest.json --output latents/manifest.json

With --part 2/8, only the shards of that part are encoded, and no manifest is written. Parts can run at the same time. A
last call without --part finds all shards and writes the manifest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from image_diffusion.codecs.base import Codec, Tokens
from image_diffusion.core.config.base import dump, load
from image_diffusion.core.devices import best_device
from image_diffusion.core.files.atomic import remove_unfinished, write_text
from image_diffusion.core.journal.writer import open_journal
from image_diffusion.core.levels import rendered
from image_diffusion.core.process import command
from image_diffusion.core.types import DataSpec
from image_diffusion.data.encoded.imported_latents import Import
from image_diffusion.data.encoded.latents import encode_shards, write_manifest
from image_diffusion.data.quality.contact_sheets import reconstruction_sheet
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.experiments.experiment import EncodeStage
from image_diffusion.metrics.images.reconstruction import codebook_use
from image_diffusion.nn.blocks import check_compiler

SMALLER = ("encode.batch_size",)
"""Keys of an experiment that make the command need less memory when they are smaller."""

_SHOWN = 16


def main() -> None:
    parser = command.Parser(
        prog="image-diffusion encode", description="Encode crops to latents or tokens, or import latents."
    )
    parser.add_config("the stage's configuration, YAML")
    parser.add_path("--data", "manifest.json of the crops, or source.json of latents", required=True)
    parser.add_path("--codec-weights", "weights.safetensors of the trained codec")
    parser.add_argument("--part", type=command.part_of, help="part of the shards, 2/8 is part 2 of 0 to 7")
    parser.add_path("--output", "manifest.json, or a part's file, to write", required=True)
    parser.add_path("--journal", "folder of the journal")
    arguments = parser.parse_args()

    stage = load(EncodeStage, arguments.config, arguments.changes)
    device = best_device()
    weights = arguments.codec_weights.parent if arguments.codec_weights else None
    codec = stage.build(weights, device)
    if stage.encode.compile:
        check_compiler(device)
        codec.compile_encoder()
    crops, output = arguments.data.parent, arguments.output.parent
    imported = import_of(stage, codec, output)

    def write_shards(part: tuple[int, int] = (0, 1)) -> int:
        if imported is not None:
            return imported.write_shards(part)
        return encode_shards(crops, output, codec, stage.encode, device, part)

    if arguments.part is not None:
        written = write_shards(arguments.part)
        write_text(arguments.output, "")
        print(f"encode: part {arguments.part[0]} of {arguments.part[1]} is done, {written} shards written")
        return

    with open_journal(arguments.journal, "encode") as journal:
        journal.params(dump(stage))
        remove_unfinished(output)
        written = write_shards()
        if imported is not None:
            manifest = imported.write_manifest(arguments.data)
        else:
            picture = output / "reconstructions.png"
            show_reconstructions(crops, codec, stage.encode.batch_size, device, picture)
            manifest = write_manifest(crops, output, codec, stage.encode, [picture])
            journal.image("reconstructions", picture, step=0)
        if manifest["kind"] == "tokens":
            numbers = codebook_use(torch.tensor(manifest["token_counts"]))
        else:
            numbers = {"latent_std": manifest["statistics"]["global_std"]}
        journal.metrics({"images": manifest["num_samples"], **numbers}, step=0)
    if "statistics" in manifest and (advice := stage.codec.advice(manifest["statistics"])):
        print(f"note: {advice}", file=sys.stderr, flush=True)
    figures = ", ".join(f"{name} {value:.3f}" for name, value in numbers.items())
    print(
        f"encode: {manifest['num_samples']:,} images in {len(manifest['shards'])} shards ({written} written), {figures}"
    )


def import_of(stage: EncodeStage, codec: Codec | Tokens, output: Path) -> Import | None:
    """Return the import of latents encoded elsewhere; None: the data are crops to encode. Raises ValueError for an
    incomplete source, and for latents of another shape than the codec's."""
    if stage.data is None:
        return None
    images = DataSpec(channels=stage.data.num_channels, resolution=stage.data.resolution, num_classes=1)
    return Import(stage.data, stage.codec.spec(images, None), codec, stage.encode, output)


def show_reconstructions(crops: Path, codec: Codec | Tokens, batch_size: int, device: torch.device, path: Path) -> None:
    """Draw images evenly spread over the set, their reconstructions, and the differences. batch_size: images encoded
    and decoded at a time."""
    dataset = open_shards(crops, "all")
    chosen = np.linspace(0, dataset.num_samples - 1, min(_SHOWN, dataset.num_samples)).astype(np.int64)
    images = dataset.gather(chosen)
    decoded = []
    for batch in images.split(batch_size):
        encoded = codec.encode(batch.to(device))
        decoded.append(codec.decode(encoded if isinstance(codec, Tokens) else codec.normalise(encoded[:, 0])).cpu())
    shown, reconstructed = (rendered(pictures, dataset.levels).numpy() for pictures in (images, torch.cat(decoded)))
    reconstruction_sheet(shown, reconstructed, path)
