"""Facts about a folder of images, from its listing and some of its files, which decide the training of a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np

from image_diffusion.core.levels import DType
from image_diffusion.core.texts import lines_in
from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.array_files import ArrayFile, BadImage, Undecided, read_array_file
from image_diffusion.data.crop.image import Crop, crop_image, quiet_pillow
from image_diffusion.data.crop.stored import DARK, WIDE
from image_diffusion.data.masks import FOLDERS, MOST_LABELS, MaskFacts, images_beside_masks, masks_beside
from image_diffusion.data.sources.archives import ZipArchive
from image_diffusion.data.sources.base import Item, Listing, stamp_if_file
from image_diffusion.data.sources.folder import Folder, stem_of
from image_diffusion.data.sources.table import Table, read_columns

T = TypeVar("T")

Images = Folder | Table | ZipArchive
"""Sources that `source_of` returns for a path."""
READ = 64
"""Number of images that are read. Shares of them have a standard error of about six percent."""
_TEXT_TABLES = (".csv", ".tsv", ".jsonl")
_TABLES = (*_TEXT_TABLES, ".parquet")
_LABELS = ("label", "class", "category")
_CAPTIONS = ("caption", "text")
"""Names that columns of classes and of captions usually have."""
_MASK_SUFFIXES = ("_mask", "_masks", "_cp_masks", "_seg", "-mask")
_PAGED = frozenset({".tif", ".tiff"})
_DEEP = _PAGED | {".png", ".pgm", ".ppm", ".pnm", ".jp2", ".j2k"}
"""Endings of pictures that may have several pages, and 16 bits."""
_TYPES: dict[str, DType] = {"bool": "uint8", "uint8": "uint8", "int8": "int16", "uint16": "uint16", "int16": "int16"}
"""Data type of the crops by that of the file; float32 for all others."""
_PROMPTS = 1000
"""Maximum number of captions that are kept as prompts."""


@dataclass(frozen=True)
class CaptionFacts:
    """Facts about the captions of a set of images.

    count: number of images with a caption. column: of a table. per_image: the median. words: 95th percentile
    of the number of words in a caption. prompts: different captions of evenly spaced images.
    """

    count: int
    column: str
    per_image: int
    words: int
    prompts: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Facts about a set of images.

    num_images: of the listing, some of which may be damaged. per_class: number of images of each class; empty without
    classes. short_side: in pixels, at least that of nine in ten images. aspect: width over height, of the tenth and the
    ninetieth of a hundred images. channels: 1 for grey pictures, however they are stored. names: of the channels of
    arrays. dtype: of arrays; None for pictures. transparent: True if every picture has an alpha channel. several_pages:
    True if a file has several pages, or its format allows them. deep: the same for 16-bit pictures. captions, masks:
    None if there are none. notices: lines of the source.
    """

    source: Images
    num_images: int
    per_class: tuple[int, ...]
    short_side: int
    aspect: tuple[float, float]
    channels: int
    names: tuple[str, ...] = ()
    dtype: DType | None = None
    transparent: bool = False
    several_pages: bool = False
    deep: bool = False
    captions: CaptionFacts | None = None
    masks: MaskFacts | None = None
    notices: tuple[str, ...] = ()


