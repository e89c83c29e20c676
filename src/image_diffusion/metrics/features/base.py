"""Features of a detector for a set of images: features, class scores, spatial features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.files.partial_results import Arrays, batches, gathered, share
from image_diffusion.core.process.progress import Progress
from image_diffusion.metrics.distances.moments import check_finite

AT_ONCE = 16
"""Fixed batch size of the detectors. Rounding depends on the shape of a batch, so a fixed size makes the features of an
image depend only on the set. (Larger batches are no faster on CPUs.)"""


_KEPT_TOGETHER = 32 * AT_ONCE
"""Number of images whose features are stored together: at most a second of GPU time, half a minute of CPU time."""


class ImageSet(Protocol):
    """Images with labels: a split of a data set's crops, or generated samples."""

    num_samples: int
    shape: tuple[int, ...]
    labels: np.ndarray
    classes: list[str]

    @property
    def digest(self) -> str:
        """Return the digest of the images."""
        ...

    @property
    def selection(self) -> str:
        """Return a digest of the selection of images from their set; empty for all images."""
        ...

    def gather(self, indices: np.ndarray) -> Tensor:
        """Return the images at these positions, [B, C, H, W]: pictures as uint8, arrays as float32 from 0 to 255."""
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
        """Return the first rows."""
        return self if count == len(self) else self.take(torch.arange(count))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    @property
    def compared(self) -> dict[str, Tensor]:
        """Return the features by the Fréchet distance that compares them: "fd" and optionally "spatial_fd"."""
        return {"fd": self.features} if self.spatial is None else {"fd": self.features, "spatial_fd": self.spatial}

    def take(self, index: Tensor) -> Detected:
        """Return the rows at `index`."""
        return Detected(**{name: rows[index] for name, rows in self.tensors.items()})

    @staticmethod
    def join(parts: Sequence[Detected]) -> Detected:
        """Return all rows of the parts, in order."""
        return Detected(**{name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors})


class Detector(Protocol):
    """Detector: uint8 images [B, C, H, W] -> features.

    identity: name, digest of the weights and preparation of the images; metrics are comparable only between equal
    identities. classes: names of the logits; empty if they are not the data set's own classes. doubt: the reason why
    its numbers are unreliable, or None.
    """

    identity: dict[str, Any]
    classes: list[str]
    doubt: str | None

    def __call__(self, images: Tensor) -> Detected: ...

    def metric_name(self, metric: str) -> str:
        """Return the name of a metric on this detector: `inpipe_fd`, `fd_dinov2`; `fid` only on Inception."""
        ...


def padded_batches(rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield the rows, AT_ONCE at a time, each group with its number of real rows: the last group is padded with the
    last row."""
    for start in range(0, len(rows), AT_ONCE):
        chosen = rows[start : start + AT_ONCE]
        yield len(chosen), np.pad(chosen, (0, AT_ONCE - len(chosen)), mode="edge")


def detect(detector: Detector, images: ImageSet, title: str = "features", limit: int | None = None) -> Detected:
    """Return the features of a detector for every image of a set (see `detect_each`)."""
    return detect_each([detector], images, title, limit)[0]


def storage_groups(places: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield this process's positions in a set, in groups that `core.files.partial_results` stores together."""
    yield from (some for some in np.split(places, np.flatnonzero(places % _KEPT_TOGETHER == 0)) if len(some))


def packed(features: Sequence[Detected]) -> dict[str, NDArray[Any]]:
    """Return the features of several detectors, as arrays."""
    return {f"{i}-{name}": rows.cpu().numpy() for i, seen in enumerate(features) for name, rows in seen.tensors.items()}


def unpacked(arrays: Arrays, count: int) -> list[Detected]:
    """Return the features of `count` detectors from packed arrays."""
    by_detector: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, array in arrays.items():
        number, _, part = name.partition("-")
        by_detector[int(number)][part] = torch.from_numpy(array)
    return [Detected(**tensors) for tensors in by_detector]


@torch.inference_mode()
def features_of_rows(
    detectors: Sequence[Callable[[Tensor], Detected]], images: ImageSet, rows: NDArray[np.int64], title: str
) -> Iterator[tuple[NDArray[np.int64], list[Detected]]]:
    """Yield each detector's features of some rows of a set, with the rows: this process's share, in parts. Each image
    is read once, or not at all if an interrupted run has processed it (`core.files.partial_results`).

    Raises ValueError for features that are not finite.
    """

    def see(chosen: NDArray[np.int64]) -> Arrays:
        parts: list[list[Detected]] = [[] for _ in detectors]
        for count, some in padded_batches(chosen):
            read = images.gather(some)
            for detector, seen in zip(detectors, parts, strict=True):
                seen.append(detector(read).first(count))
                check_finite(seen[-1].features)
            progress.advance(count)
        return packed([Detected.join(seen) for seen in parts])

    shared = share(np.arange(len(rows)), AT_ONCE)
    # A function has no identity; it is identified by its code, as all stored work is.
    identities = [getattr(detector, "identity", None) for detector in detectors]
    once = batches([title, identities, len(rows), *rows[:1].tolist(), *rows[-1:].tolist()])
    with Progress(title, len(shared), "image") as progress:
        for places in storage_groups(shared):
            seen = once(f"{places[0]}-{places[-1] + 1}", partial(see, rows[places]))
            progress.reach(int(places[-1] - shared[0]) + 1)
            yield rows[places], unpacked(seen, len(detectors))


def detect_each(
    detectors: Sequence[Callable[[Tensor], Detected]],
    images: ImageSet,
    title: str = "features",
    limit: int | None = None,
) -> list[Detected]:
    """Return each detector's features of every image of a set, in the set's order, or of a fixed random subset of
    `limit` images. Each image is read once.

    If a launcher started several processes, they share the images, and each returns the features of all images: the
    same bytes for any number of processes. Raises ValueError for features that are not finite.
    """
    order = np.arange(images.num_samples)
    if limit is not None and limit < len(order):
        order = np.sort(np.random.default_rng(0).permutation(order)[:limit])
    parts = [features for _, features in features_of_rows(detectors, images, order, title)]
    every = [features for gathered_parts in gathered(parts) for features in gathered_parts]
    return [Detected.join([features[i] for features in every]) for i in range(len(detectors))]
