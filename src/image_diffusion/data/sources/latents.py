"""Latents that other tools encoded, without their images."""

from __future__ import annotations

import hashlib
import io
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from image_diffusion.core.files.atomic import Stamp, stamp_of
from image_diffusion.data.sources.archives import ZipArchive
from image_diffusion.data.sources.base import FewFiles, FileGroup, ImageSource, Item, Listing
from image_diffusion.data.sources.folder import Folder
from image_diffusion.data.sources.layouts import LABELS_FILE, labels_in

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

UNIT = "latent"
"""Kind of an item of these sources, in the singular."""
_ARRAYS, _DTYPES = ("latents", "latents_flip"), ("F16", "F32", "F64")
_FEATURES, _LABELS = "_features", "_labels"


@dataclass(frozen=True)
class Encoded:
    """One image encoded by another tool, unscaled.

    arrays: latent of the image, and of its mirror image if it exists, each [k, c, h, w]: mean and standard deviation,
    or only the latent if k = 1. sha256: of the bytes that were read.
    """

    arrays: Sequence[NDArray[np.generic]]
    sha256: str


class LatentSource(ImageSource):
    """Base of the sources of latents in place of images. Each layout is a class in `Source`."""

    type: str
    """Name of the source."""
    path: str = Field(min_length=1)
    """Path of the latents."""

    no_captions: ClassVar[str] = "data.source holds latents: there are no images beside which captions could lie."
    has_mirror_images: ClassVar[bool] = False
    """True if the source holds latents of the mirror images, too."""
    num_moments: ClassVar[Literal[1, 2]] = 1
    """2: mean and standard deviation; 1: only the latent."""
    pixels: ClassVar[Literal["signed", "unit"]] = "signed"
    """Range of the pixels that the autoencoder was given: [-1, 1], or [0, 1]."""

    @abstractmethod
    def listing(self) -> Listing:
        """Return every encoded image, sorted by name, with its class number in the files. Raises ValueError for files
        that are missing, truncated or inconsistent."""

    @abstractmethod
    def encoded(self, item: Item) -> Encoded:
        """Return one encoded image. Raises ValueError with the name of a file that cannot be read or is invalid."""

    def settings(self) -> dict[str, object]:
        """Return the other settings that decide the result of `encoded`."""
        return {}

    def read(self, item: Item) -> bytes:
        """Raise OSError: the source has no images."""
        raise OSError(f"{item.name} is a latent, not an image")


