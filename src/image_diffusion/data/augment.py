"""Augmentation as a condition: the network is given the parameters of the augmentation; at zero, their value in
sampling, it generates images without augmentation.

Karras et al. 2022, "Elucidating the design space of diffusion-based generative models" (arXiv:2206.00364), appendix
F.2: the operations, their order and strengths, and the labels. Brightness, contrast and saturation, which that paper
omits, are those of ADA: Karras et al. 2020, "Training generative adversarial networks with limited data"
(arXiv:2006.06676), appendix B. The transposition makes the eight symmetries of a square complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.resolution import Size, size_text
from image_diffusion.core.types import IMAGE, Batch
from image_diffusion.data.shards.loader import mirrored

NUM_LABELS = 13
"""Number of augmentation labels of an image; zeros for operations that were not applied."""
_COLORS = "brightness", "contrast", "saturation"


class Augment(Config):
    """Augmentation of the training images. Its parameters are a condition of the network, zero in sampling, and include
    the horizontal flip of `train.flip_probability`."""

    probability: float = Field(0.12, ge=0, le=1)
    """Probability of each operation below, drawn independently. 0: only the horizontal flip is applied, as for
    latents."""
    vertical_flip: bool = True
    """Flip vertically, in half of the cases."""
    transpose: bool = False
    """Exchange rows and columns, in half of the cases: with both flips, the eight symmetries of a square."""
    scale: float = Field(0.2, ge=0)
    """Standard deviation of the binary logarithm of the factor by which an image is enlarged."""
    rotation: float = Field(180.0, ge=0, le=180)
    """Largest angle of a rotation to either side, in degrees."""
    anisotropy: float = Field(0.2, ge=0)
    """Standard deviation of the binary logarithm of the factor by which an image is stretched in a random direction and
    shrunk perpendicular to it."""
    shift: float = Field(0.125, ge=0)
    """Standard deviation of a shift along either axis, as a share of the side."""
    brightness: float = Field(0.0, ge=0)
    """Standard deviation of the offset that is added to pixels in [-1, 1]: 0.2 in ADA. Grey or RGB."""
    contrast: float = Field(0.0, ge=0)
    """Standard deviation of the binary logarithm of the factor of pixels in [-1, 1]: 0.5 in ADA. Grey or RGB."""
    saturation: float = Field(0.0, ge=0)
    """Standard deviation of the binary logarithm of the factor of the difference from grey: 1 in ADA. Only RGB."""

    until: float = Field(0.75, gt=0, le=1)
    """Share of the training steps, from the first on, with augmentation. The remaining steps apply only the horizontal
    flip, so that a training too short to learn the condition forgets the augmentation (see docs/choosing.md)."""

    def at(self, done: float) -> Augment:
        """Return the augmentation of the step at which the share `done` of the training is completed."""
        return self if done < self.until else self.model_copy(update={"probability": 0.0})

    def check(self, stored: str, channels: int, size: Size) -> None:
        """Raise ValueError for operations that the data do not allow. stored: crops, latents, …. channels, size: of a
        crop."""
        if stored != "crops" and self.probability > 0:
            raise ValueError(
                f"train.augment.probability is {self.probability:g}, but {stored} allow the stored mirror image alone. "
                f"Set it to 0, leave train.augment out, or train on pixels."
            )
        if self.transpose and size[0] != size[1]:
            raise ValueError(
                f"train.augment.transpose is true, but the images are rectangles, {size_text(size)}. Leave it out."
            )
        for name in _COLORS:
            allowed = (3,) if name == "saturation" else (1, 3)
            if getattr(self, name) > 0 and channels not in allowed:
                raise ValueError(
                    f"train.augment.{name} is {getattr(self, name):g}, but the images have {channels} channels. It "
                    f"needs {' or '.join(map(str, allowed))}: leave it out."
                )

    def draw(self, streams: Streams, flip_probability: float) -> Draws:
        """Draw the operations on each sample of a batch. flip_probability: of the reader's flip."""

        def event(name: str, share: float = 1.0) -> Tensor:
            return streams.event(f"augment/{name}", self.probability * share * bool(getattr(self, name)))

        def strength(name: str, axis: str = "") -> Tensor:
            return streams.normal(f"augment/{name}/strength{axis}").double() * event(name)

        def angle(name: str, largest: float) -> Tensor:
            return (2 * streams.uniform(f"augment/{name}/angle").double() - 1) * largest * event(name)

        return Draws(
            horizontal_flip=mirrored(streams, flip_probability),
            vertical_flip=event("vertical_flip", 0.5),
            transpose=event("transpose", 0.5),
            scale=strength("scale"),
            rotation=angle("rotation", math.radians(self.rotation)),
            anisotropy=strength("anisotropy"),
            direction=angle("anisotropy", math.pi),
            shift_x=strength("shift", "/x"),
            shift_y=strength("shift", "/y"),
            **{name: strength(name) for name in _COLORS},
        )

    def apply(self, x: Tensor, draws: Draws) -> Tensor:
        """Return pixels [B, C, H, W] in [-1, 1] after their operations; the reader has applied the horizontal flip."""
        if self.vertical_flip:
            x = torch.where(_columns(draws.vertical_flip), x.flip(2), x)
        if self.transpose:
            x = torch.where(_columns(draws.transpose), x.mT, x)
        if self.scale or self.rotation or self.anisotropy or self.shift:
            maps = Affine(
                log2_scale=self.scale * draws.scale,
                rotation=draws.rotation,
                log2_stretch=self.anisotropy * draws.anisotropy,
                direction=draws.direction,
                shift_x=self.shift * draws.shift_x,
                shift_y=self.shift * draws.shift_y,
            )
            x = warp(x, maps)
        if self.brightness:
            x = (x + _columns(self.brightness * draws.brightness).float()).clamp(-1, 1)
        if self.contrast:
            x = (x * _columns(torch.exp2(self.contrast * draws.contrast)).float()).clamp(-1, 1)
        if self.saturation:
            grey = x.mean(1, keepdim=True)
            factor = _columns(torch.exp2(self.saturation * draws.saturation)).float()
            changed = (grey + (x - grey) * factor).clamp(-1, 1)
            # Keep the bits of unchanged samples, which grey + (x - grey) would round.
            x = torch.where(_columns(draws.saturation).ne(0), changed, x)
        return x


