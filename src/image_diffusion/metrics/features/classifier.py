"""Embedded detector: a small classifier of the user's own classes. No download, no torchvision.

The in-pipeline metrics (`inpipe_fd`, …) are computed on its 128 features. On CIFAR-10, such features ranked every
graded degradation (blur, noise, dropped classes, …) correctly, which moments of pixels or spectra and random weights
did not. Values are comparable only for one data set and one digest of the weights; the distance is not an FID and is
never called so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.files.atomic import read_json, sha256_file
from image_diffusion.metrics.features.base import Detected

FEATURES = 128
FORMAT = 2
"""Format version of detector.json."""
LEAST_SKILL = 0.1
"""Minimum skill of a classifier, at the lower end of its 95 % interval: the share of a guess's errors that it avoids.
Our choice: an accuracy of 0.145 for ten classes, 0.55 for two."""
_STEM, _WIDTHS = 32, ((64, 1), (96, 2), (96, 1), (192, 2))


class Classifier(nn.Module):
    """Classifier of uint8 [B, C, H, W] of any size -> features [B, 128] and logits [B, K]. About 0.35 million
    parameters.

    Images are resized to 32, 64, 128 or 256 pixels, the next size above their longer side (bilinear, antialiased when
    reducing); the first convolution reduces each of these to 16 x 16, so that all cost about the same.
    """

    def __init__(self, channels: int, num_classes: int, resolution: int) -> None:
        super().__init__()
        self.resolution = min(256, max(32, 1 << (resolution - 1).bit_length()))
        stride = self.resolution // 16
        layers, width = [convolved(channels, _STEM, stride + 1, stride)], _STEM
        for wider, stride in _WIDTHS:
            layers.append(convolved(width, wider, 3, stride))
            width = wider
        self.layers = nn.Sequential(*layers)
        self.features = nn.Linear(width, FEATURES)
        self.head = nn.Linear(FEATURES, num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(self.maps(images).mean(dim=(2, 3)))  # [B, 128]
        return features, self.head(F.relu(features))

    def maps(self, images: Tensor) -> Tensor:
        """Return the maps from whose mean the features are computed, [B, 192, 4, 4]."""
        x = images.to(torch.float32) / 127.5 - 1  # [B, C, H, W] in [-1, 1]
        size = (self.resolution, self.resolution)
        if x.shape[2:] != size:
            x = F.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False)
        maps: Tensor = self.layers(x)
        return maps


def convolved(width: int, wider: int, kernel: int, stride: int) -> nn.Sequential:
    """Build a convolution with batch normalisation and ReLU."""
    convolution = nn.Conv2d(width, wider, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(wider), nn.ReLU(inplace=True))


class InPipeDetector:
    """A trained classifier as a detector. Read with `load_detector`."""

    def __init__(self, network: Classifier, description: dict[str, Any], device: str = "cpu") -> None:
        self._network = network.eval().requires_grad_(False).to(device)
        self._device = device
        self._channels: int = description["channels"]
        self.classes: list[str] = description["classes"] if description["labels"] == "classes" else []
        self.doubt = judge_doubt(description)
        self.identity: dict[str, Any] = {
            "name": "inpipe",
            "labels": description["labels"],
            "accuracy": description["accuracy"],
            "resolution": network.resolution,
            "resize": "bilinear, antialiased",
            "sha256": description["sha256"],
        }

    def __call__(self, images: Tensor) -> Detected:
        features, logits = self._network(self._fitting(images))
        return Detected(features.cpu(), logits.cpu())

    @torch.inference_mode()
    def maps(self, images: Tensor) -> Tensor:
        """Return the spatial features of images uint8 [B, C, H, W]: [B, 192, 4, 4], on the CPU."""
        return self._network.maps(self._fitting(images)).cpu()

    def _fitting(self, images: Tensor) -> Tensor:
        """Return the images on the network's device. Raises ValueError for another number of channels."""
        if images.shape[1] != self._channels:
            raise ValueError(
                f"The images have {images.shape[1]} channels but the detector was trained on {self._channels}. "
                "Run detect on the data set these images belong to."
            )
        return images.to(self._device)

    def metric_name(self, metric: str) -> str:
        return InPipe().metric_name(metric)


def judge_doubt(description: Mapping[str, Any]) -> str | None:
    """Return the reason why the data set's own classifier is unreliable; None if it is reliable.

    description: detector.json. Its skill is (accuracy - chance) / (1 - chance), Cohen's kappa (1960) against always
    naming the most common answer; its interval is Wilson's (1927), over the held-out images.
    """
    from scipy.stats import binomtest  # imported here, because it slows the start of a stage

    n, accuracy, chance = description["num_held_out"], description["accuracy"], description["chance"]
    low = float(binomtest(round(accuracy * n), n).proportion_ci(method="wilson").low)
    if low >= chance + LEAST_SKILL * (1 - chance):
        return None
    own = "classes" if description["labels"] == "classes" else "images"
    return (
        f"this data set is too small to judge by its own {own}: the classifier is right for {accuracy:.0%} of {n:,} "
        f"held-out images, and a guess for {chance:.0%}. More images, or another of evaluate.detectors, would decide"
    )


class InPipe(Config):
    """Embedded classifier that `detect` trained on the experiment's own data set."""

    type: Literal["inpipe"] = "inpipe"

    def metric_name(self, metric: str) -> str:
        """Return the name of a metric on this detector."""
        return f"inpipe_{metric}"

    def build(self, folder: Path | None, device: str = "cpu") -> InPipeDetector:
        """Load the detector that `detect` wrote into a folder. Raises ValueError as `load_detector` does."""
        if folder is None:
            raise ValueError("The inpipe detector needs --detector, the folder that detect wrote.")
        return load_detector(folder, device)


def load_detector(folder: Path, device: str = "cpu") -> InPipeDetector:
    """Load the detector that `detect` wrote. Raises ValueError if files are missing, have another format, or do not
    belong together."""
    description, weights = read_json(folder / "detector.json"), folder / "detector.safetensors"
    if description.get("format") != FORMAT:
        raise ValueError(
            f"{folder / 'detector.json'} has format {description.get('format')}; this version reads format {FORMAT}. "
            f"Run detect again."
        )
    if not weights.is_file():
        raise ValueError(f"{weights} does not exist. Run detect again.")
    if sha256_file(weights) != description["sha256"]:
        raise ValueError(f"{weights} is not the file that {folder / 'detector.json'} describes. Run detect again.")
    network = Classifier(description["channels"], description["num_outputs"], description["resolution"])
    network.load_state_dict(load_file(weights))
    return InPipeDetector(network, description, device)
