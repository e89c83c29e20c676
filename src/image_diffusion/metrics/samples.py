"""Generated images as files: an .npz in ADM's layout, or a folder of pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from image_diffusion.core.arrays import read_arrays
from image_diffusion.core.files import read_json, sha256_file
from image_diffusion.core.verify import damaged

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


class Samples:
    """Images in memory or in a mapped file, with the labels that were asked for. An ImageSet.

    images: uint8 [N, H, W, C]. labels: int64 [N], or None for samples without classes. protocol: how they were made.
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64] | None,
        classes: list[str],
        digest: str = "",
        protocol: dict[str, Any] | None = None,
    ) -> None:
        self._images = images
        self.num_samples, height, width, channels = images.shape
        self.shape: tuple[int, ...] = (channels, height, width)
        self.labels = np.zeros(len(images), np.int64) if labels is None else labels
        self.has_labels = labels is not None
        self.classes, self.digest, self.protocol = classes, digest, protocol or {}

    def gather(self, indices: NDArray[np.int64]) -> Tensor:
        """Uint8 [B, C, H, W]."""
        return torch.from_numpy(self._images[indices]).permute(0, 3, 1, 2).contiguous()


def read_samples(path: Path, classes: list[str] | None = None) -> Samples:
    """Read samples.npz (arr_0 uint8 [N, H, W, C], arr_1 int64 [N]) and samples.json beside it, or a folder of pictures.

    Raises ValueError when there are none, they are damaged, or they differ in size.
    """
    if path.is_dir():
        return _read_pictures(path, classes or [])
    arrays = read_arrays(path)
    if "arr_0" not in arrays:
        raise ValueError(f"{path} holds {', '.join(arrays)} but no arr_0. Samples are uint8 [N, H, W, C].")
    images, labels = arrays["arr_0"], arrays.get("arr_1")
    if images.dtype != np.uint8 or images.ndim != 4:
        raise ValueError(f"arr_0 of {path} is {images.dtype} {list(images.shape)}; expected uint8 [N, H, W, C].")
    if len(images) == 0:
        raise ValueError(f"{path} holds no samples. Set sample.num_samples.")
    if labels is not None and labels.shape != (len(images),):
        raise ValueError(f"{path} holds {len(images):,} samples but labels of shape {list(labels.shape)}.")
    described = path.with_suffix(".json")
    protocol = read_json(described) if described.is_file() else {}
    stated = protocol.pop("files", {}).get(path.name)
    if stated is not None and damaged(path.parent, {path.name: stated}):
        raise ValueError(f"{path} is not the file that {described} describes. Run sample again.")
    digest = stated or sha256_file(path)
    return Samples(images, None if labels is None else labels.astype(np.int64), classes or [], digest, protocol)


def _read_pictures(folder: Path, classes: list[str]) -> Samples:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _PICTURES)
    if not paths:
        raise ValueError(f"{folder} holds no pictures ({', '.join(_PICTURES)}).")
    images: list[NDArray[np.uint8]] = []
    for path in paths:
        with Image.open(path) as picture:
            images.append(np.asarray(picture.convert("RGB")))
        if images[-1].shape != images[0].shape:
            sizes = " and ".join("x".join(map(str, each.shape[1::-1])) for each in (images[0], images[-1]))
            raise ValueError(
                f"{folder} mixes sizes: {paths[0].name} and {path.name} are {sizes}. Give samples of one size."
            )
    return Samples(np.stack(images), None, classes)
