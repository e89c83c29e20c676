"""Crop images to one size, and write them as shards.

    python -m image_diffusion crop --config data.yaml --source source.json --output crops/manifest.json --processes 8

The shard of an image depends on its path, so after images change, only their shards are rewritten.

With --part 2/8, only the shards of that part are written, and --output lists them. Parts can run at the same time. A
last call with --made combines them: the result has the same bytes as without parts.
"""

from __future__ import annotations

from image_diffusion.core.config.base import dump, load
from image_diffusion.core.journal.writer import open_journal
from image_diffusion.core.process.command import Parser, part_of
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset, crop_part


def main() -> None:
    parser = Parser(prog="image-diffusion crop", description="Crop images to one size, and write them as shards.")
    parser.add_config("the data section, YAML")
    parser.add_path("--source", "source.json, which records the files that were read")
    parser.add_argument("--part", type=part_of, help="part of the shards, 2/8 is part 2 of 0 to 7 (default: all)")
    parser.add_paths("--made", "outputs of all parts, to combine")
    parser.add_path("--output", "manifest.json, or a part's note, to write beside the shards", required=True)
    parser.add_argument("--processes", type=int, default=1, help="number of processes (default: 1)")
    parser.add_path("--journal", "folder of the journal")
    arguments = parser.parse_args()
    config = load(DataConfig, arguments.config, arguments.changes)
    if arguments.part is not None:
        folder, (index, count) = arguments.output.parent, arguments.part
        written = crop_part(config, folder, arguments.output, arguments.part, arguments.processes)
        print(f"crop: part {index} of {count} is done, {written} shards written")
        return
    # Here and not above: torch and matplotlib would slow the start of every crop process by seconds.
    from image_diffusion.data.quality.contact_sheets import write_sheets

    with open_journal(arguments.journal, "crop") as journal:
        journal.params(dump(config))
        done = crop_dataset(config, arguments.output.parent, arguments.source, arguments.processes, arguments.made)
        manifest = done.manifest
        # Before the metrics, so that an attempt that ends here has sent none of images that may change.
        pictures = write_sheets(arguments.output.parent, manifest, done.records)
        numbers = {"images": manifest["num_samples"], "quarantined": manifest["quarantined"]}
        journal.metrics({**numbers, **{f"flag/{name}": count for name, count in manifest["flags"].items()}}, step=0)
        for picture in pictures:
            journal.image(picture.stem, picture, step=0)
        journal.artifact(arguments.output.parent / "quarantine.csv")
    print(
        f"crop: {manifest['num_samples']:,} crops in {len(manifest['shards'])} shards "
        f"({done.num_written} written), {manifest['quarantined']:,} files quarantined"
    )
    if config.profile == "ignore" and (other := manifest["flags"].get("profile", 0)):
        print(
            f"crop: {other:,} crops are of images whose colour profile is not sRGB. It is ignored; set data.profile to "
            "convert to apply it."
        )
