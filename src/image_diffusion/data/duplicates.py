"""Which crops show the same picture: byte for byte, or after saving, scaling, trimming or mirroring it once more.

A crop is looked at in grey at 32 x 32 pixels: the signs of the lowest 63 coefficients of its cosine transform (pHash:
Zauner 2010, "Implementation and Benchmarking of Perceptual Image Hash Functions", section 3.2.1, with the sign in place
of the median, so that the mirrored image has the same bits with every odd column inverted). The same is done of four
views that lack 5 % at two of the sides, which is what a trimmed copy shows. Two crops whose bits nearly agree are then
laid over each other, and are near duplicates where what they show correlates.

Not every two looks are compared, but those that are the same in two of the eight rows of coefficients, for each two
rows: so are all that differ in six bits, and most that differ in ten. (Manku, Jain and Das Sarma 2007, "Detecting
Near-Duplicates for Web Crawling", find fingerprints of web pages in such tables.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray
from PIL import Image

RADIUS = 10
"""Bits of 63 in which the looks of near duplicates may differ. Of 4,000 crops of CIFAR-10, 2 pairs of 100,000 do."""
CORRELATION = 0.95
"""What near duplicates have in common at least, once they lie over each other, -1 to 1. Saved as JPEG of quality 60,
scaled by 0.9, trimmed by 5 % or mirrored, 99 of 100 images reach 0.95; of 4,000 crops of CIFAR-10 none did that were
not the same picture."""
FAINT = 2.0
"""Standard deviation of the grey values, 0 to 255, below which there is nothing to compare."""
TOO_MANY = 30
"""Others, on average, whose looks nearly agree with those of an image: above it, looks tell nothing."""
CROWDED = 5e-4
"""Share of all pairs whose looks nearly agree and that are other pictures all the same: likewise, where most are."""

_TRIMMED = 0.95
_SIDE, _BITS = 32, 8
_SHARED = 2
_PORTION = 1 << 21
_GREYS_KEPT, _OVERLAYS_KEPT = 500_000, 4_000  # 500 MB, 160 MB
_VIEWS = ((0, 0), (1, 1), (1, 2), (2, 1), (2, 2))  # windows down and across: 0 the whole, 1 the start, 2 the end
_MIRROR = np.packbits(np.tile(np.arange(_BITS) % 2 == 1, _BITS)).view(">u8")[0].astype(np.uint64)
_TRIMMED_VIEWS = range(1, len(_VIEWS))

Looks = NDArray[np.uint64]
"""The bits of every view of n crops, [n, 5]; the first view is the whole crop."""
Pair = tuple[int, int]


def pixel_hash(pixels: NDArray[np.uint8]) -> str:
    """What crops of the same bytes have in common, and of one shape no others: 32 hexadecimal digits."""
    return hashlib.sha256(pixels.data).hexdigest()[:32]


def look(pixels: NDArray[np.uint8]) -> str:
    """What a crop [C, H, W] looks like, as text for a record; empty where it is too faint to say."""
    return looks(grey(pixels)[None])[0]


def looks(greys: NDArray[np.uint8]) -> list[str]:
    """The same of many crops in grey, [n, 32, 32]."""
    windows = _windows()
    every = (windows @ greys.astype(np.float64) @ windows.T).reshape(-1, 3, _BITS, 3, _BITS)  # windows down and across
    signs = np.stack([every[:, down, :, across] > 0 for down, across in _VIEWS], axis=1).reshape(-1, len(_VIEWS), 64)
    signs[:, :, 0] = False  # the mean says nothing
    faint = greys.std((1, 2)) < FAINT
    return ["" if faint[i] else bits.tobytes().hex() for i, bits in enumerate(np.packbits(signs, axis=2))]


def grey(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A crop of 1 to 4 channels in grey, without its alpha, [32, 32]: red, green and blue as in ITU-R BT.601."""
    small = [_small(channel) for channel in (pixels[:3] if len(pixels) > 2 else pixels[:1])]
    if len(small) == 1:
        return small[0]
    red, green, blue = (channel.astype(np.uint16) for channel in small)
    return ((77 * red + 150 * green + 29 * blue) >> 8).astype(np.uint8)


