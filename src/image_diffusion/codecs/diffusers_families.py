"""Autoencoders of diffusers: the content of their config.json, how they are called, and their decoders alone.

Each supported class of diffusers has a class here, which is listed in `KINDS`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.codecs.base import in_slices, latent_spec, to_uint8
from image_diffusion.codecs.hub_files import load_pretrained, settings_of
from image_diffusion.core.config.errors import nearest
from image_diffusion.core.process.errors import package
from image_diffusion.core.resolution import written
from image_diffusion.core.types import DataSpec

_FAR = 0.2


@dataclass(frozen=True)
class Factors:
    """Factors to normalise latents to mean 0 and standard deviation 1: x = (latent - mean) / std.

    mean, std: of each channel, or one number for all.
    """

    mean: Sequence[float]
    std: Sequence[float]

    def normalise(self, latent: Tensor) -> Tensor:
        """Normalise latents [B, c, h, w] -> x."""
        return (latent - _like(latent, self.mean)) / _like(latent, self.std)

    def restore(self, x: Tensor) -> Tensor:
        """Restore x [B, c, h, w] -> latents."""
        return x * _like(x, self.std) + _like(x, self.mean)


def _like(x: Tensor, values: Sequence[float]) -> Tensor:
    """Return one number for each channel, or one for all, as a tensor that broadcasts with x [B, c, h, w]."""
    return torch.tensor(values, dtype=x.dtype, device=x.device).view(-1, 1, 1)


def as_declared(statistics: Mapping[str, Any], declared: Factors) -> tuple[float, float]:
    """Return the mean and standard deviation of all numbers of latents after normalisation by the author's factors.

    statistics: measured {"mean", "std"} of each channel.
    """
    mean, std = (np.asarray(statistics[name], np.float64) for name in ("mean", "std"))
    of_each = (mean - np.asarray(declared.mean)) / np.asarray(declared.std)
    squares = (std / np.asarray(declared.std)) ** 2 + of_each**2
    overall = float(of_each.mean())
    return overall, float(np.sqrt(max(squares.mean() - overall**2, 0.0)))


def is_badly_normalised(mean: float, std: float) -> bool:
    """True if x is more than a fifth away from mean 0 and standard deviation 1."""
    return abs(mean) > _FAR or abs(std - 1) > _FAR


class Kind:
    """A class of autoencoders. settings: the config.json. where: its location, for errors."""

    source: ClassVar[str]
    """Module and name of the class in diffusers.models.autoencoders."""
    widths: ClassVar[str] = "block_out_channels"
    """Key of the config.json with the number of channels at each resolution."""
    scaling_factor: ClassVar[float] = 1.0
    """Default of diffusers for scaling_factor, which old config.json files lack."""
    resolution: int | None = None
    """The only resolution that it decodes; None: any resolution that the downsampling divides."""

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        self._settings, self._where = settings, where
        self.image_channels = int(self._get("in_channels"))
        self.channels = int(self._get("latent_channels"))
        self.downsampling = int(2 ** (len(self._get(self.widths)) - 1))

    def _get(self, name: str) -> Any:
        if name not in self._settings:
            raise ValueError(f"{self._where}/config.json has no key {name}. Use a folder that diffusers wrote.")
        return self._settings[name]

    def spec(self, images: DataSpec) -> DataSpec:
        """Return the shapes that the data determine for a network on these latents. Raises ValueError when the images
        do not fit."""
        if images.channels != self.image_channels:
            raise ValueError(
                f"data.channels is {images.channels}, but the autoencoder {self._where} reads {self.image_channels}. "
                f"Set it to {self.image_channels}."
            )
        if self.resolution is not None and images.resolution != self.resolution:
            raise ValueError(
                f"data.resolution is {written(images.resolution)}, but the autoencoder {self._where} decodes to "
                f"{self.resolution} alone. Set it to {self.resolution}."
            )
        return latent_spec(images, self.channels, self.downsampling)

    @classmethod
    def network(cls) -> Any:
        """Import and return the class of diffusers, which takes seconds."""
        module, name = cls.source.split(".")
        return getattr(importlib.import_module(f"diffusers.models.autoencoders.{module}"), name)

    def encode(self, vae: Any, images: Tensor) -> Tensor:
        """Encode images in [-1, 1] -> [B, 2, c, h, w], mean and standard deviation; [B, 1, c, h, w] if
        deterministic."""
        latent: Tensor = vae.encode(images)[0]
        return latent[:, None]

    def decode(self, vae: Any, latent: Tensor) -> Tensor:
        """Decode latents [B, c, h, w] -> images in [-1, 1]."""
        images: Tensor = vae.decode(latent).sample
        return images

    def declared(self, vae: Any) -> Factors:
        """Return the author's factors in the config.json: scaling_factor and shift_factor, or latents_mean and
        latents_std (x = (latent - latents_mean) * scaling_factor / latents_std, as in diffusers' pipelines)."""
        scaling = float(self._settings.get("scaling_factor") or self.scaling_factor)
        shift = float(self._settings.get("shift_factor") or 0.0)
        mean, std = self._settings.get("latents_mean"), self._settings.get("latents_std")
        if mean is None or std is None:
            return Factors([shift], [1.0 / scaling])
        return Factors([float(value) for value in mean], [float(value) / scaling for value in std])


def _posterior(vae: Any, images: Tensor) -> Tensor:
    """Encode images -> mean and standard deviation, [B, 2, c, h, w]."""
    posterior = vae.encode(images).latent_dist
    return torch.stack([posterior.mean, posterior.std], dim=1)


class Kl(Kind):
    """Rombach et al. 2022: Stable Diffusion, SDXL, SD3, FLUX.1, …: a posterior of 4, 16, … channels."""

    source = "autoencoder_kl.AutoencoderKL"
    scaling_factor = 0.18215

    def encode(self, vae: Any, images: Tensor) -> Tensor:
        return _posterior(vae, images)


class KlFlux2(Kind):
    """Autoencoder of FLUX.2. Its latents are the ones its pipeline works on: each patch of 2 x 2 elements is one of
    four times as many channels, normalised by the running statistics of a batch norm that lies among the weights."""

    source = "autoencoder_kl_flux2.AutoencoderKLFlux2"

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        super().__init__(settings, where)
        self._patch = tuple(int(edge) for edge in self._get("patch_size"))
        if self._patch[0] != self._patch[1]:
            raise ValueError(f"{where}/config.json has patch_size {list(self._patch)}. Patches must be square.")
        self.channels *= math.prod(self._patch)
        self.downsampling *= self._patch[0]

    def encode(self, vae: Any, images: Tensor) -> Tensor:
        return F.pixel_unshuffle(_posterior(vae, images), self._patch[0])  # channel c p² + row p + column

    def decode(self, vae: Any, latent: Tensor) -> Tensor:
        return super().decode(vae, F.pixel_shuffle(latent, self._patch[0]))

    def declared(self, vae: Any) -> Factors:
        norm = vae.bn
        std = torch.sqrt(norm.running_var.double() + self._get("batch_norm_eps"))
        return Factors(norm.running_mean.double().tolist(), std.tolist())


class Dc(Kind):
    """Deep compression autoencoder (Chen et al. 2024): downsampling by 32 or more, without a posterior."""

    source = "autoencoder_dc.AutoencoderDC"
    widths = "encoder_block_out_channels"


class Rae(Kind):
    """Features of a pretrained vision transformer, with a decoder for them (Zheng et al. 2025). It normalises its
    latents itself, by statistics among its weights."""

    source = "autoencoder_rae.AutoencoderRAE"

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        self._settings, self._where = settings, where
        self.image_channels, self.channels = int(self._get("num_channels")), int(self._get("encoder_hidden_size"))
        self.downsampling = int(self._get("patch_size"))
        self.resolution = self.downsampling * (
            int(self._get("encoder_input_size")) // int(self._get("encoder_patch_size"))
        )
        if not settings.get("reshape_to_2d", True):
            raise ValueError(
                f"{where}/config.json has reshape_to_2d false. Set it to true: latents are [c, h, w] here."
            )

    @classmethod
    def network(cls) -> Any:
        if importlib.util.find_spec("transformers") is None:
            raise ValueError(f"AutoencoderRAE needs {package('transformers', 'text')}")
        return super().network()

    def encode(self, vae: Any, images: Tensor) -> Tensor:
        return super().encode(vae, (images + 1) / 2)  # the input is in [0, 1]

    def decode(self, vae: Any, latent: Tensor) -> Tensor:
        return super().decode(vae, latent) * 2 - 1

    def declared(self, vae: Any) -> Factors:
        return Factors([0.0], [1.0])


class Tiny(Kind):
    """TAESD and related models: small and fast, for the latents of another autoencoder as scaled by its pipeline."""

    source = "autoencoder_tiny.AutoencoderTiny"
    widths = "encoder_block_out_channels"


class Vq(Kind):
    """A vector-quantised autoencoder (van den Oord et al. 2017; Rombach et al. 2022). The latents are not quantised;
    decoding quantises them. The codes are tokens."""

    source = "vq_model.VQModel"
    scaling_factor = 0.18215

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        super().__init__(settings, where)
        self.channels = int(settings.get("vq_embed_dim") or self.channels)
        self.num_tokens = int(self._get("num_vq_embeddings"))

    def codes(self, vae: Any, images: Tensor) -> Tensor:
        """Encode images in [-1, 1] -> int64 [B, h, w], the nearest entry of the codebook."""
        latent: Tensor = vae.encode(images).latents
        indices: Tensor = vae.quantize(latent)[2][2]
        return indices.view(len(latent), *latent.shape[2:])

    def decode_codes(self, vae: Any, codes: Tensor) -> Tensor:
        """Decode int64 [B, h, w] -> images in [-1, 1]."""
        latent = vae.quantize.get_codebook_entry(codes.flatten(), (*codes.shape, self.channels))
        images: Tensor = vae.decoder(
            vae.post_quant_conv(latent), latent if self._settings.get("norm_type") == "spatial" else None
        )
        return images


KINDS: dict[str, type[Kind]] = {kind.source.split(".")[1]: kind for kind in (Kl, KlFlux2, Dc, Rae, Tiny, Vq)}


def kind_of(settings: Mapping[str, Any], where: str) -> Kind:
    """Return the kind of autoencoder in a config.json. Raises ValueError for an unsupported class."""
    name = str(settings.get("_class_name"))
    if name not in KINDS:
        close = nearest(name, list(KINDS))
        advice = f" Did you mean {close}?" if close else ""
        raise ValueError(f"{where} holds a {name}, which is not supported.{advice} Known: {', '.join(KINDS)}.")
    return KINDS[name](settings, where)


KEY = "sample.decoder"


@dataclass(frozen=True)
class Decoder:
    """Decoder of another autoencoder: x, normalised by declared factors as in diffusers' pipelines -> uint8 images [B,
    C, H, W]. The factors of this autoencoder restore the latents.

    weights: a folder in diffusers' layout, or a name on the Hub; loaded when first used.
    """

    weights: str
    device: torch.device

    @cached_property
    def kind(self) -> Kind:
        return kind_of(settings_of(self.weights, None, KEY), self.weights)

    @cached_property
    def vae(self) -> Any:
        return load_pretrained(self.kind.network(), self.weights, None, self.device, torch.float32, KEY)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        latent = self.kind.declared(self.vae).restore(x.to(self.device, torch.float32))
        return in_slices(lambda part: to_uint8(self.kind.decode(self.vae, part)), latent, self.kind.downsampling)


def check_decoder(key: str, weights: str, channels: int, downsampling: int) -> None:
    """Raise ValueError if the config.json of an autoencoder shows that it cannot decode latents of this shape."""
    other = kind_of(settings_of(weights, None, key), weights)
    if (other.channels, other.downsampling) != (channels, downsampling):
        raise ValueError(
            f"{key} is {weights}, which decodes latents of {other.channels} channels and 1/{other.downsampling} of an "
            f"image's edge, but those of the codec have {channels} and 1/{downsampling}. Name one that fits."
        )
