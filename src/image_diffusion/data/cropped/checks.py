"""Checks of a finished crop: too few images, an alpha channel that is missing or lost, a doubtful range."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from image_diffusion.core.process.errors import log_line
from image_diffusion.data.crop.stored import WIDE
from image_diffusion.data.shards.records import Quarantined, ShardRecord

_HALF, DARK = 2**15, 2**13
"""Limits for 16-bit images: with all values below the first, their range is probably smaller; with all values below the
second, they are nearly black in the 16-bit range."""


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


def check_range(records: Sequence[ShardRecord], is_decided: bool = False) -> None:
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
