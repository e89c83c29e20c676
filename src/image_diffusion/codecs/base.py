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

    latent_channels: channels of a latent. downsampling: ratio of the side of the image in pixels to that of the latent.
    """

    @property
    def latent_channels(self) -> int: ...

    @property
    def downsampling(self) -> int: ...


@runtime_checkable
class TokenShape(LatentShape, Protocol):
    """Settings that decide the shape of the latents of an autoencoder with a codebook of num_tokens tokens."""

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True)
class Packed:
    """Parts of a codec that are exported with a model. settings: plain data. network: the decoding network, an
    autoencoder of diffusers or of this package; None if the codec has none."""

    settings: dict[str, Any] = field(default_factory=dict)
    network: nn.Module | None = None


class Codec(Protocol):
    """Interface of a codec, which converts images to the inputs of a network, and samples back to images.

    An image is encoded once, to moments, which are stored; `draw` turns what was stored into x each time it is read,
    so that posterior noise is new in every epoch. The scale of a latent is applied in `draw` and `decode` only.
    """

    @property
    def identity(self) -> dict[str, Any]:
        """Return plain data that identifies the codec: it is never used with latents of another identity."""
        ...

    @property
    def bounded(self) -> bool:
        """True if x lies in [-1, 1], as pixels do, so that samplers clamp their predictions of x to this range."""
        ...

    def compile_encoder(self) -> None:
        """Compile `encode` with torch.compile, which takes minutes."""
        ...

    def encode(self, images: Tensor) -> Tensor:
        """Encode stored images [B, C, H, W] -> float32 [B, 2, c, h, w]: mean and standard deviation, unscaled. [B, 1,
        c, h, w] for latents without a standard deviation."""
        ...

    def draw(self, stored: Tensor, streams: Streams) -> Tensor:
        """Draw x, float32 [B, c, h, w], from stored moments or pixels; for tokens, x is int64 [B, h, w]."""
        ...

    def normalise(self, latent: Tensor) -> Tensor:
        """Convert unscaled latents, float32 [B, c, h, w], to x. Pixels are unchanged."""
        ...

    def decode(self, x: Tensor) -> Tensor:
        """Decode x, float32 [B, c, h, w] -> images [B, C, H, W] of the stored type."""
        ...

    def with_decoder(self, weights: str, device: torch.device) -> Codec:
        """Return this codec with the decoder of another autoencoder with the same latents: a folder, or a name on the
        Hub. Raises ValueError if the codec has no exchangeable decoder."""
        ...

    def packed(self) -> Packed:
        """Return the parts to export with a model, from which `unpacked` rebuilds the codec."""
        ...

    @classmethod
    def unpacked(cls, packed: Packed) -> Self:
        """Rebuild the codec from its packed parts, for decoding."""
        ...


@dataclass(frozen=True)
class Tokens(ABC):
    """Base of the tokenizers, which convert images to integers and back.

    codec: encodes the same images as latents. num_tokens: size of its codebook.
    """

    codec: Codec
    num_tokens: int

    type: ClassVar[str]
    """Name of the kind of tokens."""

    @property
    def identity(self) -> dict[str, Any]:
        """Return plain data that identifies the tokens."""
        return {**self.codec.identity, "type": self.type, "num_tokens": self.num_tokens}

    def compile_encoder(self) -> None:
        """Compile `encode` with torch.compile."""
        self.codec.compile_encoder()

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """Encode stored images [B, C, H, W] -> int64 [B, h, w], from 0 to num_tokens - 1."""

    @abstractmethod
    def decode(self, tokens: Tensor) -> Tensor:
        """Decode tokens [B, h, w] -> images [B, C, H, W] of the stored type."""


class CodecSettings(Config, ABC):
    """Base of the section `codec`: the settings that the stages read before the codec is built."""

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Return the name of the folder of encoded data, next to the crops; None if the codec encodes nothing."""

    @property
    def takes_arrays(self) -> bool:
        """True if the codec supports arrays (data.dtype) as well as pictures of 8 bits."""
        return False

    @property
    def trained_by(self) -> str | None:
        """Return the name of the experiment that trains the codec; None if it needs no training."""
        return None

    @property
    def pixel_range(self) -> Literal["signed", "unit"]:
        """Return the pixel range of the autoencoder's input: [-1, 1], or [0, 1]."""
        return "signed"

    @property
    def stores(self) -> Literal["crops", "latents", "tokens"]:
        """Return the kind of shards on which a network with this codec is trained."""
        return "latents" if self.name is not None else "crops"

    @abstractmethod
    def spec(self, images: DataSpec, autoencoder: LatentShape | None) -> DataSpec:
        """Return the shapes that the data determine for a network. autoencoder: settings of the experiment that trains
        the codec, if any.

        Raises ValueError if the images do not fit, which is checked without loading weights.
        """

    @abstractmethod
    def build(self, weights: Path | None, scale: Any, device: torch.device, dtype: torch.dtype) -> Codec:
        """Build the codec. weights: folder of the experiment that trained it, if any. scale: result of `scale_of` for
        the encoded data set; None while encoding. dtype: type of its computations."""

    def tokens(self, weights: Path | None, device: torch.device, dtype: torch.dtype) -> Tokens:
        """Return the tokenizer. Raises ValueError for a codec without tokens."""
        raise ValueError(f"encode.tokens is set, but the codec {self.name} has none. Leave encode.tokens out.")

    def scale_of(self, statistics: Mapping[str, Any] | None) -> Any:
        """Return the scale of a data set as plain data, for `build` and model.json.

        statistics: of the latents, from the manifest; the levels for array crops; None for pictures. By default, the
        scale is the inverse of the standard deviation of all numbers.
        """
        return None if statistics is None else 1.0 / statistics["global_std"]

    def encoded_by(self) -> Self:
        """Return the settings that decide the latents: experiments with equal settings share latents."""
        return self

    @property
    def files(self) -> list[Path]:
        """Return the external files of the codec: latents are encoded again when one changes."""
        return []

    def check_decoder(self, key: str, weights: str) -> None:
        """Raise ValueError if the autoencoder named by a configuration key cannot decode these latents. Loads no
        weights."""
        raise ValueError(
            f"{key} is {weights}, but only the latents of a published autoencoder (codec.type diffusers or "
            f"stability_vae) have other decoders. Leave it out."
        )

    def advice(self, statistics: Mapping[str, Any]) -> str | None:
        """Return advice on latents with these measured statistics; None if there is none."""
        return None


