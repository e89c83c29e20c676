"""Detection of JPEG files whose pixels a decoder partly invented."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Sequence

from PIL import Image

_SCAN = 0xDA
FILLED = "its data end too early or have a hole, and decoders fill the rest"
"""Message for a file for which `is_filled` is true."""
_END = 0xD9
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_RESTART = re.compile(rb"\xff([\xd0-\xd7])")
_RESTART_INTERVAL = b"\xff\xdd\0\4"
"""Start of the segment that announces restart markers."""
_END_OF_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_HOLE = bytes(512)
"""Disk sector of zeros, which was never written or was lost."""
_NOISE = b"\0" + hashlib.sha512(b"noise").digest().replace(b"\xff", b"\xfe")
"""Bytes that decode as coefficients and contain no marker."""


def is_filled(data: bytes, last_pixel: Sequence[int]) -> bool:
    """Return whether a decoder invented pixels of a JPEG, since the coded data end too early or have a hole of zeros.
    Decoders warn of both, but Pillow does not report the warning.

    A decoder that runs out of data fills the image with grey up to the last pixel, so only images with a grey last
    pixel, or with many zeros in their data, are examined. Data inserted before every marker of a scan change the pixels
    only if the scan lacks data. Otherwise, if the zeros were decoded but the last bytes were not, the data before those
    are damaged. An examined image is decoded up to five times. Restart markers are numbered, which reveals gaps.

    last_pixel: levels of the last pixel, 0 to 255, in the mode of the file.
    """
    start = _behind_scan_header(data, 2)
    if _RESTART_INTERVAL in data[:start] and not all(_is_numbered(data[begin:end]) for begin, end in _scans(data)):
        return True
    hole = data.find(_HOLE, start, data.rfind(b"\xff\xd9"))
    if hole < 0 and any(level not in (127, 128) for level in last_pixel):
        return False
    scans, pixels = list(_scans(data)), _decoded(data)
    fed, at = b"", 0
    for start, end in scans:
        fed += data[at:start] + _MARKER.sub(lambda marker: _NOISE + marker[0], data[start:end]) + _NOISE
        at = end
    if _decoded(fed + data[at:]) != pixels:
        return True
    for start, end in scans:
        hole = data.find(_HOLE, start, end)
        if hole >= 0 and _decoded(_with_noise(data, hole)) != pixels:
            return _decoded(_with_noise(data, end - len(_NOISE))) == pixels
    return False


def _is_numbered(scan: bytes) -> bool:
    """True if the restart markers of a scan count from 0 to 7, over and over."""
    return all(marker[1][0] & 7 == number % 8 for number, marker in enumerate(_RESTART.finditer(scan)))


def _with_noise(data: bytes, at: int) -> bytes:
    return data[:at] + _NOISE + data[at + len(_NOISE) :]


def _decoded(data: bytes) -> bytes:
    """Return the pixels of a JPEG; empty where it cannot be decoded."""
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            return image.tobytes()
    except OSError:
        return b""


def _scans(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of the coded data of every scan of the first picture."""
    start = _behind_scan_header(data, 2)
    while start < len(data):
        marker = _END_OF_SCAN.search(data, start)
        end = marker.start() if marker else len(data)
        yield start, end
        start = _behind_scan_header(data, end)


def _behind_scan_header(data: bytes, at: int) -> int:
    """Return the start of the coded data of the next scan, by the segments from `at` on; the length where no scan
    follows."""
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _END:
        marker = data[at + 1]
        if marker == 0xFF:  # any number of them may stand before a marker
            at += 1
            continue
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
        if marker == _SCAN:
            return at
    return len(data)
