"""crop: images -> shards of square crops.

    python -m image_diffusion.crop --config data.yaml --source source.json --output crops/manifest.json --processes 8

An image's path decides its shard, so a run over changed images writes only the shards they belong to.

With --part 2/8 only the shards of that part are written, and --output is a note of them; parts run side by side, and a
last call with --made finds every shard in place: the same bytes as of one call.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import features

from image_diffusion.core.command import Parser, part_of, run
from image_diffusion.core.config import dump, load
from image_diffusion.core.files import digest, read_json, remove_unfinished, sha256_file, stamp_of, write_json
from image_diffusion.core.journal import Journal, NullJournal
from image_diffusion.core.lifeline import end_with, mark
from image_diffusion.core.progress import Progress
from image_diffusion.core.verify import describe
from image_diffusion.data.alike import left_out, not_held_out, same_crops
from image_diffusion.data.chosen import chosen
from image_diffusion.data.config import DataConfig
from image_diffusion.data.duplicates import grey, looks, pixel_hash, sharpness
from image_diffusion.data.images import BadImage, crop_image, quiet_pillow
from image_diffusion.data.reading import Image, images_of, state_of
from image_diffusion.data.records import (
    FORMAT,
    Quarantined,
    Sample,
    ShardRecord,
    class_histogram,
    describe_shards,
    kept,
    key_prefix,
    read_record,
    record_hashes,
    record_path,
    remove_surplus,
    tar_path,
    write_index,
    write_quarantine,
    write_record,
)
from image_diffusion.data.source import remember
from image_diffusion.data.sources.listing import Found, Item, Listing, by_shard
from image_diffusion.data.tar import KEY_DIGITS, Layout
from image_diffusion.data.write import Chunk, histogram, write_shard

_LOOK_S = 0.5  # between looks at what other processes have done
_done: Synchronized[int] | None = None  # in a process of the pool: how many items all of them have done


@dataclass(frozen=True)
class Cropped:
    """What a run of `crop_dataset` did.

    manifest: what it wrote. num_written: shards that were not up to date. records: of every shard, in order.
    """

    manifest: dict[str, Any]
    num_written: int
    records: list[ShardRecord]


def crop_part(config: DataConfig, output: Path, note: Path, part: tuple[int, int], processes: int = 1) -> int:
    """Crop the images of one part into `output`: the shards with `number % n == i` of part (i, n), and their records.
    Returns how many were written.

    note: a file that tells `crop_dataset` which shards these are, of which files. processes: as there.
    """
    files = list(config.source.found())
    listing, _ = chosen(config.source, config.source.listing(), config.keep)
    index, of = part
    tasks = list(enumerate(by_shard(listing.items, config.num_shards)))[index::of]
    layout = crop_layout(config, labelled=bool(listing.classes))
    output.mkdir(parents=True, exist_ok=True)
    written = 0
    with Progress("crop", sum(len(items) for _, items in tasks), listing.unit) as progress:
        for _, is_new in _map(config, layout, tasks, output, processes, None, progress):
            written += is_new
    shards = {str(shard): stamp_of(tar_path(output, shard)) for shard, _ in tasks}
    write_json(note, {"of": _of(config, files), "shards": shards})
    return written


def crop_dataset(
    config: DataConfig,
    output: Path,
    source_json: Path | None = None,
    processes: int = 1,
    made: Sequence[Path] = (),
) -> Cropped:
    """Crop every image of the source into `output`: shards, their records, quarantine.csv, index.npy, manifest.json.

    source_json: where the source's fingerprint lies, to note there what was read. processes: how many crop at once;
    the bytes do not depend on it. made: the notes of `crop_part`: while the source is as those found it, their shards
    are not compared with it again. Raises ValueError when the source is missing or empty, or when more than
    `max_bad_fraction` of its files give no crop.
    """
    files = list(config.source.found())
    listing, unwanted = chosen(config.source, config.source.listing(), config.keep)
    output.mkdir(parents=True, exist_ok=True)
    remove_unfinished(output)
    tasks = list(enumerate(by_shard(listing.items, config.num_shards)))
    there = _made(made, _of(config, files), output)
    written: set[int] = set()
    layout = crop_layout(config, labelled=bool(listing.classes))
    with Progress("crop", len(listing.items), listing.unit) as progress:
        progress.advance(sum(len(items) for shard, items in tasks if shard in there))
        missing = [(shard, items) for shard, items in tasks if shard not in there]
        for record, is_new in _map(config, layout, missing, output, processes, None, progress):
            there[record.shard] = record
            written |= {record.shard} if is_new else set()
    records = [there[shard] for shard, _ in tasks]
    spare = same_crops(records) if config.duplicates == "drop" else {}
    drops = {record.shard: _spare_of(record, spare) for record in records}
    again = [(shard, items) for shard, items in tasks if _dropped(records[shard]) != drops[shard]]
    if again:
        with Progress("crop: without duplicates", sum(len(items) for _, items in again), listing.unit) as progress:
            for record, _ in _map(config, layout, again, output, processes, drops, progress):
                records[record.shard] = record
                written.add(record.shard)
    bad = sorted(
        [Quarantined(path, reason) for path, reason in listing.rejected]
        + [each for record in records for each in record.quarantined],
        key=lambda each: each.path,
    )
    listed = [*bad, *unwanted, *left_out(records, spare)]
    write_quarantine(output / "quarantine.csv", sorted(listed, key=lambda each: each.path))
    seen = sum(each.view == 0 for record in records for each in (*record.samples, *record.dropped))
    found = seen + sum(len(record.quarantined) for record in records)
    _judge(config, output, bad, found + len(listing.rejected))
    _judge_alpha(config, records)
    remove_surplus(output, config.num_shards)
    write_index(output / "index.npy", records)
    moved = not_held_out(records, output, layout, config.validation_fraction, processes)
    manifest = _manifest(config, listing, records, bad, output) | ({"not_held_out": moved} if moved else {})
    write_json(output / "manifest.json", manifest)
    if source_json is not None:
        read: dict[str, str] = {}
        for record in records:
            read |= _hashes([*record.samples, *record.dropped], record.quarantined)
        remember(config.source, source_json, files, read)
    return Cropped(manifest, len(written), records)


def _of(config: DataConfig, files: Sequence[Found]) -> str:
    """What tells the files of a source and what is made of them, by names and stamps."""
    stamps = sorted([each.folder, each.digest()] for each in files)
    return digest({"format": FORMAT, "data": dump(config), "files": stamps})


def _made(notes: Sequence[Path], of: str, output: Path) -> dict[int, ShardRecord]:
    """The records of the shards that parts have made of the same files, by number; of those that are as they were."""
    found = {}
    for note in notes:
        told = read_json(note)
        for shard, stamp in told["shards"].items() if told["of"] == of else ():
            with suppress(ValueError, OSError):
                record = read_record(output, int(shard))
                if [*stamp_of(tar_path(output, record.shard))] == stamp and _is_looked_at(record):
                    found[record.shard] = record
    return found


def crop_layout(config: DataConfig, labelled: bool) -> Layout:
    """Where a crop lies in its shard."""
    return Layout(("npy",), (config.channels, config.resolution, config.resolution), "uint8", labelled)


def crop_shard(
    config: DataConfig,
    layout: Layout,
    shard: int,
    items: list[Item],
    output: Path,
    drop: Set[str] | None,
    count: Callable[[int], None],
) -> tuple[ShardRecord, bool]:
    """Crop the images of one shard, unless it already holds exactly them; returns its record and whether it was
    written.

    layout: of a crop. drop: the names of those that are left out; None: a shard that is there may have left out any.
    count: called with how many items are done, now and then. Raises ValueError for a tar that cannot be had.
    """
    if record_path(output, shard).is_file():
        made_from = _made_from(config, items, [state_of(config.source, item) for item in items])
        record = kept(output, shard, made_from)
        if record is not None and drop in (None, _dropped(record)) and _is_looked_at(record):
            count(len(items))
            return record, False
    noted: list[tuple[Sample, NDArray[np.uint8]]] = []
    bad: list[Quarantined] = []
    with quiet_pillow():
        crops = _crops(config, shard, items, drop or set(), noted, bad, count)
        sha256, size, num_samples = write_shard(output, shard, layout, crops)
    every = _looked_at(noted)
    samples, dropped = [each for each in every if each.key], [each for each in every if not each.key]
    # Of the bytes that were cropped: an image that changed in between must not pass for the one it was.
    read = _hashes([*samples, *dropped], bad)
    states = [read[item.name] if item.name in read else state_of(config.source, item) for item in items]
    made_from = _made_from(config, items, states)
    versions = {"pillow": PIL.__version__, "libjpeg_turbo": str(features.version("libjpeg_turbo"))}
    classes = histogram(each.label for each in samples)
    record = ShardRecord(shard, made_from, sha256, size, num_samples, classes, samples, versions, bad, dropped=dropped)
    write_record(output, record)
    return record, True


def _crops(
    config: DataConfig,
    shard: int,
    items: list[Item],
    drop: Set[str],
    noted: list[tuple[Sample, NDArray[np.uint8]]],
    bad: list[Quarantined],
    count: Callable[[int], None],
) -> Iterator[Chunk]:
    """The crops of a shard, one at a time; notes each image, with its crop in grey, or as bad, and has it counted. One
    that is dropped has no key."""
    number = 0
    for item, read in _images(config, items, count):
        data = b""
        try:
            data = read()
            crop = crop_image(data, config)
        except OSError as error:
            bad.append(Quarantined(item.name, f"cannot be read: {error.strerror or error}"))
            continue
        except BadImage as error:
            bad.append(Quarantined(item.name, str(error), hashlib.sha256(data).hexdigest()))
            continue
        sha256 = hashlib.sha256(data).hexdigest()
        for view, pixels in enumerate(crop.squares):
            key = "" if item.name in drop else f"{key_prefix(shard)}{number:0{KEY_DIGITS}d}"
            about = crop.size, crop.flags, crop.format, crop.mode, pixel_hash(pixels)
            sample = Sample(key, item.name, sha256, item.label, *about, sharpness=sharpness(pixels), view=view)
            noted.append((sample, grey(pixels)))
            if not key:
                continue
            number += 1
            yield {"npy": pixels[np.newaxis]}, np.array([item.label or 0])


def _images(config: DataConfig, items: list[Item], count: Callable[[int], None]) -> Iterator[Image]:
    """Every image of the items, each of which is counted."""
    for item in items:
        count(1)
        yield from images_of(config.source, item)


def _looked_at(noted: Sequence[tuple[Sample, NDArray[np.uint8]]]) -> list[Sample]:
    """The samples, with what their crops in grey tell of all of them at once."""
    if not noted:
        return []
    greys = np.stack([small for _, small in noted])
    means, contrasts = (greys.mean((1, 2)).round(3).tolist(), greys.std((1, 2)).round(3).tolist())
    told = zip((sample for sample, _ in noted), looks(greys), means, contrasts, strict=True)
    return [replace(sample, look=look, brightness=mean, contrast=contrast) for sample, look, mean, contrast in told]


def _hashes(samples: Iterable[Sample], bad: Iterable[Quarantined]) -> dict[str, str]:
    """The content hash of every file that was read, by its name."""
    return {each.path: each.sha256 for each in samples} | {each.path: each.sha256 for each in bad}


def _dropped(record: ShardRecord) -> set[str]:
    return {each.path for each in record.dropped}


def _is_looked_at(record: ShardRecord) -> bool:
    """Whether the record says what each crop looks like: those of earlier versions do not."""
    return all(each.pixels for each in (*record.samples, *record.dropped))


def _spare_of(record: ShardRecord, spare: Mapping[str, str]) -> set[str]:
    return {each.path for each in (*record.samples, *record.dropped) if each.path in spare}


def _made_from(config: DataConfig, items: list[Item], sums: list[str]) -> str:
    """What decides the bytes of a shard: the format, the crop, and each image's path, content and class."""
    inputs = [[item.name, sha256, item.label] for item, sha256 in zip(items, sums, strict=True)]
    return digest({"format": FORMAT, "crop": config.crop_identity(), "images": inputs})