class Edm2Latents(LatentSource):
    """Means and standard deviations of a VAE as `dataset_tool.py encode` of NVlabs/edm2 writes them, unscaled and
    without mirror images: a folder or a zip.

        00000/img-mean-std-00000000.npy    float32 [2c, h, w]: the mean, then the standard deviation
        dataset.json                       {"labels": [["00000/img-mean-std-00000000.npy", 5], …]} or {"labels": null}

    EDM2 encodes pixels in [0, 1] (`encode_pixels` in training/encoders.py divides by 255), while the autoencoders of
    diffusers take [-1, 1]: set `pixels: unit` in the codec to decode the samples of a model that learns these latents.
    """

    type: Literal["edm2_latents"] = "edm2_latents"
    """Latents as EDM2's dataset_tool.py encode writes them; path: the folder or the zip."""
    classes: Literal["labels", "none"] = "labels"
    """labels: dataset.json gives the classes. none: unconditional data."""

    num_moments: ClassVar[Literal[1, 2]] = 2
    pixels: ClassVar[Literal["signed", "unit"]] = "unit"

    def file_groups(self) -> Iterator[FileGroup]:
        return self._inner.file_groups()

    def listing(self) -> Listing:
        addresses = {item.name: item.address for item in self._inner.listing().items if item.name.endswith(".npy")}
        if self.classes == "none":
            return _listing(None, addresses, self.path)
        labels = self._labels()
        if unlabelled := sorted(addresses.keys() - labels.keys()):
            raise ValueError(f"{self.path}: {LABELS_FILE} names no class of {unlabelled[0]}. Copy {LABELS_FILE} again.")
        if missing := sorted(labels.keys() - addresses.keys()):
            raise ValueError(f"{self.path}: {missing[0]} is missing, which {LABELS_FILE} names. Copy all of it again.")
        return _listing({name: int(label) for name, label in labels.items()}, addresses, self.path)

    def encoded(self, item: Item) -> Encoded:
        where = f"{self.path}: {item.name}"
        data, array = _array(self._inner, item, where)
        if array.ndim != 3 or array.dtype.kind != "f" or len(array) % 2:
            raise ValueError(f"{where} holds {array.dtype} {list(array.shape)}, not means and deviations [2c, h, w].")
        return Encoded([array.reshape(2, len(array) // 2, *array.shape[1:])], _sha256(data))

    @property
    def _inner(self) -> Folder | ZipArchive:
        if Path(self.path).is_dir():
            return Folder(path=self.path, classes="none")
        return ZipArchive(path=self.path, classes="none")

    def _labels(self) -> dict[str, str]:
        advice = "Copy it again, or set data.source.classes to none."
        try:
            data = self._inner.read(Item(LABELS_FILE, None, (LABELS_FILE,)))
        except OSError as error:
            raise ValueError(
                f"{self.path}: {LABELS_FILE} cannot be read: {error.strerror or error}. {advice}"
            ) from None
        labels = labels_in(data, self.path)
        if labels is None:
            raise ValueError(f"{self.path}: {LABELS_FILE} names no classes. {advice}")
        return labels


class LightningDiTLatents(FewFiles, LatentSource):
    """Latents as extract_features.py of hustvl/LightningDiT writes them, drawn once and unscaled, of images and of
    their mirror images: a folder of safetensors files.

        latents_rank00_shard000.safetensors, …    latents, latents_flip: [n, c, h, w]; labels: [n]
        latents_stats.pt                          mean and std of some latents; not read, but measured again
    """

    type: Literal["lightningdit_latents"] = "lightningdit_latents"
    """Latents as LightningDiT's extract_features.py writes them; path: the folder."""

    has_mirror_images: ClassVar[bool] = True

    def files(self) -> dict[str, tuple[str, Stamp]]:
        paths = sorted(Path(self.path).glob("*.safetensors"))
        if not paths:
            raise ValueError(f"data.source.path: {self.path} holds no .safetensors file. Give the folder with them.")
        return {path.name: (str(path), stamp_of(path)) for path in paths}

    def listing(self) -> Listing:
        labels: dict[str, int] = {}
        addresses: dict[str, tuple[str | int, ...]] = {}
        for name, (path, stamp) in self.files().items():
            for row, label in enumerate(_labels(path, stamp)):
                labels[f"{name}/{row:06d}"] = label
                addresses[f"{name}/{row:06d}"] = (path, row)
        return _listing(labels, addresses, self.path)

    def encoded(self, item: Item) -> Encoded:
        path, row = str(item.address[0]), int(item.address[1])
        file = _open(path, stamp_of(Path(path)))
        arrays = [file.get_slice(name)[row : row + 1] for name in _ARRAYS]
        return Encoded(arrays, _sha256(*(array.tobytes() for array in arrays)))


class FastDiTLatents(LatentSource):
    """Latents as extract_features.py of chuanyangjin/fast-DiT writes them, two folders of `.npy` files.

        imagenet256_features/0.npy, …    float32 [1, c, h, w], drawn once and multiplied by 0.18215
        imagenet256_labels/0.npy, …      int64 [1]

    Each image was mirrored at random once, before it was encoded, so there are no mirror images.
    """

    type: Literal["fastdit_latents"] = "fastdit_latents"
    """Latents as fast-DiT's extract_features.py writes them; path: the folder with NAME_features and NAME_labels."""
    scale: float = Field(0.18215, gt=0)
    """Factor by which the latents were multiplied. It is divided out, since the codec scales latents itself."""

    def file_groups(self) -> Iterator[FileGroup]:
        for folder in self._folders():
            for group in self._inner(folder).file_groups():
                yield replace(group, folder=f"{folder}/{group.folder}")

    def settings(self) -> dict[str, object]:
        return {"scale": self.scale}

    def listing(self) -> Listing:
        folders = self._folders()
        features, labels = ({item.name for item in self._inner(folder).listing().items} for folder in folders)
        if odd := sorted(features ^ labels):
            has, lacks = folders if odd[0] in features else reversed(folders)
            raise ValueError(
                f"{self.path}/{has}/{odd[0]} is there, but {self.path}/{lacks}/{odd[0]} is missing. Copy both."
            )
        return _listing(
            {name: self._label(folders[1], name) for name in features},
            {name: (folders[0], name) for name in features},
            self.path,
        )

    def encoded(self, item: Item) -> Encoded:
        folder, name = map(str, item.address)
        data, array = self._array(folder, name)
        if array.ndim != 4 or len(array) != 1 or array.dtype.kind != "f":
            raise ValueError(
                f"{self.path}/{folder}/{name} holds {array.dtype} {list(array.shape)}, not one latent, floats "
                "[1, c, h, w]."
            )
        return Encoded([array.astype("float64") / self.scale], _sha256(data))

    def _folders(self) -> tuple[str, str]:
        """Return the names of both folders."""
        names = sorted(path.name for path in Path(self.path).glob(f"*{_FEATURES}") if path.is_dir())
        if len(names) != 1:
            raise ValueError(
                f"data.source.path: {self.path} holds {len(names)} folders NAME{_FEATURES}, not one. Give the folder "
                f"in which NAME{_FEATURES} and NAME{_LABELS} lie."
            )
        labels = names[0].removesuffix(_FEATURES) + _LABELS
        if not Path(self.path, labels).is_dir():
            raise ValueError(f"data.source.path: {self.path}/{labels} is missing. Copy it beside {names[0]}.")
        return names[0], labels

    def _inner(self, folder: str) -> Folder:
        return Folder(path=str(Path(self.path, folder)), classes="none")

    def _array(self, folder: str, name: str) -> tuple[bytes, NDArray[np.generic]]:
        return _array(self._inner(folder), Item(name, None, (name,)), str(Path(self.path, folder, name)))

    def _label(self, folder: str, name: str) -> int:
        _, array = self._array(folder, name)
        if array.shape != (1,) or array.dtype.kind not in "iu":
            raise ValueError(
                f"{self.path}/{folder}/{name} holds {array.dtype} {list(array.shape)}, not one class, an integer [1]."
            )
        return int(array[0])


def _array(source: Folder | ZipArchive, item: Item, where: str) -> tuple[bytes, NDArray[np.generic]]:
    """Return the bytes of a `.npy` file of a source, and its array. where: name of the file, for errors. Raises
    ValueError for a file that cannot be read."""
    import numpy as np  # imported here: change detection does not need it

    try:
        data = source.read(item)
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror or error}. Copy it again.") from None
    try:
        array: NDArray[np.generic] = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where} is damaged or cut short: {reason}. Copy it again.") from None
    return data, array


def _sha256(*parts: bytes) -> str:
    """Return the sha256 of concatenated bytes."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _listing(labels: Mapping[str, int] | None, addresses: Mapping[str, tuple[str | int, ...]], where: str) -> Listing:
    """List the items by name, with the labels, if any, as their class numbers. where: name of the source, for errors.
    Raises ValueError for a negative label or an empty source."""
    if not addresses:
        raise ValueError(f"data.source.path: {where} holds no latents. Give the folder or file that the tool wrote.")
    if labels is None:
        return Listing([Item(name, None, addresses[name]) for name in sorted(addresses)], [], [], unit=UNIT)
    if wrong := next((name for name in sorted(addresses) if labels[name] < 0), None):
        raise ValueError(f"{where}: the class of {wrong} is {labels[wrong]}. Classes are numbered from 0.")
    classes = [str(number) for number in range(max(labels[name] for name in addresses) + 1)]
    return Listing([Item(name, labels[name], addresses[name]) for name in sorted(addresses)], classes, [], unit=UNIT)


@lru_cache(maxsize=256)
def _open(path: str, stamp: Stamp) -> Any:
    """Open a file, memory-mapped. stamp: of the file, so that a replaced file is reopened. Raises ValueError."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}. Copy it again.") from None


def _labels(path: str, stamp: Stamp) -> list[int]:
    """Return the classes in a file, after checking that its arrays match. Raises ValueError."""
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
