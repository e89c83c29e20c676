"""Second images of a set of crops, such as masks, for networks that are conditioned on them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor

from image_diffusion.core.config.base import dump, parse
from image_diffusion.core.files.atomic import digest
from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.array_files import BadImage, Undecided
from image_diffusion.data.crop.image import READER, crop_image, quiet_pillow
from image_diffusion.data.encoded.pairs import PairSet
from image_diffusion.data.masks import LabelDecoder, Value
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.records import Quarantined, Sample, read_record
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import read_image
from image_diffusion.data.sources.folder import files_in, stem_of
from image_diffusion.systems.pairs.inputs import JoinedPairs, PairInputs

_MOST_LABELS = 256
_Level = Annotated[int, Field(ge=0, le=255)]
_Colour = tuple[_Level, _Level, _Level]
_Number = Annotated[int, Field(ge=0, le=2**16 - 1)]
_CROPPED_BY = ("resolution", "channels", "crop", "background", "range", "pages", "profile", "min_side", "max_pixels")
"""Keys of the section data that decide how an image is cropped."""

Read = Callable[[], bytes]
"""Function that reads a file. Raises OSError."""


class ImageFilePairs(JoinedPairs):
    """Second images of the crops, from another folder, cropped as the data set's images and stored next to them."""

    kind: ClassVar[str] = "images"
    condition: ClassVar[str] = "image"
    dtype: ClassVar[Literal["uint8"]] = "uint8"
    """Data type of the stored images."""
    type: Literal["images"] = "images"
    """Images of a second folder, such as masks, for system.condition image, from: pairs."""
    path: str | None = Field(None, min_length=1)
    """The folder. An image in it has the path (with any suffix) and the size of the data set's image that it belongs
    to. Unset: the data source itself provides the images, such as the masks of painted_digits."""
    labels: int | dict[str, _Number | _Colour] | None = None
    """Labels of masks. N: grey values, or numbers of a palette, from 0 to N - 1. {background: 0, cell: 255}: names,
    each with its grey value, number of a palette, or colour [red, green, blue]. Masks are resized by nearest neighbour,
    and the network receives a channel for each label. The bars of data.crop.type: pad have the first label. Unset: the
    images are pictures."""
    channels: Literal[1, 2, 3, 4] | None = None
    """Channels of pictures: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha. Unset: the value of data.channels."""

    @field_validator("labels")
    @classmethod
    def _several_of_one_kind(cls, value: int | dict[str, Value] | None) -> int | dict[str, Value] | None:
        if value is None:
            return value
        count = value if isinstance(value, int) else len(value)
        if not 2 <= count <= _MOST_LABELS:
            raise ValueError(f"{count} labels; expected 2 to {_MOST_LABELS}. Name each value of the masks.")
        if isinstance(value, dict):
            if len({type(level) for level in value.values()}) > 1:
                raise ValueError("some labels are numbers and some are colours. Give all of them one form.")
            if len({*value.values()}) < count:
                raise ValueError("two labels have one value. Give each its own.")
        return value

    @property
    def values(self) -> dict[str, Value]:
        """Return the value of each label by its name; empty for pictures."""
        if isinstance(self.labels, int):
            return {str(number): number for number in range(self.labels)}
        return dict(self.labels or {})

    @property
    def other_files(self) -> str | None:
        return self.path

    @property
    def needs_source(self) -> bool:
        return self.path is None

    @property
    def needs_crop(self) -> bool:
        return True

    def check(self, data: DataConfig) -> None:
        """Raise ValueError for a crop that cannot be applied to a second image."""
        if self.path is None and not isinstance(data.source, HasImages):
            raise ValueError(
                f"pairs.path is unset, but data.source.type: {data.source.type} has no images beside its own. Name a "
                f"folder of some: pairs: {{type: images, path: FOLDER}}."
            )
        if self.labels is not None and self.channels is not None:
            raise ValueError("pairs.channels is set beside pairs.labels: masks have a channel a label. Leave it out.")
        if data.crop.type == "random_resized":
            raise ValueError(
                "pairs.type is images, but data.crop.type is random_resized, which draws its parts by the bytes of a "
                "file: those of another image differ. Choose another crop."
            )

    def build(self, inputs: PairInputs) -> PairSet:
        if inputs.crops is None or inputs.data is None:
            raise ValueError("Images are cropped as those of a data set: give --data.")
        self.check(inputs.data)
        channels = self.channels or inputs.data.num_channels
        data = inputs.data.model_copy(update={"channels": 1 if self.labels is not None else channels})
        return PairedImages(inputs.crops, self._images(inputs.source), ImageCropper(data, self.values))

    def _images(self, source: Source | None) -> dict[str, Read]:
        """Return the function that reads each image, by its name without the suffix."""
        if self.path is not None:
            return {stem: partial(read_image, path) for stem, path in files_in(self.path, "pairs.path").items()}
        assert isinstance(source, HasImages)
        return {stem_of(name): read for name, read in source.images_beside().items()}


