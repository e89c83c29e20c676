"""Plan of a crop: the images of a source, the shard of each, and the shards that other processes have written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from image_diffusion.core.files.atomic import digest, read_json, stamp_of, write_json
from image_diffusion.data.crop.filter_expression import MissingValue, Rule
from image_diffusion.data.crop.image import READER
from image_diffusion.data.shards.records import FORMAT, UNWANTED, Quarantined, ShardRecord, read_record, tar_path
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import HasValues, Item, Listing, by_shard

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
