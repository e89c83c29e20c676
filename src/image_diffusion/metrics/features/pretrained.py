"""Detectors from published networks: Inception, and those of torchvision, transformers and torch.hub.

Inception-V3 is as the papers use it: TensorFlow's 2015 weights behind TensorFlow's resize, through torch-fidelity. Only
a Fréchet distance on this detector is called FID. torchvision's Inception has different weights, and gives different
values.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.files.atomic import digest, sha256_file
from image_diffusion.core.files.weights import content_digest, without_wrappers
from image_diffusion.core.process.errors import package
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


_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CLIP = "openai/clip-vit-large-patch14-336"
_DINOV2_SIDE, _DINOV2_GRID = 224, 16  # pixels; patches of 14 pixels in a row


class EncoderConfig(Config, ABC):
    """Common settings of both encoders."""

    resize: Literal["antialiased", "legacy"] = "antialiased"
    """Resizing of images to the network's input: antialiased, bicubic; or legacy, bilinear without antialiasing, as in
    older programs, which gives other values, so the metric names end with _legacy."""
    resolution: int | None = Field(None, ge=16)
    """Side of the network's input, in pixels; unset: 224, or the value in the model's processor. A teacher with patches
    of p pixels has resolution / p patches per row."""

    @property
    @abstractmethod
    def suffix(self) -> str:
        """Return the suffix of the metric names."""

    def metric_name(self, metric: str) -> str:
        """Return the name of a metric on this detector."""
        return f"{metric}_{self.suffix}{'_legacy' if self.resize == 'legacy' else ''}"


class Torchvision(EncoderConfig):
    """Classifier of torchvision, whose features are the input of the last linear layer."""

    type: Literal["torchvision"] = "torchvision"
    model: str = "convnext_base"
    """Network, by torchvision's name: convnext_base, resnet50, vit_b_16."""
    weights: Path | None = None
    """File with the state dict; unset: torchvision downloads its own."""

    @property
    def suffix(self) -> str:
        return self.model

    def build(self, folder: Path | None = None, device: str = "cpu") -> Encoder:
        """Load the network. Raises ValueError for an unknown network and for missing or foreign weights."""
        from torchvision import models  # imported here, because it slows the start of a stage

        if self.model not in models.list_models(module=models):
            raise ValueError(f"evaluate.detectors: torchvision has no classifier {self.model}. Choose convnext_base.")
        if self.weights is not None and not self.weights.is_file():
            raise ValueError(f"evaluate.detectors: weights of {self.model} is {self.weights}, which does not exist.")
        try:
            network = models.get_model(self.model, weights="DEFAULT" if self.weights is None else None)
            if self.weights is not None:
                tensors = torch.load(self.weights, map_location="cpu", weights_only=True)
                network.load_state_dict(without_wrappers(tensors, self.weights))
        except (OSError, RuntimeError, UnpicklingError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"{self.model} could not be loaded: {reason} "
                "Set weights in evaluate.detectors to a file with its state dict."
            ) from None
        sha256 = sha256_file(self.weights) if self.weights else "torchvision's own release"
        last = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
        side, antialiased = self.resolution or 224, self.resize == "antialiased"
        return Encoder(_GivenTo(network, last), self.metric_name, self.model, sha256, side, device, antialiased)


class Transformers(EncoderConfig):
    """A vision tower of the package transformers (CLIP, SigLIP, DINOv2, DINOv3): the embedding of an image."""

    type: Literal["transformers"] = "transformers"
    weights: str = _CLIP
    """Path of a local folder in transformers' layout, or a name on the Hugging Face Hub."""
    name: str = Field("clip", pattern="^[a-z0-9][a-z0-9_]*$")
    """Suffix of the metric names, as in fd_clip. Only the default weights may be called clip."""

    @model_validator(mode="after")
    def _is_named(self) -> Transformers:
        if (self.weights == _CLIP) != (self.name == "clip"):
            raise ValueError(
                f"weights are {self.weights}, name is {self.name}: only {_CLIP} is called clip. Name others."
            )
        return self

    @property
    def suffix(self) -> str:
        return self.name

    def build(self, folder: Path | None = None, device: str = "cpu") -> Encoder:
        """Load the network. Raises ValueError if the package or the weights are missing."""
        return self.load(device)[0]

    def load(self, device: str) -> tuple[Encoder, Any, str]:
        """Return the image encoder, the whole model that contains it, and the location of the weights. Raises
        ValueError as `build` does."""
        try:
            import transformers
        except ImportError:
            raise ValueError(
                f"The detector {self.name} needs {package('transformers', 'text')} Detectors of torchvision need no "
                "further package."
            ) from None
        local = Path(self.weights).expanduser()
        where = str(local) if local.is_dir() else self.weights
        try:
            model = transformers.AutoModel.from_pretrained(where, dtype=torch.float32)
            prepared: Any = transformers.AutoImageProcessor.from_pretrained(where)
        except (OSError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"The detector {self.name} could not be loaded from {self.weights}: {reason} Without access to the "
                "Hugging Face Hub, copy the model's folder to this machine and set weights to its path."
            ) from None
        mean, std = tuple(prepared.image_mean), tuple(prepared.image_std)
        sha256 = digest([content_digest(model.state_dict()), mean, std])
        tower = _Tower(model, self.weights)
        side, antialiased = self.resolution or _side(prepared) or tower.side, self.resize == "antialiased"
        model.eval().to(device)
        encoder = Encoder(tower, self.metric_name, self.name, sha256, side, device, antialiased, mean, std)
        return encoder, model, where


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
        return Encoder(ClassToken(network), self.metric_name, self.model, sha256, _DINOV2_SIDE, device)


