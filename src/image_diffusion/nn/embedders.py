"""Embeddings of the inputs of a transformer: patches, time, labels, captions and images.

Parameters have the names of DiT's published weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from image_diffusion.nn.inputs import patchify
from image_diffusion.nn.linear import Linear, linear
from image_diffusion.nn.positions import sinusoid

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
