"""Autoencoders of diffusers as codecs: any of them, its latents normalised by their statistics over the data set; and
`AutoencoderKL` with one factor for all channels (Rombach et al. 2022, section 3.1), which is Stable Diffusion 1's
pretrained autoencoder, and the small one that an experiment trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.codecs.base import (
    Codec,
    CodecSettings,
    LatentShape,
    Packed,
    ScaledCodec,
    Tokens,
    from_uint8,
    in_slices,
    latent_spec,
    sample_posterior,
    to_images,
    to_uint8,
    to_x,
)
from image_diffusion.codecs.diffusers_families import (
    Decoder,
    Factors,
    Kind,
    Kl,
    Vq,
    as_declared,
    check_decoder,
    is_badly_normalised,
    kind_of,
)
from image_diffusion.codecs.hub_files import content_of, files_of, folder_of, load_pretrained, settings_of
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec


@dataclass(frozen=True)
class KlCodec(ScaledCodec[Any]):
    """An `AutoencoderKL`, which takes seconds to import, and its scale (0.18215 for the SD VAE). decoder: replaces the
    autoencoder's own."""

    decoder: Decoder | None = None

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        x = to_x(images.to(self.network.device), self.levels).to(self.network.dtype)
        posterior = self.network.encode(x).latent_dist
        return torch.stack([posterior.mean, posterior.std], dim=1).to(torch.float32)

    def draw(self, stored: Tensor, streams: Streams) -> Tensor:
        return self.normalise(sample_posterior(stored, streams))

    def with_decoder(self, weights: str, device: torch.device) -> KlCodec:
        return replace(self, decoder=Decoder(weights, device))

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        if self.decoder is not None:
            return self.decoder(x)
        vae = self.network
        latent = (x / self.scale).to(vae.device, vae.dtype)
        downsampling = 2 ** (len(vae.config.block_out_channels) - 1)
        return in_slices(lambda part: to_images(vae.decode(part).sample, self.levels), latent, downsampling)