def source_of(path: Path) -> Images:
    """Return the source that reads a folder, a table of paths or a zip. Raises ValueError for any other path.

    A folder is read by the one table in it that names images with their classes or captions, if there is one. Of a
    folder that holds a folder of images and one of masks, the images are read.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist. Give the folder that holds the images.")
    where = str(path.resolve())
    if path.is_dir():
        return _table_in(path) or Folder(path=str(images_beside_masks(path.resolve()) or where))
    if path.suffix == ".zip":
        return ZipArchive(path=where)
    if path.suffix not in _TABLES:
        raise ValueError(f"{path} is no folder of images. Give a folder, a zip, or a table ({', '.join(_TABLES)}).")
    table, columns = _read_table(path)
    if table is None:
        raise ValueError(
            f"{path} names no images: of its columns ({', '.join(columns)}) none holds paths of files, which begin in "
            f"{path.parent}."
        )
    return table


def _table_in(folder: Path) -> Table | None:
    """Return the table in a folder that names images with their classes or captions; None unless there is just one.

    Parquet files in a folder usually hold the images themselves, and are not read. Raises ValueError for a table that
    names images but is damaged.
    """
    tables = []
    for path in sorted(path for path in folder.iterdir() if path.name.endswith(_TEXT_TABLES)):
        try:
            table, columns = _read_table(path)
        except ValueError:
            if _names_images(path):
                raise
            continue
        if table is not None and not columns.isdisjoint((*_LABELS, *_CAPTIONS)):
            tables.append(table)
    return tables[0] if len(tables) == 1 else None


def _names_images(path: Path) -> bool:
    """True if a damaged table has a class or a caption in its first line, and a path of a file in most others."""
    try:
        lines = [re.split(r'[,;\t"]', line) for line in lines_in(path.read_bytes()) if line.strip()]
    except ValueError:
        return False
    some = spread(lines[path.suffix != ".jsonl" :], READ)
    named = sum(any(stamp_if_file(path.parent / cell) for cell in line) for line in some)
    return 2 * named > len(some) and not {*_LABELS, *_CAPTIONS}.isdisjoint(lines[0])


def _read_table(path: Path) -> tuple[Table | None, Set[str]]:
    """Return the source that reads a table, and the names of its columns.

    The paths are in the first column whose cells name files, and the classes in one of a usual name; None where no
    column names files. Raises ValueError for a file that is no table.
    """
    columns = read_columns(path)
    for name, cells in columns.items():
        some = spread(cells, READ)
        named = [cell for cell in some if stamp_if_file(path.parent / cell)]
        if 2 * len(named) > len(some):
            label = next((label for label in _LABELS if label in columns and label != name), None)
            return Table(path=str(path.resolve()), path_column=name, label_column=label), columns.keys()
    return None, columns.keys()


def spread(values: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of some values, evenly spaced."""
    return [values[number * len(values) // count] for number in range(count)] if len(values) > count else [*values]


def describe_source(source: Images) -> Facts:
    """Describe a source from its listing and READ of its images, with the readers of `crop`.

    Raises ValueError where there are no images, none of those can be read, or a person has to decide how.
    """
    listing = source.listing()
    items = spread(listing.items, READ)
    labels = Counter(item.label for item in listing.items)
    common: dict[str, Any] = {
        "source": source,
        "num_images": len(listing.items),
        "per_class": tuple(labels[number] for number in range(len(listing.classes))),
        "captions": _captions(source),
        "masks": masks_beside(Path(source.path), [item.name for item in listing.items])
        if isinstance(source, Folder)
        else None,
        "notices": (*listing.notices, *_masks_among(listing)),
    }
    reading = DataConfig(
        name="images", source=source, resolution=32, background=(255, 255, 255), range="file", pages="first"
    )
    crops, reasons = _read(source, items, reading)
    endings = {PurePosixPath(item.name).suffix.lower() for item in listing.items}
    are_pictures = not all(crop.mode in WIDE for crop in crops)  # grey of 16 bits keeps them as an array
    if are_pictures and len(crops) > len(items) / 2:
        return _facts(common, _of_pictures(crops, endings), _have_pages(crops))
    stacks = _stacks(source, items, reading.model_copy(update={"dtype": "float32"}))
    if are_pictures and len(crops) >= len(stacks):
        return _facts(common, _of_pictures(crops, endings), _have_pages(crops))
    if not stacks:
        reason, _ = Counter(reasons).most_common(1)[0] if reasons else ("no files", 0)
        raise ValueError(
            f"The {source.type} {getattr(source, 'path', '')} holds no images: of {len(items)} files none could be "
            f"read ({reason}). Give the folder that holds the images."
        )
    of_arrays = _of_arrays(stacks)
    return _facts(common, of_arrays, of_arrays["several_pages"])


def _facts(common: dict[str, Any], own: dict[str, Any], have_pages: bool) -> Facts:
    """Return the facts, with a notice of pages that are left out."""
    if have_pages:
        notice = "Files hold several pages, of which the first is used. data.pages: all takes each as an image."
        common |= {"notices": (*common["notices"], notice)}
    return Facts(**common, **own)


def _masks_among(listing: Listing) -> Iterator[str]:
    """Yield a notice of images that are named as masks of others."""
    names = [item.name for item in listing.items]
    masks = next((name for name in listing.classes if name.lower() in FOLDERS), None)
    if masks is not None and len(listing.classes) == 2:
        by_folder = [
            {stem_of(name.partition("/")[2]) for name in names if name.startswith(f"{folder}/")}
            for folder in listing.classes
        ]
        if 2 * len(set.intersection(*by_folder)) > max(map(len, by_folder)):
            yield (
                f"The folder {masks} is a class, as its files are no masks of 2 to {MOST_LABELS} labels, but they are "
                "named like the other images. If they are masks with soft edges, of JPEG or of numbered objects, give "
                "--data the folder of the images alone."
            )
    stems = {stem_of(name): name for name in names}
    for suffix in _MASK_SUFFIXES:
        pairs = [stem for stem in stems if stem + suffix in stems]
        if 3 * len(pairs) > len(names):
            mask, image = (PurePosixPath(stems[stem]).name for stem in (pairs[0] + suffix, pairs[0]))
            yield (
                f"{len(pairs):,} of {len(names):,} files are named as masks of others ({mask} beside {image}) and "
                "would be trained on as images. Move them to a folder masks next to the folder of images."
            )


def _have_pages(crops: Sequence[Crop]) -> bool:
    return any("first_frame" in crop.flags and crop.format == "TIFF" for crop in crops)


def _captions(source: Images) -> CaptionFacts | None:
    """Describe the captions beside the images, or in a column of one of the usual names; None if there are none."""
    for column in _CAPTIONS:
        with suppress(ValueError):  # from a source without captions
            if not (captions := [*source.read_captions((column,)).values()]):
                return None
            lengths = [len(text.split()) for texts in captions for text in texts]
            return CaptionFacts(
                count=len(captions),
                column=column,
                per_image=int(np.median([len(texts) for texts in captions])),
                words=int(np.quantile(lengths, 0.95, method="higher")),
                prompts=tuple(dict.fromkeys(" ".join(texts[0].split()) for texts in spread(captions, _PROMPTS))),
            )
    return None


def _read(source: Images, items: Sequence[Item], config: DataConfig) -> tuple[list[Crop], list[str]]:
    crops, reasons = list[Crop](), list[str]()
    with quiet_pillow():
        for item in items:
            try:
                crops.append(crop_image(source.read(item), config))
            except (BadImage, OSError) as error:
                reasons.append(str(error))
    return crops, reasons


def _stacks(source: Images, items: Sequence[Item], config: DataConfig) -> list[ArrayFile]:
    stacks = []
    for item in items:
        try:
            stacks.append(read_array_file(source.read(item), config.max_pixels, config.pages))
        except (Undecided, ModuleNotFoundError):
            raise
        except Exception:  # decoders raise nearly any exception for damaged files
            continue
    return stacks


def _of_pictures(crops: Sequence[Crop], endings: Set[str]) -> dict[str, Any]:
    """Describe pictures. endings: of all files, since one of 16 bits, or of several pages, would stop the crops, read
    here or not. Raises ValueError for images of 16 bits that would be nearly black."""
    deep = [crop.values for crop in crops if crop.values]
    if deep and (usual := max(values[1] for values in deep)) < DARK:
        raise ValueError(
            f"{len(deep)} of {len(crops)} images that were read have 16 bits and use values up to {usual:,} of 65,535: "
            "beside pictures of 8 bits they would be nearly black. Leave them out, or write the experiment by hand, "
            "with data.range, or with data.dtype to keep their numbers."
        )
    is_grey = all((pixels == pixels[:1]).all() for crop in crops for pixels in crop.crops)
    return {
        **_sizes([crop.size for crop in crops]),
        "channels": 1 if is_grey else 3,
        "transparent": all("alpha" in crop.flags for crop in crops),
        "several_pages": not endings.isdisjoint(_PAGED) or _have_pages(crops),
        "deep": not endings.isdisjoint(_DEEP) or any("16bit" in crop.flags for crop in crops),
    }


def _of_arrays(stacks: Sequence[ArrayFile]) -> dict[str, Any]:
    axes = [stack.axes or _axes(stack.numbers.shape) for stack in stacks]
    shapes = [dict(zip(names, stack.numbers.shape, strict=True)) for names, stack in zip(axes, stacks, strict=True)]
    types = {_TYPES.get(str(stack.numbers.dtype), "float32") for stack in stacks}
    names = {stack.names for stack in stacks}
    return {
        **_sizes([(shape["X"], shape["Y"]) for shape in shapes]),
        "channels": Counter(shape.get("C", 1) for shape in shapes).most_common(1)[0][0],
        "names": next(iter(names)) if len(names) == 1 else (),
        "dtype": next(iter(types)) if len(types) == 1 else "float32",
        "several_pages": any(length > 1 for shape in shapes for axis, length in shape.items() if axis not in "CYX"),
    }


def _axes(shape: tuple[int, ...]) -> str:
    """Return the axes of an array whose file states none: of three, the shortest is that of the channels."""
    if len(shape) == 2:
        return "YX"
    if len(shape) != 3 or sorted(shape)[0] == sorted(shape)[1]:
        sides = " x ".join(map(str, shape))
        raise ValueError(
            f"Nothing states which axes of {sides} numbers are rows, columns and channels. Write "
            "the experiment by hand, with data.axes."
        )
    return "CYX" if shape[0] == min(shape) else "YXC"


def _sizes(sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Describe widths and heights."""
    width, height = np.array(sizes, dtype=np.float64).T
    low, high = np.quantile(width / height, (0.1, 0.9))
    short_side = np.quantile(np.minimum(width, height), 0.1, method="lower")
    return {"short_side": int(short_side), "aspect": (round(float(low), 3), round(float(high), 3))}
