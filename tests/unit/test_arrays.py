"""Arrays as images: each layout is read correctly or rejected in one line, and values are kept."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from numpy.typing import NDArray
from PIL import Image

from image_diffusion.codecs.diffusers import KlCodec
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.codecs.trained import DVAECodec
from image_diffusion.core.config.base import parse
from image_diffusion.core.files.image_arrays import write_tiff
from image_diffusion.core.levels import Levels
from image_diffusion.core.pictures import as_pictures
from image_diffusion.core.types import DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.array_files import BadImage, Undecided
from image_diffusion.data.crop.arrays import read_array
from image_diffusion.data.crop.image import crop_image, quiet_pillow
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.manifest import check_manifest
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.sources.drawn_cells import CHANNELS, drawn
from image_diffusion.experiments.checks import check_experiment
from image_diffusion.experiments.experiment import parse_experiment
from image_diffusion.networks.autoencoder import AutoencoderConfig
from image_diffusion.networks.dvae import DVAEConfig
from image_diffusion.systems.base import Others
from image_diffusion.systems.codec.reconstruction import reconstruct

Numbers = NDArray[Any]


def config(**changed: Any) -> DataConfig:
    values = {
        "name": "x",
        "source": {"type": "folder", "path": "x"},
        "resolution": 16,
        "dtype": "uint16",
        "channels": 3,
    }
    return parse(DataConfig, values | changed, "data")


def read(data: bytes, **changed: Any) -> Numbers:
    with quiet_pillow():
        (numbers,) = read_array(data, config(**changed)).images
        return numbers


def counts(shape: tuple[int, ...], dtype: str = "uint16", most: int = 4095) -> Numbers:
    numbers = np.random.default_rng(7).integers(0, min(most, np.iinfo(dtype).max) + 1, shape)
    return numbers.astype(dtype)


def npy(numbers: Numbers, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, numbers, **options)
    return buffer.getvalue()


def npz(**arrays: Numbers) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def zipped(numbers: Numbers) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, a=numbers)
    return buffer.getvalue()


def tiff(numbers: Numbers, **options: Any) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, numbers, **options)
    return buffer.getvalue()


def picture(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


CYX = counts((3, 20, 24))
YXC = np.ascontiguousarray(CYX.transpose(1, 2, 0))


# TIFF layouts with writer options; each must yield the values of CYX, three channels of uint16.
@pytest.mark.parametrize("big", [False, True], ids=["classic", "big"])
@pytest.mark.parametrize("order", ["<", ">"], ids=["little", "big-endian"])
@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize(
    "options",
    [
        {"metadata": {"axes": "CYX"}, "ome": True},
        {"metadata": {"axes": "CYX"}, "imagej": True},
        {"photometric": "rgb", "planarconfig": "separate"},
        {"photometric": "minisblack", "planarconfig": "separate"},
        {"metadata": {"axes": "CYX"}, "photometric": "minisblack", "tile": (16, 16)},
        {"metadata": {"axes": "CYX"}, "photometric": "minisblack", "rowsperstrip": 7},
    ],
    ids=["ome", "imagej", "planar-rgb", "planar-grey", "tiles", "strips"],
)
def test_every_layout_of_tiff_gives_its_numbers(
    options: dict[str, Any], compression: str | None, order: str, big: bool
) -> None:
    if options.get("imagej"):  # writes classic big-endian files
        big, order = False, ">"
    data = tiff(CYX, **options, compression=compression, byteorder=order, bigtiff=big)
    assert np.array_equal(read(data), CYX)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_tiff_samples_per_pixel_are_channels(planar: str, order: str) -> None:
    numbers = YXC if planar == "contig" else CYX
    assert np.array_equal(read(tiff(numbers, photometric="rgb", planarconfig=planar, byteorder=order)), CYX)


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4", ">i4", "<u4", "<i8", "<f4", ">f4", "<f8"])
@pytest.mark.parametrize("layout", ["CYX", "YXC"])
def test_numpy_files_of_every_type(layout: str, dtype: str) -> None:
    numbers = CYX if layout == "CYX" else YXC
    for data in (
        npy(numbers.astype(dtype)),
        npy(np.asfortranarray(numbers.astype(dtype))),
        npz(a=numbers.astype(dtype)),
    ):
        assert np.array_equal(read(data), CYX)


def test_two_axes_are_one_channel() -> None:
    for data in (
        npy(CYX[0]),
        tiff(CYX[0]),
        picture(Image.fromarray(CYX[0]), "PNG"),
        picture(Image.fromarray(CYX[0]), "TIFF"),
    ):
        assert np.array_equal(read(data, channels=1), CYX[:1])


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "PPM", "WEBP"])
def test_8_bit_pictures_can_be_read_as_arrays(kind: str) -> None:
    pixels = counts((20, 24, 3), "uint8", 255)
    options = {"lossless": True} if kind == "WEBP" else {}
    data = picture(Image.fromarray(pixels), kind, **options)
    assert np.array_equal(read(data, dtype="uint8"), pixels.transpose(2, 0, 1))
    assert np.array_equal(read(data, dtype="float32"), pixels.transpose(2, 0, 1))


@pytest.mark.parametrize("bits", [9, 10, 12, 14, 16])
def test_pgm_of_any_depth_and_jpeg_2000_keep_their_values(bits: int) -> None:
    numbers = counts((20, 24), most=2**bits - 1)
    pgm = f"P5 24 20 {2**bits - 1}\n".encode() + numbers.astype(">u2").tobytes()
    assert np.array_equal(read(pgm, channels=1)[0], numbers)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_tag_is_applied_to_arrays(orientation: int) -> None:
    pixels = counts((20, 24), "uint8", 255)
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = read(picture(Image.fromarray(pixels), "PNG", exif=exif), channels=1)
    assert np.array_equal(upright, read(tiff(pixels, extratags=[(274, 3, 1, orientation, True)]), channels=1))
    assert (upright.shape[1:] == (20, 24)) == (orientation < 5)
    assert np.array_equal(upright[0], pixels) == (orientation == 1)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_white_is_zero_images_are_inverted(dtype: str) -> None:
    numbers = counts((20, 24), dtype)
    assert np.array_equal(
        read(tiff(numbers, photometric="miniswhite"), channels=1, dtype=dtype)[0], np.iinfo(dtype).max - numbers
    )


def test_signed_and_float_values_keep_their_sign() -> None:
    hounsfield = np.random.default_rng(0).integers(-1024, 3071, (20, 24)).astype(np.int16)
    assert np.array_equal(read(tiff(hounsfield), channels=1, dtype="int16")[0], hounsfield)
    heights = np.random.default_rng(0).normal(0, 1000, (20, 24)).astype(np.float32)
    for data in (tiff(heights), npy(heights), picture(Image.fromarray(heights), "TIFF")):
        assert np.array_equal(read(data, channels=1, dtype="float32")[0], heights)


NAMES = ["DAPI", "actin", "ER"]


@pytest.mark.parametrize("chosen", [list(c) for n in (1, 2, 3) for c in itertools.permutations(NAMES, n)], ids="-".join)
def test_channels_are_chosen_by_the_names_in_the_file(chosen: list[str]) -> None:
    data = tiff(CYX, ome=True, metadata={"axes": "CYX", "Channel": {"Name": NAMES}})
    assert np.array_equal(read(data, channels=chosen), CYX[[NAMES.index(name) for name in chosen]])


def test_file_channel_names_are_not_matched_by_position_if_some_are_configured() -> None:
    data = tiff(CYX, ome=True, metadata={"axes": "CYX", "Channel": {"Name": NAMES}})
    last, first = NAMES[2].swapcase(), NAMES[0].swapcase()
    assert np.array_equal(read(data, channels=[last, first]), CYX[[2, 0]])
    for channels in ([last, "b", "c"], [last, "b"]):
        stated = f"other channels: {', '.join(NAMES)}, but data.channels names {', '.join(channels)}"
        with pytest.raises(BadImage, match=stated):
            read(data, channels=channels)
    assert np.array_equal(read(data, channels=["x", "y", "z"]), CYX)
    twins = tiff(CYX, ome=True, metadata={"axes": "CYX", "Channel": {"Name": ["n", "N", "o"]}})
    assert np.array_equal(read(twins, channels=["N", "O"]), CYX[1:])


def test_channels_are_selected_by_index_and_named_in_order() -> None:
    assert np.array_equal(read(npy(CYX), channels={0: "a", 2: "b"}, axes="CYX"), CYX[[0, 2]])
    assert np.array_equal(read(npy(CYX), channels=["a", "b", "c"]), CYX)
    assert config(channels={0: "a", 2: "b"}).channel_names == ("a", "b")


@pytest.mark.parametrize("axis", ["Z", "T"])
def test_pages_first_takes_the_first_index_of_other_axes(axis: str) -> None:
    stack = counts((4, 20, 24))
    data = tiff(stack, ome=True, metadata={"axes": axis + "YX"})
    assert np.array_equal(read(data, channels=1, pages="first"), stack[:1])
    assert np.array_equal(read(data, channels=4, axes="CYX"), stack)
    with pytest.raises(Undecided, match=f"4 x 20 x 24 numbers along the axes {axis}YX.*data.axes.*data.pages to first"):
        read(data, channels=1)


def test_pages_are_read_as_channels_with_axes_cyx() -> None:
    buffer = io.BytesIO()
    with tifffile.TiffWriter(buffer) as file:
        for page in CYX:
            file.write(page, metadata=None, contiguous=False)
    with pytest.raises(Undecided, match="data.axes"):
        read(buffer.getvalue())
    assert np.array_equal(read(buffer.getvalue(), axes="CYX"), CYX)
    assert np.array_equal(read(buffer.getvalue(), channels=1, pages="first"), CYX[:1])


def pages(*numbers: Numbers) -> bytes:
    buffer = io.BytesIO()
    with tifffile.TiffWriter(buffer) as file:
        for page in numbers:
            file.write(page, metadata=None, contiguous=False)
    return buffer.getvalue()


# Name of the case, file contents, settings, expected one-line message.
REFUSED: list[tuple[str, Callable[[], bytes], dict[str, Any], str]] = [
    ("as many rows as channels", lambda: npy(counts((3, 24, 3))), {}, "which axis of 3 x 24 x 3 has the 3 channels"),
    ("no axis fits", lambda: npy(counts((5, 20, 24))), {}, "which axis of 5 x 20 x 24 has the 3 channels"),
    ("places of unknown axes", lambda: npy(counts((5, 20, 24))), {"channels": {0: "a"}}, "data.axes"),
    ("four axes", lambda: npy(counts((2, 3, 20, 24))), {}, "data.axes"),
    ("other axes than stated", lambda: npy(CYX), {"axes": "YX"}, "3 x 20 x 24 numbers are not YX"),
    (
        "pages of two sizes",
        lambda: pages(counts((20, 24)), counts((9, 9))),
        {"channels": 1},
        "2 images, of 20 x 24 and 9 x 9",
    ),
    ("pages of two depths", lambda: pages(counts((20, 24)), counts((20, 24), "uint8")), {"channels": 1}, "2 images"),
    ("fewer channels", lambda: tiff(CYX[:2], ome=True, metadata={"axes": "CYX"}), {}, "2, but data.channels has 3"),
    ("more channels", lambda: tiff(YXC, photometric="rgb"), {"channels": 1}, "3, but data.channels has 1"),
    ("a name too few", lambda: npy(CYX), {"channels": ["a", "b"], "axes": "CYX"}, "3, but data.channels has 2"),
    ("a place too many", lambda: npy(CYX), {"channels": {7: "a"}, "axes": "CYX"}, "too few channels: 3, .* has 7"),
    ("too large for the type", lambda: npy(counts((3, 20, 24), "uint32", 99_999)), {}, "uint16 does not hold: uint32"),
    ("negative", lambda: npy(-CYX.astype(np.int32)), {}, "uint16 does not hold: int32 from -4092 to -9"),
    ("fractions", lambda: npy(CYX / 2), {}, "uint16 does not hold: float64"),
    ("beyond float32", lambda: npy(np.full((3, 20, 24), 2**24 + 1)), {"dtype": "float32"}, "float32 does not hold"),
    ("1e300", lambda: npy(np.where(CYX > 9, 1e300, 1)), {"dtype": "float32"}, "hold: float64 from 1 to 1e.300"),
    ("not a number", lambda: npy(np.full((3, 20, 24), np.nan)), {"dtype": "float32"}, "not finite"),
    ("infinite", lambda: npy(np.full((3, 20, 24), np.inf)), {"dtype": "float32"}, "not finite"),
    ("complex", lambda: npy(CYX.astype(complex)), {}, "no numbers: complex128"),
    ("texts", lambda: npy(np.full((3, 20, 24), "a")), {}, "no numbers: <U1"),
    ("objects", lambda: npy(np.full((3, 20, 24), None), allow_pickle=True), {}, "damaged: Object arrays"),
    ("dates", lambda: npy(np.zeros((3, 20, 24), "M8[s]")), {}, "no numbers: datetime64"),
    ("nothing", lambda: npy(np.zeros((3, 0, 24), np.uint16)), {}, "no numbers"),
    ("no pixels of an axis", lambda: npy(np.zeros((), np.uint16)), {"axes": "YX"}, "are not YX"),
    ("two arrays", lambda: npz(a=CYX, b=CYX), {}, "not one array: the file holds 2"),
    ("no array", npz, {}, "not one array: the file holds 0"),
    (
        "a palette",
        lambda: picture(Image.fromarray(counts((20, 24), "uint8", 255)).convert("P"), "PNG"),
        {"channels": 1},
        "mode P",
    ),
    (
        "a palette in a TIFF",
        lambda: tiff(counts((20, 24), "uint8", 255), photometric="palette", colormap=np.zeros((3, 256), np.uint16)),
        {"channels": 1},
        "a palette",
    ),
    ("CMYK", lambda: picture(Image.new("CMYK", (24, 20)), "JPEG"), {"channels": 4}, "mode CMYK"),
    (
        "an animation",
        lambda: picture(Image.new("L", (24, 20)), "WEBP", save_all=True, append_images=[Image.new("L", (24, 20), 9)]),
        {},
        "an animation",
    ),
    (
        "floating-point white is 0",
        lambda: tiff(np.ones((20, 24), np.float32), photometric="miniswhite"),
        {"channels": 1, "dtype": "float32"},
        "white is 0",
    ),
    ("a cut file", lambda: npy(CYX)[:-99], {}, "damaged"),
    ("a cut TIFF", lambda: tiff(CYX, photometric="minisblack")[:-999], {"axes": "CYX"}, "damaged"),
    ("a cut npz", lambda: npz(a=CYX)[:-99], {}, "damaged|not an image"),
    ("noise", lambda: bytes(range(256)), {}, "damaged"),
    ("empty", lambda: b"", {}, "an empty file"),
    (
        "too large",
        lambda: npy(np.zeros((1, 200, 200), np.uint8)),
        {"channels": 1, "axes": "CYX", "max_pixels": 1000},
        "too large: 200 x 200",
    ),
    (
        "a large TIFF",
        lambda: tiff(np.zeros((300, 300), np.uint8)),
        {"channels": 1, "max_pixels": 1000},
        "too large: 300 x 300",
    ),
    (
        "a large picture",
        lambda: picture(Image.new("L", (300, 300)), "PNG"),
        {"channels": 1, "max_pixels": 1000},
        "too large: 300 x 300 numbers",
    ),
    (
        "a large npz",
        lambda: zipped(np.zeros((1, 900, 900), np.uint8)),
        {"channels": 1, "max_pixels": 1000},
        "too large",
    ),
    ("too small", lambda: npy(CYX), {"min_side": 99}, "too small: 24 x 20"),
    (
        "too thin",
        lambda: npy(np.zeros((1, 20000, 1), np.uint8)),
        {"channels": 1, "axes": "CYX", "max_pixels": 30_000},
        "too thin",
    ),
]


@pytest.mark.parametrize(("make", "changed", "says"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_unreadable_arrays_are_rejected_in_one_line(
    make: Callable[[], bytes], changed: dict[str, Any], says: str
) -> None:
    with quiet_pillow(), pytest.raises((BadImage, Undecided), match=says) as caught:
        crop_image(make(), config(**changed))
    assert "\n" not in str(caught.value)


def test_16_bit_colour_png_is_not_read_at_8_bits(tmp_path: Path) -> None:
    import zlib

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in YXC)
    header = chunk(b"IHDR", (24).to_bytes(4, "big") + (20).to_bytes(4, "big") + bytes([16, 2, 0, 0, 0]))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    with pytest.raises(BadImage, match="colour of 16 bits"):
        read(data)


@pytest.mark.parametrize("crop", ["adm", "resize", "multi", "random_resized"])
def test_crops_stay_within_minimum_and_maximum(crop: str) -> None:
    numbers = counts((2, 50, 70))
    numbers[:, 20:30, 20:30] = 4095
    with quiet_pillow():
        cropped = crop_image(npy(numbers), config(channels=2, crop={"type": crop})).crops
    for pixels in cropped:
        assert pixels.dtype == np.uint16
        assert pixels.shape == (2, 16, 16)
        assert pixels.max() <= numbers.max()
        assert pixels.min() >= numbers.min()


def test_crop_at_the_original_size_equals_the_array() -> None:
    numbers = counts((3, 16, 16))
    with quiet_pillow():
        assert np.array_equal(crop_image(npy(numbers), config()).crops[0], numbers)


def test_array_scaling_matches_picture_scaling() -> None:
    pixels = counts((64, 80, 3), "uint8", 255)
    with quiet_pillow():
        as_picture = crop_image(picture(Image.fromarray(pixels), "PNG"), config(dtype=None)).crops[0]
        as_array = crop_image(picture(Image.fromarray(pixels), "PNG"), config(dtype="uint8")).crops[0]
    # Pillow rounds pictures to 8 bits after each pass, arrays once.
    assert np.abs(as_picture.astype(int) - as_array.astype(int)).max() <= 2


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
def test_values_survive_normalise_and_restore(dtype: str) -> None:
    low, high = (-1000.0, 3000.0) if dtype in ("int16", "float32") else (7.0, 250.0 if dtype == "uint8" else 65_535.0)
    levels = Levels(dtype=dtype, channels=("a", "b"), low=(low, low), high=(high, high / 2))
    numbers = torch.from_numpy(np.linspace(low, high / 2, 2 * 64 * 64).astype(dtype).reshape(1, 2, 64, 64))
    x = levels.normalise(numbers)
    assert x.min() >= -1
    assert x.max() <= 1
    back = levels.restore(x)
    assert back.dtype == numbers.dtype
    difference = np.abs(back.numpy().astype(np.float64) - numbers.numpy().astype(np.float64)).max()
    assert difference == 0 if dtype != "float32" else difference < 1e-3


@pytest.mark.parametrize(("dtype", "low", "high"), [("uint16", 0, 65536), ("uint8", 0, 256), ("int16", -40000, 40000)])
def test_restored_integers_are_clamped_to_their_dtype(dtype: str, low: int, high: int) -> None:
    levels, limits = Levels(dtype=dtype, channels=("a",), low=(low,), high=(high,)), np.iinfo(dtype)
    black, white = levels.restore(torch.tensor([-1.0, 1.0]).view(1, 1, 1, 2)).flatten().tolist()
    assert (black, white) == (limits.min, limits.max)


def cells(folder: Path, count: int = 24, **changed: Any) -> dict[str, Any]:
    (folder / "images").mkdir(parents=True)
    for number in range(count):
        tifffile.imwrite(
            folder / "images" / f"{number:03}.ome.tif", drawn(number), ome=True,
            metadata={"axes": "CYX", "Channel": {"Name": list(CHANNELS)}}, photometric="minisblack",
        )  # fmt: skip
    values = {
        "source": {"type": "folder", "path": str(folder / "images")},
        "resolution": 48,
        "channels": list(CHANNELS),
    }
    made = crop_dataset(config(**values, num_shards=2, **changed), folder / "crops")
    return made.manifest


def test_shards_keep_every_12_bit_value_in_uint16(tmp_path: Path) -> None:
    ramp = np.arange(4096, dtype=np.uint16).reshape(1, 64, 64)
    (tmp_path / "images").mkdir()
    np.save(tmp_path / "images" / "ramp.npy", ramp)
    values = {"source": {"type": "folder", "path": str(tmp_path / "images")}, "resolution": 64, "channels": 1}
    crop_dataset(config(**values, num_shards=1), tmp_path / "crops")
    shards = open_shards(tmp_path / "crops", "all")
    assert np.array_equal(shards.gather(np.array([0]))[0].numpy(), ramp)
    assert shards.levels is not None
    rounded = shards.levels.restore(shards.levels.normalise(shards.gather(np.array([0])))).numpy()
    assert len(np.unique(rounded)) >= 4090  # of 4,096; the others lie beyond the quantiles


def test_range_is_measured_or_configured_per_channel(tmp_path: Path) -> None:
    measured = cells(tmp_path / "a")["levels"]
    numbers = np.stack([drawn(number) for number in range(24)])
    for channel, name in enumerate(CHANNELS):
        assert measured["channels"][channel] == name
        low, high = np.quantile(numbers[:, channel], (0.0001, 0.9999))
        assert measured["low"][channel] == pytest.approx(low, abs=2)
        assert measured["high"][channel] == pytest.approx(high, abs=20)
        outside = (numbers[:, channel] < measured["low"][channel]) | (numbers[:, channel] > measured["high"][channel])
        assert measured["clipped"][channel] == pytest.approx(outside.mean(), abs=1e-8)
    stated = cells(tmp_path / "b", range={"nuclei": [0, 4095], "granules": "file"})["levels"]
    assert (stated["low"][0], stated["high"][0]) == (0, 4095)
    assert (stated["low"][3], stated["high"][3]) == (0, 65535)
    assert stated["high"][1] == measured["high"][1]
    of_type = cells(tmp_path / "c", range="file")["levels"]
    assert of_type["low"] == [0] * 5


def test_changed_range_rewrites_no_shards(tmp_path: Path) -> None:
    cells(tmp_path)
    values = {
        "source": {"type": "folder", "path": str(tmp_path / "images")},
        "resolution": 48,
        "channels": list(CHANNELS),
    }
    again = crop_dataset(config(**values, num_shards=2, range=[0, 4095]), tmp_path / "crops")
    assert again.num_written == 0
    assert again.manifest["levels"]["high"] == [4095] * 5


def test_constant_channel_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    numbers = counts((2, 20, 24))
    numbers[1] = 9
    np.save(tmp_path / "images" / "a.npy", numbers)
    values = {"source": {"type": "folder", "path": str(tmp_path / "images")}, "channels": ["a", "b"]}
    with pytest.raises(ValueError, match=r"data.range: the channel b is 9 in all images"):
        crop_dataset(config(**values, num_shards=1), tmp_path / "crops")


def test_floating_point_ranges_are_measured(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    heights = np.random.default_rng(0).normal(0, 1000, (4, 1, 16, 16)).astype(np.float32)
    for number, image in enumerate(heights):
        np.save(tmp_path / "images" / f"{number}.npy", image)
    values = {"source": {"type": "folder", "path": str(tmp_path / "images")}, "channels": 1, "dtype": "float32"}
    levels = crop_dataset(config(**values, num_shards=1), tmp_path / "crops").manifest["levels"]
    assert levels["low"][0] == pytest.approx(heights.min(), abs=10)
    assert levels["high"][0] == pytest.approx(heights.max(), abs=10)


@pytest.mark.parametrize("hot", [None, 1e6, -3.4028235e38])
@pytest.mark.parametrize("stated", [None, [-0.1, 3e38]])
def test_float_ranges_are_quantiles_unaffected_by_an_outlier_pixel(
    hot: float | None, stated: list[float] | None, tmp_path: Path
) -> None:
    (tmp_path / "images").mkdir()
    heights = np.random.default_rng(0).normal(0, 1, (80, 1, 16, 16)).astype(np.float32)
    heights[:, :, 3] = -0.0
    if hot is not None:
        heights[7, 0, 5, 5] = hot
    for number, image in enumerate(heights):
        np.save(tmp_path / "images" / f"{number}.npy", image)
    values = {"source": {"type": "folder", "path": str(tmp_path / "images")}, "channels": 1, "dtype": "float32"}
    levels = crop_dataset(config(**values, num_shards=2, range=stated), tmp_path / "crops").manifest["levels"]
    least, most = stated or np.quantile(heights, (0.0001, 0.9999), method="inverted_cdf").tolist()
    assert (levels["low"][0], levels["high"][0]) == (least, most)
    exact = heights.astype(np.float64)
    assert levels["clipped"][0] == round(float(((exact < least) | (exact > most)).mean()), 8)


def test_rendered_shards_yield_floats_and_gather_flips_images(tmp_path: Path) -> None:
    cells(tmp_path)
    shards, rendered = (open_shards(tmp_path / "crops", "all", renders=renders) for renders in (False, True))
    rows = np.arange(6)
    plain = shards.gather(rows)
    assert plain.dtype == torch.uint16
    mirrored = shards.gather(rows, np.array([True, False] * 3))
    assert np.array_equal(mirrored[0].numpy(), plain[0].numpy()[..., ::-1])
    assert np.array_equal(mirrored[1].numpy(), plain[1].numpy())
    seen = rendered.gather(rows)
    assert seen.dtype == torch.float32
    assert seen.min() >= 0
    assert seen.max() <= 255
    assert shards.levels is not None
    torch.testing.assert_close(seen, shards.levels.rendered(plain))


@pytest.mark.parametrize("channels", [1, 2, 3, 5, 64])
def test_arrays_are_rendered_as_pictures(channels: int) -> None:
    images = torch.zeros(2, channels, 8, 8)
    assert as_pictures(images).dtype == torch.uint8
    assert as_pictures(images).shape == (2, 1 if channels == 1 else 3, 8, 8)
    images[:, 0] = 255
    shown = as_pictures(images)[0, :, 0, 0].tolist()
    assert shown == ([255] if channels == 1 else [255, 0, 0])


@pytest.mark.parametrize("channels", [8, 13, 64])
def test_pictures_of_many_channels_show_brightness(channels: int) -> None:
    dark, bright = (as_pictures(torch.full((1, channels, 1, 1), share * 255)).int() for share in (0.3, 0.6))
    assert dark.min() > 255 * 0.25 and dark.max() < bright.min() and bright.max() <= 255 * 0.6
    noise = 255 * torch.rand(1, channels, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(as_pictures(noise).amax(1), noise.amax(1).round().to(torch.uint8))
    assert torch.equal(as_pictures(torch.zeros(1, channels, 1, 1)), torch.zeros(1, 3, 1, 1, dtype=torch.uint8))


def test_samples_are_stacks_with_named_channels_and_reproducible_bytes(tmp_path: Path) -> None:
    images = np.stack([drawn(number).transpose(1, 2, 0) for number in range(4)])
    for name in ("a", "b"):
        write_tiff(tmp_path / f"{name}.ome.tif", images, CHANNELS)
    assert (tmp_path / "a.ome.tif").read_bytes() == (tmp_path / "b.ome.tif").read_bytes()
    with tifffile.TiffFile(tmp_path / "a.ome.tif") as file:
        assert file.series[0].axes == "TCYX"
        assert np.array_equal(file.asarray(), images.transpose(0, 3, 1, 2))
        assert file.ome_metadata is not None
        assert all(f'Name="{name}"' in file.ome_metadata for name in CHANNELS)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"dtype": None, "channels": 5}, "channels is 5, but pictures have 1 to 4. Set dtype"),
        ({"dtype": None, "channels": ["a"]}, "channels is .'a'., but pictures have"),
        ({"dtype": None, "axes": "CYX"}, "axes is CYX, which is for arrays"),
        ({"dtype": None, "range": "measured"}, "range is measured, which is for arrays"),
        ({"dtype": "int8"}, "dtype"),
        ({"channels": 65}, "channels"),
        ({"channels": ["a", "a", "b"]}, "has a name twice"),
        ({"channels": []}, "channels"),
        ({"range": {"z": "file"}}, "range names 'z', which is no channel. Known: 0, 1, 2"),
        ({"range": [5, 5]}, "not a range"),
        ({"range": {"0": [9, 1]}}, "not a range"),
        ({"dtype": "float32", "range": [1, 1.00000001]}, r"\[1.0, 1.00000001\] is no range in float32. .* apart"),
        ({"dtype": "float32", "range": {"0": [-3e38, 3e38]}}, "is no range in float32"),
        ({"range": [0, 1e39]}, "is no range in float32"),
        ({"dtype": "float32", "range": "file"}, "float32 has no largest number"),
        ({"dtype": "float32", "range": {"0": "file"}}, "float32 has no largest number"),
        ({"crop": {"type": "pad"}}, "bars have no number in arrays"),
        ({"axes": "cyx"}, "axes"),
    ],
)
def test_invalid_array_settings_are_reported_in_one_line(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        config(**changed)
    assert "\n" not in str(caught.value)


def test_array_keys_are_absent_from_picture_configs() -> None:
    dumped = config(dtype=None).model_dump(mode="json")
    assert "dtype" not in dumped
    assert "axes" not in dumped
    assert config(dtype=None).crop_identity().keys() == {
        "method", "version", "resolution", "channels", "resize", "background", "min_side", "max_pixels",
    }  # fmt: skip


def dicom(stored: Numbers, **elements: Any) -> bytes:
    pydicom = pytest.importorskip("pydicom", reason="the extra `arrays`")
    dataset = pydicom.Dataset()
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    dataset.Rows, dataset.Columns = stored.shape[-2:]
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 16, 12, 11
    dataset.PixelRepresentation = int(stored.dtype.kind == "i")
    for name, value in elements.items():
        setattr(dataset, name, value)
    dataset.PixelData = stored.tobytes()
    buffer = io.BytesIO()
    dataset.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


STORED = counts((20, 24))


@pytest.mark.parametrize(
    ("elements", "dtype", "expected"),
    [
        ({}, "uint16", STORED),
        ({"RescaleSlope": 1, "RescaleIntercept": -1024}, "int16", STORED.astype(np.int16) - 1024),
        ({"RescaleSlope": "0.5", "RescaleIntercept": 0}, "float32", STORED / np.float32(2)),
        ({"PhotometricInterpretation": "MONOCHROME1"}, "uint16", 4095 - STORED),
        ({"WindowCenter": 40, "WindowWidth": 80}, "uint16", STORED),
        (
            {"RescaleSlope": 2, "RescaleIntercept": 0, "PhotometricInterpretation": "MONOCHROME1"},
            "uint16",
            2 * (4095 - STORED),
        ),
        (
            {
                "RescaleSlope": 1,
                "RescaleIntercept": -1024,
                "RescaleType": "HU",
                "PhotometricInterpretation": "MONOCHROME1",
            },
            "int16",
            STORED.astype(np.int16) - 1024,
        ),
        (
            {
                "RescaleSlope": 1,
                "RescaleIntercept": -1024,
                "Modality": "CT",
                "PhotometricInterpretation": "MONOCHROME1",
            },
            "int16",
            STORED.astype(np.int16) - 1024,
        ),
        (
            {"RescaleSlope": 2, "RescaleIntercept": 0, "RescaleType": "US", "PhotometricInterpretation": "MONOCHROME1"},
            "uint16",
            2 * (4095 - STORED),
        ),
    ],
    ids=[
        "plain",
        "hounsfield",
        "fractions",
        "white is 0",
        "a window",
        "white is 0 and a slope",
        "white is 0 and a unit",
        "white is 0 in CT",
        "white is 0 and no unit",
    ],
)
def test_dicom_values_are_rescaled_and_inverted_as_stated(
    elements: dict[str, Any], dtype: str, expected: Numbers
) -> None:
    assert np.array_equal(read(dicom(STORED, **elements), channels=1, dtype=dtype)[0], expected)


def test_signed_monochrome1_dicom_is_negated() -> None:
    stored = (STORED.astype(np.int16) - 2048).astype(np.int16)
    data = dicom(stored, PhotometricInterpretation="MONOCHROME1")
    assert np.array_equal(read(data, channels=1, dtype="int16")[0], -1 - stored)


def test_dicom_with_per_frame_metadata_is_rejected() -> None:
    from_pydicom = pytest.importorskip("pydicom", reason="the extra `arrays`")
    data = dicom(STORED, SharedFunctionalGroupsSequence=from_pydicom.Sequence([from_pydicom.Dataset()]))
    with pytest.raises(BadImage, match="an enhanced DICOM file"):
        read(data, channels=1)


def test_multi_frame_dicom_requires_data_pages() -> None:
    data = dicom(counts((3, 20, 24)), NumberOfFrames=3)
    with pytest.raises(Undecided, match="3 x 20 x 24 numbers along the axes ZYX"):
        read(data, channels=1)
    assert read(data, channels=1, pages="first").shape == (1, 20, 24)


def test_compressed_dicom_without_its_decoder_stops_the_crop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, whole series of intact scans would be listed as damaged and left out."""
    pydicom = pytest.importorskip("pydicom", reason="the extra `arrays`")
    path = pydicom.data.get_testdata_file("MR_small_jpeg_ls_lossless.dcm", download=False)
    monkeypatch.setattr("pydicom.pixels.get_decoder", lambda _: SimpleNamespace(is_available=False))
    with pytest.raises(Undecided, match=r"\(JPEG-LS Lossless .*\) needs the package gdcm\."):
        read(Path(path).read_bytes(), channels=1, dtype="int16")