class Diffusers(CodecSettings):
    """An autoencoder of diffusers: AutoencoderKL of any family, AutoencoderKLFlux2, AutoencoderDC, AutoencoderRAE,
    AutoencoderTiny or VQModel."""

    type: Literal["diffusers"] = "diffusers"
    """Any autoencoder of diffusers."""
    weights: str
    """Path of a local folder in diffusers' layout, or name on the Hugging Face Hub."""
    subfolder: str | None = None
    """Subfolder of the weights: vae in the folder of a pipeline."""
    normalisation: Literal["measured", "declared"] = "measured"
    """Normalisation of latents to mean 0 and standard deviation 1. measured: each channel by its mean and standard
    deviation over the data set. declared: by the author's factors, such as scaling_factor, shift_factor,
    latents_mean and latents_std in config.json, with which published networks were trained."""
    pixels: Literal["signed", "unit"] = "signed"
    """Pixel range of the autoencoder's input. signed: [-1, 1], as in its training. unit: [0, 1], as EDM2 uses Stable
    Diffusion's autoencoder; latents of EDM2 decode to the right colours only with unit."""

    @property
    def name(self) -> str:
        place = Path(self.weights).name or Path(self.weights).resolve().name
        parts = [place, *([self.subfolder.replace("/", "-")] if self.subfolder else [])]
        return "-".join([*parts, "unit"] if self.pixels == "unit" else parts)

    @property
    def pixel_range(self) -> Literal["signed", "unit"]:
        return self.pixels

    @property
    def kind(self) -> Kind:
        """Return the kind of autoencoder in its config.json. Raises ValueError if the file is not available, or its
        class is not supported."""
        return kind_of(settings_of(self.weights, self.subfolder, "codec.weights"), self.name)

    @property
    def files(self) -> list[Path]:
        return files_of(self.weights, self.subfolder)

    def spec(self, images: DataSpec, autoencoder: LatentShape | None) -> DataSpec:
        return self.kind.spec(images)

    def build(self, weights: Path | None, scale: Any, device: torch.device, dtype: torch.dtype) -> Codec:
        """Build the codec; its weights are loaded when first used. The argument `weights` is ignored."""
        return DiffusersCodec(self, scale, device, dtype)

    def tokens(self, weights: Path | None, device: torch.device, dtype: torch.dtype) -> VqTokens:
        if not isinstance(self.kind, Vq):
            raise ValueError(f"encode.tokens is set, but {self.name} has no codebook. Leave encode.tokens out.")
        return VqTokens(DiffusersCodec(self, None, device, dtype), self.kind.num_tokens)

    def scale_of(self, statistics: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the factors {"mean", "std"} of x, and the author's factors under "declared"."""
        if statistics is None:
            return None
        declared = statistics.get("declared")
        if declared is None:
            raise ValueError(f"The latents of {self.name} were encoded by another codec. Run encode again.")
        if self.normalisation == "declared":
            return {**declared, "declared": declared}
        # Do not scale a constant channel.
        std = [deviation if deviation > 0 else 1.0 for deviation in statistics["std"]]
        return {"mean": statistics["mean"], "std": std, "declared": declared}

    def encoded_by(self) -> Self:
        return self.model_copy(update={"normalisation": "measured"})

    def check_decoder(self, key: str, weights: str) -> None:
        if self.pixels == "unit":
            raise ValueError(
                f"{key} is set, but codec.pixels is unit, and other decoders return signed pixels. Leave it out."
            )
        check_decoder(key, weights, self.kind.channels, self.kind.downsampling)

    def advice(self, statistics: Mapping[str, Any]) -> str | None:
        mean, std = as_declared(statistics, Factors(**statistics["declared"]))
        if not is_badly_normalised(mean, std):
            return None
        return (
            f"By the factors that {self.name} declares, its latents have mean {mean:.2f} and standard deviation "
            f"{std:.2f} over this data set, not 0 and 1. codec.normalisation: measured, the default, makes them that."
        )


@dataclass(frozen=True)
class DiffusersCodec:
    """An autoencoder and the normalisation of its latents.

    scale: from `Diffusers.scale_of`; None while encoding: x is then the latent. decoder: replaces the autoencoder's
    own. loaded: the autoencoder, if it is already loaded.
    """

    settings: Diffusers
    scale: Mapping[str, Any] | None
    device: torch.device
    dtype: torch.dtype
    decoder: Decoder | None = None
    loaded: Any = None

    bounded: ClassVar[bool] = False

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return plain data that identifies the codec by the content of its folder."""
        content = content_of(self.settings.weights, self.settings.subfolder)
        return {"type": "diffusers", **content} | ({"pixels": "unit"} if self.settings.pixels == "unit" else {})

    @cached_property
    def kind(self) -> Kind:
        if self.loaded is None:
            return self.settings.kind
        return kind_of({**self.loaded.config, "_class_name": type(self.loaded).__name__}, self.settings.name)

    @cached_property
    def vae(self) -> Any:
        if self.loaded is not None:
            return self.loaded
        weights, subfolder = self.settings.weights, self.settings.subfolder
        return load_pretrained(self.kind.network(), weights, subfolder, self.device, self.dtype, "codec.weights")

    @cached_property
    def _factors(self) -> Factors:
        return Factors([0.0], [1.0]) if self.scale is None else Factors(self.scale["mean"], self.scale["std"])

    def declared(self) -> dict[str, Any]:
        """Return the factors that the autoencoder's author gives, as plain data for the manifest: {"mean", "std"}."""
        factors = self.kind.declared(self.vae)
        return {"mean": list(factors.mean), "std": list(factors.std)}

    def compile_encoder(self) -> None:
        self.vae.encoder.compile()

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Encode uint8 [B, C, H, W] -> float32 [B, 2, c, h, w], mean and deviation; [B, 1, c, h, w] if
        deterministic."""
        return self.kind.encode(self.vae, self.pixels(images)).to(torch.float32)

    def draw(self, stored: Tensor, streams: Streams) -> Tensor:
        return self.normalise(sample_posterior(stored, streams))

    def normalise(self, latent: Tensor) -> Tensor:
        return self._factors.normalise(latent)

    def with_decoder(self, weights: str, device: torch.device) -> DiffusersCodec:
        return replace(self, decoder=Decoder(weights, device))

    def packed(self) -> Packed:
        settings = {"name": self.settings.name, "scale": self.scale, "pixels": self.settings.pixels}
        return Packed(settings, self.vae)

    @classmethod
    def unpacked(cls, packed: Packed) -> Self:
        vae: Any = packed.network
        settings = Diffusers(weights=packed.settings["name"], pixels=packed.settings.get("pixels", "signed"))
        return cls(settings, packed.settings["scale"], vae.device, vae.dtype, loaded=vae)

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        latent = self._factors.restore(x.to(torch.float32))
        if self.decoder is not None:
            assert self.scale is not None
            return self.decoder(Factors(**self.scale["declared"]).normalise(latent))
        latent = latent.to(self.device, self.dtype)
        return in_slices(lambda part: self.shown(self.kind.decode(self.vae, part)), latent, self.kind.downsampling)

    def pixels(self, images: Tensor) -> Tensor:
        """Convert uint8 [B, C, H, W] to the input of the autoencoder."""
        x = from_uint8(images.to(self.device))
        return ((x + 1) / 2 if self.settings.pixels == "unit" else x).to(self.dtype)

    def shown(self, decoded: Tensor) -> Tensor:
        """Convert the output of the autoencoder to uint8 [B, C, H, W]."""
        return to_uint8(2 * decoded.float() - 1 if self.settings.pixels == "unit" else decoded)


@dataclass(frozen=True)
class VqTokens(Tokens):
    """Codes of a VQModel in place of latents."""

    codec: DiffusersCodec

    type = "vq_tokens"

    @property
    def _kind(self) -> Vq:
        assert isinstance(self.codec.kind, Vq)
        return self.codec.kind

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        return self._kind.codes(self.codec.vae, self.codec.pixels(images))

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        return self.codec.shown(self._kind.decode_codes(self.codec.vae, tokens.to(self.codec.device).long()))


_CHANNELS, _DOWNSAMPLING = 4, 8
_SAME = 1e-6


class StabilityVae(CodecSettings):
    """Stable Diffusion 1's autoencoder: downsampling by 8, 4 channels. For any other, use codec.type diffusers."""

    type: Literal["stability_vae"] = "stability_vae"
    """Stable Diffusion's pretrained autoencoder."""
    weights: str = "stabilityai/sd-vae-ft-ema"
    """Name on the Hugging Face Hub, or path of a local folder in diffusers' layout."""
    scale: float = Field(0.18215, gt=0)
    """Factor by which latents are multiplied, so that their standard deviation is near 1."""

    @property
    def name(self) -> str:
        return Path(self.weights).name or Path(self.weights).resolve().name

    @property
    def files(self) -> list[Path]:
        return files_of(self.weights)

    def spec(self, images: DataSpec, autoencoder: LatentShape | None) -> DataSpec:
        """Return the shapes that the data determine for a network on these latents. Raises ValueError when the images
        do not fit, or a local folder holds an autoencoder other than Stable Diffusion 1's."""
        if images.channels != 3:
            raise ValueError(f"data.channels is {images.channels}, but the codec stability_vae reads RGB. Set it to 3.")
        folder = folder_of(self.weights)
        if folder is not None and (folder / "config.json").is_file():
            self._check(settings_of(self.weights, None, "codec.weights"), "scale" in self.model_fields_set)
        return latent_spec(images, _CHANNELS, _DOWNSAMPLING)

    def build(self, weights: Path | None, scale: Any, device: torch.device, dtype: torch.dtype) -> Codec:
        """Build the codec; its weights are loaded when first used. The arguments `weights` and `scale` are ignored."""

        def load() -> Any:
            vae = load_pretrained(Kl.network(), self.weights, None, device, dtype, "codec.weights")
            self._check({"_class_name": "AutoencoderKL", **vae.config}, scale_is_chosen=True)
            return vae

        is_local = folder_of(self.weights) is not None
        content = content_of(self.weights, None) if is_local else {"weights": self.weights}
        return KlCodec(identity={"type": "kl", **content}, load=load, scale=self.scale)

    def check_decoder(self, key: str, weights: str) -> None:
        check_decoder(key, weights, _CHANNELS, _DOWNSAMPLING)
        settings = settings_of(self.weights, None, "codec.weights")
        self._check(settings, scale_is_chosen=True)
        own = kind_of(settings, self.weights).declared(None).std[0]
        if abs(self.scale * own - 1) >= _SAME:
            raise ValueError(
                f"{key} is set, but codec.scale is {self.scale:g} and not the {1 / own:g} of {self.weights}, with "
                f"which other decoders read latents. Leave {key} out, or train with that scale."
            )

    def advice(self, statistics: Mapping[str, Any]) -> str | None:
        mean, std = as_declared(statistics, Factors([0.0], [1 / self.scale]))
        if not is_badly_normalised(mean, std):
            return None
        return (
            f"Multiplied with codec.scale {self.scale:g}, the latents have mean {mean:.2f} and standard deviation "
            f"{std:.2f} over this data set, not 0 and 1. codec: {{type: diffusers, weights: {self.weights}}} "
            f"normalises them by what was measured."
        )

    def _check(self, settings: Mapping[str, Any], scale_is_chosen: bool) -> None:
        """Raise ValueError for another autoencoder, since this codec scales latents by a single factor."""
        kind = kind_of(settings, self.weights)
        if isinstance(kind, Kl) and (kind.channels, kind.downsampling) == (_CHANNELS, _DOWNSAMPLING):
            declared = kind.declared(None)
            has_one_factor = list(declared.mean) == [0.0] and len(declared.std) == 1
            if has_one_factor and (scale_is_chosen or abs(self.scale * declared.std[0] - 1) < _SAME):
                return
        raise ValueError(
            f"codec.weights is {self.weights}, which is not Stable Diffusion 1's autoencoder: it has {kind.channels} "
            f"channels at 1/{kind.downsampling} of the edge, and factors of its own. Use codec: {{type: diffusers, "
            f"weights: {self.weights}}}."
        )
