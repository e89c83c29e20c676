"""Features of the real images of a data set, stored in files and computed once for all comparisons.

Each detector has a folder with, for both splits and the degraded images (`self_test`), the features (float32 [N, D]
.npy, and likewise any class scores and spatial features), the statistics in the layout of ADM and EDM, and
reference.json, which identifies the images and the detector, with the sha256 of each file. Features are memory-mapped:
a data set of any size takes no more memory than the rows that a metric uses.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.files.atomic import atomic_write, make_folder, read_json, to_json, write_json
from image_diffusion.core.files.checksums import check_files, describe
from image_diffusion.core.files.image_arrays import read_arrays
from image_diffusion.core.files.partial_results import gathered, rows_of_part
from image_diffusion.core.names import inside
from image_diffusion.metrics.compute import gaussians_of
from image_diffusion.metrics.distances.moments import Gaussian
from image_diffusion.metrics.features.base import AT_ONCE, Detected, Detector, ImageSet, features_of_rows

FORMAT = 2
"""Format version of reference.json."""
_AGAIN = "Run reference again."
_PARTS = tuple(field.name for field in fields(Detected))
_STATISTICS = {"fd": ("mu", "sigma"), "spatial_fd": ("mu_s", "sigma_s")}
"""Keys of the mean and the covariance in a file of statistics, as ADM and EDM publish them, by metric."""


@dataclass(frozen=True)
class ReferenceFeatures:
    """Reference features of one split: the features of each image, in the split's order, and their Gaussians."""

    detected: Detected
    gaussians: Mapping[str, Gaussian]


def write_features(
    detector: Detector,
    splits: Mapping[str, ImageSet],
    folder: Path,
    writes: bool = True,
    parts: Sequence[Path] = (),
) -> None:
    """Write the features of every image of the splits, by name; splits of fewer than two images are left out.

    If a launcher started several processes, they share the images, and the process with `writes` completes the folder.
    parts: all files written by `write_part`, in order, to join instead of computing features. Raises ValueError for
    features that are not finite, and for damaged or missing parts.
    """
    make_folder(folder)
    if writes:
        for left_over in folder.glob("*.np[yz]"):
            left_over.unlink()
    gathered(True)  # waits for all processes: no old files are left
    usable = _splits_with_statistics(splits)
    if parts and writes:
        _join(parts, _description(detector, usable), usable, folder)
    for name, images in {} if parts else usable.items():
        for start, features in _look(detector, images, name, np.arange(images.num_samples)):
            _write_all(folder, name, features.tensors, start, images.num_samples)
    gathered(True)  # all rows are written
    if not writes:
        return
    for name in usable:
        write_statistics(folder / f"{name}.npz", gaussians_of(_read(folder, name)), str(detector.identity["sha256"]))
    paths = [path for name in usable for path in (*_parts_in(folder, name).values(), folder / f"{name}.npz")]
    write_json(folder / "reference.json", _description(detector, usable) | {"files": describe(folder, paths)})


def write_part(
    detector: Detector, splits: Mapping[str, ImageSet], path: Path, part: tuple[int, int], writes: bool = True
) -> None:
    """Write the features of the images of part i of n, (i, n), as an .npz for `write_features` to join.

    Several processes share the images as in `write_features`. Raises ValueError for features that are not finite.
    """
    usable = _splits_with_statistics(splits)
    arrays: dict[str, NDArray[np.float32]] = {}
    for name, images in usable.items():
        places = [np.arange(some.start, some.stop) for some in rows_of_part(images.num_samples, AT_ONCE, part)]
        chosen = np.concatenate(places) if places else np.empty(0, np.int64)
        shares = gathered([features for _, features in _look(detector, images, name, chosen)])
        if groups := [features for share in shares for features in share]:
            joined = Detected.join(groups)
            arrays |= {f"{name}-{which}": rows.numpy() for which, rows in joined.tensors.items()}
    if writes:
        about = np.frombuffer(to_json(_description(detector, usable)).encode(), np.uint8)
        with atomic_write(path) as file:
            np.savez(file, about=about, **arrays)  # type: ignore[arg-type]