def latent_spec(images: DataSpec, channels: int, downsampling: int) -> DataSpec:
    """Return the shapes that the data determine for a network on latents. Raises ValueError when the resolution is not
    divisible."""
    size = divided(images.resolution, downsampling)
    if size is None:
        raise ValueError(
            f"data.resolution is {written(images.resolution)}, but the codec divides each edge by {downsampling}. "
            f"Choose a multiple of {downsampling} for each side."
        )
    return DataSpec(channels=channels, resolution=resolution_of(*size), num_classes=images.num_classes)


def sample_posterior(stored: Tensor, streams: Streams) -> Tensor:
    """Draw latents, float32 [B, c, h, w], from their stored mean and standard deviation, [B, 2, c, h, w]. [B, 1, c, h,
    w] are returned without a draw: they are deterministic, or were drawn once by another tool."""
    stored = stored.to(torch.float32)
    latent = stored[:, 0]
    if stored.shape[1] > 1:
        latent = latent + stored[:, 1] * streams.normal("posterior", tuple(latent.shape[1:]))
    return latent


def in_slices(decode: Callable[[Tensor], Tensor], latent: Tensor, downsampling: int) -> Tensor:
    """Decode a batch [B, c, h, w] in slices of about a million pixels, for which a float32 autoencoder of Stable
    Diffusion's size takes about 3 GiB. downsampling: as in `LatentShape`."""
    pixels = downsampling**2 * latent.shape[2] * latent.shape[3]
    return torch.cat([decode(part) for part in latent.split(max(1, _PIXELS_AT_ONCE // pixels))])


def layout_on(device: torch.device) -> torch.memory_format:
    """Return the memory format of convolution weights on a device: channels last on a GPU, as its tensor cores read
    them; unchanged on a CPU. On a GPU, the output of a convolution has the format of its weights, whatever the format
    of its input."""
    return torch.channels_last if device.type == "cuda" else torch.preserve_format


def on_device(network: N, device: torch.device) -> N:
    """Return an autoencoder in evaluation mode on the device that encodes and decodes."""
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
    """Convert pixels in [-1, 1] to uint8 pictures, or to arrays of `levels.dtype`."""
    return to_uint8(x) if levels is None else levels.restore(x)


@dataclass(frozen=True)
class ScaledCodec(Generic[N]):
    """Base of the codecs that multiply latents by one factor.

    identity: identifies the weights. load: returns the network in evaluation mode on its device; called once, when an
    image is first encoded or decoded. scale: factor from a latent to x, chosen so that x has a standard deviation near
    1. levels: of the arrays that the codec was trained on; None for pictures.
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
    """Return the levels as settings of a packed codec; empty for pictures."""
    return {} if levels is None else {"levels": dump(levels)}
