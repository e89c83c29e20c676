"""Sampling from trained models: the interface of a kind of system to `sample`, to previews, to `doctor` and to serving.

`System.sampling` returns it. It contains the values that sampling depends on, and does not refer to the system.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from PIL import Image
from torch import Tensor, nn

from image_diffusion.codecs.base import Codec
from image_diffusion.core.files.atomic import write_json
from image_diffusion.core.files.checksums import describe
from image_diffusion.core.files.image_arrays import ImageDigests, read_arrays, stream_samples, write_tiff
from image_diffusion.core.pictures import as_pictures, grid_columns, image_grid, save_picture
from image_diffusion.core.types import DataSpec, SamplesOf
from image_diffusion.data.shards.reader import Shards
from image_diffusion.nn.precision import Precision
from image_diffusion.systems.interface import TrainedNetwork

Preview = Callable[[nn.Module, int, Path], Mapping[str, Path | float]]
"""Function of the network (with averaged weights, if any), the step, and a folder for its files -> pictures and numbers
by name."""

Embed = Callable[[Sequence[str], Tensor], Tensor]
"""Function of captions and the seed of each, int64 [N] -> image embeddings [N, dim], as the stage `sample` writes
them."""

Predict = Callable[[Any], Any]
"""A table of the columns of `Served`, or images as an array -> images [N, H, W, C]."""


class SampleSettings(Protocol):
    """Settings of the section `sample` that the stage `sample` reads for every system.

    batch_size: the number of samples made at once; it does not change them. num_jobs: the number of jobs. num_stored:
    the number of samples stored, from the first one. first_seed: sample number i has seed first_seed + i.
    """

    @property
    def num_samples(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def num_jobs(self) -> int: ...

    @property
    def num_stored(self) -> int: ...

    @property
    def first_seed(self) -> int: ...


@dataclass(frozen=True)
class SamplingSources:
    """Inputs of sampling other than the model: the samples of another experiment, or a file. small_images: images that
    samples are conditioned on; "validation": derived from the held-out crops. embeddings: that samples are conditioned
    on; "validation": of held-out images."""

    small_images: SamplesOf | str | None = None
    embeddings: SamplesOf | str | None = None


@dataclass(frozen=True)
class PreviewInputs:
    """Inputs of the previews during training.

    spec: of the data. codec: builds the codec, on the device of the network. settings: the section `preview`. training,
    validation: the splits. num_samples: number of samples used per validation.
    """

    spec: DataSpec
    codec: Callable[[], Codec]
    settings: Any
    training: Shards
    validation: Shards
    num_samples: int

    @property
    def held_out(self) -> Shards:
        """Return the validation split, or the training split if the validation split is empty."""
        return self.validation if self.validation.num_samples else self.training


@dataclass(frozen=True)
class SamplingInputs:
    """Inputs of the stage `sample`. settings: the section `sample`. codec: on the sampling device.

    load: a weights folder -> its model. small_images: images that samples are conditioned on, if the command line names
    them. embeddings: a folder of embeddings, or the folders of the pairs and of the crops of held-out images. crop:
    crop.yaml of the data set, by which the pictures of `sample.given` and `sample.start` are cropped."""

    model: TrainedNetwork
    settings: Any
    codec: Codec
    load: Callable[[Path], TrainedNetwork]
    small_images: Path | None = None
    embeddings: Sequence[Path] = ()
    crop: Path | None = None


class Maker(Protocol):
    """Maker of the samples of the stage `sample`, each from its own seed.

    labels: of all images, int64 [N]; None without classes. titles: captions of all images in grids; empty: none.
    described: entries of samples.json, in addition to the settings or in place of them.
    """

    @property
    def labels(self) -> Tensor | None: ...

    @property
    def titles(self) -> list[str]: ...

    @property
    def described(self) -> dict[str, Any]: ...

    def __call__(self, rows: slice) -> Tensor:
        """Return some of the samples, on the CPU: images [n, C, H, W] of the data's type, or embeddings [n, dim]."""
        ...

    def pictures(self) -> dict[str, Image.Image]:
        """Return pictures of the steps of sampling, by the name of their file; "steps" is one of them."""
        ...


@dataclass(frozen=True)
class SamplesToWrite:
    """Samples that the stage `sample` is about to write.

    batches: the samples, in order; count: their number, smaller than in the settings if not all are stored. settings:
    the section `sample`. description: content of the JSON file next to them. output: path from the command line.
    """

    batches: Iterable[Tensor]
    maker: Maker
    settings: Any
    model: TrainedNetwork
    description: dict[str, Any]
    output: Path
    count: int


class SampleFiles(ABC):
    """Format of the samples of a system, and how they are written.

    kind: of the samples. one: name of a single sample. file: name of the output file.
    """

    kind: ClassVar[Literal["images", "embeddings"]]
    one: ClassVar[str]
    file: ClassVar[str]

    @abstractmethod
    def shown(self, settings: Any) -> int:
        """Return the number of samples to show."""

    @abstractmethod
    def write(self, samples: SamplesToWrite) -> dict[str, Path]:
        """Write the samples and their description. Returns pictures of them, by name."""


