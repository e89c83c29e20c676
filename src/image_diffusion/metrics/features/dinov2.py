"""DINOv2 ViT-L/14, on which Stein et al. (2023, arXiv 2306.04675) and EDM2 report the Fréchet distance FD-DINOv2."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from image_diffusion.core.config.base import Config
from image_diffusion.core.files.atomic import sha256_file
from image_diffusion.core.files.weights import without_wrappers
from image_diffusion.metrics.features.pretrained import Encoder

_RESOLUTION = 224
_GRID = 16  # patches of 14 pixels in a row


class Dinov2(Config):
    """DINOv2's class token. The code is loaded by torch.hub, from a local clone or the internet."""

    type: Literal["dinov2"] = "dinov2"
    model: Literal["dinov2_vits14", "dinov2_vitb14", "dinov2_vitl14"] = "dinov2_vitl14"
    """Network; the papers use dinov2_vitl14, and only its values are comparable with theirs."""
    weights: Path | None = None
    """File with the published state dict; unset: torch.hub downloads it."""
    repository: Path | None = None
    """Local clone of facebookresearch/dinov2; unset: torch.hub downloads it."""

    def metric_name(self, metric: str) -> str:
        """Return the name of a metric on this detector."""
        return f"{metric}_{self.suffix}"

    @property
    def suffix(self) -> str:
        """Return the suffix of the metric names; only the network of the papers is called dinov2."""
        return "dinov2" if self.model == "dinov2_vitl14" else self.model

    def build(self, folder: Path | None = None, device: str = "cpu") -> Encoder:
        """Load the network. Raises ValueError if code or weights are missing."""
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
        return Encoder(ClassToken(network), self.metric_name, self.model, sha256, _RESOLUTION, device)


class ClassToken(nn.Module):
    """Images [B, 3, 224, 224] -> the normalized class token of a DINOv2, [B, 1024] for ViT-L."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        token: Tensor = self.network(x)
        return token

    def patches(self, x: Tensor) -> Tensor:
        """Return the normalized tokens of the patches, [B, D, 16, 16]."""
        tokens: Tensor = self.network.forward_features(x)["x_norm_patchtokens"]
        maps: Tensor = tokens.transpose(1, 2).unflatten(2, (_GRID, _GRID))
        return maps
