"""Images of a diffusion system: for the stage `sample`, for previews during training, and for serving."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from image_diffusion.codecs.base import Codec
from image_diffusion.core.classes import ClassLabel
from image_diffusion.core.config.base import dump
from image_diffusion.core.files.image_arrays import save_samples
from image_diffusion.core.pictures import grid_columns, image_grid, save_picture
from image_diffusion.core.types import IMAGE, DataSpec
from image_diffusion.nn.precision import Precision
from image_diffusion.systems.base import on_best_device
from image_diffusion.systems.diffusion.conditioning import Conditions
from image_diffusion.systems.diffusion.conditions.base import (
    ConditionInputs,
    ImageSource,
    SamplingRequest,
    ServedModel,
    classes_named,
    read_prompts,
    read_rows,
)
from image_diffusion.systems.diffusion.conditions.image import condition_pictures
from image_diffusion.systems.diffusion.generator import SampleConfig, chosen_classes, requested_labels, ten_of
from image_diffusion.systems.interface import TrainedNetwork
from image_diffusion.systems.pairs.numbers import LABEL
from image_diffusion.systems.pictures import Pictures, listed, read_pictures
from image_diffusion.systems.sampling import (
    Embed,
    Predict,
    Preview,
    PreviewInputs,
    Sampling,
    SamplingInputs,
    SamplingSources,
    Served,
)

if TYPE_CHECKING:
    import pandas


class ImageGenerator(Protocol):
    """Generator of images from seeds, int64 [N], and labels, int64 [N] or None, on the device of its network.

    settings: completed with the values of the model. conditions: of each image other than its class, by name.
    """

    @property
    def settings(self) -> SampleConfig: ...

    def __call__(self, seeds: Tensor, labels: Tensor | None, conditions: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return images [N, C, H, W] of the data's type."""
        ...

    def trajectory(
        self, seeds: Tensor, labels: Tensor | None, conditions: Mapping[str, Tensor] | None = None
    ) -> list[Tensor]:
        """Return the images after each step."""
        ...


_APART, _OF_EACH = 8, 4  # number of pictures next to the grid, and of images in each
_BESIDE = 8  # number of images shown step by step, or with their conditions