def test_missing_pydicom_is_named_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pydicom", None)
    with pytest.raises(Undecided, match=r"pip install 'image-diffusion\[arrays\]'"):
        read(bytes(128) + b"DICM" + bytes(99), channels=1)


def check(**sections: Any) -> None:
    values: dict[str, Any] = {
        "data": {"name": "x", "source": {"type": "drawn_cells"}, "resolution": 16, "dtype": "uint16", "channels": 5},
        "system": {"type": "dit", "network": {"depth": 1, "width": 32, "num_heads": 2, "patch": 4}},
        "train": {"steps": 2},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section if name != "system" else section
    check_experiment(parse_experiment(values, "x.yaml"), Others())


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"codec": {"type": "stability_vae"}}, "data.dtype is uint16, but codec.type stability_vae takes pictures"),
        (
            {"system": {"type": "prior"}, "pairs": {"type": "hashed"}},
            "data.dtype is uint16, but system.type prior takes pictures",
        ),
        (
            {"system": {"type": "iddpm", "condition": {"type": "image", "from": "self", "shrink": 2}}},
            r"but an image in system.condition is for pictures of 8 bits.*data.range: \[low, high\] makes such of grey",
        ),
        ({"evaluate": {"likelihood": {}}}, "but evaluate.likelihood is for pictures"),
        ({"sample": {"start": {"images": "x", "strength": 0.5}}}, "sample.start"),
        (
            {"evaluate": {"detectors": [{"type": "inception"}]}},
            "inception, which takes images of 1 or 3 channels, .* 5",
        ),
        (
            {
                "data": {"dtype": None, "channels": 4, "source": {"type": "folder", "path": "x"}},
                "evaluate": {"detectors": [{"type": "inception"}]},
            },
            "inception, which takes images of 1 or 3 channels, .* 4",
        ),
        ({"synthesize": {}}, "synthesize"),
        (
            {"train": {"augment": {"brightness": 0.2}}},
            "train.augment.brightness is 0.2, but the images have 5 channels",
        ),
    ],
)
def test_features_for_8_bit_pictures_reject_arrays_before_any_work(sections: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        check(**sections)
    assert "\n" not in str(caught.value)


LEVELS = Levels(dtype="uint16", channels=("a", "b"), low=(100, 100), high=(4095, 3000))


def test_an_exported_codec_keeps_the_levels() -> None:
    spec = DataSpec(channels=2, resolution=16, levels=LEVELS)
    dvae = DVAEConfig(num_tokens=6, codebook_dim=4, num_layers=2, num_resnet_blocks=0, hidden_dim=8).build(spec).eval()
    vae = AutoencoderConfig(block_channels=[16, 16]).build(spec).eval().vae
    numbers = torch.from_numpy(counts((3, 2, 16, 16)))
    for codec in (
        DVAECodec({"type": "dvae"}, lambda: dvae, 2.0, LEVELS),
        KlCodec({"type": "kl"}, lambda: vae, 2.0, levels=LEVELS),
    ):
        again = type(codec).unpacked(codec.packed())
        x = codec.normalise(codec.encode(numbers)[:, 0])
        assert codec.decode(x).dtype == torch.uint16
        assert np.array_equal(again.decode(x).numpy(), codec.decode(x).numpy())
    pixels = Rgb().build(None, Rgb().scale_of(LEVELS.model_dump()), torch.device("cpu"), torch.float32)
    again = Rgb.unpacked(pixels.packed())
    clipped = numbers.float().clamp(100).minimum(torch.tensor([4095.0, 3000.0]).view(2, 1, 1))
    assert torch.equal(again.decode(pixels.pixels(numbers)).float(), clipped)
    assert Rgb.unpacked(Rgb().packed()) == Rgb()


def test_reconstructions_of_arrays_are_compared_without_rounding() -> None:
    numbers = torch.from_numpy(counts((4, 2, 16, 16)))
    network = AutoencoderConfig(block_channels=[16, 16]).build(DataSpec(channels=2, resolution=16)).eval()
    result = reconstruct(network, LEVELS.rendered(numbers))
    assert result.decoded["mean"].dtype == torch.float32
    assert not torch.equal(result.decoded["mean"], result.decoded["mean"].round())
    error = (result.images.double() - result.decoded["mean"].double()).square().mean((1, 2, 3))
    torch.testing.assert_close(result.quality()["psnr_mean"], 10 * torch.log10(255**2 / error))
    assert result.picture().mode == "RGB"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"low": [0.0]}, "5 channels have 1 lows and 5 highs"),
        ({"low": [9e9] * 5}, "are not ranges"),
        ({"high": [float("inf")] * 5}, "are not ranges"),
        ({"dtype": "int16"}, "levels are of 5 channels of int16, but the samples are not"),
        ({"channels": ["a"], "low": [0.0], "high": [1.0]}, "levels are of 1 channels of uint16"),
    ],
)
def test_levels_of_a_foreign_manifest_are_checked(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    manifest = cells(tmp_path, 6)
    with pytest.raises(ValueError, match=says):
        check_manifest(manifest | {"levels": manifest["levels"] | changed}, "x")