class ImageFiles(SampleFiles):
    """Files of images: samples.npz with all images or the first ones, grid.png, other pictures of the maker,
    samples.json; for arrays samples.ome.tif; with the setting `pictures` a PNG for each image."""

    kind: ClassVar = "images"
    one: ClassVar = "image"
    file: ClassVar = "samples.npz"

    def shown(self, settings: Any) -> int:
        """Return the number of images that the grid holds."""
        return int(settings.grid_images)

    def write(self, samples: SamplesToWrite) -> dict[str, Path]:
        """Write the files; only one batch at a time is in memory."""
        settings, maker, folder = samples.settings, samples.maker, samples.output.parent
        labels = None if maker.labels is None else maker.labels[: samples.count]
        digests = ImageDigests()
        stream_samples(samples.output, digests.passed(samples.batches), samples.count, labels)
        images, spec = read_arrays(samples.output)["arr_0"], samples.model.spec
        shown = spec.shown(torch.from_numpy(images[: settings.grid_images].copy()).permute(0, 3, 1, 2))
        columns = grid_columns(len(shown), len(samples.model.classes))
        save_picture(image_grid(shown, columns, maker.titles[: len(shown)]), folder / "grid.png")
        pictures = maker.pictures()
        for name, picture in pictures.items():
            save_picture(picture, folder / f"{name}.png")
        shutil.rmtree(folder / "pictures", ignore_errors=True)  # files of an earlier run with more images
        if settings.pictures:
            for seed, image in enumerate(images, settings.first_seed):
                drawn = as_pictures(spec.shown(torch.from_numpy(image.copy()).permute(2, 0, 1)[None]))
                array = drawn[0].permute(1, 2, 0).squeeze(2).numpy()
                save_picture(Image.fromarray(array), folder / "pictures" / f"{seed:08}.png")
        beside = [folder / f"{name}.png" for name in ("grid", *pictures)]
        if spec.levels is not None:
            beside.append(folder / "samples.ome.tif")
            write_tiff(beside[-1], images, spec.levels.channels, spec.levels.pixel_size)
        all_images = {"images_sha256": digests.combined} if samples.count == settings.num_samples else {}
        files = {"files": describe(folder, [samples.output, *beside])}
        write_json(folder / "samples.json", samples.description | all_images | files)
        return {"samples": folder / "grid.png", "denoising": folder / "steps.png"}


@dataclass(frozen=True)
class Column:
    """A column of a table that a served model takes. required: whether a request must have it. example: its values in
    the example; empty if it is not part of the example."""

    kind: Literal["long", "double", "string", "binary"]
    required: bool = False
    example: tuple[float | str | bytes, ...] = ()


@dataclass(frozen=True)
class Served:
    """Inputs and outputs of a served model.

    columns: of the input table, by name; or images: the shape of an input image, [H, W, C]. The outputs are images [N,
    H, W, C] of `dtype`.
    """

    columns: dict[str, Column] = field(default_factory=dict)
    images: tuple[int, int, int] | None = None
    dtype: str = "uint8"


class Sampling:
    """Sampling from the models of a kind of system. This base class is for systems that make no samples."""

    files: ClassVar[SampleFiles] = ImageFiles()
    """Format of the samples that the stage `sample` makes."""

    @property
    def takes_classes(self) -> bool:
        """True if samples are conditioned on a class."""
        return False

    def sources(self, settings: Any) -> SamplingSources:
        """Return the inputs that the section `sample` names."""
        return SamplingSources()

    def derived_conditions(self, spec: DataSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the conditions that are derived from the images themselves, by name. spec: of the
        images."""
        return {}

    def pictures(self, settings: Any) -> list[str]:
        """Return the image files that samples are made from, and their masks. Raises ValueError if a folder has
        none."""
        return []

    def num_listed(self, settings: Any) -> int:
        """Return the number of rows or prompts in the section `sample`; 0 if there are none. Raises ValueError for a
        file that cannot be read."""
        return 0

    def preview(self, inputs: PreviewInputs) -> Preview | None:
        """Return the function that previews the progress of a training at intervals; None: there are no previews."""
        return None

    def maker(self, inputs: SamplingInputs) -> Maker:
        """Return the maker of the samples of the stage `sample`.

        Raises ValueError for settings, weights or images that do not fit.
        """
        raise ValueError("The model makes no samples. Sample an experiment whose system does.")

    def num_evaluations(self, settings: Any) -> int:
        """Return the number of network evaluations for one image of the section `sample`."""
        return 0

    def precision(self, settings: Any) -> Precision:
        """Return the precision in which the network computes while it makes the images of a section."""
        return "float32"

    def decoder_input(self, spec: DataSpec, count: int) -> Tensor:
        """Return any tensor in the form of the decoder's input for `count` images, for timing it."""
        return torch.randn(count, spec.channels, *spec.size)

    def served(
        self, spec: DataSpec, classes: list[str], pairs: Mapping[str, Any] | None = None, embeds: bool = False
    ) -> Served | None:
        """Return the inputs and outputs of the served model; None: its samples cannot be requested. pairs: the model's
        description of the sets that it was trained on, by kind. embeds: whether a model that makes embeddings of
        captions is served with it. Raises ValueError for a model that cannot answer requests."""
        return None

    def predictor(
        self,
        model: TrainedNetwork,
        settings: Any,
        codec: Callable[[], Codec],
        weaker: TrainedNetwork | None,
        embed: Embed | None = None,
    ) -> Predict:
        """Return the function that answers requests. settings: the section `sample`, if the system has one; weaker: the
        network of `weaker_weights`; embed: the `embedder` of the model of `embeddings`. Call it only if `served` does
        not return None."""
        raise ValueError("The model makes nothing of seeds or images alone.")

    def embedder(self, model: TrainedNetwork, settings: Any) -> Embed:
        """Return the function that makes image embeddings of new captions, if the samples are embeddings. settings: the
        section `sample`. Raises ValueError for settings that do not fit the model."""
        raise ValueError("The model makes no embeddings. Name an experiment with a prior.")
