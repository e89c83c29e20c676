"""Interface of a codec: pixels <-> the space a network works in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from image_diffusion.core.config.base import Config, dump
from image_diffusion.core.levels import Levels
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.resolution import divided, resolution_of, written
from image_diffusion.core.types import DataSpec

_PIXELS_AT_ONCE = 2**20

N = TypeVar("N", bound=nn.Module)


class LatentShape(Protocol):
    """Settings of an autoencoder's configuration that decide the shape of its latents.

    latent_channels: of a latent. downsampling: number of pixels along an edge of the image for each element along an
    edge of the latent.
    """

    @property
    def latent_channels(self) -> int: ...

    @property
    def downsampling(self) -> int: ...


@runtime_checkable
class TokenShape(LatentShape, Protocol):
    """Settings that decide the shape of the latents of an autoencoder that has tokens, num_tokens different ones."""

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True)
class Packed:
    """Parts of a codec that go with a model that leaves this package. settings: plain data. network: the network that
    decodes, an autoencoder of diffusers or a network of our own; None: the codec has no network."""

    settings: dict[str, Any] = field(default_factory=dict)
    network: nn.Module | None = None


class Codec(Protocol):
    """Codec: turns images into the inputs of a network's training, and samples back into images.

    An image is encoded once, to moments, which are stored; `draw` turns what was stored into x each time it is read,
    so that posterior noise is new in every epoch. The scale of a latent is applied in `draw` and `decode` only.
    """

    @property
    def identity(self) -> dict[str, Any]:
        """Return plain data that distinguishes this codec from every other: latents of another identity are never used
        with it."""
        ...

    @property
    def bounded(self) -> bool:
        """True if x lies in [-1, 1], as pixels do: then samplers hold their predictions of it to that range."""
        ...

    def compile_encoder(self) -> None:
        """Make `encode` faster with torch.compile, after the minutes that this takes."""
        ...

    def encode(self, images: Tensor) -> Tensor:
        """Encode images [B, C, H, W], as they are stored -> float32 [B, 2, c, h, w]: mean and standard deviation, not
        scaled. [B, 1, c, h, w] for latents without a deviation."""
        ...

    def draw(self, stored: Tensor, streams: Streams) -> Tensor:
        """Draw x, float32 [B, c, h, w], from the content of the shards."""
        ...

    def normalise(self, latent: Tensor) -> Tensor:
        """A latent as it was encoded, float32 [B, c, h, w] -> x; pixels stay what they are."""
        ...

    def decode(self, x: Tensor) -> Tensor:
        """Decode x, float32 [B, c, h, w] -> images [B, C, H, W], of the type they are stored in."""
        ...

    def with_decoder(self, weights: str, device: torch.device) -> Codec:
        """Return this codec with the decoder of another autoencoder of the same latents: a folder, or a name on the
        Hub. Raises ValueError for a codec that takes none."""
        ...

    def packed(self) -> Packed:
        """Return the parts that go with an exported model, for `unpacked`."""
        ...

    @classmethod
    def unpacked(cls, packed: Packed) -> Self:
        """Rebuild the codec from its packed parts, to decode with."""
        ...


@runtime_checkable
class Tokens(Protocol):
    """Tokenizer: turns images into integers, and those back into images."""

    @property
    def codec(self) -> Codec:
        """Return the codec whose tokens they are."""
        ...

    @property
    def num_tokens(self) -> int:
        """Return the number of different integers."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """Return plain data that distinguishes these tokens from all others."""
        ...

    def compile_encoder(self) -> None:
        """Make `encode` faster with torch.compile."""
        ...

    def encode(self, images: Tensor) -> Tensor:
        """Encode images [B, C, H, W], as they are stored -> int64 [B, h, w], from 0 to num_tokens - 1."""
        ...

    def decode(self, tokens: Tensor) -> Tensor:
        """Decode tokens [B, h, w] -> images [B, C, H, W], of the type they are stored in."""
        ...


class CodecSettings(Config, ABC):
    """Base of the section `codec`: the settings that the stages read before the codec is built."""

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Return the name of the folder of encoded data, beside the crops; None: nothing is encoded."""

    @property
    def takes_arrays(self) -> bool:
        """True if images may be arrays (data.dtype), and not pictures of 8 bits alone."""
        return False

    @property
    def trained_by(self) -> str | None:
        """Return the name of the experiment that trains the codec; None: it needs no training."""
        return None

    @property
    def pixel_range(self) -> Literal["signed", "unit"]:
        """Return the range of pixels that the autoencoder takes: [-1, 1], or [0, 1]."""
        return "signed"

    @property
    def stores(self) -> Literal["crops", "latents", "tokens"]:
        """Return the kind of shards that a network on the codec learns from."""
        return "latents" if self.name is not None else "crops"

    @abstractmethod
    def spec(self, images: DataSpec, autoencoder: LatentShape | None) -> DataSpec:
        """Return the shapes that the data fix for a network. autoencoder: of the experiment that trains the codec,
        where one does.

        Raises ValueError when the images do not fit, from what can be known without loading any weights.
        """

    @abstractmethod
    def build(self, weights: Path | None, scale: Any, device: torch.device, dtype: torch.dtype) -> Codec:
        """Build the codec. weights: the folder of the experiment that trained it, where one did. scale: the result of
        `scale_of` for the encoded data set; None while encoding. dtype: the type it computes in."""

    def tokens(self, weights: Path | None, device: torch.device, dtype: torch.dtype) -> Tokens:
        """Return the tokenizer of images. Raises ValueError for a codec that has none."""
        raise ValueError(f"encode.tokens is set, but the codec {self.name} has none. Leave encode.tokens out.")

    def scale_of(self, statistics: Mapping[str, Any] | None) -> Any:
        """Return the scale of a data set, as plain data: for `build`, and kept in model.json.

        statistics: those of the latents in its manifest; of crops that are arrays their levels; None for pictures. By
        default one over the standard deviation of all numbers.
        """
        return None if statistics is None else 1.0 / statistics["global_std"]

    def encoded_by(self) -> Self:
        """Return the settings that decide the latents: experiments that agree in these share them."""
        return self

    @property
    def files(self) -> list[Path]:
        """Return the files that are not ours and that the codec is read from: latents are made again when one
        changes."""
        return []

    def check_decoder(self, key: str, weights: str) -> None:
        """Raise ValueError where the autoencoder that a key names cannot decode these latents. Nothing is loaded."""
        raise ValueError(
            f"{key} is {weights}, but only the latents of a published autoencoder (codec.type diffusers or "
            f"stability_vae) have other decoders. Leave it out."
        )

    def advice(self, statistics: Mapping[str, Any]) -> str | None:
        """Return advice on latents of which these statistics were measured; None: no advice."""
        return None


