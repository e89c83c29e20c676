"""What a detector sees in a set of images: features, class scores, spatial features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.halfway import Arrays, batches
from image_diffusion.core.progress import Progress
from image_diffusion.core.together import gathered, share
from image_diffusion.metrics.moments import check_finite

AT_ONCE = 16
"""Images that a network looks at at a time, always: a product of another shape is rounded otherwise. So what is seen in
an image depends on the set and nothing else. (More at a time are no faster on CPUs.)"""


_KEPT_TOGETHER = 32 * AT_ONCE
"""Images of which is kept together what was seen in them: a second or less of a GPU, half a minute of a CPU."""


class ImageSet(Protocol):
    """Images with labels: a split of a data set's crops, or generated samples."""

    num_samples: int
    shape: tuple[int, ...]
    labels: np.ndarray
    classes: list[str]

    @property
    def digest(self) -> str:
        """Of the images."""
        ...

    def gather(self, indices: np.ndarray) -> Tensor:
        """Uint8 [B, C, H, W]: the images at these positions."""
        ...


@dataclass(frozen=True)
class Detected:
    """features: float32 [N, D]. logits: float32 [N, K], or None. spatial: float32 [N, S] for spatial FID, or None."""

    features: Tensor
    logits: Tensor | None = None
    spatial: Tensor | None = None

    def __len__(self) -> int:
        return len(self.features)

    def first(self, count: int) -> Detected:
        """The first rows."""
        return self if count == len(self) else self.take(torch.arange(count))

    def take(self, index: Tensor) -> Detected:
        """The rows at `index`."""
        rows = (None if each is None else each[index] for each in (self.logits, self.spatial))
        return Detected(self.features[index], *rows)

    @staticmethod
    def join(parts: Sequence[Detected]) -> Detected:
        """All rows of the parts, in order."""

        def cat(name: str) -> Tensor | None:
            rows = [getattr(part, name) for part in parts]
            return None if rows[0] is None else torch.cat(rows)

        features = cat("features")
        assert features is not None
        return Detected(features, cat("logits"), cat("spatial"))


_PARTS = tuple(field.name for field in fields(Detected))


class Detector(Protocol):
    """Uint8 images [B, C, H, W] -> features.

    identity: name, digest of the weights and how images are prepared: numbers compare only where it is equal.
    classes: names of what the logits score; empty when they are not the data set's own classes.
    doubt: why what it measures must not be believed; None: no reason is known.
    """

    identity: dict[str, Any]
    classes: list[str]
    doubt: str | None

    def __call__(self, images: Tensor) -> Detected: ...

    def metric_name(self, metric: str) -> str:
        """What a metric is called on this detector: `inpipe_fd`, `fd_dinov2`; `fid` on Inception alone."""
        ...


def at_once(rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The rows, AT_ONCE at a time, each with how many count: the last ones are filled up with the last row."""
    for start in range(0, len(rows), AT_ONCE):
        chosen = rows[start : start + AT_ONCE]
        yield len(chosen), np.pad(chosen, (0, AT_ONCE - len(chosen)), mode="edge")


def detect(detector: Detector, images: ImageSet, title: str = "features", limit: int | None = None) -> Detected:
    """What a detector sees in every image of a set (see `detect_each`)."""
    return detect_each([detector], images, title, limit)[0]


def kept_together(places: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """The places of this process in a set, those at a time whose work `core.halfway` keeps in one file."""
    yield from (some for some in np.split(places, np.flatnonzero(places % _KEPT_TOGETHER == 0)) if len(some))


def packed(seen: Sequence[Detected]) -> dict[str, NDArray[Any]]:
    """What several detectors have seen, as arrays."""
    parts = ((f"{i}-{name}", getattr(each, name)) for i, each in enumerate(seen) for name in _PARTS)
    return {name: part.cpu().numpy() for name, part in parts if part is not None}


def unpacked(arrays: Arrays, count: int) -> list[Detected]:
    """The same as `count` detectors have seen it."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return [Detected(*(tensors.get(f"{i}-{name}") for name in _PARTS)) for i in range(count)]  # type: ignore[arg-type]


@torch.inference_mode()
def look(
    detectors: Sequence[Callable[[Tensor], Detected]], images: ImageSet, rows: NDArray[np.int64], title: str
) -> Iterator[tuple[NDArray[np.int64], list[Detected]]]:
    """What each detector sees in some rows of a set: this process's share of them, some at a time, each with its rows.
    Each image is read once, and not at all where an earlier start has seen it (`core.halfway`).

    Raises ValueError for features that are not finite.
    """

    def see(chosen: NDArray[np.int64]) -> Arrays:
        parts: list[list[Detected]] = [[] for _ in detectors]
        for count, some in at_once(chosen):
            read = images.gather(some)
            for detector, seen in zip(detectors, parts, strict=True):
                seen.append(detector(read).first(count))
                check_finite(seen[-1].features)
            progress.advance(count)
        return packed([Detected.join(seen) for seen in parts])

    mine = share(np.arange(len(rows)), AT_ONCE)
    # A function has no identity: its code decides, which is told of all work.
    known = [getattr(detector, "identity", None) for detector in detectors]
    once = batches([title, known, len(rows), *rows[:1].tolist(), *rows[-1:].tolist()])
    with Progress(title, len(mine), "image") as progress:
        for places in kept_together(mine):
            seen = once(f"{places[0]}-{places[-1] + 1}", partial(see, rows[places]))
            progress.reach(int(places[-1] - mine[0]) + 1)
            yield rows[places], unpacked(seen, len(detectors))


def detect_each(
    detectors: Sequence[Callable[[Tensor], Detected]],
    images: ImageSet,
    title: str = "features",
    limit: int | None = None,
) -> list[Detected]:
    """What each detector sees in every image of a set, in the set's order; or in `limit` of them, drawn once for all.
    Each image is read once.

    Where a launcher started several processes, they share the images, and each returns what all have seen: the same
    bytes for any number of them. Raises ValueError for features that are not finite.
    """
    order = np.arange(images.num_samples)
    if limit is not None and limit < len(order):
        order = np.sort(np.random.default_rng(0).permutation(order)[:limit])
    parts = [seen for _, seen in look(detectors, images, order, title)]
    every = [seen for each in gathered(parts) for seen in each]
    return [Detected.join([seen[i] for seen in every]) for i in range(len(detectors))]
