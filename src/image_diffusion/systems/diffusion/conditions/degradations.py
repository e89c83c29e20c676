"""Degradations of an image that a network learns to invert: a small image, a grey one, one with a hole, its edges. A
new degradation is a class here and its field in `Degradations`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.devices import to_device
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.resolution import Size, size_text

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601

Shape = tuple[int, int, int]
Share = Annotated[float, Field(gt=0, le=1)]


class Degradation(ABC):
    """A function of images, and the shape of its result."""

    picture: ClassVar[str] = "paired"
    """Name of the picture that compares it with the samples."""

    @abstractmethod
    def shape(self, channels: int, size: Size) -> Shape:
        """Return the shape of the result for an image [channels, *size]. Raises ValueError if there is none."""

    @abstractmethod
    def __call__(self, x: Tensor, streams: Streams) -> Tensor:
        """Return the conditions made from images [B, C, H, W] in [-1, 1]. streams: random numbers of these samples."""

    def baselines(self, made: Tensor, size: Size) -> dict[str, Tensor]:
        """Return guesses at the images by methods without a network, by name, for comparison; by default none."""
        return {}


class Small(Degradation):
    """A reduced image; each pixel is the mean of the area that it replaces."""

    picture: ClassVar[str] = "enlarged"

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def shape(self, channels: int, size: Size) -> Shape:
        if any(side % self.factor for side in size):
            raise ValueError(f"shrink {self.factor} does not divide the resolution of the images, {size_text(size)}")
        return (channels, size[0] // self.factor, size[1] // self.factor)

    def __call__(self, x: Tensor, streams: Streams) -> Tensor:
        return F.interpolate(x, (x.shape[2] // self.factor, x.shape[3] // self.factor), mode="area")

    def baselines(self, made: Tensor, size: Size) -> dict[str, Tensor]:
        # in an enlargement, antialias only changes the kernel, to that of Pillow and Matlab (a = -0.5)
        return {"bicubic": F.interpolate(made, size, mode="bicubic", antialias=True)}


class Gray(Degradation):
    """The luminance of the image, one channel; for images that are not RGB, the mean of the channels."""

    def shape(self, channels: int, size: Size) -> Shape:
        if channels == 1:
            raise ValueError("gray is true, but the images have one channel")
        return (1, *size)

    def __call__(self, x: Tensor, streams: Streams) -> Tensor:
        shares = _LUMA if x.shape[1] == 3 else (1 / x.shape[1],) * x.shape[1]
        weights = to_device(torch.tensor(shares, dtype=x.dtype), x.device)
        return (x * weights[:, None, None]).sum(1, keepdim=True)


class Hole(Config, Degradation):
    """A box that is hidden in the image. Its sides and place are drawn for each image, in training anew in each epoch.
    The network receives 0 inside the box, and an additional channel that is 1 inside it and -1 elsewhere."""

    low: Share = 0.25
    """Smallest side of the box, as a share of the side of the image."""
    high: Share = 0.5
    """Largest side of the box, as a share of the side of the image."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low is {self.low:g}, above high, {self.high:g}. Exchange them.")
        return self

    def shape(self, channels: int, size: Size) -> Shape:
        return (channels + 1, *size)

    def __call__(self, x: Tensor, streams: Streams) -> Tensor:
        inside = torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device)
        for axis, name in ((1, "rows"), (2, "columns")):
            side = x.shape[axis + 1]
            share = self.low + (self.high - self.low) * streams.uniform(f"hole/{name}/share")  # [B]
            length = (share * side).round().clamp(min=1)
            start = (streams.uniform(f"hole/{name}/start") * (side - length + 1)).floor()
            place = torch.arange(side, device=x.device).view((-1, 1) if axis == 1 else (-1,))
            first, end = start.view(-1, 1, 1), (start + length).view(-1, 1, 1)
            inside &= (place >= first) & (place < end)
        hidden = inside[:, None].to(x.dtype)
        return torch.cat([x * (1 - hidden), 2 * hidden - 1], dim=1)


class Edges(Degradation):
    """The strength of the edges of the image, one channel: the length of the Sobel gradient of the mean of its
    channels, divided by that of a step from -1 to 1, in [-1, 1]."""

    def shape(self, channels: int, size: Size) -> Shape:
        return (1, *size)

    def __call__(self, x: Tensor, streams: Streams) -> Tensor:
        kernel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]], dtype=x.dtype)
        sobel = to_device(kernel, x.device) / 8
        grey = F.pad(x.mean(1, keepdim=True), (1, 1, 1, 1), mode="replicate")
        gradient = F.conv2d(grey, torch.stack([sobel, sobel.T])[:, None])  # [B, 2, H, W]
        strength: Tensor = gradient.square().sum(1, keepdim=True).sqrt()
        return 2 * strength.clamp(max=1) - 1


class Degradations(Config):
    """Degradations of the image itself, of which one is set."""

    shrink: int | None = Field(None, ge=2)
    """Factor by which the image is reduced, by averaging areas: super-resolution."""
    gray: Literal[True] | None = None
    """Make the image grey: colouring."""
    hole: Hole | None = None
    """Hide a box, with a channel that marks it: inpainting."""
    edges: Literal[True] | None = None
    """Keep only the edges, by the Sobel gradient: drawing from outlines."""

    @property
    def degradations(self) -> dict[str, Degradation]:
        """Return the degradations that are set, by name."""
        made: dict[str, Degradation | None] = {
            "shrink": Small(self.shrink) if self.shrink is not None else None,
            "gray": Gray() if self.gray else None,
            "hole": self.hole,
            "edges": Edges() if self.edges else None,
        }
        return {name: degradation for name, degradation in made.items() if degradation is not None}