@dataclass(frozen=True, kw_only=True)
class ImageSampling(Sampling, ABC):
    """Sampling of images. condition: of the network."""

    condition: Conditions

    @abstractmethod
    def generator(
        self,
        network: nn.Module,
        spec: DataSpec,
        codec: Codec,
        settings: SampleConfig,
        weaker: nn.Module | None = None,
        null: Mapping[str, Tensor] | None = None,
        pictures: Pictures | None = None,
    ) -> ImageGenerator:
        """Build the generator. weaker: the network of `settings.weaker_weights`. null: the condition that guidance
        leads away from. pictures: the pictures to sample from. Raises ValueError for a sampler or guidance that do not
        fit."""

    @property
    def takes_classes(self) -> bool:
        return self.condition.takes_classes

    def sources(self, settings: SampleConfig) -> SamplingSources:
        return SamplingSources(self.condition.draws_images(settings), self.condition.draws(settings))

    def derived_conditions(self, spec: DataSpec) -> dict[str, tuple[int, ...]]:
        return {} if self.condition.image is None else self.condition.image.derived(spec)

    def pictures(self, settings: SampleConfig) -> list[str]:
        return [str(path) for path in (*listed(settings.given, settings.start), *self.condition.pictures(settings))]

    def num_listed(self, settings: SampleConfig) -> int:
        if settings.conditions is not None:
            return len(read_rows(settings.conditions, "sample.conditions"))
        return len(read_prompts(settings.prompts, "sample.prompts")) if settings.prompts is not None else 0

    def precision(self, settings: SampleConfig) -> Precision:
        return settings.precision

    def maker(self, inputs: SamplingInputs) -> ImageMaker:
        settings, model = inputs.settings, inputs.model
        weaker = inputs.load(Path(settings.weaker_weights)) if settings.weaker_weights else None
        seeds = torch.arange(settings.first_seed, settings.first_seed + settings.num_samples)
        image_source = ImageSource(model.spec, inputs.small_images)
        request = self.condition.sampling_request(
            ConditionInputs(settings, seeds, model.pairs, inputs.embeddings, image_source)
        )
        labels = _labels(model.spec, request, settings, model.classes, seeds, model.untrained)
        pictures = read_pictures(settings.given, settings.start, inputs.crop, model.spec)
        generator = self._generator_on_best_device(model, settings, inputs.codec, weaker, request, pictures)
        described: dict[str, Any] = {"settings": dump(generator.settings)}
        if weaker is not None:
            described["weaker_sha256"] = weaker.sha256
        described |= request.described
        if pictures is not None:
            described["pictures"] = pictures.source
        titles = _titles(request, labels, model.classes)
        return ImageMaker(generator, seeds, labels, described, request, titles, model.spec)

    def preview(self, inputs: PreviewInputs) -> Preview:
        """Return the function that writes `step-NNNNNNN.png`, the same images as .npz, and a picture for each of the
        first eight classes or prompts, with the same name in all runs. Raises ValueError for a class that does not
        exist."""
        settings, classes = inputs.settings, inputs.training.classes
        seeds = torch.arange(settings.first_seed, settings.first_seed + settings.num_samples)
        pairs = {kind: shards.manifest["pairs"] for kind, shards in inputs.training.joined_sets.items()}
        image_source = ImageSource(inputs.spec, inputs.held_out)
        request = self.condition.sampling_request(
            ConditionInputs(settings, seeds, pairs, inputs.held_out, image_source)
        )
        labels = _labels(inputs.spec, request, settings, classes, seeds, inputs.training.untrained())
        class_names = [classes[label] for label in labels.tolist()] if classes and labels is not None else []
        shown = _titles(request, labels, classes)
        titles = shown or class_names
        rows_by_title: dict[str, list[int]] = {}
        for row, title in enumerate(titles):
            rows_by_title.setdefault(title, []).append(row)

        def draw(network: nn.Module, step: int, folder: Path) -> Mapping[str, Path | float]:
            generator = self.generator(network, inputs.spec, inputs.codec(), settings, null=request.null)
            conditions = request.select(torch.arange(len(seeds)))
            images = generator(seeds, labels if inputs.spec.num_classes else None, conditions)
            path = folder / f"step-{step:07d}.png"
            save_samples(path.with_suffix(".npz"), images, labels)
            images = inputs.spec.shown(images)
            save_picture(image_grid(images, grid_columns(len(images), len(classes)), shown), path)
            pictures = {"preview": path}
            if request.drawn is not None:
                pictures["preview/conditions"] = folder / f"step-{step:07d}-conditions.png"
                save_picture(beside_conditions(images[:_BESIDE], request.drawn), pictures["preview/conditions"])
            for number, (title, rows) in enumerate(list(rows_by_title.items())[:_APART]):
                path = folder / f"step-{step:07d}-{number}.png"
                save_picture(image_grid(images[rows[:_OF_EACH]], _OF_EACH // 2), path)
                pictures[f"preview/{title}"] = path
            return pictures

        return draw

    def served(
        self, spec: DataSpec, classes: list[str], pairs: Mapping[str, Any] | None = None, embeds: bool = False
    ) -> Served | None:
        """Return the columns of a request: seeds, and those of each part of the condition. None if a part cannot be in
        a request."""
        columns = self.condition.served(ServedModel(spec, classes, pairs, embeds))
        if columns is None:
            return None
        return Served(columns, dtype=spec.levels.dtype if spec.levels is not None else "uint8")

    def predictor(
        self,
        model: TrainedNetwork,
        settings: SampleConfig,
        codec: Callable[[], Codec],
        weaker: TrainedNetwork | None,
        embed: Embed | None = None,
    ) -> Predict:
        """Return the function that makes the images of a table's rows, as in `sample`: each from its own seed."""
        decoder, generators = codec(), list[ImageGenerator]()

        def predict(table: pandas.DataFrame) -> NDArray[Any]:
            """Return images, [N, H, W, C]. table: the columns of `served`; without a column of classes, each seed gets
            the same class as in `sample`. Raises ValueError for an empty table, for a class that is missing in a row,
            does not exist or is named twice, and for an image that cannot be read or does not fit."""
            if table.empty:
                raise ValueError("The table has no rows. Give a row for each image.")
            seeds = torch.tensor(table["seed"].to_numpy(np.int64))
            labels = None
            if model.spec.num_classes:
                named = _wanted_labels(table)
                first_seed = None if named else settings.first_seed
                labels = requested_labels(
                    named or settings.labels, model.classes, seeds, settings.seed, model.untrained, first_seed
                )
            rows = table.drop(columns=["seed", LABEL], errors="ignore").to_dict("records")
            request = self.condition.sampling_request(
                ConditionInputs(
                    settings.model_copy(update={"conditions": None}),
                    seeds,
                    model.pairs,
                    image_source=ImageSource(model.spec),
                    rows=rows,
                    key="The request",
                    is_request=True,
                    embed=embed,
                )
            )
            if not generators:
                generators.append(self._generator_on_best_device(model, settings, decoder, weaker, request))
            images = [
                generators[0](seeds[part], None if labels is None else labels[part], request.select(part))
                for part in torch.arange(len(seeds)).split(settings.batch_size)
            ]
            return torch.cat(images).permute(0, 2, 3, 1).contiguous().numpy()

        return predict

    def _generator_on_best_device(
        self,
        model: TrainedNetwork,
        settings: SampleConfig,
        codec: Codec,
        weaker: TrainedNetwork | None,
        request: SamplingRequest,
        pictures: Pictures | None = None,
    ) -> ImageGenerator:
        if weaker is not None and (weaker.spec, weaker.codec) != (model.spec, model.codec):
            raise ValueError(
                f"sample.weaker_weights {settings.weaker_weights} was trained on other data or another codec than the "
                f"network that it is to guide. Name a weaker network of the same data."
            )
        other = on_best_device(weaker) if weaker is not None else None
        return self.generator(on_best_device(model), model.spec, codec, settings, other, request.null, pictures)


def _labels(
    spec: DataSpec,
    request: SamplingRequest,
    settings: SampleConfig,
    classes: list[str],
    seeds: Tensor,
    untrained: Sequence[str],
) -> Tensor | None:
    """Return the class that each image should show, int64 [N]; None if unknown. For text or embedding conditions it is
    only for the evaluation: the class that every prompt names, or the class of the embedded image. Conditions of
    held-out images come with the classes of these images, unless the settings choose others, or the network is
    conditioned on text and not on a class."""
    text_alone = "prompts" in request.described and not spec.num_classes
    if request.labels is not None and settings.labels == "balanced" and not text_alone:
        return request.labels
    if not spec.num_classes:
        return classes_named(request.described.get("prompts", []), classes)
    if IMAGE in spec.conditions and not request.classes and settings.labels == "balanced":
        raise ValueError(
            "sample.small_images has no labels, but the network was trained with classes. Name images of an experiment "
            "with the same classes, or list their classes in sample.labels, or as label in sample.conditions."
        )
    if request.classes:
        return torch.tensor(chosen_classes("sample.conditions", request.classes, classes))
    return requested_labels(settings.labels, classes, seeds, settings.seed, untrained)


def _titles(request: SamplingRequest, labels: Tensor | None, classes: list[str]) -> list[str]:
    """Return the caption of each image: the title of its conditions, after its class if the title is not a prompt;
    empty if only the class is known."""
    if labels is None or not classes or "prompts" in request.described:
        return request.titles
    return [f"{classes[label]}, {title}" for label, title in zip(labels.tolist(), request.titles, strict=False)]


def beside_conditions(images: Tensor, conditions: Tensor) -> Image.Image:
    """Draw images, uint8 [N, C, H, W], below their conditions, float32 [P, C', h, w] in [-1, 1]."""
    above = condition_pictures(conditions[torch.arange(len(images)) % len(conditions)], images)
    return image_grid(torch.cat([above, images]), columns=len(images))


@dataclass(frozen=True)
class ImageMaker:
    """Images by row; implements `systems.sampling.Maker`."""

    generator: ImageGenerator
    seeds: Tensor
    labels: Tensor | None
    described: dict[str, Any]
    request: SamplingRequest
    titles: list[str]
    spec: DataSpec

    def __call__(self, rows: slice) -> Tensor:
        return self.generator(*self._for_rows(rows))

    def pictures(self) -> dict[str, Image.Image]:
        """Return the pictures by name. steps: a row for each seed, from the noise to the last step's prediction.
        conditions: the first images below their conditions, if these are images."""
        chosen = ten_of(self.generator.trajectory(*self._for_rows(slice(_BESIDE))))
        images = self.spec.shown(torch.stack(chosen, dim=1).flatten(0, 1))
        pictures = {"steps": image_grid(images, columns=len(chosen))}
        if self.request.drawn is not None:
            pictures["conditions"] = beside_conditions(self.spec.shown(chosen[-1]), self.request.drawn)
        return pictures

    def _for_rows(self, rows: slice) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        labels = self.labels[rows] if self.labels is not None and self.spec.num_classes else None
        return self.seeds[rows], labels, self.request.select(torch.arange(len(self.seeds))[rows])


def _wanted_labels(rows: pandas.DataFrame) -> Sequence[ClassLabel]:
    """Return the classes of a request's rows, in the form of the section `sample`; empty if it names none."""
    columns = [name for name in ("label", "class") if name in rows]
    if len(columns) > 1:
        raise ValueError("A class is given by a number, label, and by its name, class. Give one of the two.")
    for name in columns:
        for number, is_missing in enumerate(rows[name].isna()):
            if is_missing:
                raise ValueError(f"Row {number} has no class. Name one in each row, or leave out the column {name!r}.")
    return [int(label) if columns == ["label"] else str(label) for name in columns for label in rows[name]]
