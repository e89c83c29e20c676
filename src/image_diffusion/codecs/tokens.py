"""Tokens of a discrete codec as the space in which a network works."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, assert_never

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.codecs.base import Codec, CodecSettings, LatentShape, Packed, Tokens, TokenShape, latent_spec
from image_diffusion.codecs.diffusers import Diffusers, DiffusersCodec, VqTokens
from image_diffusion.codecs.diffusers_families import Vq
from image_diffusion.codecs.trained import DVAECodec, DVAETokens, Trained
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec


class TokensOf(CodecSettings):
    """Tokens of a discrete VAE that another experiment trains, or of a published VQModel."""

    type: Literal["tokens"] = "tokens"
    """Tokens, for `system.type: tokens`."""
    of: Annotated[Trained | Diffusers, Field(discriminator="type")]
    """Codec of the tokens: {type: trained, experiment: …} for a discrete VAE, or {type: diffusers, weights: …}."""

    @property
    def name(self) -> str:
        """Return the name of the folder of the tokens, the one that a discrete VAE's own experiment writes
        (encode.tokens)."""
        return tokens_of(self.of.name)

    @property
    def takes_arrays(self) -> bool:
        return self.of.takes_arrays

    @property
    def trained_by(self) -> str | None:
        return self.of.trained_by

    @property
    def stores(self) -> Literal["tokens"]:
        return "tokens"

    @property
    def files(self) -> list[Path]:
        return self.of.files

    def spec(self, images: DataSpec, autoencoder: LatentShape | None) -> DataSpec:
        """Return the shapes that the data determine for a network: the number of channels is the size of the codebook.
        Raises ValueError for a codec without tokens."""
        match self.of:
            case Trained():
                if not isinstance(autoencoder, TokenShape):
                    raise ValueError(
                        f"codec.of.experiment is {self.of.experiment}, which trains no discrete VAE. Name an "
                        f"experiment whose system is a dvae."
                    )
                return latent_spec(images, autoencoder.num_tokens, autoencoder.downsampling)
            case Diffusers():
                kind = self.of.kind
                if not isinstance(kind, Vq):
                    raise ValueError(f"codec.of.weights is {self.of.weights}, which has no tokens. Name a VQModel.")
                return kind.spec(images).model_copy(update={"channels": kind.num_tokens})
            case _:
                assert_never(self.of)

    def build(self, weights: Path | None, scale: Any, device: torch.device, dtype: torch.dtype) -> TokenCodec:
        return TokenCodec(self.of.tokens(weights, device, dtype))

    def tokens(self, weights: Path | None, device: torch.device, dtype: torch.dtype) -> Tokens:
        return self.of.tokens(weights, device, dtype)

    def encoded_by(self) -> Any:
        """Return the settings of the codec, which also decide the tokens that its own experiment encodes."""
        return self.of.encoded_by()


@dataclass(frozen=True)
class TokenCodec:
    """Codec of tokens: x is int64 [B, h, w], and nothing is drawn."""

    tokens: Tokens

    bounded: ClassVar[bool] = False

    @property
    def identity(self) -> dict[str, Any]:
        return self.tokens.identity

    def compile_encoder(self) -> None:
        self.tokens.compile_encoder()

    def encode(self, images: Tensor) -> Tensor:
        """Encode images [B, C, H, W] -> int64 [B, h, w]."""
        return self.tokens.encode(images)

    def draw(self, stored: Tensor, streams: Streams) -> Tensor:
        return stored.long()

    def normalise(self, latent: Tensor) -> Tensor:
        return latent

    def decode(self, x: Tensor) -> Tensor:
        """Decode tokens [B, h, w] -> images [B, C, H, W]."""
        return self.tokens.decode(x)

    def with_decoder(self, weights: str, device: torch.device) -> Codec:
        """Raise ValueError: the decoder of tokens cannot be replaced."""
        raise ValueError(f"sample.decoder is {weights}, but tokens have one decoder only. Leave it out.")

    def packed(self) -> Packed:
        of_codec = self.tokens.codec.packed()
        settings = {"num_tokens": self.tokens.num_tokens, "codec": of_codec.settings}
        return Packed({"kind": type(self.tokens).__name__, **settings}, of_codec.network)

    @classmethod
    def unpacked(cls, packed: Packed) -> Self:
        of_codec, num_tokens = Packed(packed.settings["codec"], packed.network), packed.settings["num_tokens"]
        if packed.settings["kind"] == VqTokens.__name__:
            return cls(VqTokens(DiffusersCodec.unpacked(of_codec), num_tokens))
        return cls(DVAETokens(DVAECodec.unpacked(of_codec), num_tokens))


def tokens_of(codec: str) -> str:
    """Return the name of the folder of a codec's tokens, from that of the folder of its latents."""
    return f"{codec}-tokens"