@runtime_checkable
class HasImages(Protocol):
    """Source that has a second image for each image."""

    def images_beside(self) -> Mapping[str, Read]:
        """Return the functions that read the second images, by the names of the first ones."""
        ...


class ImageCropper:
    """Cropper of images of a folder, by the settings of a data set.

    data: the section, with the channels of these images. labels: the value of each label by its name; empty for
    pictures.
    """

    def __init__(self, data: DataConfig, labels: Mapping[str, Value]) -> None:
        self._data, self._labels = data, labels
        self._decode = LabelDecoder(list(labels.values())) if labels else None
        self.shape = (data.num_channels, *data.size)
        plain = dump(data)
        values = {name: value if isinstance(value, int) else list(value) for name, value in labels.items()}
        self.described: dict[str, Any] = {
            "labels": values,
            "crop": {key: plain[key] for key in _CROPPED_BY},
            "reader": READER,
        }

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> ImageCropper:
        """Return the cropper with this description (`described`), such as that in the manifest of a set."""
        data = {"name": "images", "source": {"type": "folder", "path": "."}} | described["crop"]
        labels = {
            name: value if isinstance(value, int) else tuple(value) for name, value in described["labels"].items()
        }
        return cls(parse(DataConfig, data, "pairs"), labels)

    def example(self, number: int) -> NDArray[Any]:
        """Return pixels of an example file, [H, W] or [H, W, C]: only the label with this number, or grey."""
        channels, height, width = self.shape
        if not self._labels:
            return np.full((height, width, channels) if channels > 1 else (height, width), 128, np.uint8)
        value = np.asarray(list(self._labels.values())[number])
        return np.broadcast_to(value, (height, width, *value.shape)).astype(
            np.uint8 if value.max() < 256 else np.uint16
        )

    def __call__(self, data: bytes) -> tuple[Sequence[NDArray[np.uint8]], tuple[int, int]]:
        """Return the crops of a file, uint8 [C, H, W], and the (width, height) of its image. Raises BadImage, and
        Undecided for a file whose pages have no known meaning. Call it inside `quiet_pillow()`."""
        crop = crop_image(data, self._data, self._decode)
        return crop.crops, crop.size

    def read(
        self, files: Sequence[str | Path | bytes], key: str, requires_size: bool = False
    ) -> tuple[Tensor, list[tuple[int, int]]]:
        """Return the crops of files, or of the contents of files, uint8 [P, C, H, W], and the (width, height) of each
        image. key: the configuration key of the files. requires_size: reject files of another size instead of cropping
        them. Raises ValueError for files that cannot be read."""
        images = dict[str | Path | bytes, tuple[NDArray[np.uint8], tuple[int, int]]]()
        height, width = self.shape[1:]
        with quiet_pillow():
            for row, file in enumerate(files):
                if file in images:
                    continue
                name = f"image of row {row}" if isinstance(file, bytes) else str(file)
                try:
                    crops, size = self(file if isinstance(file, bytes) else read_image(Path(file)))
                except (BadImage, Undecided, OSError) as error:
                    raise ValueError(f"{key}: {name} cannot be read: {error}. Remove it, or replace it.") from None
                if requires_size and size != (width, height):
                    raise ValueError(
                        f"{key}: {name} has {size[0]} x {size[1]} pixels, but the network takes images of {width} x "
                        f"{height}. Give one of that size."
                    )
                images[file] = crops[0], size
        pixels, sizes = zip(*(images[file] for file in files), strict=True)
        return torch.from_numpy(np.stack(pixels)), list(sizes)


