"""Condition on a second image of each image, such as its mask, which the stage `embed` has stored. Sampling uses those
of held-out images, with which the samples can be compared, or reads a folder of images.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from image_diffusion.codecs.base import from_uint8
from image_diffusion.core.devices import to_device
from image_diffusion.core.random.streams import Streams, image_streams
from image_diffusion.core.types import IMAGE, DataSpec, SamplesOf
from image_diffusion.data.config import DataConfig
from image_diffusion.data.shards.reader import Shards
from image_diffusion.data.sources.folder import files_in
from image_diffusion.systems.diffusion.conditions.base import ConditionInputs, SamplingRequest, held_out, rows_of
from image_diffusion.systems.diffusion.conditions.image import ImagePart
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.pairs.images import ImageCropper

_KEY = "sample.small_images"


class PairedImageCondition(ImagePart):
    """An image of another folder (section pairs): a picture, or a mask with a channel for each label."""

    type: Literal["image"] = "image"
    """An image."""
    source: Literal["pairs"] = Field(alias="from")
    """The image of the same name in the folder of the section pairs."""

    reads: ClassVar[str] = "images"
    pairs_example: ClassVar[str] = "{type: images, path: FOLDER}"
    source_key: ClassVar[str] = "small_images"
    source_advice: ClassVar[str] = "name a folder"
    requires_size: ClassVar[bool] = False

    def check(self, section: str, settings: SampleConfig, pairs: Any = None) -> None:
        """Raise ValueError for settings without effect, and for images that are not a folder of files."""
        super().check(section, settings, pairs)
        named = settings.small_images
        if named is not None and (isinstance(named, SamplesOf) or not Path(named).is_dir()):
            raise ValueError(
                f"{section}.small_images is {named if isinstance(named, str) else 'an experiment'}, but the network "
                f"takes images like those of pairs.path. Name a folder of some, or leave it out for those of held-out "
                f"images."
            )

    def check_pairs(self, pairs: Any, data: DataConfig) -> None:
        """Raise ValueError for a crop that cannot be applied to the second images."""
        pairs.check(data)

    def spec(self, spec: DataSpec, pairs: Shards | None) -> DataSpec:
        """Return the data spec of the network: no classes, an image of [channels or labels, H, W]."""
        assert pairs is not None
        shape = (_channels(pairs), *pairs.shape[1:])
        return spec.model_copy(update={"num_classes": 0, "conditions": {IMAGE: shape}})

    def training_conditions(self, stored: Tensor, streams: Streams, spec: DataSpec) -> dict[str, Tensor]:
        """Return the second images [B, C, H, W] as the network's condition."""
        return {IMAGE: as_condition(stored, spec.conditions[IMAGE][0])}

    def draws(self, settings: SampleConfig) -> SamplesOf | str | None:
        return "validation" if settings.small_images is None and not super().pictures(settings) else None

    def of_held_out(self, images: Shards, rows: NDArray[np.int64], streams: Streams) -> Tensor:
        return as_condition(images.gather_of(self.reads, rows), _channels(images.joined_sets[self.reads]))

    def pictures(self, settings: SampleConfig) -> list[Path]:
        """Return the image files of the configured folder, or those that the rows name. Raises ValueError for a folder
        without images, and for a table that cannot be read."""
        if settings.small_images is None:
            return super().pictures(settings)
        return list(files_in(str(settings.small_images), _KEY).values())

    def cropper(self, spec: DataSpec, pairs: Any) -> ImageCropper:
        if pairs is None:
            raise ValueError("The model does not say which images it was trained on. Train it again.")
        return ImageCropper.from_description(pairs)

    def as_condition(self, stored: Tensor, spec: DataSpec) -> Tensor:
        return as_condition(stored, spec.conditions[IMAGE][0])

    def described(self, pairs: Any) -> dict[str, Any]:
        return super().described(pairs) | {"labels": list(pairs["labels"])}

    def drawn(self, image: Tensor, pairs: Any) -> Tensor:
        return mask_picture(image) if pairs["labels"] else image

    def sampling_request(self, inputs: ConditionInputs) -> SamplingRequest:
        """Return the conditions of the samples: images of rows or of a folder, in turn, or those of held-out images
        with their classes. Raises ValueError for images that are missing or do not fit."""
        if (of_rows := self.of_rows(inputs)) is not None:
            return of_rows
        if inputs.pairs is None or inputs.image_source is None:
            raise ValueError("The model does not say which images it was trained on. Train it again.")
        if inputs.settings.small_images is not None:
            crop = self.cropper(inputs.image_source.spec, inputs.pairs)
            stored, _ = crop.read(self.pictures(inputs.settings), _KEY)
            request = self.of_stored(stored, inputs)
            turns = inputs.seeds % len(stored)  # the image of a seed does not depend on first_seed
            assert request.drawn is not None
            return replace(request, conditions=request.select(turns), drawn=request.drawn[turns])
        images = held_out(inputs.source, "small_images")
        rows, labels, origin = rows_of(images, inputs.seeds)
        image = self.of_held_out(images, rows, image_streams(inputs.seeds, inputs.settings.seed))
        described = self.described(inputs.pairs) | origin
        drawn = self.drawn(image, inputs.pairs)
        return SamplingRequest(conditions={IMAGE: image}, labels=labels, described={"image": described}, drawn=drawn)


def _channels(pairs: Shards) -> int:
    """Return the number of channels of a set's images in the network's condition."""
    return len(pairs.manifest["pairs"]["labels"]) or pairs.shape[0]


def as_condition(stored: Tensor, channels: int) -> Tensor:
    """Return stored images uint8 [B, C, H, W] as a network's condition, float32 [B, channels, H, W] in [-1, 1]. Masks
    have a channel for each label: 1 inside the label and -1 elsewhere."""
    if stored.shape[1] == channels:
        return from_uint8(stored)
    labels = torch.arange(channels, device=stored.device).view(-1, 1, 1)
    return (stored == labels).float() * 2 - 1  # F.one_hot would synchronise the GPU to check the range of numbers


def mask_picture(mask: Tensor) -> Tensor:
    """Return a mask of a network's condition [B, labels, H, W] in grey, float32 [B, 1, H, W] in [-1, 1]: the first
    label black, the last one white."""
    levels = to_device(torch.linspace(-1, 1, mask.shape[1]), mask.device)
    return levels[mask.argmax(1)][:, None]
