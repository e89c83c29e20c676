"""What a JPEG says of itself before its pixels begin, read in a few microseconds."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_FRAME = struct.Struct(">BHHB")
"""The start of a frame header: bits of a sample, height, width, number of components."""
_BASELINE_TO_PROGRESSIVE = (0xC0, 0xC1, 0xC2)
_TABLES_AND_COMMENTS = (0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0))
_SCAN = 0xDA


@dataclass(frozen=True)
class JpegHeader:
    """size: (width, height) in pixels, as stored. components: 1 grey, 3 colour. exif: whether Exif data may turn it."""

    size: tuple[int, int]
    components: int
    exif: bool


def plain_header(data: bytes) -> JpegHeader | None:
    """The header of a JPEG of 8 bits, grey or of three components, and one picture. None for any other file, and for
    whatever is out of the ordinary.

    ITU-T T.81, appendix B: segments of a marker, a length and that many bytes, up to the start of the first scan.
    """
    if data[:2] != b"\xff\xd8":
        return None
    frame, exif, at = None, False, 2
    while at + 4 + _FRAME.size <= len(data) and data[at] == 0xFF:
        marker, start = data[at + 1], at + 4
        at += 2 + int.from_bytes(data[at + 2 : start])
        if marker == _SCAN and frame is not None:
            _, height, width, components = frame
            return JpegHeader((width, height), components, exif)
        if marker in _BASELINE_TO_PROGRESSIVE and frame is None:
            frame = _FRAME.unpack_from(data, start)
            if frame[0] != 8 or frame[3] not in (1, 3):
                return None
        elif marker not in _TABLES_AND_COMMENTS or data.startswith(b"MPF\0", start):  # the latter: several pictures
            return None
        exif = exif or data.startswith(b"Exif", start)
    return None