def latent_spec(images: DataSpec, channels: int, downsampling: int) -> DataSpec:
    """Return the shapes that the data fix once images are latents. Raises ValueError when the resolution cannot be
    divided."""
    size = divided(images.resolution, downsampling)
    if size is None:
        raise ValueError(
            f"data.resolution is {written(images.resolution)}, but the codec divides each edge by {downsampling}. "
            f"Choose a multiple of {downsampling} for each side."
        )
    return DataSpec(channels=channels, resolution=resolution_of(*size), num_classes=images.num_classes)


def sample_posterior(stored: Tensor, streams: Streams) -> Tensor:
    """Draw latents, float32 [B, c, h, w], from their stored mean and deviation, [B, 2, c, h, w]; from [B, 1, c, h, w]
    nothing is drawn: the latents are certain, or others have drawn them, once."""
    stored = stored.to(torch.float32)
    latent = stored[:, 0]
    if stored.shape[1] > 1:
        latent = latent + stored[:, 1] * streams.normal("posterior", tuple(latent.shape[1:]))
    return latent


def in_slices(decode: Callable[[Tensor], Tensor], latent: Tensor, downsampling: int) -> Tensor:
    """Decode a batch [B, c, h, w] in slices of about a million pixels, for which a float32 autoencoder of Stable
    Diffusion's size takes about 3 GiB. downsampling: pixels along an edge for each element of the latent."""
    pixels = downsampling**2 * latent.shape[2] * latent.shape[3]
    return torch.cat([decode(part) for part in latent.split(max(1, _PIXELS_AT_ONCE // pixels))])


def layout_on(device: torch.device) -> torch.memory_format:
    """Return the memory format of convolution weights on a device: on a GPU with channels innermost, as its tensor
    cores read them; on a CPU unchanged. On a GPU the output of a convolution has the format of its weights, whatever
    the format of its input."""
    return torch.channels_last if device.type == "cuda" else torch.preserve_format


def placed(network: N, device: torch.device) -> N:
    """An autoencoder where it is to encode and decode, in evaluation mode."""
    return network.to(device).to(memory_format=layout_on(device)).eval().requires_grad_(False)


def to_uint8(x: Tensor) -> Tensor:
    """Convert pixels in [-1, 1] -> uint8, rounded to nearest: clamp(127.5 x + 128), truncated, as DiT does.
    Contiguous."""
    # In float32: bf16 has no fractions from 128 on, so truncation would move whole levels.
    return (127.5 * x.float() + 128.0).clamp(0, 255).to(torch.uint8, memory_format=torch.contiguous_format)


def from_uint8(images: Tensor) -> Tensor:
    """Convert uint8 pixels -> float32 in [-1, 1]."""
    return images.to(torch.float32) / 127.5 - 1.0


def to_x(images: Tensor, levels: Levels | None) -> Tensor:
    """Convert images [B, C, H, W] -> float32 in [-1, 1]. levels: of arrays; None for pictures, uint8."""
    return from_uint8(images) if levels is None else levels.normalise(images)


def to_images(x: Tensor, levels: Levels | None) -> Tensor:
    """Convert pixels in [-1, 1] -> pictures, uint8, or arrays of `levels.dtype`."""
    return to_uint8(x) if levels is None else levels.restore(x)


@dataclass(frozen=True)
class ScaledCodec(Generic[N]):
    """Base of the codecs whose latents are multiplied with one factor.

    identity: says which weights these are. load: gives the network, in evaluation mode, on the device it is to run on;
    called once, when an image is first encoded or decoded. scale: what a latent is multiplied with to become x, so that
    x has a standard deviation near 1. levels: of the arrays that it was trained on; None for pictures.
    """

    identity: dict[str, Any]
    load: Callable[[], N]
    scale: float
    levels: Levels | None = None

    bounded: ClassVar[bool] = False

    @cached_property
    def network(self) -> N:
        return self.load()

    def compile_encoder(self) -> None:
        encoder: Any = self.network.encoder
        encoder.compile()

    def normalise(self, latent: Tensor) -> Tensor:
        return latent * self.scale

    def packed(self) -> Packed:
        return Packed({"identity": self.identity, "scale": self.scale, **packed_levels(self.levels)}, self.network)

    @classmethod
    def unpacked(cls, packed: Packed) -> Self:
        settings = packed.settings
        return cls(
            identity=settings["identity"],
            load=lambda: cast("N", packed.network),
            scale=settings["scale"],
            levels=Levels(**settings["levels"]) if "levels" in settings else None,
        )


def packed_levels(levels: Levels | None) -> dict[str, Any]:
    """Return the levels as a part of the settings of a packed codec; nothing for pictures."""
    return {} if levels is None else {"levels": dump(levels)}
