"""Write a datasheet of a data set, as a page and as JSON, to be read before training.

    python -m image_diffusion datasheet --config data.yaml --data crops/manifest.json --output datasheet/datasheet.json

Also shows images that occur more than once, and outliers. Does not read the original files again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from image_diffusion.core.config.base import load
from image_diffusion.core.files.atomic import make_folder, write_json, write_page
from image_diffusion.core.files.checksums import describe
from image_diffusion.core.journal.writer import open_journal
from image_diffusion.core.process.command import Parser
from image_diffusion.core.texts import plain_page
from image_diffusion.data.config import DataConfig
from image_diffusion.data.quality.contact_sheets import repeated_pictures, strange_images
from image_diffusion.data.quality.datasheet import body, describe_images
from image_diffusion.data.quality.duplicates import near_duplicates
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.records import read_record, read_unwanted


def write_datasheet(
    crops: Path, output: Path, captions: Mapping[str, Sequence[str]] | None, processes: int = 1
) -> dict[str, Any]:
    """Write datasheet.json, index.html and the pictures into `output`, of the crops in a folder; returns the sheet.

    captions: see `describe_images`. processes: number of threads that compare images. Raises ValueError if the crops
    are missing or damaged.
    """
    every = open_shards(crops, "all", renders=True)
    records = [read_record(crops, shard) for shard in range(len(every.manifest["shards"]))]
    crops_of = [sample for record in records for sample in record.samples]
    rows = [row for row, sample in enumerate(crops_of) if sample.view == 0]  # the first crop of an image with several
    samples = [crops_of[row] for row in rows]
    pairs = near_duplicates(
        [sample.look for sample in samples],
        lambda place: every.gather(np.array([rows[place]]))[0].numpy(),
        processes=processes,
    )
    sheet = describe_images(
        every.manifest,
        samples,
        [row for record in records for row in record.quarantined],
        [sample for record in records for sample in record.dropped],
        read_unwanted(crops / "quarantine.csv"),
        pairs,
        every.held_out()[rows],
        captions,
    )
    make_folder(output)
    numbers = {sample.path: row for row, sample in zip(rows, samples, strict=True)}
    drawn = [
        *repeated_pictures(every, sheet, numbers, output / "same.png"),
        *strange_images(every, sheet, numbers, output / "strange.png"),
    ]
    sheet |= {"data": every.digest, "files": describe(output, drawn)}
    page = plain_page(f"Datasheet of {sheet['name']}", body(sheet, lambda name: name))
    write_page(output / "index.html", page)
    write_json(output / "datasheet.json", sheet)
    return sheet


def captions_of(config: DataConfig) -> dict[str, list[str]] | None:
    """Return the captions that come with the images, in columns named `caption`; None without captions."""
    try:
        return config.source.read_captions(("caption",))
    except ValueError:  # the error of a source without captions
        return None


def main() -> None:
    parser = Parser(prog="image-diffusion datasheet", description="Write a datasheet of a data set.")
    parser.add_config("the data section, YAML")
    parser.add_path("--data", "manifest.json of the crops", required=True)
    parser.add_path("--output", "datasheet.json to write; the page is written next to it", required=True)
    parser.add_argument("--processes", type=int, default=1, help="number of threads (default: 1)")
    parser.add_path("--journal", "folder of the journal")
    arguments = parser.parse_args()
    config = load(DataConfig, arguments.config, arguments.changes)
    output: Path = arguments.output.parent
    with open_journal(arguments.journal, "datasheet") as journal:
        sheet = write_datasheet(arguments.data.parent, output, captions_of(config), arguments.processes)
        journal.params({"data": sheet["data"]})
        journal.metrics({f"found/{finding['kind']}": finding["count"] for finding in sheet["findings"]}, step=0)
        for name in sheet["files"]:
            journal.image(Path(name).stem, output / name, step=0)
        journal.artifact(output / "index.html")
        journal.artifact(output / "datasheet.json")
    print(f"datasheet: {sheet['num_samples']:,} images. {output / 'index.html'}")
    for finding in sheet["findings"]:
        print(f"  {finding['kind']}: {finding['count']:,} {finding['what']}")