def _map(
    config: DataConfig,
    layout: Layout,
    tasks: list[tuple[int, list[Item]]],
    output: Path,
    processes: int,
    drops: Mapping[int, Set[str]] | None,
    progress: Progress,
) -> Iterator[tuple[ShardRecord, bool]]:
    """Crop the shards, in their order; in this process where one is enough or no others can be had. drops: what each
    leaves out, by name; None: nothing is left out of shards that are not there yet."""
    shared = _pool(config, min(processes, len(tasks)))
    if shared is None:
        for shard, items in tasks:
            drop = None if drops is None else drops[shard]
            yield crop_shard(config, layout, shard, items, output, drop, progress.advance)
        return
    (pool, done), shown = shared, 0
    with pool:
        futures = [
            pool.submit(_crop_shard, config, layout, shard, items, output, None if drops is None else drops[shard])
            for shard, items in tasks
        ]
        try:
            for future in futures:
                while True:
                    wait([future], _LOOK_S)
                    now = done.get_obj().value  # without its lock, which a process may have taken into its grave
                    progress.advance(now - shown)
                    shown = now
                    if future.done():
                        break
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _pool(config: DataConfig, workers: int) -> tuple[ProcessPoolExecutor, Synchronized[int]] | None:
    """Processes that crop, and how many items all of them have done."""
    if workers <= 1:
        return None
    try:
        spawn = multiprocessing.get_context("spawn")
        done: Synchronized[int] = spawn.Value("q", 0)
        return ProcessPoolExecutor(workers, spawn, _set_up, (config, mark(), done)), done
    except OSError as error:  # what they share lies in /dev/shm
        told = "crop: one process crops, since several share memory in /dev/shm, which this machine does not give"
        print(f"{told}: {error}.", file=sys.stderr)
        return None


