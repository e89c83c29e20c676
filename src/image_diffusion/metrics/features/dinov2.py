"""DINOv2 ViT-L/14, on which Stein et al. (2023, arXiv 2306.04675) and EDM2 report the Fréchet distance FD-DINOv2."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.files.atomic import sha256_file
from image_diffusion.core.files.weights import without_wrappers
from image_diffusion.metrics.features.base import Detected

_RESOLUTION = 224
_GRID = 16  # patches of 14 pixels in a row
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Dinov2(Config):
    """DINOv2's class token. The code comes through torch.hub: a local clone, or the network."""

    type: Literal["dinov2"] = "dinov2"
    model: Literal["dinov2_vits14", "dinov2_vitb14", "dinov2_vitl14"] = "dinov2_vitl14"
    """Network; the papers use dinov2_vitl14, and only its numbers compare with theirs."""
    weights: Path | None = None
    """A file with the published state dict; unset: torch.hub fetches it."""
    repository: Path | None = None
    """A local clone of facebookresearch/dinov2; unset: torch.hub fetches it."""

    def metric_name(self, metric: str) -> str:
        """Return the name of a metric on this detector."""
        return f"{metric}_{self.suffix}"

    @property
    def suffix(self) -> str:
        """Return the suffix of the names of its metrics: only the papers' network is called dinov2."""
        return "dinov2" if self.model == "dinov2_vitl14" else self.model

    def build(self, folder: Path | None = None, device: str = "cpu") -> Dinov2Detector:
        """Load the network. Raises ValueError when code or weights are missing."""
        for option, path in (("weights", self.weights), ("repository", self.repository)):
            if path is not None and not path.exists():
                raise ValueError(f"evaluate.detectors: {option} of {self.model} is {path}, which does not exist.")
        where = str(self.repository) if self.repository else "facebookresearch/dinov2"
        source = "local" if self.repository else "github"
        try:
            network: Any = torch.hub.load(
                where, self.model, source=source, pretrained=self.weights is None, trust_repo=True, verbose=False
            )
        except (OSError, ImportError) as error:
            raise ValueError(
                f"DINOv2 could not be loaded ({error}). Without a network, set in evaluate.detectors its repository to "
                "a clone of facebookresearch/dinov2 and its weights to the published file."
            ) from None
        if self.weights is not None:
            tensors = torch.load(self.weights, map_location="cpu", weights_only=True)
            network.load_state_dict(without_wrappers(tensors, self.weights))
        sha256 = sha256_file(self.weights) if self.weights else "torch.hub's own release"
        return Dinov2Detector(network, self, sha256, device)


class Dinov2Detector:
    """Features: the normalized class token, [B, 1024] for ViT-L. Images are brought to 224 (bicubic, antialiased)."""

    classes: list[str] = []  # noqa: RUF012 - it has none
    doubt: str | None = None

    def __init__(self, network: Any, config: Dinov2, sha256: str, device: str) -> None:
        self._network, self._device = network.eval().to(device), device
        self.metric_name = config.metric_name
        self.identity: dict[str, Any] = {"name": config.model, "resize": "bicubic, antialiased, 224", "sha256": sha256}

    def __call__(self, images: Tensor) -> Detected:
        return Detected(self._network(prepare(images).to(self._device)).to("cpu", torch.float32))

    @torch.inference_mode()
    def maps(self, images: Tensor) -> Tensor:
        """Return the normalized tokens of the patches of images uint8 [B, C, H, W]: [B, D, 16, 16], on the CPU."""
        tokens: Tensor = self._network.forward_features(prepare(images).to(self._device))["x_norm_patchtokens"]
        maps: Tensor = tokens.transpose(1, 2).unflatten(2, (_GRID, _GRID))
        return maps.to("cpu", torch.float32)


def prepare(images: Tensor) -> Tensor:
    """Convert uint8 [B, C, H, W] with 1 or 3 channels -> float32 [B, 3, 224, 224], normalized as DINOv2 was trained."""
    x = images.expand(-1, 3, -1, -1).to(torch.float32) / 255
    x = F.interpolate(x, (_RESOLUTION, _RESOLUTION), mode="bicubic", antialias=True, align_corners=False)
    return (x.clamp(0, 1) - torch.tensor(_MEAN).view(1, 3, 1, 1)) / torch.tensor(_STD).view(1, 3, 1, 1)