def sharpness(pixels: NDArray[np.uint8]) -> float:
    """The mean difference of horizontal neighbours in every second row of a crop's green or only channel, 0 to 255."""
    rows = pixels[1 if len(pixels) > 2 else 0, ::2].astype(np.int16)
    return round(float(np.abs(rows[:, 1:] - rows[:, :-1]).mean()), 3) if rows.shape[1] > 1 else 0.0


def looks_of(texts: Sequence[str]) -> Looks:
    """The bits in texts of `look`, none of them empty."""
    data = bytes.fromhex("".join(texts))
    return np.frombuffer(data, ">u8").astype(np.uint64).reshape(-1, len(_VIEWS))


def groups(keys: Iterable[str]) -> list[list[int]]:
    """The places of equal keys, of each that occurs more than once; empty keys are equal to none."""
    places: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return [found for key, found in places.items() if key and len(found) > 1]


def near_duplicates(
    texts: Sequence[str],
    crop: Callable[[int], NDArray[np.uint8]],
    of: Iterable[int] | None = None,
    processes: int = 1,
) -> list[tuple[int, int, float]] | None:
    """The near duplicates among crops, (first, second, correlation), first < second, in their order; None where so many
    look alike, as handwritten digits do, that looks tell nothing.

    texts: what `look` says of each; those without a look are compared with none. crop: the pixels [C, H, W] of one, by
    its place. of: compare only these with all; unset: all with all. processes: how many threads compare.
    """
    seen = np.array([place for place, text in enumerate(texts) if text], dtype=np.int64)
    if len(seen) < 2:
        return []
    bits = looks_of([texts[place] for place in seen])
    asked = np.arange(len(seen)) if of is None else np.flatnonzero(np.isin(seen, list(of)))
    close = _close(bits, asked, processes)
    if close is None:
        return None
    greys = lru_cache(_GREYS_KEPT)(lambda place: grey(crop(place)))
    views = lru_cache(_OVERLAYS_KEPT)(lambda place: _overlays(greys(place)))
    alike = []
    for a, b in seen[close].tolist():
        if (score := _correlation(views(a), views(b))) >= CORRELATION:
            alike.append((a, b, score))
    unlike = len(close) - len(alike)
    return None if unlike > max(len(alike), TOO_MANY, CROWDED * len(asked) * len(seen)) else alike


def chains(pairs: Iterable[Pair]) -> list[list[int]]:
    """The places that pairs connect, directly or by others, each sorted."""
    root: dict[int, int] = {}

    def find(place: int) -> int:
        while root.setdefault(place, place) != place:
            root[place] = place = root[root[place]]
        return place

    for a, b in pairs:
        low, high = sorted((find(a), find(b)))
        root[high] = low
    found: dict[int, list[int]] = {}
    for place in sorted(root):
        found.setdefault(find(place), []).append(place)
    return list(found.values())


def straddling(pairs: Sequence[Pair], held_out: Iterable[int]) -> list[int]:
    """Those held out that a pair connects, directly or by others held out, with one that is not; sorted."""
    apart = set(held_out)
    before = len(apart) + 1
    while len(apart) < before:
        before = len(apart)
        apart -= {one for a, b in pairs for one, other in ((a, b), (b, a)) if other not in apart}
    return sorted(set(held_out) - apart)


def _close(looks: Looks, asked: NDArray[np.int64], processes: int) -> NDArray[np.int64] | None:
    """The pairs of those asked with all others whose bits nearly agree, in any view of either, mirrored or not, as rows
    (first, second), [m, 2], sorted; None where they are too many to tell anything."""
    count, most = len(looks), TOO_MANY * len(asked)
    everything = np.arange(count)
    sides = [(asked, everything)] if len(asked) == count else [(asked, everything), (everything, asked)]

    def sharing(rows: tuple[int, ...]) -> NDArray[np.int64]:
        equal = np.uint64(sum(0xFF << _BITS * row for row in rows))
        found, seen = [np.empty(0, np.int64)], 0
        for queries, others in sides:
            for close in _sharing(looks, equal, queries, others):
                found.append(close)
                seen += len(close)
                if seen > most:
                    found = [np.unique(np.concatenate(found))]
                    if (seen := len(found[0])) > most:
                        return found[0]
        return np.concatenate(found)

    pairs = np.empty(0, np.int64)
    with ThreadPoolExecutor(processes) as pool:
        for found in pool.map(sharing, combinations(range(_BITS), _SHARED)):
            pairs = np.union1d(pairs, found)
            if len(pairs) > most:
                pool.shutdown(cancel_futures=True)
                return None
    return np.stack(np.divmod(pairs, count), axis=1)


