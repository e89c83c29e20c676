"""The labelled image sets of torchvision.datasets, from their files or downloaded."""

from __future__ import annotations

import inspect
import io
from collections.abc import Sequence
from functools import lru_cache
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from image_diffusion.core.files.atomic import Stamp, folder_lock
from image_diffusion.data.sources.base import FewFiles, Item, Listing, number_labels, plain_text
from image_diffusion.data.sources.folder import Walk

Name = Literal[
    "CIFAR10", "CIFAR100", "CLEVRClassification", "Caltech101", "Caltech256", "Country211", "DTD", "EMNIST", "EuroSAT",
    "FER2013", "FGVCAircraft", "FashionMNIST", "Flowers102", "Food101", "GTSRB", "INaturalist", "ImageNet",
    "Imagenette", "KMNIST", "LFWPeople", "MNIST", "Omniglot", "OxfordIIITPet", "PCAM", "Places365", "QMNIST",
    "RenderedSST2", "SEMEION", "STL10", "SUN397", "SVHN", "StanfordCars", "USPS",
]  # fmt: skip
_OURS = {"root", "download", "loader", "transform", "target_transform", "transforms"}
_TARGETS = ("targets", "labels", "_labels", "y")  # attributes in which most sets store the classes of all images
_PAIRS = ("samples", "_samples")  # attributes with pairs of file and class


class TorchvisionSet(FewFiles):
    """A data set of torchvision.datasets whose items are an image and its class number. An image is named by its number
    and read as torchvision returns it: decoded, and not turned by its Exif orientation."""

    type: Literal["torchvision"] = "torchvision"
    """A labelled image set of torchvision.datasets."""
    name: Name
    """Name of the data set's class in torchvision.datasets."""
    path: str = Field(min_length=1)
    """Argument `root` of the class: the folder of the data set's files, preferably of no others."""
    options: dict[str, bool | int | str] = Field({})
    """Further arguments of the class. Examples: `{train: false}`, `{split: test}`."""
    classes: Literal["labels", "none"] = "labels"
    """labels: the classes of the data set. none: unconditional data."""
    download: bool = False
    """Let torchvision download missing files. Torchvision then checks the files, and changing them re-runs nothing."""

    no_captions: ClassVar[str] = (
        "data.source.type is torchvision, whose sets have no captions. Set pairs.captions.type to classes."
    )

    @field_validator("options")
    @classmethod
    def _are_not_ours(cls, value: dict[str, bool | int | str]) -> dict[str, bool | int | str]:
        if mine := sorted(_OURS & value.keys()):
            raise ValueError(
                f"{', '.join(mine)} cannot be set here. Use path and download; images are cropped as they are."
            )
        return value

    def listing(self) -> Listing:
        """Return every image, in order. Raises ValueError for a data set that is missing or has no classes."""
        dataset = self._open(self.download)
        names = [f"{number:09d}" for number in range(len(dataset))]
        if self.classes == "none":
            return Listing([Item(name, None, (number,)) for number, name in enumerate(names)], [], [])
        targets = _targets(dataset, self.name)
        classes = _class_names(dataset, max(targets, default=-1) + 1)
        if classes is None:
            numbers = number_labels((str(target) for target in targets if target >= 0), self.path)
            labels, classes = [numbers.get(str(target)) for target in targets], list(numbers)
        else:
            labels = [target if target >= 0 else None for target in targets]
        rows = list(enumerate(zip(names, labels, strict=True)))
        items = [Item(name, label, (number,)) for number, (name, label) in rows if label is not None]
        return Listing(items, classes, [(name, "no class") for _, (name, label) in rows if label is None])

    def known_classes(self) -> list[str] | None:
        return [] if self.classes == "none" else None

    def read(self, item: Item) -> bytes:
        """Return one image as a PNG. Raises OSError."""
        try:
            image = self._open(download=False)[int(item.address[0])][0]
            buffer = io.BytesIO()
            image.save(buffer, "png", compress_level=0)
        except Exception as error:  # each set raises its own
            reason, folder = _in_one_line(error), Path(self.path)
            for prefix in (folder.resolve(), folder.absolute(), folder):  # results contain no path of this machine
                reason = reason.replace(f"{prefix}/", "")
            raise OSError(f"torchvision cannot read it: {reason}") from None
        return buffer.getvalue()

    def files(self) -> dict[str, tuple[str, Stamp]]:
        """Return every file in the folder; none if torchvision downloads and checks them. Raises ValueError when the
        folder is empty."""
        if self.download:
            return {}
        files = Walk(self.path).files() if Path(self.path).is_dir() else {}
        if not files:
            advice = "holds no files. Put those of the set there, or set data.source.download to true"
            raise ValueError(f"data.source.path: {self.path} {advice}.")
        return {plain_text(name): (f"{self.path}/{name}", stamp) for name, stamp in files.items()}

    def _open(self, download: bool) -> Any:
        return _load(self.name, self.path, tuple(sorted(self.options.items())), download)


@lru_cache(maxsize=1)
def _load(name: str, path: str, options: tuple[tuple[str, Any], ...], download: bool) -> Any:
    """Open the set. Raises ValueError."""
    import torchvision.datasets  # takes seconds, and change detection does not need it

    kind = getattr(torchvision.datasets, name)
    can_download = "download" in inspect.signature(kind).parameters
    arguments = dict(options) | ({"download": download} if can_download or download else {})
    try:
        if not download:
            return kind(path, **arguments)
        Path(path).mkdir(parents=True, exist_ok=True)
        with folder_lock(Path(path)):  # locks out other processes of this package
            return kind(path, **arguments)
    except Exception as error:  # each set raises its own
        advice = (
            "Put its files there, or set data.source.download to true; arguments of its own go into data.source.options"
        )
        raise ValueError(f"torchvision cannot open {name} in {path}: {_in_one_line(error)}. {advice}.") from None


def _targets(dataset: Any, name: str) -> list[int]:
    """Return the number of the class of every image: from the attribute that most sets have, or else image by image."""
    for attribute in (*_TARGETS, *_PAIRS):
        values: Any = getattr(dataset, attribute, None)
        if isinstance(values, Sequence) or hasattr(values, "tolist"):
            targets = list(values) if isinstance(values, Sequence) else values.tolist()
            targets = [pair[1] for pair in targets] if attribute in _PAIRS else targets
            if _are_those_of(targets, dataset):
                return [int(target) for target in targets]
    targets = [dataset[number][1] for number in range(len(dataset))]
    if not all(isinstance(target, Integral) for target in targets):
        kind = next(type(target).__name__ for target in targets if not isinstance(target, Integral))
        raise ValueError(
            f"torchvision's {name} gives {kind} with an image, not the number of a class. Set classes: none."
        )
    return [int(target) for target in targets]


def _are_those_of(targets: list[Any], dataset: Any) -> bool:
    """True if these are the targets of the data set, judged by its first and last image."""
    if not targets or len(targets) != len(dataset) or not all(isinstance(target, Integral) for target in targets):
        return False
    return all(targets[number] == dataset[number][1] for number in (0, len(targets) - 1))


def _class_names(dataset: Any, count: int) -> list[str] | None:
    """Return the names of the classes; None unless the data set has a different name for each."""
    for attribute in ("classes", "categories"):
        names_of_set = getattr(dataset, attribute, None)
        if isinstance(names_of_set, Sequence):
            names = [", ".join(name) if isinstance(name, tuple) else str(name) for name in names_of_set]
            if len(set(names)) == len(names) >= count:
                return names
    return None


def _in_one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