class Encoder:
    """Features: float32 [B, D] of uint8 images [B, C, H, W] with 1 or 3 channels.

    network: images [B, 3, side, side], normalized with `mean` and `std` -> features; its method `patches`, if any,
    returns maps.
    """

    classes: list[str] = []  # noqa: RUF012 - not the data set's
    doubt: str | None = None

    def __init__(
        self,
        network: nn.Module,
        metric_name: Callable[[str], str],
        name: str,
        sha256: str,
        side: int,
        device: str,
        antialiased: bool = True,
        mean: tuple[float, ...] = _MEAN,
        std: tuple[float, ...] = _STD,
    ) -> None:
        self._network: Any = network.eval().requires_grad_(False).to(device)
        self._device, self._antialiased, self._side = device, antialiased, side
        self._mean, self._std = (torch.tensor(statistic).view(1, 3, 1, 1) for statistic in (mean, std))
        self.metric_name = metric_name
        how = "bicubic, antialiased" if antialiased else "bilinear, not antialiased"
        self.identity: dict[str, Any] = {"name": name, "resize": f"{how}, {side}", "sha256": sha256}

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Detected:
        return Detected(self._network(self._prepared(images)).to("cpu", torch.float32))

    @torch.inference_mode()
    def maps(self, images: Tensor) -> Tensor:
        """Return the features of a transformer for each patch of images uint8 [B, C, H, W]: [B, D, h, w], on the
        CPU."""
        maps: Tensor = self._network.patches(self._prepared(images)).to("cpu", torch.float32)
        return maps

    def _prepared(self, images: Tensor) -> Tensor:
        if images.shape[1] not in (1, 3):
            raise ValueError(
                f"The images have {images.shape[1]} channels but {self.identity['name']} takes 1 or 3. "
                "Compare them by a detector that was trained on them."
            )
        x = images.expand(-1, 3, -1, -1).to(torch.float32) / 255
        mode = "bicubic" if self._antialiased else "bilinear"
        x = F.interpolate(x, (self._side,) * 2, mode=mode, antialias=self._antialiased, align_corners=False)
        return ((x.clamp(0, 1) - self._mean) / self._std).to(self._device)


class ClassToken(nn.Module):
    """Images [B, 3, 224, 224] -> the normalized class token of a DINOv2, [B, 1024] for ViT-L/14, on which Stein et al.
    (2023, arXiv 2306.04675) and EDM2 report the Fréchet distance FD-DINOv2."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        token: Tensor = self.network(x)
        return token

    def patches(self, x: Tensor) -> Tensor:
        """Return the normalized tokens of the patches, [B, D, 16, 16]."""
        tokens: Tensor = self.network.forward_features(x)["x_norm_patchtokens"]
        maps: Tensor = tokens.transpose(1, 2).unflatten(2, (_DINOV2_GRID, _DINOV2_GRID))
        return maps


class _GivenTo(nn.Module):
    """Module that returns the input of one layer of a network: x -> layer input."""

    def __init__(self, network: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.network, self._features = network, list[Tensor]()
        layer.register_forward_pre_hook(lambda _, inputs: self._features.append(inputs[0]))

    def forward(self, x: Tensor) -> Tensor:
        self.network(x)
        return self._features.pop()


class _Tower(nn.Module):
    """Vision tower: x -> image embedding, pooled, and projected if the model has a projection. name: for errors."""

    def __init__(self, model: Any, name: str) -> None:
        super().__init__()
        self.tower, self.projection = (
            getattr(model, "vision_model", model),
            getattr(model, "visual_projection", nn.Identity()),
        )
        self.name, self.config = name, self.tower.config

    @property
    def side(self) -> int:
        """Return the side of the images that the position embeddings were trained on, in pixels."""
        side: int = self.config.image_size
        return side

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.projection(self._features(x).pooler_output)
        return pooled

    def patches(self, x: Tensor) -> Tensor:
        """Return the last hidden states of the patches, [B, D, h, w]. Raises ValueError for a model without such a
        grid."""
        tokens: Tensor = self._features(x).last_hidden_state  # [B, class and register tokens, then patches, D]
        patch = getattr(self.config, "patch_size", None)
        grid = x.shape[-1] // patch if isinstance(patch, int) else 0
        others = (0, 1, 1 + getattr(self.config, "num_register_tokens", 0))
        if not grid or tokens.ndim != 3 or tokens.shape[1] - grid**2 not in others:
            raise ValueError(
                f"{self.name} gives {list(tokens.shape[1:])} for an image, which is not one token for each of its "
                f"patches, after those of the class and registers. Choose a DINOv2, DINOv3, CLIP or SigLIP."
            )
        maps: Tensor = tokens[:, -(grid**2) :].transpose(1, 2).unflatten(2, (grid, grid))
        return maps

    def _features(self, x: Tensor) -> Any:
        other = {} if x.shape[-1] == self.side else {"interpolate_pos_encoding": True}  # some do it anyway
        return self.tower(pixel_values=x, **other)


def _side(processor: Any) -> int | None:
    """Return the side of the squares that a processor crops or resizes to, in pixels."""
    size = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
    side: int | None = getattr(size, "height", None)
    return side
