"""240 photographs are cropped as by the original, byte for byte.

Needs imagenet-240.tar: photographs of EliSchwartz/imagenet-sample-images (`make test-photographs`).
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from crops import crop, original

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"


@pytest.fixture(scope="module")
def images(photographs: Callable[[str], Path]) -> dict[str, bytes]:
    """Return the photographs by the stems of their names."""
    with tarfile.open(photographs("imagenet-240.tar")) as tar:
        files = ((member.name, tar.extractfile(member)) for member in tar)
        return {Path(name).stem: file.read() for name, file in files if file is not None}


def test_crops_have_known_digests_of_original(images: dict[str, bytes]) -> None:
    """All photographs in the tar that have known digests."""
    manifest = json.loads((GOLDEN / "MANIFEST.json").read_text())
    (entry,) = (each for each in manifest["files"] if each["file"] == "p01_center_crop.npz")
    cases = [case["params"] for case in entry["cases"] if "jpeg_sha256" in case["params"]]
    known = {params["jpeg_sha256"]: params["crop_sha256"] for params in cases}
    found = [(data, known.get(hashlib.sha256(data).hexdigest())) for data in images.values()]
    checked = [(data, int(size), digest) for data, crops in found if crops for size, digest in crops.items()]
    assert checked
    for data, size, digest in checked:
        assert hashlib.sha256(crop(data, size).tobytes()).hexdigest() == digest, size


@pytest.mark.parametrize("resolution", [64, 256, 512])
def test_every_photograph_is_cropped_as_by_the_formula(images: dict[str, bytes], resolution: int) -> None:
    assert len(images) == 240
    for name, data in images.items():
        assert (crop(data, resolution) == original(Image.open(io.BytesIO(data)), resolution)).all(), name
