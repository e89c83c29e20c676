"""Condition on an image that is derived from the image itself, such as a small one to enlarge (super-resolution). In
training it is derived from the crops. In sampling it is derived from held-out crops, with which the result can be
compared, or read from a samples.npz, so that one experiment can enlarge the samples of another (a cascade, Ho et al.
2021).
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.codecs import CodecConfig
from image_diffusion.codecs.base import from_uint8, to_uint8
from image_diffusion.core.config.base import dump
from image_diffusion.core.files.atomic import digest, sha256_file
from image_diffusion.core.files.image_arrays import read_arrays
from image_diffusion.core.random.streams import Streams, image_streams
from image_diffusion.core.resolution import Size
from image_diffusion.core.types import IMAGE, DataSpec, SamplesOf
from image_diffusion.data.config import DataConfig
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.systems.diffusion.conditions.base import (
    ConditionInputs,
    ConditionPart,
    ImageSource,
    SamplingRequest,
    ServedModel,
    images_of,
    read_rows,
    rows_of,
)
from image_diffusion.systems.diffusion.conditions.degradations import Degradation, Degradations
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.pairs.images import ImageCropper
from image_diffusion.systems.sampling import Column

_KEY, _ROWS = "sample.small_images", "sample.conditions"


class ImagePart(ConditionPart, ABC):
    """Condition on another image, whose channels are appended to the network's input."""

    model_config = ConfigDict(serialize_by_alias=True)

    keys: ClassVar[frozenset[str]] = frozenset({"small_images", "conditions"})
    requires_size: ClassVar[bool]
    """True if image files must have the size of the network's condition; false: they are cropped to it."""

    def check(self, section: str, settings: SampleConfig, pairs: Any = None) -> None:
        """Raise ValueError for settings without effect, and for rows with missing image files."""
        if settings.prompts is not None or settings.negative_prompt:
            raise ValueError(f"{section}.prompts is set, but the network takes images, not words. Leave it out.")
        if settings.labels != "balanced":
            raise ValueError(f"{section}.labels is set, but the network takes images alone. Leave it out.")
        super().check(section, settings, pairs)
        files = _files_of_rows(settings, f"{section}.conditions")
        if files and settings.small_images is not None:
            raise ValueError(
                f"{section}.small_images is set, and {section}.conditions names images. Leave one of them out."
            )
        if absent := next((path for path in files if not path.is_file()), None):
            raise ValueError(f"{section}.conditions: {absent} does not exist. Give the path of an image file.")

    def names(self, pairs: Any) -> tuple[str, ...]:
        return (IMAGE,)

    def pictures(self, settings: SampleConfig) -> list[Path]:
        return _files_of_rows(settings, _ROWS)

    def served(self, model: ServedModel) -> dict[str, Column]:
        """Return the column of image files. Its example has two files."""
        crop = self.cropper(model.spec, model.pairs)
        return {IMAGE: Column("binary", required=True, example=tuple(_as_png(crop.example(i)) for i in (0, -1)))}

    def of_rows(self, inputs: ConditionInputs) -> SamplingRequest | None:
        """Return the images of the requested rows; None if the rows name none. Raises ValueError for images that cannot
        be read or do not fit."""
        files = images_of(inputs.rows or [], inputs.key, bytes if inputs.is_request else str)
        if not files:
            return None
        assert inputs.image_source is not None
        crop = self.cropper(inputs.image_source.spec, inputs.pairs)
        return self.of_stored(crop.read(files, inputs.key, self.requires_size)[0], inputs)

    def of_stored(self, stored: Tensor, inputs: ConditionInputs) -> SamplingRequest:
        """Return the request for cropped images, uint8 [P, C, H, W]; sample i takes image i modulo P."""
        assert inputs.image_source is not None
        image = self.as_condition(stored, inputs.image_source.spec)
        described = self.described(inputs.pairs) | {"sha256": digest(stored.numpy().tobytes().hex())}
        return SamplingRequest(
            conditions={IMAGE: image}, described={"image": described}, drawn=self.drawn(image, inputs.pairs)
        )

    @abstractmethod
    def cropper(self, spec: DataSpec, pairs: Any) -> ImageCropper:
        """Return the cropper of files. spec: of the network. Raises ValueError if no file can contain such images."""

    @abstractmethod
    def as_condition(self, stored: Tensor, spec: DataSpec) -> Tensor:
        """Return cropped images, uint8 [B, C, H, W], as the network's condition, float32 [B, C', h, w] in [-1, 1]."""

    def described(self, pairs: Any) -> dict[str, Any]:
        """Return the description of the part for samples.json."""
        return {"condition": dump(self)}

    def drawn(self, image: Tensor, pairs: Any) -> Tensor | None:
        """Return the pictures of the conditions, shown above the samples; None: none."""
        return None

    @property
    def picture(self) -> str:
        """Return the name of the picture that compares the conditions with the samples."""
        return "paired"

    def check_data(self, data: DataConfig, codec: CodecConfig) -> None:
        """Raise ValueError for data or a codec that does not fit the image."""

    def derived(self, spec: DataSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the conditions derived from the images themselves, by name. spec: of the images."""
        return {}

    def degraded(self, x: Tensor, streams: Streams) -> dict[str, Tensor]:
        """Return the condition derived from images [B, C, H, W] in [-1, 1], by name."""
        return {}

    @abstractmethod
    def of_held_out(self, images: Shards, rows: NDArray[np.int64], streams: Streams) -> Tensor:
        """Return the conditions of images with these rows, float32 [B, C', h, w] in [-1, 1]. streams: of the
        samples."""

    def baselines(self, made: Tensor, size: Size) -> dict[str, Tensor]:
        """Return guesses at the images by methods without a network, by name, for comparison."""
        return {}

    def draws_images(self, settings: SampleConfig) -> SamplesOf | str | None:
        """Return the source of the images in the section sample; "validation": derived from held-out images; None
        without one."""
        return None


class ImageCondition(Degradations, ImagePart):
    """An image that is derived from the image itself."""

    type: Literal["image"] = "image"
    """An image."""
    source: Literal["self"] = Field(alias="from")
    """The image itself, degraded by shrink, gray, hole or edges."""

    requires_size: ClassVar[bool] = True

    @model_validator(mode="after")
    def _is_made_in_one_way(self) -> Self:
        if len(self.degradations) != 1:
            named = " and ".join(self.degradations) or "nothing"
            known = ", ".join(Degradations.model_fields)
            raise ValueError(f"{named} is set beside from: self. Set one of {known}.")
        return self

    @property
    def degradation(self) -> Degradation:
        """Return the degradation that derives the image."""
        return next(iter(self.degradations.values()))

    def check_data(self, data: DataConfig, codec: CodecConfig) -> None:
        if codec.stores != "crops":
            raise ValueError(
                f"system.condition has an image that is made of the image itself, but codec.type is {codec.type}: it "
                f"is made of pixels. Leave one of the two out, or take images of another folder, from: pairs."
            )
        try:
            self.degradation.shape(data.num_channels, data.size)
        except ValueError as error:
            raise ValueError(f"system.condition: {error}. Leave it out, or change it.") from None

    def spec(self, spec: DataSpec, pairs: Shards | None) -> DataSpec:
        """Return the data spec of the network: no classes, an image of [C', h, w]."""
        return spec.model_copy(update={"num_classes": 0, "conditions": self.derived(spec)})

    def derived(self, spec: DataSpec) -> dict[str, tuple[int, ...]]:
        return {IMAGE: self.degradation.shape(spec.channels, spec.size)}

    def of_held_out(self, images: Shards, rows: NDArray[np.int64], streams: Streams) -> Tensor:
        return self.degradation(from_uint8(images.gather(rows)), streams)

    def baselines(self, made: Tensor, size: Size) -> dict[str, Tensor]:
        return self.degradation.baselines(made, size)

    @property
    def picture(self) -> str:
        return self.degradation.picture

    def degraded(self, x: Tensor, streams: Streams) -> dict[str, Tensor]:
        return {IMAGE: self.degradation(x, streams)}

    def draws_images(self, settings: SampleConfig) -> SamplesOf | str | None:
        return None if self.pictures(settings) else settings.small_images or "validation"

    def cropper(self, spec: DataSpec, pairs: Any) -> ImageCropper:
        channels, *size = spec.conditions[IMAGE]
        if channels > 4:
            raise ValueError(f"The network takes images of {channels} channels, and pictures have 1 to 4.")
        return ImageCropper.from_description({"labels": {}, "crop": {"resolution": size, "channels": channels}})

    def as_condition(self, stored: Tensor, spec: DataSpec) -> Tensor:
        return from_uint8(stored)

    def sampling_request(self, inputs: ConditionInputs) -> SamplingRequest:
        """Return the conditions of the samples, and their classes, if known. Raises ValueError for images that are
        missing or do not fit."""
        if (of_rows := self.of_rows(inputs)) is not None:
            return of_rows
        settings, image_source, seeds = inputs.settings, inputs.image_source, inputs.seeds
        assert image_source is not None
        wanted = self.draws_images(settings)
        described = self.described(inputs.pairs)
        if wanted == "validation" or isinstance(image_source.source, Shards):
            crops = image_source.source if isinstance(image_source.source, Shards) else _held_out(image_source)
            rows, labels, origin = rows_of(crops, seeds)
            image = self.of_held_out(crops, rows, image_streams(seeds, settings.seed))
            described |= origin
        else:
            if image_source.source is None and isinstance(wanted, SamplesOf):
                raise ValueError(f"{_KEY} needs the samples.npz of {wanted.experiment}. Name it: --small-images PATH.")
            path = image_source.source or Path(str(wanted))
            image, labels = read_images(path, image_source.spec, seeds)
            described |= {"sha256": sha256_file(path)}
        return SamplingRequest(conditions={IMAGE: image}, labels=labels, described={"image": described})


def _held_out(image_source: ImageSource) -> Shards:
    """Return the held-out crops. Raises ValueError if there are none, or if their size differs."""
    if image_source.source is None:
        raise ValueError(f"{_KEY} needs the folder of the crops. Name it: --small-images PATH.")
    assert isinstance(image_source.source, Path)
    crops, spec = open_shards(image_source.source, "validation"), image_source.spec
    if crops.shape != (spec.channels, *spec.size):
        raise ValueError(
            f"The crops in {image_source.source} have shape {list(crops.shape)}, but the network makes images of "
            f"{[spec.channels, *spec.size]}. Name the crops it was trained on."
        )
    if crops.num_samples == 0:
        raise ValueError(f"{_KEY} is validation, but no images are held out. Set data.validation_fraction.")
    return crops


def read_images(path: Path, spec: DataSpec, seeds: Tensor) -> tuple[Tensor, Tensor | None]:
    """Read images that a network is conditioned on, for seeds int64 [N]: float32 [N, C', h, w] in [-1, 1], and their
    labels.

    path: a samples.npz, arr_0 uint8 [M, h, w, C'] and, with classes, arr_1 int64 [M]; seed s takes row s modulo M.
    spec: of the network. Raises ValueError when it cannot be read, its images are of another size, or a label is not a
    class of the network.
    """
    channels, *size = spec.conditions[IMAGE]
    try:
        arrays = read_arrays(path)
        images = torch.from_numpy(arrays["arr_0"].copy())
        labels = torch.from_numpy(arrays["arr_1"].copy()) if "arr_1" in arrays else None
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{_KEY}: {path} is not a samples.npz: {error}") from None
    if tuple(images.shape[1:]) != (*size, channels) or images.dtype != torch.uint8 or not len(images):
        raise ValueError(
            f"{_KEY}: {path} holds {images.dtype} images of {tuple(images.shape)}, but the network takes uint8 images "
            f"of (N, {size[0]}, {size[1]}, {channels}). Sample an experiment of that resolution."
        )
    if labels is not None and spec.num_classes and not 0 <= int(labels.min()) <= int(labels.max()) < spec.num_classes:
        raise ValueError(
            f"{_KEY}: {path} has labels up to {int(labels.max())}, but the network has {spec.num_classes} classes. "
            f"Sample an experiment of the same data."
        )
    rows = seeds % len(images)
    return from_uint8(images[rows].permute(0, 3, 1, 2)), None if labels is None else labels[rows]


def condition_pictures(conditions: Tensor, images: Tensor) -> Tensor:
    """Return conditions, float32 [N, C', h, w] in [-1, 1], as pictures of the size of images [..., C, H, W], uint8 [N,
    C, H, W]: their first channels, or the first one alone if they have fewer."""
    channels, *size = images.shape[1:]
    first = conditions[:, : channels if conditions.shape[1] >= channels else 1]
    return to_uint8(F.interpolate(first, size, mode="nearest")).expand(-1, channels, -1, -1)


def _files_of_rows(settings: SampleConfig, key: str) -> list[Path]:
    if settings.conditions is None:
        return []
    return [Path(str(file)) for file in images_of(read_rows(settings.conditions, key), key, str)]


def _as_png(pixels: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()
