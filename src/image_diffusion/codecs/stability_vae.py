"""Pretrained autoencoder of Stable Diffusion 1, from the Hub or from a local folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from image_diffusion.codecs.base import Codec, CodecSettings, LatentShape, latent_spec
from image_diffusion.codecs.diffusers_families import (
    Factors,
    Kl,
    as_declared,
    check_decoder,
    is_badly_normalised,
    kind_of,
)
from image_diffusion.codecs.hub_files import content_of, files_of, folder_of, load_pretrained, settings_of
from image_diffusion.codecs.kl import KlCodec
from image_diffusion.core.types import DataSpec

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
