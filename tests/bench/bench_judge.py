"""The built-in judge on photographs: compared with a ResNet-18, and the damages that each metric detects.

    python tests/bench/bench_judge.py accuracy --images cifar10-20k.tar
    python tests/bench/bench_judge.py damage --images cifar10-20k.tar
    python tests/bench/bench_judge.py duplicates --images cifar10-20k.tar
    python tests/bench/bench_judge.py jpeg --images cifar10-20k.tar

Needs a tar of 2,000 pictures of 32 x 32 of each of ten classes, in a folder a class. `accuracy` trains the judge, and
then torchvision's ResNet-18 for as many CPU seconds. `damage` damages 1,000 held-out pictures in twelve ways, each at
three strengths, and prints for each metric whether it says so. `duplicates` asks whether the judge's features tell
changed copies of pictures from other pictures, as the datasheet's looks do. `jpeg` asks why no judge finds pictures
worse, the lower the quality they are saved at. All print tables in Markdown.
"""

from __future__ import annotations

import argparse
import io
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import functional as T

from image_diffusion.core.journal.metric_definitions import definition_of
from image_diffusion.core.process import command
from image_diffusion.data.crop.centre_crop import centre_crop
from image_diffusion.data.quality.duplicates import near_duplicates
from image_diffusion.metrics.compute import Reference, measure
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.distances.jackknife import share_estimate
from image_diffusion.metrics.distances.set_distances import frechet_between
from image_diffusion.metrics.evaluate_samples import RealImages
from image_diffusion.metrics.features.base import detect, detect_each
from image_diffusion.metrics.features.classifier import Classifier, InPipeDetector, load_detector
from image_diffusion.metrics.features.classifier_training import DetectorTraining, train_detector
from image_diffusion.metrics.images.memorization import find_copies, find_feature_copies, reduced
from image_diffusion.metrics.samples import Samples

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from photographs import CHANGES, views

ROWS = {"train": slice(0, 1200), "validation": slice(1200, 1500), "pool": slice(1500, 2000)}
"""Of each class: images to train judges on and to compare samples with; for the floor; to be damaged."""
COUNT = 1000
SHOWN = ("fd", "kd", "mind", "precision", "recall", "density", "coverage", "c2st", "agreement", "class_fd", "copies")


