"""datasheet: a data set's crops -> what somebody should look at before training: a page, and the same as JSON.

    python -m image_diffusion.datasheet --config data.yaml --data crops/manifest.json --output datasheet/datasheet.json

Also draws the pictures that occur more than once, and the strangest images. Reads no original again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from image_diffusion.core.command import Parser, run
from image_diffusion.core.config import load
from image_diffusion.core.files import write_json, write_page
from image_diffusion.core.journal import Journal, NullJournal
from image_diffusion.core.verify import describe
from image_diffusion.data.config import DataConfig
from image_diffusion.data.datasheet import body, describe_images
from image_diffusion.data.duplicates import near_duplicates
from image_diffusion.data.records import read_record, read_unwanted
from image_diffusion.data.shards import Shards, open_shards
from image_diffusion.data.sheets import titled_rows

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse } td, th { padding: .2rem 1rem .2rem 0; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums } img { max-width: 100% } summary { cursor: pointer }
"""
_COLUMNS, _ROWS = 10, 20


def write_datasheet(
    crops: Path, output: Path, captions: Mapping[str, Sequence[str]] | None, processes: int = 1
) -> dict[str, Any]:
    """Write datasheet.json, index.html and the pictures into `output`, of the crops in a folder; returns the sheet.

    captions: see `describe_images`. processes: how many threads compare images. Raises ValueError where the crops are
    missing or damaged.
    """
    every = open_shards(crops, "all")
    records = [read_record(crops, shard) for shard in range(len(every.manifest["shards"]))]
    crops_of = [sample for record in records for sample in record.samples]
    rows = [row for row, sample in enumerate(crops_of) if sample.view == 0]  # of an image of several crops the first
    samples = [crops_of[row] for row in rows]
    pairs = near_duplicates(
        [sample.look for sample in samples],
        lambda place: every.gather(np.array([rows[place]]))[0].numpy(),
        processes=processes,
    )
    sheet = describe_images(
        every.manifest,
        samples,
        [each for record in records for each in record.quarantined],
        [each for record in records for each in record.dropped],
        read_unwanted(crops / "quarantine.csv"),
        pairs,
        every.held_out()[rows],
        captions,
    )
    output.mkdir(parents=True, exist_ok=True)
    numbers = {sample.path: row for row, sample in zip(rows, samples, strict=True)}
    drawn = [
        *_same(every, sheet, numbers, output / "same.png"),
        *_strange(every, sheet, numbers, output / "strange.png"),
    ]
    sheet |= {"data": every.digest, "files": describe(output, drawn)}
    title = f"Data sheet of {sheet['name']}"
    head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n<style>{_STYLE}</style>'
    write_page(output / "index.html", f"{head}\n<h1>{title}</h1>\n{body(sheet, lambda name: name)}\n</html>\n")
    write_json(output / "datasheet.json", sheet)
    return sheet


def _same(every: Shards, sheet: Mapping[str, Any], numbers: Mapping[str, int], path: Path) -> list[Path]:
    """Draw pictures that occur more than once, a row each, the most frequent first."""
    path.unlink(missing_ok=True)
    chains = sorted(sheet["groups"], key=len, reverse=True)[:_ROWS]
    rows = [(_named(chain), _pixels(every, [numbers[name] for name in chain[:_COLUMNS]])) for chain in chains]
    if rows:
        titled_rows(rows, path)
    return [path] if rows else []


def _strange(every: Shards, sheet: Mapping[str, Any], numbers: Mapping[str, int], path: Path) -> list[Path]:
    """Draw the strangest images, in rows of what is strange in them."""
    path.unlink(missing_ok=True)
    by_reason: dict[str, list[int]] = {}
    for each in sheet["strange"]:
        by_reason.setdefault(each["why"], []).append(numbers[each["path"]])
    rows = []
    for why, places in by_reason.items():
        for start in range(0, len(places), _COLUMNS):
            title = f"{why} ({len(places)})" if start == 0 else ""
            rows.append((title, _pixels(every, places[start : start + _COLUMNS])))
    if rows:
        titled_rows(rows, path)
    return [path] if rows else []


def _named(chain: Sequence[str]) -> str:
    return f"{len(chain):,} x {', '.join(chain[:3])}" + (", ..." if len(chain) > 3 else "")


def _pixels(every: Shards, places: Sequence[int]) -> list[NDArray[np.uint8]]:
    return list(every.gather(np.array(places)).numpy())


def captions_of(config: DataConfig) -> dict[str, list[str]] | None:
    """The captions that come with the images, in columns named `caption`; None where there are none."""
    try:
        return config.source.captions_beside(("caption",))
    except ValueError:  # a source that has none says so in this way
        return None


def main() -> None:
    parser = Parser(prog="python -m image_diffusion.datasheet", description="Crops -> data sheet.")
    parser.add_config("the data section, YAML")
    parser.add_argument("--data", type=Path, required=True, help="manifest.json of the crops")
    parser.add_argument("--output", type=Path, required=True, help="datasheet.json to write, beside its page")
    parser.add_argument("--processes", type=int, default=1, help="how many threads compare images")
    parser.add_argument("--journal", type=Path, help="folder of journals to log to")
    arguments = parser.parse_args()
    config = load(DataConfig, arguments.config, arguments.changes)
    output: Path = arguments.output.parent
    with Journal.open(arguments.journal, "datasheet") if arguments.journal else NullJournal() as journal:
        sheet = write_datasheet(arguments.data.parent, output, captions_of(config), arguments.processes)
        journal.params({"data": sheet["data"]})
        journal.metrics({f"found/{each['kind']}": each["count"] for each in sheet["findings"]}, step=0)
        for name in sheet["files"]:
            journal.image(Path(name).stem, output / name, step=0)
        journal.artifact(output / "index.html")
        journal.artifact(output / "datasheet.json")
    print(f"datasheet: {sheet['num_samples']:,} images. {output / 'index.html'}")
    for each in sheet["findings"]:
        print(f"  {each['kind']}: {each['count']:,} {each['what']}")


if __name__ == "__main__":
    run(main)
