"""Metadata of array files (pages, pixel size, missing data) and NIfTI volumes."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from numpy.typing import NDArray
from PIL import Image
from tifffile import _imagecodecs

from image_diffusion.core.config.base import parse
from image_diffusion.core.files.image_arrays import write_tiff
from image_diffusion.core.levels import Levels
from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.array_files import BadImage, Undecided
from image_diffusion.data.crop.arrays import Arrays, crops_of_array, read_array
from image_diffusion.data.crop.image import crop_image, quiet_pillow
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.reader import open_shards

STACK = np.random.default_rng(3).integers(0, 4096, (4, 20, 24)).astype(np.uint16)


def config(**changed: Any) -> DataConfig:
    source = {"type": "folder", "path": "x", "classes": "none"}
    values = {"name": "x", "source": source, "resolution": 16, "dtype": "uint16", "channels": 1}
    return parse(DataConfig, values | changed, "data")


def read(data: bytes, **changed: Any) -> Arrays:
    with quiet_pillow():
        return read_array(data, config(**changed))


def tiff(numbers: NDArray[Any], **options: Any) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, numbers, **options)
    return buffer.getvalue()


def npy(numbers: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, numbers)
    return buffer.getvalue()


def ome(numbers: NDArray[Any] = STACK[:1], axes: str = "ZYX", **metadata: Any) -> bytes:
    return tiff(numbers, ome=True, metadata={"axes": axes, **metadata})


def test_ome_xml_with_planes_in_other_files_is_rejected() -> None:
    """tifffile reads such planes as zeros: one file per channel, or an aborted acquisition."""
    whole = ome(STACK[:3], "CYX")
    with tifffile.TiffFile(io.BytesIO(whole)) as file:
        assert file.ome_metadata is not None
        stated = file.ome_metadata.encode()
    cuts = [tiff(STACK[:planes], photometric="minisblack", description=stated, metadata=None) for planes in (1, 2)]
    assert np.array_equal(read(whole, channels=3).images[0], STACK[:3])
    for cut in cuts:
        with pytest.raises(BadImage, match="planes that its OME-XML names are not in the file: save all channels in"):
            read(cut, channels=3)


def test_pages_all_reads_every_page_as_an_image() -> None:
    images = read(ome(STACK), pages="all").images
    assert np.array_equal(np.stack(images), STACK[:, None])
    several = np.random.default_rng(4).integers(0, 99, (2, 3, 5, 20, 24)).astype(np.uint16)
    images = read(ome(several, "TCZYX"), pages="all", channels=3).images
    expected = several.transpose(0, 2, 1, 3, 4).reshape(10, 3, 20, 24)
    assert np.array_equal(np.stack(images), expected)


def test_pages_of_a_file_are_crops_of_one_image_and_one_split(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"in/{number}.tif").parent.mkdir(exist_ok=True)
        (tmp_path / f"in/{number}.tif").write_bytes(
            ome(np.random.default_rng(number).integers(0, 99, STACK.shape).astype(np.uint16))
        )
    source = {"type": "folder", "path": str(tmp_path / "in"), "classes": "none"}
    crop_dataset(config(source=source, pages="all", validation_fraction=0.4, num_shards=2), tmp_path / "out")
    splits = [open_shards(tmp_path / "out", split) for split in ("train", "validation")]
    assert sum(split.num_samples for split in splits) == 120
    assert all(split.num_samples % 4 == 0 and split.num_samples for split in splits)


def test_pages_of_pictures_are_not_images() -> None:
    with pytest.raises(ValueError, match="pages is all, which is for arrays. Set dtype"):
        config(pages="all", dtype=None)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (ome(PhysicalSizeX=0.5, PhysicalSizeY=0.25), (0.25, 0.5)),
        (ome(PhysicalSizeX=500, PhysicalSizeXUnit="nm", PhysicalSizeY=0.002, PhysicalSizeYUnit="mm"), (2, 0.5)),
        (ome(PhysicalSizeX=0.5), None),
        (ome(PhysicalSizeX=1, PhysicalSizeXUnit="pixel", PhysicalSizeY=1, PhysicalSizeYUnit="pixel"), None),
        (tiff(STACK[:1], imagej=True, resolution=(2, 4), metadata={"unit": "um"}), (0.25, 0.5)),
        (tiff(STACK[:1], imagej=True, resolution=(2, 4), metadata={"unit": "micron"}), (0.25, 0.5)),
        (tiff(STACK[:1], imagej=True, metadata={"unit": "inch"}), None),
        (tiff(STACK[0], resolution=(300, 300), resolutionunit="INCH"), None),  # of a print
    ],
    ids=["ome", "units", "one-side", "no-length", "imagej", "micron", "inch", "print"],
)
def test_pixel_size_is_read_from_file_metadata(data: bytes, expected: tuple[float, float] | None) -> None:
    assert read(data).pixel_size == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("kind", "unit", "expected"),
    [(1, 9001, (30e6, 10e6)), (1, 9002, None), (2, 9001, None)],
    ids=["m", "feet", "degrees"],
)
def test_geotiff_pixel_size_requires_metres(kind: int, unit: int, expected: tuple[float, float] | None) -> None:
    keys = (1, 1, 0, 2, 1024, 0, 1, kind, 3076, 0, 1, unit)
    tags = [(33550, "d", 3, (10.0, 30.0, 0.0), True), (34735, "H", len(keys), keys, True)]
    assert read(tiff(STACK[0], extratags=tags)).pixel_size == expected


@pytest.mark.parametrize(
    ("numbers", "stated", "count"),
    [
        (np.float32([[-9999, 1, 2], [3, -9999, 4]]), "-9999", 2),
        (np.float32([[0.1, 1, 2], [3, 0.2, 4]]), "0,1", 1),
        (np.float32([[-3.4028235e38, 1, 2], [3, 4, 5]]), "-3.40282346600000016e+38", 1),
        (np.int16([[-9999, 1, 2], [3, 4, 5]]), "-9999.0", 1),
        (np.uint8([[0, 1, 2], [0, 0, 255]]), "0", 3),
    ],
    ids=["float", "comma", "least-float", "int", "zero"],
)
def test_declared_nodata_values_are_missing_data(numbers: NDArray[Any], stated: str, count: int) -> None:
    data = tiff(numbers, extratags=[(42113, "s", 0, stated, True)])
    message = f"missing data: {count} of 6 numbers are .*, which the file declares as missing.*: crop them off"
    with pytest.raises(BadImage, match=message):
        read(data, dtype="float32")


def test_nodata_is_detected_before_white_is_inverted() -> None:
    numbers = np.uint8([[0, 1, 2], [0, 0, 255]])
    one, other = (
        tiff(numbers, photometric="miniswhite", extratags=[(42113, "s", 0, stated, True)]) for stated in ("1", "254")
    )
    with pytest.raises(BadImage, match="missing data: 1 of 6 numbers are 254, which"):
        read(one)
    assert np.array_equal(read(other).images[0][0], 255 - numbers)


@pytest.mark.parametrize("stated", ["7", "-9999", "255.5", "nan", "inf", "1e400", "-1.7976931348623157e+308", "none"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
def test_geotiff_without_nodata_pixels_is_read(stated: str, dtype: str) -> None:
    numbers = np.arange(6).reshape(2, 3).astype(dtype)  # has a 0, tifffile's result for an unreadable value
    data = tiff(numbers, extratags=[(42113, "s", 0, stated, True)])
    assert np.array_equal(read(data, dtype=dtype).images[0][0], numbers)


def test_nodata_in_unused_channels_is_ignored() -> None:
    numbers = np.uint16([[[1, 2]], [[3, 4]], [[0, 5]]])
    data = tiff(numbers, photometric="minisblack", planarconfig="separate", extratags=[(42113, "s", 0, "0", True)])
    assert np.array_equal(read(data, channels={0: "red", 1: "green"}).images[0], numbers[:2])
    with pytest.raises(BadImage, match="missing data: 1 of 6 numbers are 0"):
        read(data, channels=3)


def test_imagej_labels_name_channels() -> None:
    names = ["DAPI", "actin", "ER"]
    data = tiff(STACK[:3], imagej=True, metadata={"axes": "CYX", "Labels": names})
    assert np.array_equal(read(data, channels=names[::-1]).images[0], STACK[2::-1])
    assert np.array_equal(read(data, channels=["x", "y", "z"]).images[0], STACK[:3])
    with pytest.raises(BadImage, match="other channels: DAPI, actin, ER, but data.channels names DAPI, x, ER"):
        read(data, channels=["DAPI", "x", "ER"])
    both = np.stack([STACK[:3], STACK[1:]])
    labels = [f"{name} of slice {place}" for place in range(2) for name in names]
    slices = tiff(both, imagej=True, metadata={"axes": "ZCYX", "Labels": labels})
    assert len(read(slices, channels=names, pages="all").images) == 2


def test_configured_axes_that_move_x_or_y_drop_pixel_size() -> None:
    data = ome(STACK, PhysicalSizeX=0.5, PhysicalSizeY=0.25)
    assert read(data, axes="CYX", channels=4).pixel_size == pytest.approx((0.25, 0.5))
    assert read(data, axes="YXC", channels=24).pixel_size is None


def test_orientation_swaps_the_sides_of_pixel_size() -> None:
    data = tiff(STACK[:1], imagej=True, resolution=(2, 4), metadata={"unit": "um"}, extratags=[(274, "H", 1, 6, True)])
    turned = read(data)
    assert turned.images[0].shape == (1, 24, 20) and turned.pixel_size == pytest.approx((0.5, 0.25))


def test_cropping_scales_pixel_size() -> None:
    data = ome(PhysicalSizeX=0.5, PhysicalSizeY=0.5)
    with quiet_pillow():
        assert crop_image(data, config(resolution=10)).pixel_size == pytest.approx([1, 1])
        assert crop_image(data, config(crop={"type": "random_resized"})).pixel_size == []


@pytest.mark.parametrize(
    ("sizes", "expected"), [((0.5, 0.5, 0.502), (1, 1)), ((0.5, 0.5, 0.6), None), ((0.5, 0.5, None), None)]
)
def test_samples_get_pixel_size_if_all_images_share_it(
    sizes: tuple[float | None, ...],
    expected: tuple[float, float] | None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in").mkdir()
    for number, size in enumerate(sizes):
        stated = {} if size is None else {"PhysicalSizeX": size, "PhysicalSizeY": size}
        (tmp_path / f"in/{number}.tif").write_bytes(ome(STACK[number : number + 1], **stated))
    source = {"type": "folder", "path": str(tmp_path / "in"), "classes": "none"}
    manifest = crop_dataset(config(source=source, num_shards=1, resolution=10), tmp_path / "out").manifest
    levels = Levels(**manifest["levels"])
    assert levels.pixel_size == (None if expected is None else pytest.approx(expected))
    assert ("size of" in capfd.readouterr().err) == (expected is None)
    path = tmp_path / "samples.ome.tif"
    write_tiff(path, STACK[:2, :, :, None], ["ink"], levels.pixel_size)
    again = read(path.read_bytes(), pages="all")
    assert np.array_equal(np.stack(again.images)[:, 0], STACK[:2])
    assert again.pixel_size == (None if expected is None else pytest.approx(expected))


def nifti(numbers: NDArray[Any], version: int = 1, **changed: Any) -> bytes:
    nibabel = pytest.importorskip("nibabel", reason="the extra `arrays`")
    kind = nibabel.Nifti1Image if version == 1 else nibabel.Nifti2Image
    image = kind(numbers, changed.get("affine", np.diag([0.5, 0.25, 3, 1])))
    image.header.set_xyzt_units(changed.get("unit", "mm"))
    image.header.set_slope_inter(*changed.get("slope", (1, 0)))
    data: bytes = image.to_bytes()
    return data


VOLUME = np.random.default_rng(5).integers(-1000, 2000, (24, 20, 6)).astype(np.int16)
SLICES = VOLUME.transpose(2, 1, 0)[:, ::-1]
"""Slices from feet to head, with anterior at the top and the patient's left at the left."""


