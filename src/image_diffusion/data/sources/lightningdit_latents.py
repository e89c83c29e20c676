"""Latents as extract_features.py of hustvl/LightningDiT writes them: a folder of safetensors files.

latents_rank00_shard000.safetensors, …    latents, latents_flip: [n, c, h, w], drawn once, unscaled; labels: [n]
latents_stats.pt                          mean and deviation of some of them; not read, they are measured anew
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from image_diffusion.core.files import Stamp, stamp_of
from image_diffusion.data.sources.latents import Encoded, LatentSource, listed, sha256_of
from image_diffusion.data.sources.listing import FewFiles, Item, Listing

_ARRAYS = ("latents", "latents_flip")
_DTYPES = ("F16", "F32", "F64")


class LightningDiTLatents(FewFiles, LatentSource):
    """Latents that were drawn once, of images and of their mirror images. There are no images to crop."""

    type: Literal["lightningdit_latents"] = "lightningdit_latents"
    """Latents as LightningDiT's extract_features.py writes them; path: the folder."""

    has_mirror_images: ClassVar[bool] = True

    def files(self) -> dict[str, tuple[str, Stamp]]:
        found = sorted(Path(self.path).glob("*.safetensors"))
        if not found:
            raise ValueError(f"data.source.path: {self.path} holds no .safetensors file. Give the folder with them.")
        return {path.name: (str(path), stamp_of(path)) for path in found}

    def listing(self) -> Listing:
        labels: dict[str, int] = {}
        addresses: dict[str, tuple[str | int, ...]] = {}
        for name, (path, stamp) in self.files().items():
            for row, label in enumerate(_labels(path, stamp)):
                labels[f"{name}/{row:06d}"] = label
                addresses[f"{name}/{row:06d}"] = (path, row)
        return listed(labels, addresses, self.path)

    def encoded(self, item: Item) -> Encoded:
        path, row = str(item.address[0]), int(item.address[1])
        file = _open(path, stamp_of(Path(path)))
        arrays = [file.get_slice(name)[row : row + 1] for name in _ARRAYS]
        return Encoded(arrays, sha256_of(*(each.tobytes() for each in arrays)))


@lru_cache(maxsize=256)
def _open(path: str, stamp: Stamp) -> Any:
    """A file, memory-mapped. stamp: so that another file of that name is opened anew. Raises ValueError."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}. Copy it again.") from None


def _labels(path: str, stamp: Stamp) -> list[int]:
    """The classes in a file, whose arrays fit them. Raises ValueError."""
    file = _open(path, stamp)
    if missing := sorted({*_ARRAYS, "labels"} - set(file.keys())):
        raise ValueError(f"{path} has no tensor {missing[0]}. Expected {', '.join(_ARRAYS)} and labels.")
    labels = file.get_tensor("labels")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: labels are {labels.dtype} {list(labels.shape)}, not integers [n].")
    for name in _ARRAYS:
        part = file.get_slice(name)
        shape, dtype = part.get_shape(), part.get_dtype()
        if len(shape) != 4 or shape[0] != len(labels) or dtype not in _DTYPES:
            raise ValueError(f"{path}: {name} is {dtype} {shape}, not floats [{len(labels)}, c, h, w], one a label.")
    return [int(label) for label in labels]