def _set_up(config: DataConfig, parent: str, done: Synchronized[int]) -> None:
    """A process that crops ends with the one that started it; the fast resize must not use every core in each."""
    global _done
    _done = done
    end_with(parent.split())
    if config.resize == "fast":
        import torch

        torch.set_num_threads(1)


def _judge(config: DataConfig, output: Path, bad: list[Quarantined], total: int) -> None:
    """Raise ValueError when too little is left."""
    if not total:
        raise ValueError("The source holds no images. Its tars must hold files like 0001.jpg.")
    if not bad:
        return
    reason, count = Counter(each.reason.split(":")[0] for each in bad).most_common(1)[0]
    most = f"Most common: {reason} ({count:,}). See {output / 'quarantine.csv'}"
    if len(bad) == total:
        raise ValueError(f"None of the {total:,} files in the source gave a crop. {most}.")
    if len(bad) / total > config.max_bad_fraction:
        raise ValueError(
            f"{len(bad):,} of {total:,} files ({len(bad) / total:.1%}) gave no crop, more than "
            f"data.max_bad_fraction = {config.max_bad_fraction}. {most}; repair or remove them, or raise the limit."
        )


def _judge_alpha(config: DataConfig, records: list[ShardRecord]) -> None:
    """Raise ValueError when alpha is asked of images that have none, or would be lost from all of them unasked."""
    transparent = sum("alpha" in sample.flags for record in records for sample in record.samples)
    total = sum(record.num_samples for record in records)
    keeps_alpha = config.channels in (2, 4)
    if keeps_alpha and transparent == 0:
        raise ValueError(
            f"data.channels is {config.channels}, which includes alpha, but none of the {total:,} images has an alpha "
            f"channel. Set data.channels to {config.channels - 1}."
        )
    if not keeps_alpha and 0 < transparent == total and config.background is None:
        raise ValueError(
            f"data.channels is {config.channels}, but every one of the {total:,} images has an alpha channel. Set "
            f"data.channels to {config.channels + 1} to keep it, or data.background to the colour to put behind them."
        )


