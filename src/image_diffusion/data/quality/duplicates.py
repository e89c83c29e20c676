"""Find crops of the same picture: equal bytes, or copies that were saved again, scaled, trimmed or mirrored.

A crop is hashed in grey at 32 x 32 pixels: the signs of the lowest 63 coefficients of its cosine transform (pHash:
Zauner 2010, "Implementation and Benchmarking of Perceptual Image Hash Functions", section 3.2.1, with the sign in place
of the median, so that the mirrored image has the same bits with every odd column inverted). The same is done of four
views that lack 5 % at two of the sides, which is what a trimmed copy shows. Two crops whose bits nearly agree are then
laid over each other, and are near duplicates where what they show correlates.

Two views are compared only if they are equal in at least two of the eight rows of coefficients. This finds all pairs
that differ in up to six bits, and most that differ in ten. (Manku, Jain and Das Sarma 2007, "Detecting
Near-Duplicates for Web Crawling", find fingerprints of web pages in such tables.)
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from itertools import combinations, groupby, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from image_diffusion.data.shards.records import Quarantined, ShardRecord, index_of, share_of_hashes, tar_path
from image_diffusion.data.shards.tar_layout import Layout, read_array

RADIUS = 10
"""Number of bits of 63 in which the views of near duplicates may differ. In 4,000 crops of CIFAR-10, 2 of 100,000 pairs
are that close."""
CORRELATION = 0.95
"""Correlation that near duplicates have at least, once they lie over each other, -1 to 1. Saved as JPEG of quality 60,
scaled by 0.9, trimmed by 5 % or mirrored, 99 of 100 images reach 0.95; of 4,000 crops of CIFAR-10, no two
different pictures do."""
FAINT = 2.0
"""Standard deviation of the grey values, 0 to 255, below which a crop is too faint to compare."""
TOO_MANY = 30
"""Maximum average number of images whose views nearly agree with those of an image; above it, views cannot tell images
apart."""
CROWDED = 5e-4
"""Maximum share of all pairs whose views nearly agree although the pictures differ; above it, if these are most of the
agreeing pairs, views cannot tell images apart."""

_TRIMMED = 0.95
_SIDE, _BITS = 32, 8
_SHARED = 2
_PORTION = 1 << 21
_GREYS_KEPT, _OVERLAYS_KEPT = 500_000, 4_000  # 500 MB, 160 MB
_VIEWS = ((0, 0), (1, 1), (1, 2), (2, 1), (2, 2))  # vertical and horizontal window: 0 the whole, 1 the start, 2 the end
_MIRROR = np.packbits(np.tile(np.arange(_BITS) % 2 == 1, _BITS)).view(">u8")[0].astype(np.uint64)

ViewHashes = NDArray[np.uint64]
"""The bits of every view of n crops, [n, 5]; the first view is the whole crop."""
Pair = tuple[int, int]


def pixel_hash(pixels: NDArray[Any]) -> str:
    """Return a hash of the bytes of a crop, 32 hexadecimal digits, which is unique among crops of the same shape."""
    return hashlib.sha256(pixels.data).hexdigest()[:32]


def image_views(greys: NDArray[np.uint8]) -> list[str]:
    """Return the views of grey crops [n, 32, 32] as texts for a record, one per crop; empty for a crop that is too
    faint."""
    windows = _windows()
    every = (windows @ greys.astype(np.float64) @ windows.T).reshape(-1, 3, _BITS, 3, _BITS)  # windows down and across
    signs = np.stack([every[:, down, :, across] > 0 for down, across in _VIEWS], axis=1).reshape(-1, len(_VIEWS), 64)
    signs[:, :, 0] = False  # the mean says nothing
    faint = greys.std((1, 2)) < FAINT
    return ["" if faint[i] else bits.tobytes().hex() for i, bits in enumerate(np.packbits(signs, axis=2))]


def grey(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert a crop [C, H, W] to grey, [32, 32]: a picture by the weights of ITU-R BT.601, without its alpha; an array
    by the mean of its channels (`_eight_bits`)."""
    pixels = _eight_bits(pixels)
    small = [_small(channel) for channel in (pixels[:3] if len(pixels) > 2 else pixels[:1])]
    if len(small) == 1:
        return small[0]
    red, green, blue = (channel.astype(np.uint16) for channel in small)
    return ((77 * red + 150 * green + 29 * blue) >> 8).astype(np.uint8)