@pytest.mark.parametrize("is_compressed", [False, True], ids=["nii", "nii.gz"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_volume_gives_its_slices(version: int, is_compressed: bool) -> None:
    data = nifti(VOLUME, version)
    data = gzip.compress(data) if is_compressed else data
    found = read(data, dtype="int16", pages="all")
    assert np.array_equal(np.stack(found.images)[:, 0], SLICES)
    assert found.format == "NIfTI" and found.pixel_size == pytest.approx((250, 500))
    with pytest.raises(Undecided, match="axes XYZ.*data.pages to first .* to all"):
        read(data, dtype="int16")


def test_volume_in_another_orientation_is_reoriented() -> None:
    """Stored from head to feet, with the patient's left first in the second dimension."""
    stored = VOLUME.transpose(2, 0, 1)[::-1]
    affine = np.array([[0, 0.5, 0, 0], [0, 0, 0.25, 0], [-3, 0, 0, 0], [0, 0, 0, 1.0]])
    found = read(nifti(np.ascontiguousarray(stored), affine=affine), dtype="int16", pages="all")
    assert np.array_equal(np.stack(found.images)[:, 0], SLICES)
    assert found.pixel_size == pytest.approx((250, 500))


def test_slope_and_intercept_of_a_volume_are_applied() -> None:
    data = nifti(VOLUME, slope=(0.5, 10))
    assert np.array_equal(read(data, dtype="float32", pages="first").images[0][0], SLICES[0] / 2 + 10)
    with pytest.raises(BadImage, match="numbers that int16 does not hold"):
        read(data, dtype="int16", pages="first")


def test_a_volume_without_a_unit_has_no_size() -> None:
    assert read(nifti(VOLUME, unit="unknown"), dtype="int16", pages="first").pixel_size is None


@pytest.mark.parametrize("is_compressed", [False, True])
def test_truncated_volume_is_damaged(is_compressed: bool) -> None:
    data = nifti(VOLUME)[:-100]
    with quiet_pillow(), pytest.raises(BadImage, match="damaged"):
        crop_image(gzip.compress(data) if is_compressed else data, config(dtype="int16", pages="all"))


def test_too_large_volume_is_rejected_before_unpacking() -> None:
    data = gzip.compress(nifti(np.zeros((400, 400, 80), np.uint8)))
    with quiet_pillow(), pytest.raises(BadImage, match="too large: 400 x 400 x 80 numbers"):
        crop_image(data, config(dtype="int16", pages="all", max_pixels=160_000))


def test_missing_nibabel_is_named_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nibabel", None)
    with pytest.raises(Undecided, match=r"pip install 'image-diffusion\[arrays\]'"):
        read(bytes(344) + b"n+1\0" + bytes(200))


def lzw() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(STACK[0]).save(buffer, "TIFF", compression="tiff_lzw")
    return buffer.getvalue()


def packed() -> bytes:
    """Return a TIFF of packed 12-bit values."""
    data = bytearray(tiff(STACK[0]))
    with tifffile.TiffFile(io.BytesIO(bytes(data))) as file:
        at = file.pages[0].tags["BitsPerSample"].valueoffset  # type: ignore[union-attr]
    data[at] = 12
    return bytes(data)


@pytest.mark.parametrize("make", [lzw, packed])
def test_missing_imagecodecs_is_named_in_the_message(
    make: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An intact file must not be reported as damaged, because the crop stage would leave it out."""
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    monkeypatch.setattr(tifffile.tifffile, "imagecodecs", _imagecodecs)
    monkeypatch.setattr(tifffile.TIFF.DECOMPRESSORS, "_codecs", {})
    (tmp_path / "a.tif").write_bytes(make())
    says = r"^a\.tif: this TIFF file .*needs the package imagecodecs\. .*pip install 'image-diffusion\[arrays\]'\.$"
    with pytest.raises(ValueError, match=says):
        crop_dataset(config(source={"type": "folder", "path": str(tmp_path), "classes": "none"}), tmp_path / "out")


def test_lzw_and_packed_12_bit_values_are_read() -> None:
    pytest.importorskip("imagecodecs", reason="the extra `arrays`")
    assert np.array_equal(read(lzw()).images[0], STACK[:1])
    assert read(packed()).images[0].max() < 4096


def test_tiff_without_tifffile_is_not_reported_as_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with quiet_pillow(), pytest.raises(ModuleNotFoundError) as caught:
        crop_image(tiff(STACK[:1]), config())
    assert caught.value.name == "tifffile"


@pytest.mark.parametrize("broken", range(4))
def test_one_damaged_page_of_a_stack_is_damage(broken: int) -> None:
    data = bytearray(tiff(STACK, compression="zlib", photometric="minisblack", metadata={"axes": "ZYX"}))
    with tifffile.TiffFile(io.BytesIO(bytes(data))) as file:
        start, size = file.pages[broken].dataoffsets[0], file.pages[broken].databytecounts[0]  # type: ignore[union-attr]
    data[start + 2 : start + size] = bytes(size - 2)
    with quiet_pillow(), pytest.raises(BadImage, match="damaged"):
        crop_image(bytes(data), config(pages="all"))


def test_pages_of_mixed_bit_depths_require_data_pages() -> None:
    buffer = io.BytesIO()
    with tifffile.TiffWriter(buffer) as file:
        file.write(STACK[0], metadata=None)
        file.write(STACK[0].astype(np.uint8), metadata=None)
    for pages in (None, "all"):
        with pytest.raises(Undecided, match="holds 2 images, of 20 x 24 and 20 x 24. Set data.pages to first"):
            read(buffer.getvalue(), pages=pages)
    assert np.array_equal(read(buffer.getvalue(), pages="first").images[0], STACK[:1])


@pytest.mark.parametrize("shape", [(1, 1), (1, 24), (20, 1)])
def test_sides_of_one_pixel_are_read(shape: tuple[int, int]) -> None:
    numbers = STACK[0, : shape[0], : shape[1]]
    for data in (tiff(numbers), tiff(numbers, compression="zlib", tile=(16, 16)), npy(numbers)):
        assert np.array_equal(read(data).images[0][0], numbers)
    if shape == (1, 1):
        with quiet_pillow():
            assert np.array_equal(crop_image(tiff(numbers), config()).crops[0], np.full((1, 16, 16), numbers[0, 0]))


def test_files_of_mixed_dtypes_keep_their_values(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, dtype in enumerate([np.uint8, np.uint16, np.int32, np.float32]):
        tifffile.imwrite(tmp_path / f"in/{number}.tif", (STACK[0] % 200).astype(dtype))
    source = {"type": "folder", "path": str(tmp_path / "in"), "classes": "none"}
    crop_dataset(config(source=source, resolution=20, num_shards=1), tmp_path / "out")
    crops = open_shards(tmp_path / "out", "train").gather(np.arange(4))
    assert crops.unique(dim=0).shape[0] == 1 and crops.to(torch.int32).max() == (STACK[0] % 200)[:, 2:22].max()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
@pytest.mark.parametrize("crop", ["adm", "resize", "random_resized"])
def test_crops_of_every_dtype_are_computed_in_float32(dtype: str, crop: str) -> None:
    numbers = np.random.default_rng(5).integers(0, 256, (77, 91)).astype(dtype)
    settings = config(dtype=dtype, crop={"type": crop})
    image = Image.fromarray(numbers.astype(np.float32))
    with quiet_pillow():
        crops = crops_of_array(numbers[None], settings, b"seed")
        expected = settings.crop.crops(image, settings.size, (0, 0, 0), b"seed")
    for pixels, view in zip(crops, expected, strict=True):
        view = view.clip(numbers.min(), numbers.max())
        assert np.array_equal(pixels[0], (view if dtype == "float32" else np.rint(view)).astype(dtype))