@dataclass(frozen=True)
class Draws:
    """Operations on the samples of a batch, [B] each: bool for flips, otherwise float64; 0 if an operation is not
    applied.

    rotation, direction: angles in radians. The other numbers are standard normal, in multiples of the strength.
    """

    horizontal_flip: Tensor
    vertical_flip: Tensor
    transpose: Tensor
    scale: Tensor
    rotation: Tensor
    anisotropy: Tensor
    direction: Tensor
    shift_x: Tensor
    shift_y: Tensor
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor

    def labels(self) -> Tensor:
        """Return the labels that condition the network, float32 [B, NUM_LABELS]. Angles are encoded by cosine and sine,
        which have no discontinuity."""
        columns = [
            self.horizontal_flip,
            self.vertical_flip,
            self.transpose,
            self.scale,
            self.rotation.cos() - 1,
            self.rotation.sin(),
            self.anisotropy * self.direction.cos(),
            self.anisotropy * self.direction.sin(),
            self.shift_x,
            self.shift_y,
            self.brightness,
            self.contrast,
            self.saturation,
        ]
        return torch.stack([column.float() for column in columns], 1)


def augmented(batch: Batch, augment: Augment, flip_probability: float) -> Batch:
    """Return a batch with augmented `x` and the augmentation labels in `cond`. flip_probability: of the reader's flip.

    Raises ValueError if the batch has features or an image condition, to which the augmentation is not applied.
    """
    if batch.features is not None or IMAGE in batch.cond:
        raise ValueError(
            f"train.augment is set, but moves the images alone, not their "
            f"{'conditions' if batch.features is None else 'features'}. Leave it out."
        )
    draws = augment.draw(batch.streams, flip_probability)
    x = augment.apply(batch.x, draws) if augment.probability > 0 else batch.x
    return replace(batch, x=x, cond=batch.cond | {"augment": draws.labels()})


def _columns(values: Tensor) -> Tensor:
    """[B] -> [B, 1, 1, 1]."""
    return values[:, None, None, None]


@dataclass(frozen=True)
class Affine:
    """Affine maps of images about their centre, float64 [B] each. The maps are applied in the order of the fields.

    log2_scale: binary logarithm of the enlargement. rotation: angle in radians. log2_stretch: binary logarithm of the
    factor of the stretch along `direction`, an angle in radians; the image shrinks across. shift_x, shift_y: shares of
    width and height.
    """

    log2_scale: Tensor
    rotation: Tensor
    log2_stretch: Tensor
    direction: Tensor
    shift_x: Tensor
    shift_y: Tensor

    @property
    def moves(self) -> Tensor:
        """True for the images that the maps change, bool [B]."""
        changes = (self.log2_scale, self.rotation, self.log2_stretch, self.shift_x, self.shift_y)
        return torch.stack(changes).ne(0).any(0)

    def inverse(self) -> Tensor:
        """Return the linear part of the inverse maps, float64 [B, 2, 2]: scale^-1 rotation^-1 stretch^-1."""
        stretch = torch.exp2(-self.log2_stretch)
        across = _turn(self.direction) * torch.stack([stretch, 1 / stretch], -1)[:, None, :]
        along = _product(across, _turn(-self.direction))
        return _product(_turn(-self.rotation), along) * torch.exp2(-self.log2_scale)[:, None, None]


def warp(x: Tensor, maps: Affine) -> Tensor:
    """Return images [B, C, H, W] after their maps: bicubic, reflected at the edges, and clamped to [-1, 1]. An image
    with the identity map keeps its bits. The result for an image does not depend on the rest of the batch.
    """
    height, width = x.shape[-2:]
    ratio = width / height
    inverse = maps.inverse()[:, :, :, None, None]  # [B, 2, 2, 1, 1]
    columns, rows = (_centres(side, x.device) for side in (width, height))
    # In units of half the height along both axes: a rotation by another unit would shear a rectangle.
    column = ((columns[None, None, :] - 2 * maps.shift_x[:, None, None]) * ratio).expand(-1, height, -1)  # [B, H, W]
    row = (rows[None, :, None] - 2 * maps.shift_y[:, None, None]).expand(-1, -1, width)
    along_x, along_y = (inverse[:, i, 0] * column + inverse[:, i, 1] * row for i in range(2))
    grid = torch.stack([along_x / ratio, along_y], -1)  # [B, H, W, 2]
    moved = F.grid_sample(x, grid.to(x.dtype), mode="bicubic", padding_mode="reflection", align_corners=False)
    return torch.where(maps.moves[:, None, None, None], moved.clamp(-1, 1), x)


def _centres(side: int, device: torch.device) -> Tensor:
    """Return the centres of the pixels along a side, from -1 to 1. Float64 [side]."""
    return (2 * torch.arange(side, dtype=torch.float64, device=device) + 1) / side - 1


def _turn(angle: Tensor) -> Tensor:
    """Return the rotation by an angle [B] in radians, [B, 2, 2]."""
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of matrices [B, 2, 2], batch element by batch element."""
    return left[:, :, :1] * right[:, :1, :] + left[:, :, 1:] * right[:, 1:, :]