def read_features(
    folders: Sequence[Path], detectors: Sequence[Detector], splits: Mapping[str, ImageSet]
) -> list[dict[str, ReferenceFeatures] | None]:
    """Read the features that `write_features` wrote, by split, for each detector; None for a detector without a folder.

    Raises ValueError for a folder that is damaged or belongs to other images or detectors.
    """
    features: list[dict[str, ReferenceFeatures] | None] = [None] * len(detectors)
    for folder in folders:
        about = read_json(folder / "reference.json")
        number = next((i for i, x in enumerate(detectors) if about.get("detector") == x.identity), None)
        if number is None:
            names = ", ".join(str(detector.identity["name"]) for detector in detectors)
            raise ValueError(f"{folder} is of another detector than those in use ({names}). {_AGAIN}")
        features[number] = _read_checked(folder, about, detectors[number], splits)
    return features


def _read_checked(
    folder: Path, about: Mapping[str, Any], detector: Detector, splits: Mapping[str, ImageSet]
) -> dict[str, ReferenceFeatures]:
    if about.get("format") != FORMAT:
        state = f"{folder / 'reference.json'} has format {about.get('format')}"
        raise ValueError(f"{state}; this version reads format {FORMAT}. {_AGAIN}")
    for name, images in splits.items():
        of = about["splits"].get(name, {"data": None})
        same = of["data"] == images.digest and of.get("selection", images.selection) == images.selection
        if images.num_samples > 1 and not same:
            raise ValueError(f"{folder} was computed on other images than those of the {name} split. {_AGAIN}")
    check_files(folder, about["files"], _AGAIN)
    sha256 = str(detector.identity["sha256"])
    return {
        name: ReferenceFeatures(_read(folder, name), read_statistics(inside(folder, f"{name}.npz"), sha256))
        for name in about["splits"]
    }


def _splits_with_statistics(splits: Mapping[str, ImageSet]) -> dict[str, ImageSet]:
    """Return the splits with enough images for statistics."""
    return {name: images for name, images in splits.items() if images.num_samples > 1}


def _description(detector: Detector, splits: Mapping[str, ImageSet]) -> dict[str, Any]:
    described = {
        name: {"data": images.digest, "selection": images.selection, "num_images": images.num_samples}
        for name, images in splits.items()
    }
    return {"format": FORMAT, "detector": detector.identity, "splits": described}


def _look(detector: Detector, images: ImageSet, split: str, rows: NDArray[np.int64]) -> Iterator[tuple[int, Detected]]:
    """Yield this process's features of some rows of a split, on the CPU, each group with the index of its first row."""
    for chosen, (features,) in features_of_rows([detector], images, rows, f"features of the {split} split"):
        on_cpu = {which: rows.to("cpu", torch.float32).contiguous() for which, rows in features.tensors.items()}
        yield int(chosen[0]), Detected(**on_cpu)


def _write_all(folder: Path, split: str, features: Mapping[str, Tensor], start: int, total: int) -> None:
    for which, rows in features.items():
        _write_rows(folder / f"{split}-{which}.npy", rows, start, total)


def _join(parts: Sequence[Path], about: Mapping[str, Any], splits: Mapping[str, ImageSet], folder: Path) -> None:
    """Join the rows of all parts. Damaged or foreign parts are deleted, so that the next run computes them again."""
    written = dict.fromkeys(splits, 0)
    for path in parts:
        try:
            arrays = read_arrays(path)
            if arrays["about"].tobytes() != to_json(about).encode():
                raise ValueError(f"{path} is of other images or another detector.")
        except (ValueError, KeyError) as error:
            path.unlink(missing_ok=True)
            raise ValueError(f"{error} It is removed: run the same command again.") from None
        for name, images in splits.items():
            keys = {which: f"{name}-{which}" for which in _PARTS}
            stored = {which: torch.from_numpy(arrays[key].copy()) for which, key in keys.items() if key in arrays}
            if stored:
                _write_all(folder, name, stored, written[name], images.num_samples)
                written[name] += len(stored["features"])
    if incomplete := [name for name, images in splits.items() if written[name] != images.num_samples]:
        raise ValueError(
            f"--made does not hold the whole {incomplete[0]} split. Name what every part wrote, once and in order."
        )


