"""The images of a diffusion system: those of the stage `sample`, the previews of a training, those that are served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from image_diffusion.codecs.codec import Codec
from image_diffusion.core.arrays import save_samples
from image_diffusion.core.config import dump
from image_diffusion.core.pictures import grid_columns, image_grid, save_picture
from image_diffusion.core.types import EMBEDDING, TEXT, DataSpec
from image_diffusion.data.shards import Shards
from image_diffusion.systems.diffusion.asked import Asked
from image_diffusion.systems.diffusion.enlarging import small_held_out, small_images
from image_diffusion.systems.diffusion.prompts import classes_named
from image_diffusion.systems.diffusion.sampling import SampleConfig, requested_labels, ten_of
from image_diffusion.systems.given import Column, Embed, Model, Preview, Served, ToPreview, ToSample
from image_diffusion.systems.system import on_best_device

if TYPE_CHECKING:
    import pandas


class Generates(Protocol):
    """Makes images from seeds, int64 [N], and labels, int64 [N] or none, on the device of its network.

    settings: with what is taken from the model filled in. low_res: small images that are enlarged. told: what else each
    image is asked for with, by name.
    """

    @property
    def settings(self) -> SampleConfig: ...

    def __call__(
        self,
        seeds: Tensor,
        labels: Tensor | None,
        low_res: Tensor | None = None,
        told: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Uint8 images [N, C, H, W]."""
        ...

    def trajectory(
        self,
        seeds: Tensor,
        labels: Tensor | None,
        low_res: Tensor | None = None,
        told: Mapping[str, Tensor] | None = None,
    ) -> list[Tensor]:
        """The images after each step."""
        ...


class MakesImages(Protocol):
    """What is asked here of a system that makes images."""

    @property
    def low_resolution(self) -> int | None:
        """Side of the small images that it enlarges; None: it makes images from nothing."""
        ...

    def asked(
        self, settings: SampleConfig, pairs: Mapping[str, Any] | None, count: int, given: Shards | Sequence[Path] = ()
    ) -> Asked:
        """What `count` images of a section are asked for with, beside seeds and classes."""
        ...

    def generator(
        self,
        network: nn.Module,
        spec: DataSpec,
        codec: Codec,
        settings: SampleConfig,
        weaker: nn.Module | None = None,
        null: Mapping[str, Tensor] | None = None,
    ) -> Generates:
        """What makes them. weaker: the network of `settings.weaker_weights`. null: what guidance leads away from."""
        ...


def make_images(system: MakesImages, given: ToSample) -> MadeImages:
    """What makes the images of the stage `sample`. Raises ValueError for what does not fit the model."""
    settings, model = given.settings, given.model
    weaker = given.load(Path(settings.weaker_weights)) if settings.weaker_weights else None
    if weaker is not None and (weaker.spec, weaker.codec) != (model.spec, model.codec):
        raise ValueError(
            f"sample.weaker_weights {settings.weaker_weights} was trained on other data or another codec than the "
            f"network that it is to guide. Name a weaker network of the same data."
        )
    seeds = torch.arange(settings.first_seed, settings.first_seed + settings.num_samples)
    asked = system.asked(settings, model.pairs, len(seeds), given.embeddings)
    labels = _labels(model.spec, asked, settings, model.classes, seeds)
    enlarged = small_images(settings.small_images, given.small_images, system.low_resolution, model.spec, seeds)
    if enlarged is not None and model.classes:
        if enlarged.labels is None and isinstance(settings.labels, str):
            raise ValueError(
                "sample.small_images has no labels, but the network was trained with classes. Enlarge images of an "
                "experiment with the same classes, or list their classes in sample.labels."
            )
        labels = labels if enlarged.labels is None else enlarged.labels
    generator = _generator(system, model, settings, given.codec, weaker, asked)
    described: dict[str, Any] = {"settings": dump(generator.settings)}
    if weaker is not None:
        described["weaker_sha256"] = weaker.sha256
    if asked.titles:
        described["prompts"] = asked.titles
    if asked.source:
        described["embeddings"] = asked.source
    if enlarged is not None:
        described["enlarged"] = enlarged.source
    low_res = None if enlarged is None else enlarged.images
    return MadeImages(generator, seeds, labels, low_res, described, asked, bool(model.spec.num_classes))


def _labels(spec: DataSpec, asked: Asked, settings: SampleConfig, classes: list[str], seeds: Tensor) -> Tensor | None:
    """The class that each image is to show, int64 [N]; None where nothing says so. Of a network that is told words or
    embeddings it is for the judge alone: the class that every prompt names, or that of the image that was embedded."""
    if asked.labels is not None:
        return asked.labels
    if not spec.num_classes:
        return classes_named(asked.titles, classes)
    return requested_labels(settings.labels, len(seeds), classes, seeds, settings.seed)


class MadeImages:
    """Images by row, as `systems.given.Maker` says."""

    def __init__(
        self,
        generator: Generates,
        seeds: Tensor,
        labels: Tensor | None,
        low_res: Tensor | None,
        described: dict[str, Any],
        asked: Asked,
        told_labels: bool,
    ) -> None:
        self.labels, self.described, self.titles = labels, described, asked.titles
        self._generator, self._seeds, self._low_res, self._asked = generator, seeds, low_res, asked
        self._told_labels = told_labels

    def __call__(self, rows: slice) -> Tensor:
        return self._generator(*self._of(rows))

    def pictures(self) -> dict[str, Image.Image]:
        """steps: a row for each seed, from the noise to the last step's prediction."""
        chosen = ten_of(self._generator.trajectory(*self._of(slice(8))))
        return {"steps": image_grid(torch.stack(chosen, dim=1).flatten(0, 1), columns=len(chosen))}

    def _of(self, rows: slice) -> tuple[Tensor, Tensor | None, Tensor | None, dict[str, Tensor]]:
        known = self.labels if self._told_labels else None
        labels, low_res = (None if each is None else each[rows] for each in (known, self._low_res))
        return self._seeds[rows], labels, low_res, self._asked.of(torch.arange(len(self._seeds))[rows])