def _manifest(
    config: DataConfig, listing: Listing, records: list[ShardRecord], bad: list[Quarantined], output: Path
) -> dict[str, Any]:
    flags = Counter(flag for record in records for sample in record.samples for flag in sample.flags)
    return {
        "format": FORMAT,
        "kind": "crops",
        "name": config.name,
        "crop": config.crop_identity(),
        "classes": listing.classes,
        "validation_fraction": config.validation_fraction,
        **describe_shards(crop_layout(config, labelled=bool(listing.classes)), records),
        "histogram": class_histogram(records, len(listing.classes)),
        "flags": dict(sorted(flags.items())),
        "quarantined": len(bad),
        **(
            {"dropped": dropped}
            if (dropped := sum(each.view == 0 for record in records for each in record.dropped))
            else {}
        ),
        "ignored": listing.ignored,
        "index": sha256_file(output / "index.npy"),
        "files": {**record_hashes(output, len(records)), **describe(output, [output / "quarantine.csv"])},
    }


def _crop_shard(
    config: DataConfig, layout: Layout, shard: int, items: list[Item], output: Path, drop: Set[str] | None
) -> tuple[ShardRecord, bool]:
    """`crop_shard` in a process of the pool, which counts with all others."""
    done = _done
    assert done is not None

    def count(items: int) -> None:
        with done.get_lock():
            done.value += items

    return crop_shard(config, layout, shard, items, output, drop, count)


