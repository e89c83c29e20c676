"""What follows from crops that show the same picture: which of them are left out, and which are not held out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from image_diffusion.data.duplicates import groups, near_duplicates, straddling
from image_diffusion.data.records import Quarantined, ShardRecord, index_of, share_of_hashes, tar_path
from image_diffusion.data.tar import Layout, read_array


def same_crops(records: Iterable[ShardRecord]) -> dict[str, str]:
    """The images whose crops are those of another, byte for byte, and the first by name of those, which stays."""
    every = sorted(
        (each for record in records for each in (*record.samples, *record.dropped)), key=lambda each: each.path
    )
    images = [(path, "".join(each.pixels for each in crops)) for path, crops in groupby(every, lambda each: each.path)]
    same = groups(pixels for _, pixels in images)
    return {images[other][0]: images[first][0] for first, *others in same for other in others}


def left_out(records: Iterable[ShardRecord], same: Mapping[str, str]) -> list[Quarantined]:
    """What was left out as a duplicate, for the table. same: what `same_crops` found."""
    return [
        Quarantined(each.path, f"the same crop as {same[each.path]}", each.sha256)
        for record in records
        for each in record.dropped
        if each.view == 0
    ]


def not_held_out(
    records: Sequence[ShardRecord], folder: Path, layout: Layout, validation_fraction: float, processes: int
) -> list[int]:
    """The samples that would be held out by their hash, and of which a near duplicate is trained on, by their places in
    the data set.

    folder, layout: where the crops lie, and how. processes: how many threads compare. Where the images are too alike to
    tell, that is told, and there are none.
    """
    if not validation_fraction:
        return []
    content = np.concatenate([index_of(record)["content"] for record in records])
    held_out = np.flatnonzero(content < share_of_hashes(validation_fraction)).tolist()
    samples = [each for record in records for each in record.samples]
    rows = [(record.shard, row) for record in records for row in range(record.num_samples)]

    def crop(place: int) -> NDArray[np.uint8]:
        shard, row = rows[place]
        return read_array(tar_path(folder, shard), layout, row)

    pairs = near_duplicates([each.look for each in samples], crop, held_out, processes)
    if pairs is None:
        told = "these images are too alike to tell near duplicates from others, so all held-out images stay held out"
        print(f"crop: {told}.", file=sys.stderr)
        return []
    same = [
        linked
        for alike in (groups(each.pixels for each in samples), groups(each.sha256 for each in samples))
        for group in alike
        for linked in pairwise(group)
    ]
    return straddling([*same, *((a, b) for a, b, _ in pairs)], held_out)