def read_parts(path: Path) -> dict[str, Samples]:
    """Return the pictures, in the parts of `ROWS`."""
    pictures: dict[str, list[NDArray[np.uint8]]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isfile() and (file := tar.extractfile(member)) is not None:
                with Image.open(io.BytesIO(file.read())) as picture:
                    pictures.setdefault(Path(member.name).parent.name, []).append(np.asarray(picture.convert("RGB")))
    classes, parts = sorted(pictures), {}
    for name, rows in ROWS.items():
        order = np.random.default_rng(0).permutation(len(classes) * (rows.stop - rows.start))
        images = np.stack([each for one in classes for each in pictures[one][rows]])[order]
        labels = np.repeat(np.arange(len(classes)), rows.stop - rows.start)[order]
        parts[name] = Samples(images, labels, classes, digest=f"{path.name}, {name}")
    return parts


# ---- Accuracy


def accuracy(parts: dict[str, Samples]) -> None:
    """Compare the judge with a ResNet-18 that trains as long."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        described = train_detector(parts["train"], parts["validation"], DetectorTraining(), Path(folder))
        seconds = time.process_time() - began
    judge = Classifier(3, len(parts["train"].classes), 32)
    network, seen = resnet18(parts["train"], seconds)
    right = right_of(network, parts["validation"])
    print("| Network | Parameters | Held-out pictures right | Pictures seen | CPU seconds |")
    print("| --- | --: | --: | --: | --: |")
    for name, each, found, images in (
        ("the judge", judge, described["accuracy"], described["examples_seen"]),
        ("torchvision's ResNet-18", network, right, seen),
    ):
        print(f"| {name} | {size_of(each):,} | {found:.1%} | {images:,} | {seconds:.0f} |")
    print(f"\n{described['accuracy'] / right:.0%} of the accuracy of the ResNet-18.")


def size_of(network: nn.Module) -> int:
    return sum(each.numel() for each in network.parameters())


def resnet18(train: Samples, seconds: float) -> tuple[nn.Module, int]:
    """Train for this many CPU seconds by torchvision's recipe (SGD with momentum 0.9 and weight decay 1e-4, from a rate
    of 0.1 down; along a cosine here), 128 pictures at a time, shifted and mirrored. Return the network and the number
    of pictures."""
    torch.manual_seed(0)
    network = torchvision.models.resnet18(num_classes=len(train.classes))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    rng, seen, began = np.random.default_rng(0), 0, time.process_time()
    while (share := (time.process_time() - began) / seconds) < 1:
        rows = rng.permutation(train.num_samples)[:128]
        images = F.pad(train.gather(rows), (4, 4, 4, 4))
        top, left = rng.integers(0, 9, 2)
        images = images[:, :, top : top + 32, left : left + 32]
        images = images.flip(3) if rng.random() < 0.5 else images
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 + np.cos(np.pi * share))
        optimizer.zero_grad()
        F.cross_entropy(network(normalised(images)), torch.from_numpy(train.labels[rows])).backward()
        optimizer.step()
        seen += len(rows)
    return network.eval(), seen


def normalised(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


@torch.inference_mode()
def right_of(network: nn.Module, held_out: Samples) -> float:
    """Return the share of pictures that are classified correctly."""
    parts = np.split(np.arange(held_out.num_samples), 10)
    found = [network(normalised(held_out.gather(rows))).argmax(1) for rows in parts]
    return float((torch.cat(found).numpy() == held_out.labels).mean())


# ---- Damage


@dataclass(frozen=True)
class Ground:
    """images: uint8 [N, C, H, W], and labels int64 [N]: to be damaged. pool: other held-out pictures. train: training
    pictures."""

    images: Tensor
    labels: NDArray[np.int64]
    pool: Samples
    train: Samples

    def chosen(self, share: float, seed: int = 1) -> NDArray[np.int64]:
        """Return a share of the rows; a larger share contains all rows of a smaller one."""
        return np.random.default_rng(seed).permutation(len(self.labels))[: round(share * len(self.labels))]

    def replaced(self, rows: NDArray[np.int64], images: Tensor) -> Tensor:
        changed = self.images.clone()
        changed[torch.from_numpy(rows)] = images
        return changed


def without_classes(ground: Ground, lost: int) -> Tensor:
    """Pictures of other classes where those of the lost ones were asked for."""
    gone = np.random.default_rng(2).permutation(len(ground.pool.classes))[:lost]
    rows = np.flatnonzero(np.isin(ground.labels, gone))
    return ground.replaced(rows, ground.pool.gather(np.flatnonzero(~np.isin(ground.pool.labels, gone))[: len(rows)]))


def collapsed(ground: Ground, kinds: int) -> Tensor:
    """Return this many different pictures of each class, each copy with invisible noise of its own."""
    images = ground.images.clone()
    for label in range(len(ground.pool.classes)):
        rows = np.flatnonzero(ground.labels == label)
        images[torch.from_numpy(rows)] = ground.images[torch.from_numpy(rows[np.arange(len(rows)) % kinds])]
    return noisy(images, 2)


def memorised(ground: Ground, share: float) -> Tensor:
    """Replace a share of the pictures by training pictures of the same class."""
    rows = ground.chosen(share)
    order = np.random.default_rng(3).permutation(ground.train.num_samples)
    of_class = {label: iter(order[ground.train.labels[order] == label]) for label in range(len(ground.train.classes))}
    chosen = np.array([next(of_class[label]) for label in ground.labels[rows]])
    return ground.replaced(rows, ground.train.gather(chosen))


def duplicated(ground: Ground, share: float) -> Tensor:
    """Replace a share of the pictures by those of another sample of the same class."""
    rows = ground.chosen(share)
    kept = np.setdiff1d(np.arange(len(ground.labels)), rows)
    others = [kept[ground.labels[kept] == label][i % 7] for i, label in enumerate(ground.labels[rows])]
    return ground.replaced(rows, ground.images[torch.tensor(np.array(others))])


def noisy(images: Tensor, sigma: float) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)) * sigma
    return (images + noise).round().clamp(0, 255).byte()


def compressed(images: Tensor, quality: float) -> Tensor:
    encoded = torchvision.io.encode_jpeg(list(images), quality=int(quality))
    return torch.stack([torchvision.io.decode_jpeg(each) for each in encoded])


def resized(images: Tensor, side: int) -> Tensor:
    size = list(images.shape[2:])
    small = T.resize(images, [side, side], T.InterpolationMode.BICUBIC, antialias=True)
    return T.resize(small, size, T.InterpolationMode.BICUBIC, antialias=True)


def zoomed(images: Tensor, side: int) -> Tensor:
    return T.resize(T.center_crop(images, [side, side]), list(images.shape[2:]), T.InterpolationMode.BICUBIC)


DAMAGES: dict[str, tuple[tuple[float, ...], Callable[[Ground, float], Tensor]]] = {
    "blur, σ 0.5, 0.8, 1.2": ((0.5, 0.8, 1.2), lambda ground, s: T.gaussian_blur(ground.images, [7, 7], [s, s])),
    "noise, σ 8, 16, 32": ((8, 16, 32), lambda ground, s: noisy(ground.images, s)),
    "JPEG, quality 60, 30, 10": ((60, 30, 10), lambda ground, q: compressed(ground.images, q)),
    "half resolution: 24, 16, 8": ((24, 16, 8), lambda ground, side: resized(ground.images, int(side))),
    "crops: 28, 24, 16 of 32": ((28, 24, 16), lambda ground, side: zoomed(ground.images, int(side))),
    "colours turned by 18°, 43°, 108°": ((0.05, 0.12, 0.3), lambda ground, by: T.adjust_hue(ground.images, by)),
    "grey: 60 %, 30 %, 0 % of the colour": ((0.6, 0.3, 0), lambda ground, s: T.adjust_saturation(ground.images, s)),
    "2, 5, 8 classes lost": ((2, 5, 8), lambda ground, lost: without_classes(ground, int(lost))),
    "30, 10, 3 pictures of each class": ((30, 10, 3), lambda ground, kinds: collapsed(ground, int(kinds))),
    "10, 30, 60 % copies of each other": ((0.1, 0.3, 0.6), duplicated),
    "10, 30, 60 % memorised": ((0.1, 0.3, 0.6), memorised),
    "10, 30, 60 % wrong labels": ((0.1, 0.3, 0.6), lambda ground, share: ground.images),
}


def labels_of(name: str, ground: Ground, strength: float) -> NDArray[np.int64]:
    """Return the requested labels: for wrong labels, a share of them moved to the next class."""
    labels = ground.labels.copy()
    if "wrong labels" in name:
        rows = ground.chosen(strength)
        labels[rows] = (labels[rows] + 1) % len(ground.pool.classes)
    return labels


def damage(parts: dict[str, Samples]) -> None:
    """Print the table of damages that each metric detects."""
    pool, count = parts["pool"], np.arange(COUNT)
    rest = np.arange(COUNT, pool.num_samples)
    others = Samples(pool.gather(rest).permute(0, 2, 3, 1).numpy(), pool.labels[rest], pool.classes, digest="others")
    ground = Ground(pool.gather(count), pool.labels[count], others, parts["train"])
    data = RealImages(parts["train"], parts["validation"])
    with tempfile.TemporaryDirectory() as name:
        views = [View(each, data) for each in trained_judges(parts, Path(name))]
    pixels = pixels_of(data)

    def judged(images: Tensor, labels: NDArray[np.int64]) -> dict[str, Any]:
        samples = Samples(images.permute(0, 2, 3, 1).numpy(), labels, pool.classes, digest="damaged")
        found: dict[str, Any] = {"copies": pixels(detect_each([reduced], samples)[0].features)}
        for each in views:
            found |= each(samples)
        return found

    clean = judged(ground.images, ground.labels)
    found = {
        name: [judged(change(ground, each), labels_of(name, ground, each)) for each in strengths]
        for name, (strengths, change) in DAMAGES.items()
    }
    for judge in ("inpipe", "rotation"):
        names = {each: full for each in SHOWN if (full := f"{judge}_{each}") in clean}
        names |= {"copies, in pixels": "copies"} if judge == "inpipe" else {}
        print(f"\n| damage, as `{judge}` sees it | " + " | ".join(names) + " |\n| --- |" + " :-: |" * len(names))
        for name, levels in found.items():
            marks = [mark(full, [clean[full], *(each[full] for each in levels)]) for full in names.values()]
            print(f"| {name} | " + " | ".join(marks) + " |")


class View:
    """One judge's view of samples, as in `evaluate`, but without floors and self-tests; features of real images are
    cached."""

    def __init__(self, judge: InPipeDetector, data: RealImages) -> None:
        self._judge, self._settings = judge, EvaluateConfig()
        self._train, held_out = (detect(judge, each) for each in (data.train, data.validation))
        self._reference = Reference.from_images(
            self._train, torch.from_numpy(data.train.labels) if judge.classes else None
        )
        self._threshold = find_feature_copies(held_out.features[:2], self._train.features, held_out.features).threshold

    def __call__(self, samples: Samples) -> dict[str, Any]:
        seen, classes = detect(self._judge, samples), self._judge.classes
        labels = torch.from_numpy(samples.labels) if classes else None
        entries = measure(seen, labels, self._reference, classes, self._settings)
        copies = find_feature_copies(seen.features, self._train.features, None)
        entries["copies"] = share_estimate(replace(copies, threshold=self._threshold).flagged)
        return {self._judge.metric_name(name): each.as_dict() for name, each in entries.items()}


def pixels_of(data: RealImages) -> Callable[[Tensor], dict[str, Any]]:
    """Return the copies among samples by pixels, `reduced`."""
    held_out = detect_each([reduced], data.validation)[0].features
    threshold = find_copies(held_out[:2], data.train, data.validation).threshold

    def entry(samples: Tensor) -> dict[str, Any]:
        return share_estimate(replace(find_copies(samples, data.train, None), threshold=threshold).flagged).as_dict()

    return entry


def trained_judges(parts: dict[str, Samples], folder: Path) -> list[InPipeDetector]:
    """Return the judge trained on the classes, and the one for a folder without classes."""
    judges = []
    for name in ("inpipe", "rotation"):
        train, held_out = (
            Samples(each.gather(np.arange(each.num_samples)).permute(0, 2, 3, 1).numpy(),
                    each.labels if name == "inpipe" else None, each.classes if name == "inpipe" else [], each.digest)
            for each in (parts["train"], parts["validation"])
        )  # fmt: skip
        train_detector(train, held_out, DetectorTraining(), folder / name)
        judge = load_detector(folder / name)
        judge.metric_name = f"{name}_{{}}".format  # type: ignore[method-assign]
        judges.append(judge)
    return judges


def mark(metric: str, levels: list[dict[str, Any]]) -> str:
    """What a metric says of rising damage: ● worse with each strength, and beyond the intervals at the last; ○ beyond
    them at the last, but not in order; nothing: no difference; ✕: better, beyond the intervals."""
    worse = [badness(metric, each["value"]) for each in levels]
    first, last = levels[0], levels[-1]
    apart = not overlap(first, last)
    if not apart:
        return ""
    if worse[-1] < worse[0]:
        return "✕"
    return "●" if worse == sorted(worse) else "○"


def badness(metric: str, value: float) -> float:
    definition = definition_of(metric)
    better = definition.better if definition else "lower"
    if better.startswith("nearer to"):
        return abs(value - float(better.split()[2]))
    return -value if better == "higher" else value


def overlap(first: dict[str, Any], last: dict[str, Any]) -> bool:
    (low, high), (other_low, other_high) = (each["interval"] or [each["value"]] * 2 for each in (first, last))
    return bool(low <= other_high and other_low <= high)


def duplicates(parts: dict[str, Samples]) -> None:
    """Print the share of changed copies that are found without any false pair: by the judge's features, by its earlier
    layers at each position, both less their mean and of length 1, and by the datasheet's method."""
    with tempfile.TemporaryDirectory() as folder:
        train_detector(parts["train"], parts["validation"], DetectorTraining(), Path(folder))
        judge = load_detector(Path(folder))
    images = parts["train"].gather(np.arange(4000))
    ways: dict[str, Callable[[Tensor], Tensor]] = {"features": lambda x: judge(x).features, "maps": judge.maps}
    seen = {way: unit_rows(see, images) for way, see in ways.items()}
    found = near_duplicates([views(each.numpy()) for each in images], lambda i: images[i].numpy()) or []
    same = {pair for a, b, _ in found for pair in ((a, b), (b, a))}
    most = {}
    for way, rows in seen.items():
        cosines = (rows @ rows.T).fill_diagonal_(-1.0)
        for a, b in same:  # which no way may be blamed for
            cosines[a, b] = -1.0
        most[way] = float(cosines.max())
    print("| Changed by | The judge's features | Its maps | Looks |\n| --- | --: | --: | --: |")
    for name, change in CHANGES.items():
        pictures = [change(Image.fromarray(each.permute(1, 2, 0).numpy())) for each in images[:1000]]
        crops = [np.asarray(centre_crop(each, images.shape[-1])).transpose(2, 0, 1) for each in pictures]
        copies = torch.from_numpy(np.stack(crops))
        shares = [
            float(((unit_rows(see, copies) * seen[way][:1000]).sum(1) > most[way]).float().mean())
            for way, see in ways.items()
        ]
        both = torch.cat([images[:1000], copies])
        pairs = near_duplicates([views(each.numpy()) for each in both], lambda i, both=both: both[i].numpy()) or []  # type: ignore[misc]
        shares.append(sum(b == a + 1000 for a, b, _ in pairs) / 1000)
        print(f"| {name} | {' | '.join(f'{share:.1%}' for share in shares)} |")


