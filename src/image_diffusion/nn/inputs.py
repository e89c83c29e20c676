"""Inputs of a network: checks, conversion between images and sequences of square patches, flattened as (row, column,
channel), and embeddings of patches, time and conditions. Parameters have the names of DiT's published weights.

Another image is added to the input channels (Nichol and Dhariwal 2021, section 6; Saharia et al. 2021, "Image
super-resolution via iterative refinement"; Palette: Saharia et al. 2022), also of latents (Rombach et al. 2022, section
4.3.2, where downsampled semantic maps follow the channels of the latent).

Numbers and augmentation labels are added to the embedding of time and class. Each number v in [-1, 1] becomes v and the
sines and cosines of some frequencies: the positional encoding of a coordinate by Mildenhall et al. 2020 ("NeRF",
equation 4), whose first sine is monotone over the range. Gorishniy et al. 2022 ("On embeddings for numerical features
in tabular deep learning", section 3.3) put such features, a linear map and a nonlinearity before networks for tabular
data. A flag marks numbers that are present: all features of missing numbers, and of numbers dropped for guidance, are
zeros.

Augmentation of training images: a linear map of its labels (Karras et al. 2022, arXiv:2206.00364, appendix F.2). The
map has no bias, so that omitting it is equivalent to labels of zeros, which mean an unchanged image. It exists only
during training, and saved weights do not contain it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.resolution import Size, divided, size_text
from image_diffusion.core.types import IMAGE, NUMBERS, DataSpec
from image_diffusion.nn.linear import Linear, linear
from image_diffusion.nn.positions import sinusoid


def check_inputs(spec: DataSpec, x: Tensor, label: Tensor | None, **conditions: Tensor | None) -> None:
    """Raise ValueError if x [B, C, H, W], its label or another condition does not fit a network. spec: the network's
    data; a network without classes takes no label, one with classes requires it. A condition of None is absent.
    """
    image_shape = (spec.channels, *spec.size)
    if tuple(x.shape[1:]) != image_shape:
        raise ValueError(
            f"x has {size_of(x.shape[1:])} (channels x height x width) but the network was built for "
            f"{size_of(image_shape)}. Use data of the codec and resolution it was trained with."
        )
    if (label is None) != (spec.num_classes == 0):
        raise ValueError(
            f"The network was built for {spec.num_classes} classes but was called "
            f"{'without' if label is None else 'with'} labels. "
            f"{'Pass label, int64 [B].' if label is None else 'Leave them out.'}"
        )
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in conditions.items() if tensor is not None}
    if shapes != dict(spec.conditions):
        raise ValueError(
            f"The network was built for the conditions {_shapes_in_words(spec.conditions)}, but was called with "
            f"{_shapes_in_words(shapes)}. Use those it was trained with."
        )


def _shapes_in_words(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return " and ".join(f"{name} of {size_of(shape)}" for name, shape in sorted(shapes.items())) or "none"


def size_of(shape: tuple[int, ...]) -> str:
    """Return a shape as text: 3 x 32 x 32."""
    return " x ".join(str(number) for number in shape)


def grid_of(spec: DataSpec, patch: int) -> Size:
    """Return the numbers of rows and columns of patches of x. Raises ValueError if the patch does not divide its
    sides."""
    grid = divided(spec.resolution, patch)
    if grid is None:
        raise ValueError(
            f"x of {size_text(spec.resolution)} pixels cannot be cut into patches of {patch} x {patch}. Set "
            f"network.patch to a divisor of {math.gcd(*spec.size)}, or change the resolution of the data."
        )
    return grid


def patchify(x: Tensor, patch: int) -> Tensor:
    """[B, C, H, W] -> [B, N, patch · patch · C], the N = (H / patch)(W / patch) patches row by row."""
    B, C, H, W = x.shape
    x = x.reshape(B, C, H // patch, patch, W // patch, patch)
    x = x.permute(0, 2, 4, 3, 5, 1)  # [B, H/p, W/p, p, p, C]
    return x.reshape(B, (H // patch) * (W // patch), patch * patch * C)


def unpatchify(tokens: Tensor, patch: int, height: int, width: int) -> Tensor:
    """[B, N, patch · patch · C] -> [B, C, height, width]: the inverse of `patchify`."""
    B = tokens.shape[0]
    x = tokens.reshape(B, height // patch, width // patch, patch, patch, -1)
    x = x.permute(0, 5, 1, 3, 2, 4)  # [B, C, H/p, p, W/p, p]
    return x.reshape(B, -1, height, width)


def input_channels(spec: DataSpec) -> int:
    """Return the number of input channels of a network: those of x, and those of its condition's image."""
    return spec.channels + (spec.conditions[IMAGE][0] if IMAGE in spec.conditions else 0)


def with_image(x: Tensor, image: Tensor | None) -> Tensor:
    """Return the input x [B, C, H, W] concatenated with the image [B, C', h, w] of the condition, resized to H x W: [B,
    C + C', H, W]; without an image, x. A smaller image is enlarged bilinearly. A larger image is averaged over areas,
    so that a label's mask becomes its share of each area."""
    if image is None:
        return x
    mode = "area" if image.shape[2] > x.shape[2] or image.shape[3] > x.shape[3] else "bilinear"
    scaled = F.interpolate(image, x.shape[2:], mode=mode)  # [B, C', H, W]
    return torch.cat([x, scaled.to(x.dtype)], dim=1)