def _eight_bits(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a picture unchanged, and an array as the mean of its channels, each scaled to 0 to 255."""
    if pixels.dtype == np.uint8 and len(pixels) <= 4:
        return pixels
    low, high = (bound(pixels, axis=(1, 2), keepdims=True).astype(np.float32) for bound in (np.min, np.max))
    shares = (pixels - low) / np.maximum(high - low, np.finfo(np.float32).tiny)
    levels: NDArray[np.uint8] = np.rint(shares.mean(0, keepdims=True) * 255).astype(np.uint8)
    return levels


def sharpness(pixels: NDArray[Any]) -> float:
    """Return the mean difference of horizontal neighbours in every second row of a crop, 0 to 255: in the green or only
    channel of a picture, in the grey of an array (`_eight_bits`)."""
    pixels = _eight_bits(pixels)
    rows = pixels[1 if len(pixels) > 2 else 0, ::2].astype(np.int16)
    return round(float(np.abs(rows[:, 1:] - rows[:, :-1]).mean()), 3) if rows.shape[1] > 1 else 0.0


def groups(keys: Iterable[str]) -> list[list[int]]:
    """Return the indices of each key that occurs more than once; empty keys are ignored."""
    places: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return [group for key, group in places.items() if key and len(group) > 1]


def near_duplicates(
    texts: Sequence[str], crop: Callable[[int], NDArray[np.uint8]], of: Iterable[int] | None = None, processes: int = 1
) -> list[tuple[int, int, float]] | None:
    """Return the near duplicates among crops, (first, second, correlation), first < second, sorted; None if so many
    look alike, as handwritten digits do, that views cannot tell them apart.

    texts: views of each crop, from `image_views`; crops without views are skipped. crop: function from the index of a
    crop to its pixels [C, H, W]. of: compare only these with all; unset: all with all. processes: number of threads.
    """
    seen = np.array([place for place, text in enumerate(texts) if text], dtype=np.int64)
    queries = np.arange(len(seen)) if of is None else np.flatnonzero(np.isin(seen, list(of)))
    if len(seen) < 2 or not len(queries):
        return []
    data = bytes.fromhex("".join(texts[place] for place in seen))
    bits = np.frombuffer(data, ">u8").astype(np.uint64).reshape(-1, len(_VIEWS))
    close = _candidate_pairs(bits, queries, processes)
    if close is None:
        return None
    greys = lru_cache(_GREYS_KEPT)(lambda place: grey(crop(place)))
    views = lru_cache(_OVERLAYS_KEPT)(lambda place: _overlays(greys(place)))
    alike = []
    for a, b in seen[close].tolist():
        if (score := _correlation(views(a), views(b))) >= CORRELATION:
            alike.append((a, b, score))
    unlike = len(close) - len(alike)
    return None if unlike > max(len(alike), TOO_MANY, CROWDED * len(queries) * len(seen)) else alike


def chains(pairs: Iterable[Pair]) -> list[list[int]]:
    """Return the connected components of the pairs, each sorted."""
    root: dict[int, int] = {}

    def find(place: int) -> int:
        while root.setdefault(place, place) != place:
            root[place] = place = root[root[place]]
        return place

    for a, b in pairs:
        low, high = sorted((find(a), find(b)))
        root[high] = low
    groups_of: dict[int, list[int]] = {}
    for place in sorted(root):
        groups_of.setdefault(find(place), []).append(place)
    return list(groups_of.values())


def pairs_across_splits(pairs: Sequence[Pair], held_out: Iterable[int]) -> list[int]:
    """Return the held-out samples that pairs connect, directly or through other held-out samples, with a sample that is
    not held out; sorted."""
    apart = set(held_out)
    before = len(apart) + 1
    while len(apart) < before:
        before = len(apart)
        apart -= {one for a, b in pairs for one, other in ((a, b), (b, a)) if other not in apart}
    return sorted(set(held_out) - apart)


def _candidate_pairs(looks: ViewHashes, queries: NDArray[np.int64], processes: int) -> NDArray[np.int64] | None:
    """Return the pairs of the queries with all others whose bits nearly agree, in any view of either, mirrored or not,
    as rows (first, second), [m, 2], sorted; None if there are too many for views to tell crops apart."""
    count, most = len(looks), TOO_MANY * len(queries)
    everything = np.arange(count)
    sides = [(queries, everything)] if len(queries) == count else [(queries, everything), (everything, queries)]

    def sharing(rows: tuple[int, ...]) -> NDArray[np.int64]:
        equal = np.uint64(sum(0xFF << _BITS * row for row in rows))
        chunks, seen = [np.empty(0, np.int64)], 0
        for queries, others in sides:
            for close in _pairs_in_bucket(looks, equal, queries, others):
                chunks.append(close)
                seen += len(close)
                if seen > most:
                    chunks = [np.unique(np.concatenate(chunks))]
                    if (seen := len(chunks[0])) > most:
                        return chunks[0]
        return np.concatenate(chunks)

    pairs = np.empty(0, np.int64)
    with ThreadPoolExecutor(processes) as pool:
        for more in pool.map(sharing, combinations(range(_BITS), _SHARED)):
            pairs = np.union1d(pairs, more)
            if len(pairs) > most:
                pool.shutdown(cancel_futures=True)
                return None
    return np.stack(np.divmod(pairs, count), axis=1)


def _pairs_in_bucket(
    looks: ViewHashes, equal: np.uint64, queries: NDArray[np.int64], others: NDArray[np.int64]
) -> Iterator[NDArray[np.int64]]:
    """Yield the pairs of queries, in any view, with others whose bits nearly agree and are the same where those of
    `equal` are set, as first x n + second, in portions."""
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
            repeats = counts[at[mine]]
            within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            place = order[np.repeat(starts[at[mine]], repeats) + within]
            near = np.bitwise_count(np.repeat(asked[mine], repeats) ^ whole[place]) <= RADIUS
            first, second = queries[np.repeat(mine, repeats)[near]], others[place[near]]
            apart = first != second
            yield np.unique(np.minimum(first, second)[apart] * len(looks) + np.maximum(first, second)[apart])
            done = until


@cache
def _windows() -> NDArray[np.float64]:
    """Return the lowest cosines of the transform (DCT-II) of a whole line, of its start and of its end, [3 x 8, 32]."""
    x = np.arange(_SIDE) * 2 + 1
    cosines = np.stack([np.cos(np.pi * x * k / (2 * _SIDE)) for k in range(_BITS)])
    parts = (_stretch(1, 0, _SIDE), _stretch(_TRIMMED, 0, _SIDE), _stretch(_TRIMMED, 1 - _TRIMMED, _SIDE))
    return np.concatenate([cosines @ part for part in parts])


@cache
def _stretch(share: float, start: float, side: int) -> NDArray[np.float64]:
    """Return a matrix that takes from a line of 32 values the part with `share` of its length, from `start` of it on,
    as `side` values: each is the mean of what it covers, [side, 32]."""
    edges = (start + share * np.linspace(0, 1, side + 1)) * _SIDE
    cells = np.arange(_SIDE)
    covered = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    means: NDArray[np.float64] = np.maximum(covered, 0) / (edges[1:] - edges[:-1])[:, None]
    return means


def _small(channel: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Scale a channel [H, W] to 32 x 32 by the mean of the area of each pixel."""
    if channel.shape == (_SIDE, _SIDE):
        return channel
    image = Image.fromarray(channel)
    if image.width % _SIDE == image.height % _SIDE == 0:  # several times faster
        return np.asarray(image.reduce((image.width // _SIDE, image.height // _SIDE)))
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX))


def _overlays(picture: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the parts of a crop in grey that another may show, each of mean 0 and length 1, [19, 256]: the whole crop,
    then 5 and 10 % less from either side or from both."""
    parts = [np.matmul((lines @ picture)[:, None], lines.transpose(0, 2, 1)).reshape(-1, 256) for lines in _parts()]
    windows = np.concatenate(parts)
    windows -= windows.mean(1, keepdims=True)
    windows /= np.sqrt((windows * windows).sum(1, keepdims=True)) + 1e-9
    return windows


@cache
def _parts() -> list[NDArray[np.float64]]:
    """Return matrices that make a line of 32 values one of 16, of the whole of it and of parts of it, each [n, 16,
    32]."""
    places = {1.0: (0.5,), 0.95: (0, 0.5, 1), 0.9: (0, 0.5, 1)}
    return [
        np.stack([_stretch(share, (1 - share) * place, _SIDE // 2) for place in which])
        for share, which in places.items()
    ]


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the greatest correlation of the whole of one crop with a part of the other, mirrored or not."""
    wholes = [
        np.stack([picture[0], picture[0].reshape(16, 16)[:, ::-1].ravel()], axis=1) for picture in (first, second)
    ]
    return float(max((first @ wholes[1]).max(), (second @ wholes[0]).max()))


def same_crops(records: Iterable[ShardRecord]) -> dict[str, str]:
    """Return the images whose crops equal those of another image byte for byte, and the first of these by name."""
    samples = sorted(
        (sample for record in records for sample in (*record.samples, *record.dropped)), key=lambda sample: sample.path
    )
    images = [
        (path, "".join(sample.pixels for sample in crops))
        for path, crops in groupby(samples, lambda sample: sample.path)
    ]
    same = groups(pixels for _, pixels in images)
    return {images[other][0]: images[first][0] for first, *others in same for other in others}


def dropped_rows(records: Iterable[ShardRecord], same: Mapping[str, str]) -> list[Quarantined]:
    """Return the table rows of the samples that were left out as duplicates. same: result of `same_crops`."""
    return [
        Quarantined(sample.path, f"the same crop as {same[sample.path]}", sample.sha256)
        for record in records
        for sample in record.dropped
        if sample.view == 0
    ]


def held_out_by_name(names: Sequence[str], patterns: Sequence[str]) -> list[int]:
    """Return the indices of the names that match one of the patterns, sorted.

    Raises ValueError for a pattern that matches no name, and if the patterns match all names.
    """
    held_out: set[int] = set()
    for pattern in patterns:
        matched = [place for place, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not matched:
            example = f", such as {names[0]}" if names else ""
            raise ValueError(f"data.held_out: {pattern!r} matches none of {len(names):,} images{example}. Change it.")
        held_out.update(matched)
    if names and len(held_out) == len(names):
        raise ValueError(f"data.held_out matches all {len(names):,} images: none is left to train on. Change it.")
    return sorted(held_out)


def leaks_from_validation(
    records: Sequence[ShardRecord], folder: Path, layout: Layout, validation_fraction: float, processes: int
) -> list[int]:
    """Return the samples that would be held out by their hash, and of which a near duplicate is trained on, by their
    places in the data set.

    folder, layout: where the crops lie, and how. processes: how many threads compare. Where the images are too alike to
    distinguish, or none would stay held out, a message says so, and the list is empty.
    """
    if not validation_fraction:
        return []
    content = np.concatenate([index_of(record)["content"] for record in records])
    held_out = np.flatnonzero(content < share_of_hashes(validation_fraction)).tolist()
    samples = [sample for record in records for sample in record.samples]
    rows = [(record.shard, row) for record in records for row in range(record.num_samples)]

    def crop(place: int) -> NDArray[np.uint8]:
        shard, row = rows[place]
        return read_array(tar_path(folder, shard), layout, row)

    pairs = near_duplicates([sample.look for sample in samples], crop, held_out, processes)
    if pairs is None:
        reason = "these images are too alike to tell near duplicates from others, so all held-out images stay held out"
        print(f"crop: {reason}.", file=sys.stderr)
        return []
    same = [
        linked
        for alike in (groups(sample.pixels for sample in samples), groups(sample.sha256 for sample in samples))
        for group in alike
        for linked in pairwise(group)
    ]
    leaks = pairs_across_splits([*same, *((a, b) for a, b, _ in pairs)], held_out)
    if held_out and len(leaks) == len(held_out):
        reason = f"each of {len(held_out):,} held-out images has a near duplicate that is trained on: all stay held out"
        print(f"crop: {reason}.", file=sys.stderr)
        return []
    return leaks