def jpeg(parts: dict[str, Samples]) -> None:
    """Print the Fréchet distance by JPEG quality, of the judge, of one of another seed, and of one trained on pictures
    half of which were saved as JPEG; and the difference of neighbours in a row, 0 to 255."""
    pool, train = parts["pool"], parts["train"]
    images, labels = pool.gather(np.arange(COUNT)), pool.labels[:COUNT]
    qualities = (95, 85, 75, 60, 45, 30, 20, 10)
    shown = {"as they are": images, **{str(quality): compressed(images, quality) for quality in qualities}}
    draw, taught = np.random.default_rng(0), train.gather(np.arange(train.num_samples))
    for row in np.flatnonzero(draw.random(train.num_samples) < 0.5):
        taught[row] = compressed(taught[row : row + 1], int(draw.integers(10, 96)))[0]
    saved = Samples(taught.permute(0, 2, 3, 1).numpy(), train.labels, train.classes, digest="half as JPEG")
    judges = {"the judge": (train, 0), "another seed": (train, 1), "taught half as JPEG": (saved, 0)}
    print(f"| Quality | {' | '.join(shown)} |\n| --- |{' --: |' * len(shown)}")
    for name, (learnt_from, seed) in judges.items():
        with tempfile.TemporaryDirectory() as folder:
            train_detector(learnt_from, parts["validation"], DetectorTraining(seed=seed), Path(folder))
            judge = load_detector(Path(folder))
        real, found = detect(judge, train).features, []
        for each in shown.values():
            samples = Samples(each.permute(0, 2, 3, 1).numpy(), labels, pool.classes, digest="saved")
            found.append(frechet_between(detect(judge, samples).features, real).value)
        print(f"| {name} | {' | '.join(f'{value:.3g}' for value in found)} |", flush=True)
    steps = [float(each.float().diff(dim=3).abs().mean()) for each in shown.values()]
    print(f"| neighbours differ by | {' | '.join(f'{step:.1f}' for step in steps)} |")


def unit_rows(see: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Return the features of images [N, C, H, W], each row less its mean and of length 1."""
    rows = torch.cat([see(part).float().flatten(1) for part in images.split(250)])
    return F.normalize(rows - rows.mean(1, keepdim=True), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "damage", "duplicates", "jpeg"))
    parser.add_argument("--images", type=Path, required=True, help="the tar of pictures")
    arguments = parser.parse_args()
    modes = {"accuracy": accuracy, "damage": damage, "duplicates": duplicates, "jpeg": jpeg}
    modes[arguments.what](read_parts(arguments.images))


if __name__ == "__main__":
    command.run(main)
