"""What a detector has seen in the real images of a data set, in files: looked at once, for all that is compared.

A folder for each detector: of both splits and of degraded images (`self_test`) the features (float32 [N, D] .npy, and
as such the class scores and spatial features of detectors that have them), the statistics as ADM and EDM lay them out,
and reference.json, which says of which images and by which detector, with the sha256 of each file. Features are read
where they lie: a data set of any size takes no more memory than the rows that a metric asks for.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.arrays import read_arrays
from image_diffusion.core.files import atomic_write, read_json, to_json, write_json
from image_diffusion.core.together import gathered, rows_of_part
from image_diffusion.core.verify import check_files, describe
from image_diffusion.metrics.features import AT_ONCE, Detected, Detector, ImageSet, look
from image_diffusion.metrics.moments import Gaussian
from image_diffusion.metrics.panel import gaussians_of
from image_diffusion.metrics.references import read_statistics, write_statistics

FORMAT = 2
"""Of reference.json."""
_AGAIN = "Run reference again."
_PARTS = tuple(field.name for field in fields(Detected))


@dataclass(frozen=True)
class Seen:
    """Of one split: what was seen in each image, in the split's order, and the Gaussians of that."""

    detected: Detected
    gaussians: Mapping[str, Gaussian]


def write_seen(
    detector: Detector,
    splits: Mapping[str, ImageSet],
    folder: Path,
    writes: bool = True,
    made: Sequence[Path] = (),
) -> None:
    """Look at every image of the splits, by name, and write the folder; splits of fewer than two images are left out.

    Where a launcher started several processes they share the images, and the one that `writes` finishes the folder.
    made: what `write_part` wrote of all parts, in order: it is joined, and nothing is looked at.
    Raises ValueError for features that are not finite, and for parts that are damaged or not all of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if writes:
        for left_over in folder.glob("*.np[yz]"):
            left_over.unlink()
    gathered(True)  # of which nothing is left
    known = _known(splits)
    if made and writes:
        _join(made, _about(detector, known), known, folder)
    for name, images in {} if made else known.items():
        for start, seen in _look(detector, images, name, np.arange(images.num_samples)):
            _write_all(folder, name, seen, start, images.num_samples)
    gathered(True)  # all rows are written
    if not writes:
        return
    for name in known:
        write_statistics(folder / f"{name}.npz", gaussians_of(_read(folder, name)), str(detector.identity["sha256"]))
    paths = [path for name in known for path in (*_parts_in(folder, name).values(), folder / f"{name}.npz")]
    write_json(folder / "reference.json", _about(detector, known) | {"files": describe(folder, paths)})


def write_part(
    detector: Detector, splits: Mapping[str, ImageSet], path: Path, part: tuple[int, int], writes: bool = True
) -> None:
    """Look at the images of part i of n, (i, n), and write what was seen as an .npz, for `write_seen` to join.

    Several processes share them as there. Raises ValueError for features that are not finite.
    """
    known = _known(splits)
    arrays: dict[str, NDArray[np.float32]] = {}
    for name, images in known.items():
        rows = [np.arange(each.start, each.stop) for each in rows_of_part(images.num_samples, AT_ONCE, part)]
        chosen = np.concatenate(rows) if rows else np.empty(0, np.int64)
        shares = gathered([seen for _, seen in _look(detector, images, name, chosen)])
        if found := [seen for each in shares for seen in each]:
            joined = Detected.join(found)
            arrays |= {
                f"{name}-{which}": seen.numpy() for which in _PARTS if (seen := _rows(joined, which)) is not None
            }
    if writes:
        about = np.frombuffer(to_json(_about(detector, known)).encode(), np.uint8)
        with atomic_write(path) as file:
            np.savez(file, about=about, **arrays)  # type: ignore[arg-type]


def read_seen(
    folders: Sequence[Path], detectors: Sequence[Detector], splits: Mapping[str, ImageSet]
) -> list[dict[str, Seen] | None]:
    """What `write_seen` wrote, by split, for each detector; None for one of which there is no folder.

    Raises ValueError for a folder that is damaged, or of other images or detectors.
    """
    found: list[dict[str, Seen] | None] = [None] * len(detectors)
    for folder in folders:
        about = read_json(folder / "reference.json")
        number = next((i for i, each in enumerate(detectors) if about.get("detector") == each.identity), None)
        if number is None:
            names = ", ".join(str(each.identity["name"]) for each in detectors)
            raise ValueError(f"{folder} is of another detector than those in use ({names}). {_AGAIN}")
        found[number] = _read_checked(folder, about, detectors[number], splits)
    return found


def _read_checked(
    folder: Path, about: Mapping[str, Any], detector: Detector, splits: Mapping[str, ImageSet]
) -> dict[str, Seen]:
    if about.get("format") != FORMAT:
        told = f"{folder / 'reference.json'} has format {about.get('format')}"
        raise ValueError(f"{told}; this version reads format {FORMAT}. {_AGAIN}")
    for name, images in splits.items():
        seen = about["splits"].get(name, {"data": None})["data"]
        if images.num_samples > 1 and seen != images.digest:
            raise ValueError(f"{folder} is of other images than those of the {name} split. {_AGAIN}")
    check_files(folder, about["files"], _AGAIN)
    sha256 = str(detector.identity["sha256"])
    return {
        name: Seen(_read(folder, name), read_statistics(folder / f"{name}.npz", sha256)) for name in about["splits"]
    }


def _known(splits: Mapping[str, ImageSet]) -> dict[str, ImageSet]:
    """The splits that statistics can be had of."""
    return {name: images for name, images in splits.items() if images.num_samples > 1}


def _about(detector: Detector, known: Mapping[str, ImageSet]) -> dict[str, Any]:
    described = {name: {"data": images.digest, "num_images": images.num_samples} for name, images in known.items()}
    return {"format": FORMAT, "detector": detector.identity, "splits": described}


def _look(detector: Detector, images: ImageSet, split: str, rows: NDArray[np.int64]) -> Iterator[tuple[int, Detected]]:
    """What this process sees in some rows of a split, on the CPU, each time with the number of the first."""
    for chosen, (seen,) in look([detector], images, rows, f"features of the {split} split"):
        yield int(chosen[0]), Detected(**{which: _rows(seen, which) for which in _PARTS})  # type: ignore[arg-type]


def _rows(seen: Detected, which: str) -> Tensor | None:
    rows = getattr(seen, which)
    return None if rows is None else rows.to("cpu", torch.float32).contiguous()


def _write_all(folder: Path, split: str, seen: Detected, start: int, total: int) -> None:
    for which in _PARTS:
        if (rows := getattr(seen, which)) is not None:
            _write_rows(folder / f"{split}-{which}.npy", rows, start, total)


def _join(made: Sequence[Path], about: Mapping[str, Any], known: Mapping[str, ImageSet], folder: Path) -> None:
    """Write the rows of all parts. A part that is damaged or of something else is removed, to be made again."""
    written = dict.fromkeys(known, 0)
    for path in made:
        try:
            arrays = read_arrays(path)
            if arrays["about"].tobytes() != to_json(about).encode():
                raise ValueError(f"{path} is of other images or another detector.")
        except (ValueError, KeyError) as error:
            path.unlink(missing_ok=True)
            raise ValueError(f"{error} It is removed: run the same command again.") from None
        for name, images in known.items():
            seen = {which: arrays.get(f"{name}-{which}") for which in _PARTS}
            if (features := seen["features"]) is not None:
                rows = {which: None if each is None else torch.from_numpy(each.copy()) for which, each in seen.items()}
                _write_all(folder, name, Detected(**rows), written[name], images.num_samples)  # type: ignore[arg-type]
                written[name] += len(features)
    if wrong := [name for name, images in known.items() if written[name] != images.num_samples]:
        raise ValueError(
            f"--made does not hold the whole {wrong[0]} split. Name what every part wrote, once and in order."
        )


def _write_rows(path: Path, rows: Tensor, first: int, total: int) -> None:
    """Write rows [B, D] of a float32 array [total, D] that several processes fill. (A mapped file would end the process
    on a full disk; this raises OSError.)"""
    head = io.BytesIO()
    shape = (total, *rows.shape[1:])
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": shape})
    path.touch()
    with path.open("r+b") as file:
        if file.read(len(head.getvalue())) != head.getvalue():  # a new file, or one of another set
            file.seek(0)
            file.write(head.getvalue())
        data = rows.numpy()
        file.seek(len(head.getvalue()) + first * data[0].nbytes)
        file.write(data.tobytes())
        file.truncate(len(head.getvalue()) + total * data[0].nbytes)


def _parts_in(folder: Path, split: str) -> dict[str, Path]:
    paths = {part: folder / f"{split}-{part}.npy" for part in _PARTS}
    return {part: path for part, path in paths.items() if path.is_file()}


def _read(folder: Path, split: str) -> Detected:
    parts = {part: np.load(path, mmap_mode="c") for part, path in _parts_in(folder, split).items()}
    return Detected(**{part: torch.from_numpy(array) for part, array in parts.items()})