def _sharing(
    looks: Looks, equal: np.uint64, queries: NDArray[np.int64], others: NDArray[np.int64]
) -> Iterator[NDArray[np.int64]]:
    """The pairs of queries, in any view, with others whose bits nearly agree and are the same where those of `equal`
    are set, as first x n + second, in portions."""
    whole = looks[others, 0]
    order = np.argsort(whole & equal)
    keys, starts, counts = np.unique((whole & equal)[order], return_index=True, return_counts=True)
    for view, mirror in product(range(len(_VIEWS)), (np.uint64(0), _MIRROR)):
        asked = looks[queries, view] ^ mirror
        at = np.minimum(np.searchsorted(keys, asked & equal), len(keys) - 1)
        hits = np.flatnonzero(keys[at] == asked & equal)
        ends = np.cumsum(counts[at[hits]])
        done = 0
        while done < len(hits):
            # As many of the queries as have a portion of others between them, but one at least.
            before = ends[done - 1] if done else 0
            until = max(int(np.searchsorted(ends, before + _PORTION, "right")), done + 1)
            mine = hits[done:until]
            each = counts[at[mine]]
            within = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
            place = order[np.repeat(starts[at[mine]], each) + within]
            near = np.bitwise_count(np.repeat(asked[mine], each) ^ whole[place]) <= RADIUS
            first, second = queries[np.repeat(mine, each)[near]], others[place[near]]
            apart = first != second
            yield np.unique(np.minimum(first, second)[apart] * len(looks) + np.maximum(first, second)[apart])
            done = until


@cache
def _windows() -> NDArray[np.float64]:
    """The lowest cosines of the transform (DCT-II) of a whole line, of its start and of its end, [3 x 8, 32]."""
    x = np.arange(_SIDE) * 2 + 1
    cosines = np.stack([np.cos(np.pi * x * k / (2 * _SIDE)) for k in range(_BITS)])
    parts = (_stretch(1, 0, _SIDE), _stretch(_TRIMMED, 0, _SIDE), _stretch(_TRIMMED, 1 - _TRIMMED, _SIDE))
    return np.concatenate([cosines @ part for part in parts])


@cache
def _stretch(share: float, start: float, side: int) -> NDArray[np.float64]:
    """A line of 32 values -> the part of it with `share` of its length, from `start` of it on, as `side` values: each
    is the mean of what it covers, [side, 32]."""
    edges = (start + share * np.linspace(0, 1, side + 1)) * _SIDE
    cells = np.arange(_SIDE)
    covered = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    means: NDArray[np.float64] = np.maximum(covered, 0) / (edges[1:] - edges[:-1])[:, None]
    return means


def _small(channel: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A channel [H, W] at 32 x 32: the mean of what each pixel covers."""
    if channel.shape == (_SIDE, _SIDE):
        return channel
    image = Image.fromarray(channel)
    if image.width % _SIDE == 0:  # several times faster
        return np.asarray(image.reduce(image.width // _SIDE))
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX))


def _overlays(picture: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The parts of a crop in grey that another may show, each of mean 0 and length 1, [19, 256]: the whole crop, then 5
    and 10 % less from either side or from both."""
    parts = [np.matmul((lines @ picture)[:, None], lines.transpose(0, 2, 1)).reshape(-1, 256) for lines in _parts()]
    found = np.concatenate(parts)
    found -= found.mean(1, keepdims=True)
    found /= np.sqrt((found * found).sum(1, keepdims=True)) + 1e-9
    return found


@cache
def _parts() -> list[NDArray[np.float64]]:
    """What makes a line of 32 values one of 16, of the whole of it and of parts of it, each [n, 16, 32]."""
    places = {1.0: (0.5,), 0.95: (0, 0.5, 1), 0.9: (0, 0.5, 1)}
    return [
        np.stack([_stretch(share, (1 - share) * place, _SIDE // 2) for place in which])
        for share, which in places.items()
    ]


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """The most that the whole of one crop correlates with a part of the other, mirrored or not."""
    wholes = [np.stack([each[0], each[0].reshape(16, 16)[:, ::-1].ravel()], axis=1) for each in (first, second)]
    return float(max((first @ wholes[1]).max(), (second @ wholes[0]).max()))
