"""Files of arrays: `.npy`, `.npz`, TIFF, DICOM, NIfTI, and what Pillow reads without loss.

Numbers are read in the type of the file, with its axes, channel names and pixel size, as far as they are stated. The
rescaling of DICOM and NIfTI is applied, and files in which 0 is white are inverted.
"""

from __future__ import annotations

import gzip
import io
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from image_diffusion.core.process.errors import package
from image_diffusion.data.config import MOST_CHANNELS
from image_diffusion.data.crop.stored import describe

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from tifffile import TiffFile, TiffPage, TiffPageSeries

_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_MICROMETRES = {
    "nm": 1e-3, "um": 1, "µm": 1, "μm": 1, "\\u00B5m": 1, "micron": 1, "microns": 1, "mm": 1e3, "cm": 1e4, "m": 1e6,
    "meter": 1e6,
}  # fmt: skip
"""Units of length by their names in OME-XML, ImageJ and NIfTI. Both signs of micro occur."""
_PROJECTED, _LINEAR_METRE = 1, 9001
"""Values of GTModelTypeGeoKey and ProjLinearUnitsGeoKey (GeoTIFF 1.1)."""
_NIFTI_HEADER = 540  # bytes of a header of version 2; version 1 has fewer


class BadImage(Exception):  # noqa: N818 - a property of a file, not a failure of the program
    """Raised for a file that gives no crop, with the reason in a few words."""


class Undecided(ValueError):  # noqa: N818 - likewise
    """Raised for a file whose reading the user has to decide. The stage stops."""


@dataclass(frozen=True)
class ArrayFile:
    """Numbers of a file. axes: a letter for each: Y, X, C for channels, others as tifffile has them; None where the
    file does not state them. names: of the channels, where the file states them. format: of the file. pixel_size:
    height and width of a pixel in micrometres, as the numbers lie in the file; None where it is not stated. missing:
    the number that stands for missing data; NaN where the file declares none."""

    numbers: NDArray[Any]
    axes: str | None
    format: str
    names: tuple[str, ...] = ()
    orientation: int = 1
    pixel_size: tuple[float, float] | None = None
    missing: float = math.nan


