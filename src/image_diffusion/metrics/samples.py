"""Generated images: an .npz in ADM's layout, a folder of pictures, or generated when they are read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from image_diffusion.core.files.atomic import read_json, sha256_file
from image_diffusion.core.files.checksums import damaged
from image_diffusion.core.files.image_arrays import digest_of, digests_of, read_arrays
from image_diffusion.core.files.partial_results import Arrays, batches, gathered
from image_diffusion.core.levels import Levels
from image_diffusion.core.pictures import as_pictures, image_grid, save_picture

_MOST_SHOWN = 100
"""Maximum number of classes in a picture."""
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


class Rows(Protocol):
    """Rows of images [N, H, W, C], read a few at a time: an array, for instance."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[Any]: ...


class GeneratedRows:
    """Images that are generated on demand, always in the same batches; one batch is in memory.

    make: consecutive rows -> [n, C, H, W] of `dtype`, deterministic. num_samples: in total. batch_size: of each call
    except the last. image_shape: (H, W, C).
    """

    def __init__(
        self,
        make: Callable[[slice], Tensor],
        num_samples: int,
        batch_size: int,
        image_shape: tuple[int, ...],
        dtype: str = "uint8",
    ) -> None:
        self._make, self._batch_size = make, batch_size
        self.shape = (num_samples, *image_shape)
        self._number, self._batch = -1, np.empty((0, *image_shape), dtype)
        self._digests: dict[int, Arrays] = {}
        self._once = batches("digests of samples")

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        images = np.empty((len(rows), *self.shape[1:]), self._batch.dtype)
        batch = rows // self._batch_size
        for number in np.unique(batch).tolist():
            inside = batch == number
            images[inside] = self._generated(number)[rows[inside] - number * self._batch_size]
        return images

    @property
    def digest(self) -> str:
        """Return the digest of all images, after the processes that share them have read every image."""
        digests = {number: arrays for shared in gathered(self._digests) for number, arrays in shared.items()}
        for number in range(-(-self.shape[0] // self._batch_size)):
            if number not in digests:  # read in an earlier run
                digests[number] = self._once(str(number), partial(self._digests_of, number))
        return digest_of(bytes(sha256) for number in sorted(digests) for sha256 in digests[number]["sha256"])

    def _digests_of(self, number: int) -> Arrays:
        return {"sha256": np.array([list(sha256) for sha256 in digests_of(self._generated(number))], np.uint8)}

    def _generated(self, number: int) -> NDArray[Any]:
        if number != self._number:
            start = number * self._batch_size
            images = self._make(slice(start, min(start + self._batch_size, self.shape[0])))
            self._number, self._batch = number, images.movedim(1, -1).numpy()
            if number not in self._digests:  # while the batch is in memory: a second pass would sample it again
                self._digests[number] = self._once(str(number), partial(self._digests_of, number))
        return self._batch


class Samples:
    """Images in memory, in a mapped file or generated on demand, with their requested labels. An ImageSet.

    images: [N, H, W, C]. labels: int64 [N], or None for samples without classes. digest: of the images, or a function
    that returns it once all have been generated. protocol: settings of the sampling. levels: value levels of arrays;
    None for pictures, uint8.
    """

    selection = ""

    def __init__(
        self,
        images: Rows,
        labels: NDArray[np.int64] | None,
        classes: list[str],
        digest: str | Callable[[], str] = "",
        protocol: dict[str, Any] | None = None,
        levels: Levels | None = None,
    ) -> None:
        self._images, self._digest, self._levels = images, digest, levels
        self.num_samples, height, width, channels = images.shape
        self.shape: tuple[int, ...] = (channels, height, width)
        self.labels = np.zeros(self.num_samples, np.int64) if labels is None else labels
        self.has_labels = labels is not None
        self.classes, self.protocol = classes, protocol or {}

    @property
    def digest(self) -> str:
        """Return the digest of the images."""
        return self._digest if isinstance(self._digest, str) else self._digest()

    def gather(self, indices: NDArray[np.int64]) -> Tensor:
        """Return pictures, uint8 [B, C, H, W], or arrays scaled for detectors, float32 from 0 to 255."""
        images = torch.from_numpy(self._images[indices]).permute(0, 3, 1, 2).contiguous()
        return images if self._levels is None else self._levels.rendered(images)


def read_samples(path: Path, classes: list[str] | None = None, levels: Levels | None = None) -> Samples:
    """Read samples.npz (arr_0 uint8 [N, H, W, C], arr_1 int64 [N]) with its samples.json, or a folder of pictures.

    levels: value levels of the data to compare with, if these are arrays; arr_0 must then have their dtype. Raises
    ValueError if there are no samples, they are damaged, differ in size, or are not all stored.
    """
    if path.is_dir():
        return _read_pictures(path, classes or [])
    samples = _read_stored(path, classes, levels)
    total = samples.protocol.get("num_samples", samples.num_samples)
    if samples.num_samples < total:
        raise ValueError(
            f"{path} holds {samples.num_samples:,} of {total:,} samples, since sample.keep is false. Set it to "
            f"true, and run sample again."
        )
    return samples


def read_generated(
    make: Callable[[slice], Tensor],
    labels: Tensor | None,
    batch_size: int,
    path: Path,
    classes: list[str],
    levels: Levels | None = None,
) -> Samples:
    """Return samples that are generated on demand; samples.npz at `path` holds only the first ones.

    make: consecutive rows -> images [n, C, H, W]. labels: of all samples, int64 [N], if any. batch_size: of the
    sampling. Raises ValueError as `read_samples` does.
    """
    stored = _read_stored(path, classes, levels)
    channels, height, width = stored.shape
    total, shape = int(stored.protocol["num_samples"]), (height, width, channels)
    images = GeneratedRows(make, total, batch_size, shape, _dtype_of(levels))
    requested = None if labels is None else labels.numpy()
    return Samples(images, requested, classes, lambda: images.digest, stored.protocol, levels)


def _dtype_of(levels: Levels | None) -> str:
    return "uint8" if levels is None else levels.dtype


def _read_stored(path: Path, classes: list[str] | None, levels: Levels | None) -> Samples:
    arrays, dtype = read_arrays(path), _dtype_of(levels)
    if "arr_0" not in arrays:
        raise ValueError(f"{path} holds {', '.join(arrays)} but no arr_0. Samples are {dtype} [N, H, W, C].")
    images, labels = arrays["arr_0"], arrays.get("arr_1")
    if images.dtype != dtype or images.ndim != 4:
        raise ValueError(f"arr_0 of {path} is {images.dtype} {list(images.shape)}; expected {dtype} [N, H, W, C].")
    if len(images) == 0:
        raise ValueError(f"{path} holds no samples. Set sample.num_samples.")
    if labels is not None and labels.shape != (len(images),):
        raise ValueError(f"{path} holds {len(images):,} samples but labels of shape {list(labels.shape)}.")
    described = path.with_suffix(".json")
    protocol = read_json(described) if described.is_file() else {}
    stated = protocol.pop("files", {}).get(path.name)
    if stated is not None and damaged(path.parent, {path.name: stated}):
        raise ValueError(f"{path} is not the file that {described} describes. Run sample again.")
    digest = protocol.pop("images_sha256", None) or stated or sha256_file(path)
    return Samples(images, None if labels is None else labels.astype(np.int64), classes or [], digest, protocol, levels)


def _read_pictures(folder: Path, classes: list[str]) -> Samples:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _PICTURES)
    if not paths:
        raise ValueError(f"{folder} holds no pictures ({', '.join(_PICTURES)}).")
    images: list[NDArray[np.uint8]] = []
    for path in paths:
        with Image.open(path) as picture:
            images.append(np.asarray(picture.convert("RGB")))
        if images[-1].shape != images[0].shape:
            sizes = " and ".join("x".join(map(str, image.shape[1::-1])) for image in (images[0], images[-1]))
            raise ValueError(
                f"{folder} mixes sizes: {paths[0].name} and {path.name} are {sizes}. Give samples of one size."
            )
    return Samples(np.stack(images), None, classes)


def plot_classes(samples: Samples, path: Path, columns: int = 10) -> None:
    """Plot the first samples of each class, uncurated, one row per class."""
    labels = np.unique(samples.labels)[:_MOST_SHOWN]
    chosen = [np.flatnonzero(samples.labels == label)[:columns] for label in labels]
    rows = np.sort(np.concatenate(chosen))
    images = as_pictures(samples.gather(rows))
    shown = torch.full((len(labels), columns, *images.shape[1:]), 255, dtype=torch.uint8)
    for line, members in zip(shown, chosen, strict=True):
        line[: len(members)] = images[torch.from_numpy(np.searchsorted(rows, members))]
    save_picture(image_grid(shown.flatten(0, 1), columns), path)