def write_sheets(output: Path, done: Cropped) -> list[Path]:
    """Write the pictures for people beside the manifest, a contact sheet and histograms, and note them in it; returns
    where they are."""
    # Here and not above: torch and matplotlib would slow the start of every crop process by seconds.
    from image_diffusion.data.shards import Shards
    from image_diffusion.data.sheets import contact_sheet, histograms

    dataset = Shards(output, done.manifest, "all")
    sheet, plot = output / "sheet.png", output / "histograms.png"
    contact_sheet(dataset, sheet)
    histograms(dataset.classes, dataset.manifest["histogram"], done.records, plot)
    drawn = {"files": {**done.manifest["files"], **describe(output, [sheet, plot])}}
    write_json(output / "manifest.json", done.manifest | drawn)
    return [sheet, plot]


def main() -> None:
    parser = Parser(prog="python -m image_diffusion.crop", description="Images -> square crops.")
    parser.add_config("the data section, YAML")
    parser.add_argument("--source", type=Path, help="source.json, where what was read is noted")
    parser.add_argument("--part", type=part_of, help="which shards to write: 2/8 is part 2 of 0 to 7; unset: all")
    parser.add_argument(
        "--made", type=Path, nargs="+", default=[], help="the notes of all parts, whose shards are there"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="manifest.json, or a part's note, to write beside the shards"
    )
    parser.add_argument("--processes", type=int, default=1, help="how many processes crop at once")
    parser.add_argument("--journal", type=Path, help="folder of journals to log to")
    arguments = parser.parse_args()
    config = load(DataConfig, arguments.config, arguments.changes)
    if arguments.part is not None:
        folder, (index, of) = arguments.output.parent, arguments.part
        written = crop_part(config, folder, arguments.output, arguments.part, arguments.processes)
        print(f"crop: part {index} of {of} is done, {written} shards written")
        return
    with Journal.open(arguments.journal, "crop") if arguments.journal else NullJournal() as journal:
        journal.params(dump(config))
        given = arguments.source, arguments.processes, arguments.made
        done = crop_dataset(config, arguments.output.parent, *given)
        manifest = done.manifest
        numbers = {"images": manifest["num_samples"], "quarantined": manifest["quarantined"]}
        journal.metrics({**numbers, **{f"flag/{name}": count for name, count in manifest["flags"].items()}}, step=0)
        for picture in write_sheets(arguments.output.parent, done):
            journal.image(picture.stem, picture, step=0)
        journal.artifact(arguments.output.parent / "quarantine.csv")
    print(
        f"crop: {manifest['num_samples']:,} crops in {len(manifest['shards'])} shards "
        f"({done.num_written} written), {manifest['quarantined']:,} files quarantined"
    )


if __name__ == "__main__":
    run(main)