_APART, _OF_EACH = 8, 4  # pictures beside the grid, and images in each


def preview_images(system: MakesImages, given: ToPreview) -> Preview:
    """Draws `step-NNNNNNN.png`, the same images as .npz, and of the first eight classes or prompts a picture each,
    whose name is the same in all runs. Raises ValueError for a class that does not exist."""
    settings, classes = given.settings, given.training.classes
    seeds = torch.arange(settings.first_seed, settings.first_seed + settings.num_samples)
    beside = given.training.beside
    pairs = beside.manifest["pairs"] if beside is not None else None
    asked = system.asked(settings, pairs, len(seeds), given.held_out)
    labels = _labels(given.spec, asked, settings, classes, seeds)
    low_res: Tensor | None = None
    if system.low_resolution is not None:
        low_res, labels = small_held_out(given.held_out, system.low_resolution, seeds)

    of_class = [classes[label] for label in labels.tolist()] if classes and labels is not None else []
    named = asked.titles or of_class
    apart = {name: [i for i, other in enumerate(named) if other == name] for name in dict.fromkeys(named)}

    def draw(network: nn.Module, step: int, folder: Path) -> Mapping[str, Path | float]:
        generator = system.generator(network, given.spec, given.codec(), settings, null=asked.null)
        images = generator(
            seeds, labels if given.spec.num_classes else None, low_res, asked.of(torch.arange(len(seeds)))
        )
        path = folder / f"step-{step:07d}.png"
        save_samples(path.with_suffix(".npz"), images, labels)
        save_picture(image_grid(images, grid_columns(len(images), len(classes)), asked.titles), path)
        pictures = {"preview": path}
        for number, (name, rows) in enumerate(list(apart.items())[:_APART]):
            path = folder / f"step-{step:07d}-{number}.png"
            save_picture(image_grid(images[rows[:_OF_EACH]], _OF_EACH // 2), path)
            pictures[f"preview/{name}"] = path
        return pictures

    return draw


def image_columns(system: MakesImages, spec: DataSpec, classes: list[str], embeds: bool) -> Served | None:
    """Seeds and, of a model with classes, their numbers or names, of one that is told words prompts, and of one that is
    told embeddings, where what makes them goes with it (embeds); None of one that is told anything else."""
    if system.low_resolution is not None or spec.conditions.keys() - ({TEXT, EMBEDDING} if embeds else {TEXT}):
        return None
    seed = {"seed": Column("long", required=True, example=(0, 1))}
    if spec.conditions:
        prompts = ("a white square on black", "a black square on white")
        return Served(columns=seed | {"prompt": Column("string", required=True, example=prompts)})
    named = Column("string", example=(classes[0], classes[-1])) if classes else None
    return Served(columns=seed | ({"label": Column("long"), "class": named} if named else {}))


class Images:
    """Makes images of a table's rows as `sample` does: each from its own seed."""

    def __init__(
        self,
        system: MakesImages,
        model: Model,
        settings: SampleConfig,
        codec: Codec,
        weaker: Model | None,
        embed: Embed | None,
    ) -> None:
        self._system, self._model, self._settings = system, model, settings
        self._codec, self._weaker, self._embed = codec, weaker, embed
        self._generator: Generates | None = None

    def __call__(self, rows: pandas.DataFrame) -> NDArray[np.uint8]:
        """Images, uint8 [N, H, W, C]. rows: the columns of `image_columns`; without a class those that `sample` would
        give the seeds. Raises ValueError for a class that does not exist, and for one given in two ways."""
        seeds = torch.tensor(rows["seed"].to_numpy(np.int64))
        settings, asked, labels = self._settings, Asked(), None
        if self._embed is not None:
            asked = Asked(told={EMBEDDING: self._embed([str(each) for each in rows["prompt"]], seeds).float()})
        elif "prompt" in rows:
            settings = settings.model_copy(update={"prompts": tuple(map(str, rows["prompt"]))})
            asked = self._system.asked(settings, self._model.pairs, len(seeds))
        else:
            labels = requested_labels(self._wanted(rows), len(seeds), self._model.classes, seeds, settings.seed)
        if self._generator is None:
            self._generator = _generator(self._system, self._model, settings, self._codec, self._weaker, asked)
        images = [
            self._generator(seeds[part], None if labels is None else labels[part], None, asked.of(part))
            for part in torch.arange(len(seeds)).split(settings.batch_size)
        ]
        return torch.cat(images).permute(0, 2, 3, 1).contiguous().numpy()

    def _wanted(self, rows: pandas.DataFrame) -> str | list[int | str]:
        """The classes that are asked for, as the section `sample` has them."""
        given = [name for name in ("label", "class") if name in rows]
        if len(given) > 1:
            raise ValueError("A class is given by its number, label, and by its name, class. Give one of the two.")
        if not given:
            return self._settings.labels
        return [int(each) if given == ["label"] else str(each) for each in rows[given[0]]]


def _generator(
    system: MakesImages,
    model: Model,
    settings: SampleConfig,
    codec: Codec,
    weaker: Model | None,
    asked: Asked,
) -> Generates:
    other = on_best_device(weaker) if weaker is not None else None
    return system.generator(on_best_device(model), model.spec, codec, settings, other, asked.null)