TIME_CHANNELS = 256


class PatchEmbedder(nn.Module):
    """Patch embedding by one Linear, whose weights are stored as those of a convolution under the published name; with
    a bottleneck, after a Linear with fewer channels and without bias.
    """

    def __init__(self, channels: int, width: int, patch: int, bottleneck: int | None = None) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(channels, bottleneck or width, patch, stride=patch, bias=bottleneck is None)
        self.expand = nn.Identity() if bottleneck is None else Linear(bottleneck, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, N, D]. A matrix product: unlike a convolution's, its gradient is reproducible."""
        weight = self.proj.weight.permute(0, 2, 3, 1).flatten(1)  # [D, p · p · C]
        return self.expand(linear(patchify(x, self.patch), weight, self.proj.bias))


class TimeEmbedder(nn.Module):
    """Time embedding: t -> 256 sines and cosines -> Linear, SiLU, Linear."""

    def __init__(self, width: int, endpoint: bool) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.mlp = nn.Sequential(Linear(TIME_CHANNELS, width), nn.SiLU(), Linear(width, width))

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """[B] -> [B, D] of the given type. The sines are computed in float32 whatever the precision of the weights."""
        waves = sinusoid(t, TIME_CHANNELS, endpoint=self.endpoint)  # [B, 256]
        return self.mlp(waves.to(dtype))


class LabelEmbedder(nn.Module):
    """A row of a table for each label."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_rows, width)

    def forward(self, label: Tensor) -> Tensor:
        """[B] -> [B, D]."""
        return self.embedding_table(label)


class TextEmbedder(nn.Module):
    """Maps a caption's embedding and tokens to the width of the network. Both are normalised first, since text encoders
    differ in scale; zeros map to a constant."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(Linear(dim, width), nn.SiLU(), Linear(width, width))
        self.tokens = Linear(dim, width)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 1 + L, dim] -> [B, D] and [B, L, D]."""
        text = self.norm(text)
        return self.mlp(text[:, 0]), self.tokens(text[:, 1:])


class ImageEmbedder(nn.Module):
    """Maps an image embedding to the width of the network, and to several tokens. It is normalised first, since
    predictions of a prior have another norm than training embeddings; zeros map to a constant."""

    def __init__(self, dim: int, width: int, num_tokens: int) -> None:
        super().__init__()
        self.norm, self.num_tokens = nn.RMSNorm(dim, eps=1e-6), num_tokens
        self.mlp = nn.Sequential(Linear(dim, width), nn.SiLU(), Linear(width, width))
        if num_tokens:
            self.tokens = Linear(dim, num_tokens * width)

    def forward(self, embedding: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, dim] -> [B, D] and [B, M, D]; None without tokens."""
        embedding = self.norm(embedding)
        tokens = self.tokens(embedding).unflatten(1, (self.num_tokens, -1)) if self.num_tokens else None
        return self.mlp(embedding), tokens


AUGMENTATION = "augmentation"
"""Name of the map of augmentation labels in the network during training."""
_NUMBERS = "number_embedder"
_FREQUENCIES = 4


class NumberEmbedder(nn.Module):
    """Embedding of numbers, by the features of each number and an MLP of two layers."""

    def __init__(self, num_columns: int, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Linear(num_columns * (2 + 2 * _FREQUENCIES), width), nn.SiLU(), Linear(width, width))

    def forward(self, numbers: Tensor) -> Tensor:
        """Numbers and flags [B, columns, 2] -> [B, width]."""
        value, exists = numbers.split(1, dim=2)  # [B, C, 1] each
        octaves = torch.arange(_FREQUENCIES, device=numbers.device, dtype=numbers.dtype).exp2()
        angle = math.pi / 2 * value * octaves  # [B, C, F]: the first one is monotone over [-1, 1]
        features = torch.cat([torch.ones_like(value), value, angle.sin(), angle.cos()], dim=2)
        return self.mlp((features * exists).flatten(1))


class ZeroLinear(Linear):
    """A linear map that is initialised with zeros, without drawing random numbers."""

    def reset_parameters(self) -> None:
        """Set weights and bias to zero."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


def add_numbers(network: nn.Module, spec: DataSpec, width: int) -> None:
    """Add the embedder of numbers to a network, if the data have numbers. width: of the embedding of time and class."""
    if NUMBERS in spec.conditions:
        network.add_module(_NUMBERS, NumberEmbedder(spec.conditions[NUMBERS][0], width))


def add_augmentation(network: nn.Module, num_labels: int) -> None:
    """Add the map of augmentation labels to a network, initially without effect. The network has the width of its
    embedding as `condition_width`. Raises ValueError for a network that does not support it.
    """
    width = getattr(network, "condition_width", None)
    if width is None:
        raise ValueError(
            f"train.augment is set, but the network {type(network).__name__} does not take it as a condition. Leave it "
            "out."
        )
    network.add_module(AUGMENTATION, ZeroLinear(num_labels, width, bias=False))


def with_added(network: nn.Module, embedding: Tensor, numbers: Tensor | None, augment: Tensor | None) -> Tensor:
    """Return the embedding [B, D] plus those of numbers [B, columns, 2] and augmentation labels [B, L], if given."""
    for name, values in ((_NUMBERS, numbers), (AUGMENTATION, augment)):
        if values is not None:
            embedding = embedding + network.get_submodule(name)(values.to(embedding.dtype))
    return embedding