def read_array_file(data: bytes, max_pixels: int, pages: str | None) -> ArrayFile:
    """Return the numbers of a file. max_pixels, pages: as in the section data. Raises BadImage, Undecided, and other
    exceptions where the file is damaged."""
    if data.startswith(b"\x93NUMPY"):
        return ArrayFile(np.load(io.BytesIO(data), allow_pickle=False), None, "NPY")
    if data[:4] in _TIFF:
        return _tiff(data, max_pixels, pages)
    if data[128:132] == b"DICM":
        return _dicom(data, max_pixels)
    if data.startswith(b"PK") and zipfile.is_zipfile(io.BytesIO(data)):
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            _check_pixels([max((member.file_size for member in arrays.zip.infolist()), default=0) // 8], max_pixels)
            if len(arrays.files) != 1:
                raise BadImage(f"not one array: the file holds {len(arrays.files)}")
            return ArrayFile(arrays[arrays.files[0]], None, "NPZ")
    start = _inflated(data, _NIFTI_HEADER) if data[:2] == b"\x1f\x8b" else data[:_NIFTI_HEADER]
    if start[344:348] == b"n+1\0" or start[4:8] == b"n+2\0":
        return _nifti(data, start, max_pixels)
    return _picture(data, max_pixels)


def _tiff(data: bytes, max_pixels: int, pages: str | None) -> ArrayFile:
    """Read a TIFF, its axes as OME, ImageJ or the tags state them."""
    from tifffile import TiffFile  # imported here: pictures do not need it

    with TiffFile(io.BytesIO(data)) as file:
        if len(file.series) > 1 and pages != "first":
            shapes = " and ".join(" x ".join(map(str, series.shape)) for series in file.series[:2])
            raise Undecided(
                f"the file holds {len(file.series)} images, of {shapes}. Set data.pages to first to take the first."
            )
        series, page = file.series[0], file.series[0].keyframe
        if page.photometric == 3:
            raise BadImage("a palette: its numbers are names of colours")
        _check_pixels(series.shape, max_pixels)
        if series.kind == "ome" and any(page is None for page in series):  # asarray would return zeros for it
            raise BadImage("planes that its OME-XML names are not in the file: save all channels in one file")
        numbers, axes, missing = _numbers_of(series), series.axes, _missing(page)
        if page.photometric == 0:
            numbers, missing = _inverted(numbers, page.bitspersample), 2**page.bitspersample - 1 - missing
        ome = _ome_pixels(file.ome_metadata)
        names = _names_in_ome(ome) if ome is not None else _names_in_imagej(file, series)
        size = _size_in_ome(ome) if ome is not None else _size_in_tags(file, page)
        stated = names if all(names) else ()
        return ArrayFile(numbers, axes.replace("S", "C"), "TIFF", stated, _orientation(page), size, missing)


def _numbers_of(series: TiffPageSeries) -> NDArray[Any]:
    """Return the numbers of a TIFF. Raises Undecided if tifffile needs another package to decode them."""
    try:
        return series.asarray()
    except (ImportError, NotImplementedError, ValueError) as error:
        is_lacking = isinstance(error, ImportError) or "'imagecodecs'" in str(error)
        if not is_lacking or find_spec("imagecodecs") is not None:
            raise
    page, compression = series.keyframe, series.keyframe.compression
    raise Undecided(
        f"this TIFF file (Compression {getattr(compression, 'name', compression)}, BitsPerSample {page.bitspersample}) "
        f"needs {package('imagecodecs', 'arrays')}"
    )


def _orientation(page: TiffPage) -> int:
    tag = page.tags.get("Orientation")
    return int(tag.value) if tag is not None else 1


def _missing(page: TiffPage) -> float:
    """Return the number that stands for missing data in all pages, by GDAL's tag of the first; NaN where it declares
    none. tifffile's `nodata` is 0 there, and where the tag is not written as the type is, such as 255.0 for integers.
    """
    try:
        return float(str(page.tags.valueof("GDAL_NODATA", "nan")).replace(",", "."))
    except ValueError:
        return math.nan


def _ome_pixels(metadata: str | None) -> Element | None:
    """Return the element Pixels of OME-XML."""
    if metadata is None:
        return None
    from xml.etree import ElementTree  # expat refuses entities that grow since 2.4.1

    return next((node for node in ElementTree.fromstring(metadata).iter() if node.tag.endswith("}Pixels")), None)


def _names_in_ome(pixels: Element) -> tuple[str, ...]:
    return tuple(node.get("Name", "") for node in pixels if node.tag.endswith("}Channel"))


def _names_in_imagej(file: TiffFile, series: TiffPageSeries) -> tuple[str, ...]:
    """Return the labels of the planes if each plane is a channel."""
    labels = (file.imagej_metadata or {}).get("Labels")
    if series.axes != "CYX" or not isinstance(labels, list):  # a single label is a str
        return ()
    return tuple(labels) if len(labels) == series.shape[0] else ()


def _size_in_ome(pixels: Element) -> tuple[float, float] | None:
    return _size(*((pixels.get(f"PhysicalSize{axis}"), pixels.get(f"PhysicalSize{axis}Unit", "µm")) for axis in "YX"))


def _size_in_tags(file: TiffFile, page: TiffPage) -> tuple[float, float] | None:
    """Return the size of a pixel by ImageJ's metadata, or by the tags of GeoTIFF where the map is in metres. The tags
    XResolution and YResolution alone state the size of a print."""
    if file.imagej_metadata is not None:
        resolutions = (page.tags.get(f"{axis}Resolution") for axis in "YX")
        per_unit = (tag.value if tag is not None else (0, 0) for tag in resolutions)
        unit = str(file.imagej_metadata.get("unit"))
        return _size(*((parts / count if count else None, unit) for count, parts in per_unit))
    tags: Any = page.geotiff_tags if page.is_geotiff else {}
    if tags.get("GTModelTypeGeoKey") != _PROJECTED or tags.get("ProjLinearUnitsGeoKey") != _LINEAR_METRE:
        return None
    width, height, *_ = tags.get("ModelPixelScale") or (None, None)
    return _size((height, "m"), (width, "m"))


def _size(*sides: tuple[Any, str]) -> tuple[float, float] | None:
    """Return the height and the width of a pixel in micrometres, of two numbers with their units; None where one is
    missing or not a length."""
    lengths = [float(number or 0) * _MICROMETRES.get(unit, math.nan) for number, unit in sides]
    return (lengths[0], lengths[1]) if all(0 < length < math.inf for length in lengths) else None


def _dicom(data: bytes, max_pixels: int) -> ArrayFile:
    """Read a DICOM file: stored numbers, inverted where 0 is white, then rescaled by slope and intercept or the
    modality LUT (PS3.3 C.7.6.3, C.11.1). The window is ignored, since it is for display."""
    try:
        from pydicom import dcmread
        from pydicom.pixels import apply_modality_lut, get_decoder
    except ModuleNotFoundError:
        raise Undecided(f"DICOM files need {package('pydicom', 'arrays')}") from None
    file = dcmread(io.BytesIO(data))
    if "SharedFunctionalGroupsSequence" in file or "PerFrameFunctionalGroupsSequence" in file:
        raise BadImage("an enhanced DICOM file, of which each frame may be rescaled: save it as classic DICOM or .npy")
    _check_pixels([file.Rows, file.Columns, int(file.get("NumberOfFrames", 1))], max_pixels)
    syntax = file.file_meta.TransferSyntaxUID
    if syntax.is_compressed and not get_decoder(syntax).is_available:
        raise Undecided(f"this DICOM file ({syntax.name}) needs the package gdcm. Install it: pip install python-gdcm.")
    numbers, kind = file.pixel_array, file.PhotometricInterpretation
    if kind not in ("MONOCHROME1", "MONOCHROME2"):
        raise BadImage(f"not grey: a DICOM file of {kind}")
    if kind == "MONOCHROME1" and not _has_unit(file):
        numbers = -1 - numbers if file.PixelRepresentation else _inverted(numbers, file.BitsStored)
    spacing = file.get("PixelSpacing") or (None, None)
    size = _size((spacing[0], "mm"), (spacing[1], "mm"))
    axes = "YX" if numbers.ndim == 2 else "ZYX"
    return ArrayFile(apply_modality_lut(numbers, file), axes, "DICOM", pixel_size=size)


def _has_unit(file: Any) -> bool:
    """True if the rescaled numbers of a DICOM file have a unit, such as Hounsfield units, of CT by default (PS3.3
    C.8.2.1, C.11.1.1.2). Whether white or black is displayed for high numbers does not change these."""
    return str(file.get("RescaleType") or "US") != "US" or file.get("Modality") == "CT"


def _nifti(data: bytes, start: bytes, max_pixels: int) -> ArrayFile:
    """Read a NIfTI volume, put into the nearest orientation of which rows run from the front to the back, columns from
    the left to the right, and slices from the feet to the head. Slope and intercept are applied."""
    try:
        import nibabel
    except ModuleNotFoundError:
        raise Undecided(f"NIfTI files need {package('nibabel', 'arrays')}") from None
    kind: Any = nibabel.Nifti1Image if start[344:348] == b"n+1\0" else nibabel.Nifti2Image
    header = kind.header_class.from_fileobj(io.BytesIO(start))
    shape = header.get_data_shape()
    _check_pixels(shape, max_pixels)
    if data[:2] == b"\x1f\x8b":
        numbers = math.prod(map(int, shape))
        data = _inflated(data, int(header["vox_offset"]) + numbers * header.get_data_dtype().itemsize)
    image = nibabel.as_closest_canonical(kind.from_bytes(data))
    width, height = image.header.get_zooms()[:2]
    unit = image.header.get_xyzt_units()[0]
    return ArrayFile(
        np.asanyarray(image.dataobj)[:, ::-1],
        "XYZTC"[: len(shape)],
        "NIfTI",
        pixel_size=_size((height, unit), (width, unit)),
    )


def _inflated(data: bytes, count: int) -> bytes:
    """Return the first bytes of the content of a gzip file."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        return file.read(count)


def _picture(data: bytes, max_pixels: int) -> ArrayFile:
    """Read a file with Pillow, without loss of bits."""
    with Image.open(io.BytesIO(data)) as image:
        _check_pixels(image.size, max_pixels)
        stored = describe(image, data)
        if getattr(image, "is_animated", False):
            raise BadImage("an animation, which is no array")
        if stored.bits > 8 and not stored.is_exact:
            raise BadImage("colour of 16 bits, of which Pillow reads the high byte: save it as TIFF or .npy")
        if image.mode not in ("1", "L", "LA", "RGB", "RGBA", "F", "I") and not image.mode.startswith("I;16"):
            raise BadImage(f"no plain numbers: a picture of mode {image.mode}")
        format_ = str(image.format)
        numbers = np.asarray(ImageOps.exif_transpose(image))
    if stored.bits > 8 and stored.white and stored.white != stored.decoded_white:
        # Pillow has scaled them to 16 bits (PNM, JPEG 2000)
        numbers = np.rint(numbers.astype(np.float64) * stored.white / stored.decoded_white).astype(np.int64)
    return ArrayFile(numbers, "YX" if numbers.ndim == 2 else "YXC", format_)


def _inverted(numbers: NDArray[Any], bits: int) -> NDArray[Any]:
    if not np.issubdtype(numbers.dtype, np.unsignedinteger):
        raise BadImage(f"white is 0, but the numbers are {numbers.dtype}, which have no black")
    inverted: NDArray[Any] = numbers.dtype.type(2**bits - 1) - numbers
    return inverted


def _check_pixels(shape: Sequence[int], max_pixels: int) -> None:
    """Raise BadImage by the size in the header, before the image is decoded."""
    if np.prod(shape, dtype=np.float64) > MOST_CHANNELS * max_pixels:
        sides = " x ".join(map(str, shape))
        raise BadImage(f"too large: {sides} numbers, more than {MOST_CHANNELS} channels of max_pixels = {max_pixels}")