class PairedImages(PairSet):
    """Second images [C, H, W] of the crops, with one shard for each shard of crops: pictures, or the numbers of labels
    in one channel. A shard is cropped as a whole, and kept in memory until it is written."""

    kind: ClassVar = "images"

    def __init__(self, crops: Path, files: Mapping[str, Read], crop: ImageCropper) -> None:
        shards = open_shards(crops, "all")
        self.num_shards, self.num_rows = len(shards.manifest["shards"]), shards.num_samples
        self._crops, self._files, self._crop = crops, files, crop
        self.shape, self.identity = crop.shape, crop.described
        self._hashes = lru_cache(maxsize=1)(self._hash_shard)
        self._read = lru_cache(maxsize=1)(self._read_shard)

    def samples(self, shard: int) -> list[Sample]:
        """Return the crops with a second image: their ids are the hashes of the data set's images."""
        return self._read(shard)[0]

    def missing(self, shard: int) -> list[Quarantined]:
        """Return the crops without a second image, or with one that does not fit."""
        return self._read(shard)[1]

    def made_from(self, shard: int) -> str:
        """Return the digest of the second images and of their crops."""
        samples, hashes = self._hashes(shard)
        crops = [[sample.path, sample.sha256, sample.view, list(sample.size)] for sample in samples]
        return digest([crops, hashes])

    def rows(self, shard: int, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the second images of some crops, uint8 [n, C, H, W]."""
        return np.stack(self._read(shard)[2][start:stop])

    def _hash_shard(self, shard: int) -> tuple[list[Sample], list[str]]:
        """Return the crops of a shard, and the sha256 of each second image; empty if it cannot be read."""
        samples = read_record(self._crops, shard).samples
        stems = [stem_of(sample.path) for sample in samples]
        of_each = {stem: self._hash(stem) for stem in dict.fromkeys(stems)}
        return samples, [of_each[stem] for stem in stems]

    def _hash(self, stem: str) -> str:
        try:
            return hashlib.sha256(self._files[stem]()).hexdigest()
        except (KeyError, OSError):
            return ""

    def _read_shard(self, shard: int) -> tuple[list[Sample], list[Quarantined], list[NDArray[np.uint8]]]:
        samples, bad, images = list[Sample](), list[Quarantined](), list[NDArray[np.uint8]]()
        with quiet_pillow():
            for sample, sha256 in zip(*self._hashes(shard), strict=True):
                try:
                    images.append(self._image(sample, sha256))
                    samples.append(sample)
                except BadImage as error:
                    bad.append(Quarantined(sample.path, str(error), sample.sha256))
        return samples, bad, images

    def _image(self, sample: Sample, sha256: str) -> NDArray[np.uint8]:
        """Return the second image of a crop. Raises BadImage if there is none that fits."""
        read = self._files.get(stem_of(sample.path))
        if read is None:
            raise BadImage("it has no image of its name beside it")
        try:
            data = read()
        except OSError as error:
            raise BadImage(f"the image beside it cannot be read: {error.strerror or error}") from None
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"The image beside {sample.path} has changed while it was read. Run embed again.")
        try:
            crops, size = self._crop(data)
        except (BadImage, Undecided) as error:
            raise BadImage(f"the image beside it: {error}") from None
        if size != sample.size:
            raise BadImage(
                f"the image beside it has {size[0]} x {size[1]} pixels, not {sample.size[0]} x {sample.size[1]}"
            )
        return crops[sample.view]