def _write_rows(path: Path, rows: Tensor, first: int, total: int) -> None:
    """Write rows [B, D] of a float32 array [total, D] that several processes fill. (On a full disk, this raises
    OSError; writing to a mapped file would kill the process.)"""
    head = io.BytesIO()
    shape = (total, *rows.shape[1:])
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": shape})
    path.touch()
    with path.open("r+b") as file:
        if file.read(len(head.getvalue())) != head.getvalue():  # a new file, or a file of another set
            file.seek(0)
            file.write(head.getvalue())
        data = rows.numpy()
        file.seek(len(head.getvalue()) + first * data[0].nbytes)
        file.write(data.tobytes())
        file.truncate(len(head.getvalue()) + total * data[0].nbytes)


def _parts_in(folder: Path, split: str) -> dict[str, Path]:
    paths = {part: inside(folder, f"{split}-{part}.npy") for part in _PARTS}
    return {part: path for part, path in paths.items() if path.is_file()}


def _read(folder: Path, split: str) -> Detected:
    parts = {part: np.load(path, mmap_mode="c") for part, path in _parts_in(folder, split).items()}
    return Detected(**{part: torch.from_numpy(array) for part, array in parts.items()})


def is_statistics(path: Path) -> bool:
    """Return True if an .npz holds statistics (mu, sigma), not only images. Raises ValueError for other files."""
    if path.suffix == ".pkl":
        raise ValueError(
            f"{path} is a pickle, which can run code and is not read. "
            "Write its mu and sigma into an .npz with numpy.savez."
        )
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return "mu" in arrays and "sigma" in arrays
    except FileNotFoundError:
        raise ValueError(f"The reference {path} does not exist.") from None
    except (zipfile.BadZipFile, ValueError, EOFError, TypeError) as error:
        raise ValueError(f"The reference {path} is not a whole .npz file: {error}. Write it again.") from None


def read_statistics(path: Path, detector_sha256: str) -> dict[str, Gaussian]:
    """Read {"fd": Gaussian} and, if the file has mu_s and sigma_s as in ADM's files, {"spatial_fd": Gaussian}.

    Raises ValueError if mu and sigma do not fit, or the file names a detector other than the one in use.
    """
    arrays = read_arrays(path)
    written_by = str(arrays["detector"]) if "detector" in arrays else detector_sha256
    if written_by != detector_sha256:
        raise ValueError(
            f"The statistics in {path} were measured with detector {written_by[:12]}, not {detector_sha256[:12]}. "
            "Measure them again with this detector."
        )
    count = int(arrays["count"]) if "count" in arrays else None
    gaussians = {}
    for name, (mean_key, covariance_key) in _STATISTICS.items():
        if mean_key not in arrays:
            continue
        mean, covariance = (arrays[key].astype(np.float64) for key in (mean_key, covariance_key))
        if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
            raise ValueError(
                f"{path}: {mean_key} {list(mean.shape)} and {covariance_key} {list(covariance.shape)} do not fit. "
                "Expected [D] and [D, D]."
            )
        if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
            raise ValueError(f"{path}: {mean_key} or {covariance_key} holds numbers that are not finite.")
        gaussians[name] = Gaussian(torch.from_numpy(mean), torch.from_numpy(covariance), count)
    return gaussians


def write_statistics(path: Path, statistics: Mapping[str, Gaussian], detector_sha256: str) -> None:
    """Write statistics for `read_statistics`, in the layout of EDM and ADM: mu and sigma of "fd", mu_s and sigma_s of
    "spatial_fd", the number of images, the detector's digest."""
    arrays: dict[str, np.ndarray | np.generic] = {
        "count": np.int64(statistics["fd"].count or 0),
        "detector": np.str_(detector_sha256),
    }
    for name, gaussian in statistics.items():
        mean_key, covariance_key = _STATISTICS[name]
        arrays |= {mean_key: gaussian.mean.numpy(), covariance_key: gaussian.covariance.numpy()}
    with atomic_write(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
