"""Files mapped one after another into one memory region."""

import errno
import mmap
from pathlib import Path

import numpy as np
import pytest

from image_diffusion.data.shards.mmap import Region


def test_files_are_mapped_at_their_offsets_in_any_order(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    contents = [generator.integers(1, 256, size, dtype=np.uint8) for size in (1, 3 * mmap.PAGESIZE, 5000, 9000)]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content.tobytes())
    region = Region([len(content) for content in contents])
    assert not region.bytes.any() and (region.starts % mmap.ALLOCATIONGRANULARITY == 0).all()
    for number in (3, 0, 1):
        region.put(number, tmp_path / str(number))
    for number, (start, content) in enumerate(zip(region.starts, contents, strict=True)):
        found = region.bytes[start : start + len(content)].numpy()
        assert (found == (content if number != 2 else 0)).all()


def test_mapped_memory_outlives_its_region(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x07" * 5000)
    region = Region([5000])
    region.put(0, tmp_path / "x")
    numbers = region.bytes[:5000]
    del region
    assert (numbers == 7).all()


def test_mapping_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        Region([1]).put(0, tmp_path / "nowhere")
    with pytest.raises(OSError, match=str(tmp_path)) as error:
        Region([1]).put(0, tmp_path)
    assert error.value.errno == errno.ENODEV
