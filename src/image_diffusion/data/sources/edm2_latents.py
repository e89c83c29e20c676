"""Latents as `dataset_tool.py encode` of NVlabs/edm2 writes them: a folder or a zip.

    00000/img-mean-std-00000000.npy    float32 [2c, h, w]: the mean, then the standard deviation, unscaled
    dataset.json                       {"labels": [["00000/img-mean-std-00000000.npy", 5], …]} or {"labels": null}

Its autoencoder was given pixels in [0, 1] (`encode_pixels` in training/encoders.py divides by 255), where diffusers'
take [-1, 1]: the codec has to say `pixels: unit` to decode what is learnt from these.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from image_diffusion.data.sources.folder import Folder
from image_diffusion.data.sources.labels_file import LABELS_FILE, labels_in
from image_diffusion.data.sources.latents import Encoded, LatentSource, array_in, listed, sha256_of
from image_diffusion.data.sources.listing import Found, Item, Listing
from image_diffusion.data.sources.zip_archive import ZipArchive


class Edm2Latents(LatentSource):
    """Means and standard deviations of a VAE, without mirror images. There are no images to crop."""

    type: Literal["edm2_latents"] = "edm2_latents"
    """Latents as EDM2's dataset_tool.py encode writes them; path: the folder or the zip."""
    classes: Literal["labels", "none"] = "labels"
    """labels: dataset.json tells them. none: unconditional data."""

    num_moments: ClassVar[Literal[1, 2]] = 2
    pixels: ClassVar[Literal["signed", "unit"]] = "unit"

    def found(self) -> Iterator[Found]:
        return self._inner.found()

    def listing(self) -> Listing:
        found = {item.name: item.address for item in self._inner.listing().items if item.name.endswith(".npy")}
        if self.classes == "none":
            return listed(None, found, self.path)
        labels = self._labels()
        if unlabelled := sorted(found.keys() - labels.keys()):
            raise ValueError(f"{self.path}: {LABELS_FILE} names no class of {unlabelled[0]}. Copy {LABELS_FILE} again.")
        if missing := sorted(labels.keys() - found.keys()):
            raise ValueError(f"{self.path}: {missing[0]} is missing, which {LABELS_FILE} names. Copy all of it again.")
        return listed({name: int(label) for name, label in labels.items()}, found, self.path)

    def encoded(self, item: Item) -> Encoded:
        where = f"{self.path}: {item.name}"
        try:
            data = self._inner.read(item)
        except OSError as error:
            raise ValueError(f"{where} cannot be read: {error.strerror or error}. Copy it again.") from None
        array = array_in(data, where)
        if array.ndim != 3 or array.dtype.kind != "f" or len(array) % 2:
            raise ValueError(f"{where} holds {array.dtype} {list(array.shape)}, not means and deviations [2c, h, w].")
        return Encoded([array.reshape(2, len(array) // 2, *array.shape[1:])], sha256_of(data))

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
