"""Images -> shards of crops, their records, and a manifest of the set, by a plan: the images of a source, the shard of
each, and the shards that other processes have written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from image_diffusion.core.config.base import dump
from image_diffusion.core.files.atomic import digest, make_folder, read_json, remove_unfinished, stamp_of, write_json
from image_diffusion.core.process.errors import log_line
from image_diffusion.core.process.progress import Progress
from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.filter_expression import MissingValue, Rule
from image_diffusion.data.crop.image import READER, crop_image
from image_diffusion.data.crop.stored import DARK, WIDE
from image_diffusion.data.cropped.levels import measure_levels
from image_diffusion.data.cropped.shard import ShardCropper, content_hashes, crop_shards
from image_diffusion.data.quality.duplicates import dropped_rows, held_out_by_name, leaks_from_validation, same_crops
from image_diffusion.data.shards.records import (
    FORMAT,
    UNWANTED,
    Quarantined,
    ShardRecord,
    class_histogram,
    describe_files,
    describe_shards,
    index_of,
    read_record,
    remove_surplus,
    tar_path,
    write_index,
    write_quarantine,
)
from image_diffusion.data.shards.tar_layout import Layout
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import HasValues, Item, Listing, by_shard, is_text
from image_diffusion.data.sources.changes import record_source

_HALF = 2**15
"""If all values of 16-bit images are below this, their range is probably smaller."""


@dataclass(frozen=True)
class Cropped:
    """Result of a run of `crop_dataset`.

    manifest: the manifest that it wrote. num_written: number of shards that were not up to date. records: of every
    shard, in order.
    """

    manifest: dict[str, Any]
    num_written: int
    records: list[ShardRecord]


def crop_part(config: DataConfig, output: Path, note: Path, part: tuple[int, int], processes: int) -> int:
    """Crop the images of one part into `output`: the shards with `number % n == i` of part (i, n), and their records.
    Returns how many were written.

    note: output file that lists these shards for `crop_dataset`. processes: as in `crop_dataset`.
    """
    plan = CropPlan(config.source, config.rule, config.num_shards, dump(config))
    layout = Layout(("npy",), config.crop_shape, config.dtype or "uint8", labelled=bool(plan.listing.classes))
    cropper = ShardCropper(config.source, partial(crop_image, config=config), config.crop_identity(), layout, output)
    index, count = part
    tasks = plan.tasks[index::count]
    make_folder(output)
    with Progress("crop", sum(len(items) for _, items in tasks), plan.listing.unit) as progress:
        written = sum(is_new for _, is_new in crop_shards(cropper, tasks, processes, progress))
    write_note(note, plan, output, tasks)
    return written


def crop_dataset(
    config: DataConfig, output: Path, source_json: Path | None = None, processes: int = 1, made: Sequence[Path] = ()
) -> Cropped:
    """Crop every image of the source into `output`: shards, their records, quarantine.csv, index.npy, manifest.json.

    source_json: path of source.json, next to which the hashes of the files that were read are recorded. processes:
    number of parallel processes, which does not change the bytes. made: notes of `crop_part`; their shards are not
    compared with the source again unless it has changed since. Raises ValueError when the source is missing or empty,
    when more than `max_bad_fraction` of its files give no crop, or when a setting does not fit the images.
    """
    plan = CropPlan(config.source, config.rule, config.num_shards, dump(config))
    layout = Layout(("npy",), config.crop_shape, config.dtype or "uint8", labelled=bool(plan.listing.classes))
    cropper = ShardCropper(config.source, partial(crop_image, config=config), config.crop_identity(), layout, output)
    if plan.listing.unit == "image":  # checked before cropping; the names in remote tars are known only afterwards
        held_out_by_name([item.name for item in plan.listing.items], config.held_out)
    for notice in plan.notices():
        log_line(f"crop: {notice}.")
    make_folder(output)
    remove_unfinished(output)
    records, written = _crop_missing(cropper, plan, records_of_parts(made, plan, output), processes)
    duplicates = same_crops(records) if config.duplicates == "drop" else {}
    written |= _crop_without(duplicates, cropper, plan, records, processes)
    bad = [Quarantined(path, reason) for path, reason in plan.listing.rejected]
    bad = sorted(bad + [row for record in records for row in record.quarantined], key=lambda row: row.path)
    listed = [*bad, *plan.excluded, *dropped_rows(records, duplicates)]
    write_quarantine(output / "quarantine.csv", sorted(listed, key=lambda row: row.path))
    rejects = [row for row in bad if not is_text(row.path)]
    num_images = sum(sample.view == 0 for record in records for sample in (*record.samples, *record.dropped))
    check_rejects(rejects, num_images + len(rejects), config.max_bad_fraction, output / "quarantine.csv")
    if config.dtype is None:
        check_alpha(records, config.num_channels, has_background=config.background is not None)
        if config.range in (None, "file"):
            check_range(records, is_decided=config.range is not None)
    _warn_of_empty_classes(plan.listing, records)
    remove_surplus(output, len(records))
    write_index(output / "index.npy", map(index_of, records))
    moved = leaks_from_validation(records, output, layout, config.validation_fraction, processes)
    manifest = _manifest(config, plan.listing, layout, records, len(bad), output)
    names = [sample.path for record in records for sample in record.samples]
    splits = {"not_held_out": moved, "held_out": held_out_by_name(names, config.held_out)}
    manifest |= {name: numbers for name, numbers in splits.items() if numbers}
    if config.dtype is not None:
        manifest["levels"] = dump(measure_levels(config.dtype, config.channel_ranges, output, layout, records))
    write_json(output / "manifest.json", manifest)
    if source_json is not None:
        hashes: dict[str, str] = {}
        for record in records:
            hashes |= content_hashes((*record.samples, *record.dropped), record.quarantined)
        record_source(plan.source, source_json, plan.files, hashes)
    return Cropped(manifest, len(written), records)


def _crop_missing(
    cropper: ShardCropper, plan: CropPlan, finished: dict[int, ShardRecord], processes: int
) -> tuple[list[ShardRecord], set[int]]:
    """Crop the unfinished shards; return the records of all shards, in order, and the numbers of those written."""
    records, written = dict(finished), set[int]()
    with Progress("crop", len(plan.listing.items), plan.listing.unit) as progress:
        progress.advance(sum(len(items) for shard, items in plan.tasks if shard in finished))
        missing = [(shard, items) for shard, items in plan.tasks if shard not in finished]
        for record, is_new in crop_shards(cropper, missing, processes, progress):
            records[record.shard] = record
            written |= {record.shard} if is_new else set()
    return [records[shard] for shard, _ in plan.tasks], written


def _crop_without(
    duplicates: dict[str, str], cropper: ShardCropper, plan: CropPlan, records: list[ShardRecord], processes: int
) -> set[int]:
    """Crop again the shards that hold duplicates, or omit images that are no longer duplicates, and replace their
    records; return the numbers of the written shards."""
    drops = {
        record.shard: {row.path for row in (*record.samples, *record.dropped) if row.path in duplicates}
        for record in records
    }
    again = [(shard, items) for shard, items in plan.tasks if records[shard].dropped_names() != drops[shard]]
    if again:
        total = sum(len(items) for _, items in again)
        with Progress("crop: without duplicates", total, plan.listing.unit) as progress:
            for record, _ in crop_shards(cropper, again, processes, progress, drops):
                records[record.shard] = record
    return {shard for shard, _ in again}


def _warn_of_empty_classes(listing: Listing, records: Sequence[ShardRecord]) -> None:
    counts = class_histogram(records, len(listing.classes))
    if empty := [name for name, count in zip(listing.classes, counts, strict=True) if not count]:
        shown = ", ".join(empty[:8]) + (", …" if len(empty) > 8 else "")
        log_line(f"crop: {len(empty):,} of {len(listing.classes):,} classes have no image: {shown}.")


def _manifest(
    config: DataConfig, listing: Listing, layout: Layout, records: Sequence[ShardRecord], num_bad: int, output: Path
) -> dict[str, Any]:
    flags = Counter(flag for record in records for sample in record.samples for flag in sample.flags)
    dropped = sum(sample.view == 0 for record in records for sample in record.dropped)
    return {
        "format": FORMAT,
        "kind": "crops",
        "name": config.name,
        "crop": config.crop_identity(),
        "classes": listing.classes,
        "validation_fraction": config.validation_fraction,
        **describe_shards(layout, records),
        "histogram": class_histogram(records, len(listing.classes)),
        "flags": dict(sorted(flags.items())),
        "quarantined": num_bad,
        **({"dropped": dropped} if dropped else {}),
        "ignored": len(listing.passed_over),
        **({"passed_over": kinds} if (kinds := listing.kinds_passed_over()) else {}),
        **describe_files(output, len(records), [output / "quarantine.csv"]),
    }


def check_rejects(bad: Sequence[Quarantined], total: int, max_bad_fraction: float, table: Path) -> None:
    """Raise ValueError when the source is empty or too many files gave no crop. table: path of the list of these."""
    if not total:
        raise ValueError("The source holds no images. Its tars must hold files like 0001.jpg.")
    if not bad:
        return
    reason, count = Counter(row.reason.split(":")[0] for row in bad).most_common(1)[0]
    example = next(row for row in bad if row.reason.split(":")[0] == reason)
    detail = f", for example {example.path}: {example.reason}" if example.reason != reason else ""
    most = f"Most common: {reason} ({count:,}){detail}. See {table}"
    if len(bad) == total:
        raise ValueError(f"None of the {total:,} files in the source gave a crop. {most}.")
    if len(bad) / total > max_bad_fraction:
        raise ValueError(
            f"{len(bad):,} of {total:,} files ({len(bad) / total:.1%}) gave no crop, more than "
            f"data.max_bad_fraction = {max_bad_fraction}. {most}; repair or remove them, or raise the limit."
        )


def check_alpha(records: Sequence[ShardRecord], channels: int, has_background: bool) -> None:
    """Raise ValueError when the crops keep alpha but no image has it, or when all images have alpha, the crops drop it
    and `data.background` is not set."""
    transparent = sum("alpha" in sample.flags for record in records for sample in record.samples)
    total = sum(record.num_samples for record in records)
    keeps_alpha = channels in (2, 4)
    if keeps_alpha and transparent == 0:
        raise ValueError(
            f"data.channels is {channels}, which includes alpha, but none of the {total:,} images has an alpha "
            f"channel. Set data.channels to {channels - 1}."
        )
    if not keeps_alpha and 0 < transparent == total and not has_background:
        raise ValueError(
            f"data.channels is {channels}, but every one of the {total:,} images has an alpha channel. Set "
            f"data.channels to {channels + 1} to keep it, or data.background to the colour to put behind them."
        )


def check_range(records: Sequence[ShardRecord], is_decided: bool) -> None:
    """Raise ValueError when the values of black and white are doubtful in images of more than 8 bits.

    is_decided: whether `data.range: file` is set; it logs a warning if the images are then nearly black.
    """
    images = [sample for record in records for sample in (*record.samples, *record.dropped) if sample.view == 0]
    values = np.array([image.values for image in images if image.values])
    if not len(values):
        return
    least, usual, most = int(values[:, 0].min()), int(values[:, 1].max()), int(values[:, 2].max())
    used = f"{least:,} to {usual:,}" + (f" (and 0.1 % of the pixels up to {most:,})" if most > usual else "")
    have = f"{len(values):,} of {len(images):,} images have 16 bits and use values {used} of 65,535"
    if is_decided:
        if usual < DARK:
            log_line(f"crop: warning: {have}, which data.range: file makes dark.")
        return
    if usual < _HALF:
        advice = (
            "Set data.range to the numbers that should become black and white, for example "
            f"[0, {2 ** usual.bit_length() - 1}], or to file for [0, 65535]."
            if all(image.mode in WIDE for image in images if image.values)
            else "Colour is read by its high byte. Convert them to 8 bits, or set data.range to file for [0, 65535]."
        )
        raise ValueError(f"{have}. {advice}")
    if len(values) < len(images):
        raise ValueError(
            f"{len(values):,} of {len(images):,} images have 16 bits, values {used}, and the others 8 bits or a range "
            "that their file states. Set data.range to file if 65,535 is white in them, or to the numbers that should "
            "become black and white."
        )


_KINDS = 8  # kinds of ignored files that are shown on the terminal


@dataclass
class CropPlan:
    """Images of a source and their shards. Raises ValueError when the source is missing or empty.

    rule: the images to keep; None keeps all. settings: plain data of the section `data`. files: of the source. listing:
    images of the source, without `excluded`, those that the rule excludes. tasks: the number and the images of each
    shard, in order.
    """

    source: Source
    rule: Rule | None
    num_shards: int
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        self.files = list(self.source.file_groups())
        self.listing, self.excluded = _filtered(self.source, self.source.listing(), self.rule)
        self.tasks = list(enumerate(by_shard(self.listing.items, self.num_shards)))

    def digest(self) -> str:
        """Return a digest of the names and stamps of the files, and of the settings."""
        stamps = sorted([group.folder, group.digest()] for group in self.files)
        return digest({"format": FORMAT, "reader": READER, "data": self.settings, "files": stamps})

    def notices(self) -> list[str]:
        """Return lines for the terminal about the layout and the ignored files."""
        listing, notices = self.listing, list(self.listing.notices)
        if listing.passed_over:
            most = list(listing.kinds_passed_over().items())[:_KINDS]
            kinds, example = ", ".join(f"{count:,} x {kind}" for kind, count in most), listing.passed_over[0]
            notices.append(f"{len(listing.passed_over):,} files are passed over: {kinds}; for example {example}")
        return notices


def _filtered(source: Source, listing: Listing, rule: Rule | None) -> tuple[Listing, list[Quarantined]]:
    """Return the listing without the images that a rule excludes, and these images with the reason.

    Raises ValueError if the source lacks the values in the rule, if they cannot be compared, or if no image is left.
    """
    if rule is None:
        return listing, []
    if not isinstance(source, HasValues):
        raise ValueError(
            f"data.keep needs values beside the images, and data.source.type: {source.type} has none. Use a table, "
            f"Parquet or Hugging Face columns, or .json files beside the images of a folder or a tar."
        )
    values_by_name = source.read_values(rule.names)
    items, excluded = [], []
    for item in listing.items:
        values = values_by_name.get(item.name) or values_by_name.get(item.name.rpartition(".")[0]) or {}
        try:
            reason = None if rule.matches(values) else f"{UNWANTED}not {rule.text}"
        except MissingValue as error:
            reason = f"{UNWANTED}no {error}"
        except ValueError as error:
            raise ValueError(f"data.keep is {rule.text!r}, but of {item.name} {error}.") from None
        if reason is None:
            items.append(item)
        else:
            excluded.append(Quarantined(item.name, reason))
    if listing.items and not items:
        reason = excluded[0].reason
        raise ValueError(f"data.keep leaves none of {len(excluded):,} images; the first one has {reason!r}. Change it.")
    return replace(listing, items=items), excluded


def write_note(path: Path, plan: CropPlan, output: Path, tasks: Iterable[tuple[int, list[Item]]]) -> None:
    """Write a note of the shards that a part has written to `output`, with the digest of the plan."""
    shards = {str(shard): stamp_of(tar_path(output, shard)) for shard, _ in tasks}
    write_json(path, {"of": plan.digest(), "shards": shards})


def records_of_parts(notes: Sequence[Path], plan: CropPlan, output: Path) -> dict[int, ShardRecord]:
    """Return the records of the shards that parts wrote by the same plan and that are unchanged since, by number."""
    records, of = {}, plan.digest()
    for note in map(read_json, notes):
        for shard, stamp in note["shards"].items() if note["of"] == of else ():
            with suppress(ValueError, OSError):
                record = read_record(output, int(shard))
                if [*stamp_of(tar_path(output, record.shard))] == stamp and record.describes_pixels():
                    records[record.shard] = record
    return records
