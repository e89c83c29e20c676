"""Inception-V3 as the papers use it: TensorFlow's 2015 weights behind TensorFlow's resize, through torch-fidelity.

Only a Fréchet distance on this detector is called FID. torchvision's Inception has different weights, and gives
different values.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from image_diffusion.core.config.base import Config
from image_diffusion.core.files.atomic import sha256_file
from image_diffusion.metrics.features.base import Detected

_NAMES = {
    "fd": "fid",
    "spatial_fd": "sfid",
    "kd": "kid",
    "mind": "mind",
    "score": "inception_score",
    "reconstruction_fd": "rfid",
}
_SPATIAL_CHANNELS = 7


class Inception(Config):
    """Inception-V3 with the weights of the published FID. Needs the package torch-fidelity."""

    type: Literal["inception"] = "inception"
    weights: Path | None = None
    """Path of the file pt_inception-2015-12-05-6726825d.pth of torch-fidelity's releases; unset: torch-fidelity
    downloads it."""

    def metric_name(self, metric: str) -> str:
        """Return the name of a metric on this detector."""
        return _NAMES.get(metric, f"inception_{metric}")

    def build(self, folder: Path | None = None, device: str = "cpu") -> InceptionDetector:
        """Load the network. Raises ValueError if torch-fidelity or the weights are missing."""
        try:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except ImportError as error:
            raise ValueError(
                f"The inception detector needs torch-fidelity ({error}). Install it: pip install torch-fidelity."
            ) from None
        if self.weights is not None and not self.weights.is_file():
            raise ValueError(f"The Inception weights {self.weights} do not exist. See evaluate.detectors.")
        if self.weights is not None:
            _check_weights(self.weights)
        try:
            network = FeatureExtractorInceptionV3(
                "inception-v3-compat",
                ["2048", "logits_unbiased"],
                feature_extractor_weights_path=None if self.weights is None else str(self.weights),
            )
        except OSError as error:
            raise ValueError(
                f"The Inception weights could not be downloaded ({error}). Get the file of torch-fidelity's releases, "
                "and set weights to it in evaluate.detectors."
            ) from None
        return InceptionDetector(network, None if self.weights is None else sha256_file(self.weights), device)


def _check_weights(path: Path) -> None:
    """Raise ValueError unless a file is a plain state dict, since torch-fidelity would run code in a pickle."""
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        raise ValueError(f"{path} is not a file of plain tensors. Fetch torch-fidelity's release again.") from None


class InceptionDetector:
    """Features: pool_3 [B, 2048]; logits without bias [B, 1008]; spatial: 7 channels of mixed_6 [B, 2023], as in
    ADM."""

    classes: list[str] = []  # noqa: RUF012 - ImageNet's, not the data set's
    doubt: str | None = None

    def __init__(self, network: nn.Module, sha256: str | None, device: str) -> None:
        self._network, self._device = network.eval().to(device), device
        self._spatial: Tensor | None = None
        block: Any = network.get_submodule("Mixed_6d.branch1x1")
        block.register_forward_hook(self._keep_spatial)
        self.identity: dict[str, Any] = {
            "name": "inception-v3-compat (TensorFlow, 2015-12-05)",
            "resize": "TensorFlow 1 bilinear, 299",
            "sha256": sha256 or "torch-fidelity's own release",
        }

    def _keep_spatial(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._spatial = output[:, :_SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1).to("cpu", torch.float32)

    def __call__(self, images: Tensor) -> Detected:
        images = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
        if images.is_floating_point():  # arrays, while the network takes pictures only
            images = images.round().to(torch.uint8)
        features, logits = self._network(images.to(self._device))
        return Detected(features.cpu(), logits.cpu(), self._spatial)

    def metric_name(self, metric: str) -> str:
        return Inception().metric_name(metric)
