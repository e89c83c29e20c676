"""The autoencoders of diffusers: what each tells of itself in its config.json, and how it is called.

One class of diffusers, one class here; its name in `KINDS`.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from image_diffusion.codecs.codec import latent_spec
from image_diffusion.core.mistakes import nearest
from image_diffusion.core.types import DataSpec

_FAR = 0.2


@dataclass(frozen=True)
class Factors:
    """How latents are brought to mean 0 and standard deviation 1: x = (latent - mean) / std.

    mean, std: of each channel, or one number for all.
    """

    mean: Sequence[float]
    std: Sequence[float]

    def normalise(self, latent: Tensor) -> Tensor:
        """Latents [B, c, h, w] -> x."""
        mean, std = self._like(latent)
        return (latent - mean) / std

    def restore(self, x: Tensor) -> Tensor:
        """X [B, c, h, w] -> latents."""
        mean, std = self._like(x)
        return x * std + mean

    def _like(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (
            torch.tensor(each, dtype=x.dtype, device=x.device).view(-1, 1, 1) for each in (self.mean, self.std)
        )
        return mean, std


def as_declared(statistics: Mapping[str, Any], declared: Factors) -> tuple[float, float]:
    """Mean and standard deviation of all numbers of latents, once they are normalised by what an author declared.

    statistics: measured, {"mean", "std"} of each channel.
    """
    mean, std = (np.asarray(statistics[name], np.float64) for name in ("mean", "std"))
    of_each = (mean - np.asarray(declared.mean)) / np.asarray(declared.std)
    squares = (std / np.asarray(declared.std)) ** 2 + of_each**2
    overall = float(of_each.mean())
    return overall, float(np.sqrt(max(squares.mean() - overall**2, 0.0)))


def far_off(mean: float, std: float) -> bool:
    """Whether x is more than a fifth away from mean 0 and standard deviation 1."""
    return abs(mean) > _FAR or abs(std - 1) > _FAR


class Kind(ABC):
    """A class of autoencoders. settings: the config.json. where: its folder, for errors."""

    is_certain: ClassVar[bool] = True
    """Whether an image has one latent; else a mean and a standard deviation."""
    resolution: int | None = None
    """The only one that it decodes to; None: any that the downsampling divides."""

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        self._settings, self._where = settings, where
        self.image_channels = int(self._get("in_channels"))
        self.channels = int(self._get("latent_channels"))
        self.downsampling = int(2 ** (len(self._get("block_out_channels")) - 1))

    def _get(self, name: str) -> Any:
        if name not in self._settings:
            raise ValueError(f"{self._where}/config.json names no {name}. Give a folder that diffusers wrote.")
        return self._settings[name]

    def spec(self, images: DataSpec) -> DataSpec:
        """What the data fix about a network on these latents. Raises ValueError when the images do not fit."""
        if images.channels != self.image_channels:
            raise ValueError(
                f"data.channels is {images.channels}, but the autoencoder {self._where} reads {self.image_channels}. "
                f"Set it to {self.image_channels}."
            )
        if self.resolution is not None and images.resolution != self.resolution:
            raise ValueError(
                f"data.resolution is {images.resolution}, but the autoencoder {self._where} decodes to "
                f"{self.resolution} alone. Set it to {self.resolution}."
            )
        return latent_spec(images, self.channels, self.downsampling)

    @staticmethod
    @abstractmethod
    def network() -> Any:
        """The class in diffusers, which takes seconds to import."""

    @abstractmethod
    def encode(self, vae: Any, images: Tensor) -> Tensor:
        """Images in [-1, 1] -> [B, 2, c, h, w], mean and standard deviation; [B, 1, c, h, w] where it is certain."""

    def decode(self, vae: Any, latent: Tensor) -> Tensor:
        """Latents [B, c, h, w] -> images in [-1, 1]."""
        images: Tensor = vae.decode(latent).sample
        return images

    def declared(self, vae: Any) -> Factors:
        """The factors that its author gives: diffusers' scaling_factor and shift_factor, or latents_mean and
        latents_std (x = (latent - latents_mean) * scaling_factor / latents_std, as its pipelines have it)."""
        return self._in_config()

    def _in_config(self) -> Factors:
        scaling = float(self._settings.get("scaling_factor") or 1.0)
        shift = float(self._settings.get("shift_factor") or 0.0)
        mean, std = self._settings.get("latents_mean"), self._settings.get("latents_std")
        if mean is None or std is None:
            return Factors([shift], [1.0 / scaling])
        return Factors([float(each) for each in mean], [float(each) / scaling for each in std])


class Kl(Kind):
    """Rombach et al. 2022: Stable Diffusion, SDXL, SD3, FLUX.1, …: a posterior of 4, 16, … channels."""

    is_certain = False

    @staticmethod
    def network() -> Any:
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        return AutoencoderKL

    def encode(self, vae: Any, images: Tensor) -> Tensor:
        posterior = vae.encode(images).latent_dist
        return torch.stack([posterior.mean, posterior.std], dim=1)


class KlFlux2(Kind):
    """FLUX.2's. Its latents are the ones its pipeline works on: each patch of 2 x 2 elements is one of four times as
    many channels, normalised by the running statistics of a batch norm that lies among the weights."""

    is_certain = False

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        super().__init__(settings, where)
        self._patch = tuple(int(edge) for edge in self._get("patch_size"))
        if self._patch[0] != self._patch[1]:
            raise ValueError(f"{where}/config.json has patch_size {list(self._patch)}. Its edges have to be equal.")
        self.channels *= math.prod(self._patch)
        self.downsampling *= self._patch[0]

    @staticmethod
    def network() -> Any:
        from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2

        return AutoencoderKLFlux2

    def encode(self, vae: Any, images: Tensor) -> Tensor:
        posterior = vae.encode(images).latent_dist
        both = torch.stack([posterior.mean, posterior.std], dim=1)  # [B, 2, c, h, w]
        return torch.nn.functional.pixel_unshuffle(both, self._patch[0])  # channel c p² + row p + column

    def decode(self, vae: Any, latent: Tensor) -> Tensor:
        return super().decode(vae, torch.nn.functional.pixel_shuffle(latent, self._patch[0]))

    def declared(self, vae: Any) -> Factors:
        norm = vae.bn
        std = torch.sqrt(norm.running_var.double() + self._get("batch_norm_eps"))
        return Factors(norm.running_mean.double().tolist(), std.tolist())


class Dc(Kind):
    """The deep compression autoencoder (Chen et al. 2024): 32 pixels along an edge to one and more, no posterior."""

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        super().__init__({**settings, "block_out_channels": settings.get("encoder_block_out_channels", [])}, where)

    @staticmethod
    def network() -> Any:
        from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC

        return AutoencoderDC

    def encode(self, vae: Any, images: Tensor) -> Tensor:
        latent: Tensor = vae.encode(images).latent
        return latent[:, None]


class Rae(Kind):
    """Features of a pretrained vision transformer, with a decoder for them (Zheng et al. 2025). It normalises its
    latents itself, by what lies among its weights."""

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

    @staticmethod
    def network() -> Any:
        if importlib.util.find_spec("transformers") is None:
            raise ValueError("AutoencoderRAE needs the package transformers. Run: python -m pip install transformers.")
        from diffusers.models.autoencoders.autoencoder_rae import AutoencoderRAE

        return AutoencoderRAE

    def encode(self, vae: Any, images: Tensor) -> Tensor:
        latent: Tensor = vae.encode((images + 1) / 2).latent  # it reads [0, 1]
        return latent[:, None]

    def decode(self, vae: Any, latent: Tensor) -> Tensor:
        return super().decode(vae, latent) * 2 - 1

    def declared(self, vae: Any) -> Factors:
        return Factors([0.0], [1.0])


class Tiny(Kind):
    """TAESD and its kin: small and fast, for the latents of another autoencoder as its pipeline scales them."""

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        super().__init__({**settings, "block_out_channels": settings.get("encoder_block_out_channels", [])}, where)

    @staticmethod
    def network() -> Any:
        from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

        return AutoencoderTiny

    def encode(self, vae: Any, images: Tensor) -> Tensor:
        latent: Tensor = vae.encode(images).latents
        return latent[:, None]


class Vq(Kind):
    """A vector-quantised autoencoder (van den Oord et al. 2017; Rombach et al. 2022). Its latents are those before
    they are quantised, which decoding does; its codes are tokens."""

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        super().__init__(settings, where)
        self.channels = int(settings.get("vq_embed_dim") or self.channels)
        self.num_tokens = int(self._get("num_vq_embeddings"))

    @staticmethod
    def network() -> Any:
        from diffusers.models.autoencoders.vq_model import VQModel

        return VQModel

    def encode(self, vae: Any, images: Tensor) -> Tensor:
        latent: Tensor = vae.encode(images).latents
        return latent[:, None]

    def codes(self, vae: Any, images: Tensor) -> Tensor:
        """Images in [-1, 1] -> int64 [B, h, w], the nearest entry of the codebook."""
        latent: Tensor = vae.encode(images).latents
        found: Tensor = vae.quantize(latent)[2][2]
        return found.view(len(latent), *latent.shape[2:])

    def decode_codes(self, vae: Any, codes: Tensor) -> Tensor:
        """Int64 [B, h, w] -> images in [-1, 1]."""
        latent = vae.quantize.get_codebook_entry(codes.flatten(), (*codes.shape, self.channels))
        images: Tensor = vae.decoder(
            vae.post_quant_conv(latent), latent if self._settings.get("norm_type") == "spatial" else None
        )
        return images


KINDS: dict[str, type[Kind]] = {
    "AutoencoderKL": Kl,
    "AutoencoderKLFlux2": KlFlux2,
    "AutoencoderDC": Dc,
    "AutoencoderRAE": Rae,
    "AutoencoderTiny": Tiny,
    "VQModel": Vq,
}


def kind_of(settings: Mapping[str, Any], where: str) -> Kind:
    """What the config.json of an autoencoder describes. Raises ValueError for a class that is none of these."""
    name = str(settings.get("_class_name"))
    if name not in KINDS:
        close = nearest(name, list(KINDS))
        advice = f" Did you mean {close}?" if close else ""
        raise ValueError(f"{where} holds a {name}, which is no codec here.{advice} Known: {', '.join(KINDS)}.")
    return KINDS[name](settings, where)
