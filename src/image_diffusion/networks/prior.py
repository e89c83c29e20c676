"""Diffusion prior of DALL-E 2: a causal transformer over a caption, a time and a noisy image embedding.

Ramesh et al. 2022, "Hierarchical text-conditional image generation with CLIP latents", section 2.2. Parameter names,
multi-query cosine attention, null key and value, SwiGLU and learned null embeddings are those of lucidrains'
DALLE2-pytorch. Differences: normalisations compute in float32 with one epsilon for all dtypes, and the last one does
not first divide by the signed maximum, which flips the sign of a token whose entries are all negative
(`divide_by_maximum` restores this for weights trained with it).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import DataSpec
from image_diffusion.nn.positions import sinusoid

_COSINE_SCALE = 16.0
_ROTATED = 32  # maximum number of rotated channels of a head
_BUCKETS, _MAX_DISTANCE = 32, 128


class PriorConfig(Config):
    """Network of the prior. Its width equals the dimension of the embeddings."""

    type: Literal["prior"] = "prior"

    depth: int = Field(6, gt=0)
    """Number of blocks."""
    num_heads: int = Field(8, gt=0)
    """Number of query heads; there is one head of keys and values."""
    head_width: int = Field(64, ge=2, multiple_of=2)
    """Channels of a head. Even."""
    ff_mult: int = Field(4, gt=0)
    """Hidden channels of the feed-forward layers, as a multiple of the width."""
    max_text_len: int = Field(256, gt=0)
    """Number of positions for token encodings: longer captions are cut, and unused positions hold learned null
    encodings."""
    num_timesteps: int | None = Field(None, gt=0)
    """Number of rows of a table of time embeddings, one for each timestep; unset: sines and cosines."""
    num_time_embeds: int = Field(1, gt=0)
    """Number of tokens computed from the time."""
    num_image_embeds: int = Field(1, gt=0)
    """Number of tokens computed from the noisy image embedding."""
    num_text_embeds: int = Field(1, gt=0)
    """Number of tokens computed from the text embedding."""
    norm_in: bool = False
    """Normalise the tokens before the first block."""
    norm_out: bool = True
    """Normalise the tokens after the last block."""
    divide_by_maximum: bool = False
    """Divide a token by its largest entry, including its sign, before `norm_out`, as in the original: for old
    weights."""
    final_proj: bool = True
    """End with a linear layer."""
    normformer: bool = False
    """Normalise inside the feed-forward layers (Shleifer et al. 2021, "NormFormer")."""
    rotary: bool = True
    """Rotary positions of queries and keys (Su et al. 2021, "RoFormer")."""
    self_cond: bool = False
    """Take an earlier estimate of the image embedding as one more token (Chen et al. 2023, "Analog bits")."""
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of attention weights."""
    ff_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout inside the feed-forward layers."""

    def build(self, spec: DataSpec) -> Prior:
        """Build the network for embeddings of this dimension, freshly initialised from torch's global generator."""
        return Prior(self, spec)


class Prior(nn.Module):
    """Diffusion prior: x_t, t, a caption -> prediction [B, dim]."""

    def __init__(self, config: PriorConfig, spec: DataSpec) -> None:
        super().__init__()
        dim = spec.channels
        self.config, self.spec = config, spec
        self.learned_query = nn.Parameter(torch.randn(dim))
        self.null_text_encodings = nn.Parameter(torch.randn(1, config.max_text_len, dim))
        self.null_text_embeds = nn.Parameter(torch.randn(1, config.num_text_embeds, dim))
        self.null_image_embed = nn.Parameter(torch.randn(1, dim))
        self.to_text_embeds = nn.Sequential(_several(dim, config.num_text_embeds))
        self.to_time_embeds = nn.Sequential(_time_embedding(dim, config))
        self.to_image_embeds = nn.Sequential(_several(dim, config.num_image_embeds))
        self.causal_transformer = CausalTransformer(dim, config)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        /,
        text_embed: Tensor,
        text_encodings: Tensor | None = None,
        text_keep: Tensor | None = None,
        image_keep: Tensor | None = None,
        self_cond: Tensor | None = None,
    ) -> Tensor:
        """x [B, dim], t [B] in timesteps, text_embed [B, dim] -> the prediction [B, dim].

        text_encodings [B, L, dim]: one for each token of the caption; rows of zeros mark missing tokens. text_keep,
        image_keep: bool [B], false where the caption, or x, is replaced by learned nulls; default: true. self_cond [B,
        dim]: an earlier estimate; default: zeros. Raises ValueError if shapes do not fit the network.
        """
        B, dim = len(x), self.spec.channels
        check_dimensions(dim, x, text_embed, text_encodings)
        if self_cond is not None and not self.config.self_cond:
            raise ValueError("The network was built without self-conditioning. Set network.self_cond to true.")
        yes = torch.ones(B, dtype=torch.bool, device=x.device)
        text_keep = (yes if text_keep is None else text_keep)[:, None, None]
        image_keep = (yes if image_keep is None else image_keep)[:, None, None]

        if text_encodings is None:
            encodings = self.null_text_encodings.expand(B, -1, -1)
        else:
            room = self.config.max_text_len - text_encodings.shape[1]
            encodings = F.pad(text_encodings, (0, 0, 0, room))  # a negative room cuts
            is_token = (encodings != 0).any(dim=-1, keepdim=True)  # [B, max_text_len, 1]
            encodings = torch.where(is_token & text_keep, encodings, self.null_text_encodings)
        text = self.to_text_embeds(text_embed).view(B, -1, dim)
        time = self.to_time_embeds(t.long() if self.config.num_timesteps else t).view(B, -1, dim)
        image = self.to_image_embeds(x).view(B, -1, dim)
        tokens = [
            encodings,  # [B, max_text_len, dim]
            torch.where(text_keep, text, self.null_text_embeds),  # [B, num_text_embeds, dim]
            time,  # [B, num_time_embeds, dim]
            torch.where(image_keep, image, self.null_image_embed),  # [B, num_image_embeds, dim]
        ]
        if self.config.self_cond:
            tokens.append((torch.zeros_like(x) if self_cond is None else self_cond)[:, None])  # [B, 1, dim]
        tokens.append(self.learned_query.expand(B, 1, -1))
        return self.causal_transformer(torch.cat(tokens, dim=1))[:, -1]


def check_dimensions(dim: int, image: Tensor, text: Tensor, tokens: Tensor | None) -> None:
    """Raise ValueError for embeddings whose dimension differs from that of the network."""
    for name, tensor in (("Image", image), ("Text", text), ("Token", tokens)):
        if tensor is not None and tensor.shape[-1] != dim:
            raise ValueError(
                f"{name} embeddings have {tensor.shape[-1]} dimensions but the network was built for {dim}. "
                f"Use embeddings of one model."
            )


class CausalTransformer(nn.Module):
    """Causal transformer: tokens [B, N, dim] -> [B, N, dim]. Each token attends to itself and to those before it."""

    def __init__(self, dim: int, config: PriorConfig) -> None:
        super().__init__()
        self.init_norm = Norm(dim) if config.norm_in else nn.Identity()
        self.rel_pos_bias = RelativePositions(config.num_heads)
        hidden = config.ff_mult * dim
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    MultiQueryAttention(dim, config),
                    nn.Sequential(
                        Norm(dim),
                        nn.Linear(dim, 2 * hidden, bias=False),
                        SwiGlu(),
                        Norm(hidden) if config.normformer else nn.Identity(),
                        nn.Dropout(config.ff_dropout),
                        nn.Linear(hidden, dim, bias=False),
                    ),
                ]
            )
            for _ in range(config.depth)
        )
        self.norm = Norm(dim, config.divide_by_maximum) if config.norm_out else nn.Identity()
        self.project_out = nn.Linear(dim, dim, bias=False) if config.final_proj else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        N = x.shape[1]
        hidden_from = torch.ones(N, N + 1, dtype=torch.bool, device=x.device).triu(2)  # key 0 is the null
        bias = self.rel_pos_bias(N, N + 1).masked_fill(hidden_from, -torch.inf)  # [heads, N, N + 1]
        x = self.init_norm(x)
        for attention, feed_forward in cast("list[tuple[nn.Module, nn.Module]]", self.layers):
            x = x + attention(x, bias)
            x = x + feed_forward(x)
        return self.project_out(self.norm(x))


class MultiQueryAttention(nn.Module):
    """Attention with several query heads and one head of keys and values (Shazeer 2019), by cosine similarity."""

    def __init__(self, dim: int, config: PriorConfig) -> None:
        super().__init__()
        self.num_heads, self.dropout = config.num_heads, config.attention_dropout
        width = config.head_width
        self.norm = Norm(dim)
        self.null_kv = nn.Parameter(torch.randn(2, width))
        self.to_q = nn.Linear(dim, config.num_heads * width, bias=False)
        self.to_kv = nn.Linear(dim, 2 * width, bias=False)
        self.rotary_emb = Rotary(min(_ROTATED, width)) if config.rotary else nn.Identity()
        self.to_out = nn.Sequential(nn.Linear(config.num_heads * width, dim, bias=False), Norm(dim))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Tokens [B, N, dim], bias [heads, N, N + 1] -> [B, N, dim]."""
        B, N, _ = x.shape
        x = self.norm(x)
        q = self.rotary_emb(self.to_q(x).view(B, N, self.num_heads, -1).transpose(1, 2))  # [B, heads, N, d]
        k, v = self.to_kv(x)[:, None].chunk(2, dim=-1)  # [B, 1, N, d]
        null_k, null_v = self.null_kv.to(k.dtype)[:, None, None, None].expand(2, B, 1, 1, -1)
        k = torch.cat([null_k, self.rotary_emb(k)], dim=2)  # [B, 1, N + 1, d]
        v = torch.cat([null_v, v], dim=2)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        every = (-1, self.num_heads, -1, -1)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(
            q, k.expand(every), v.expand(every), bias.to(q.dtype), dropout, scale=_COSINE_SCALE
        )
        return self.to_out(out.transpose(1, 2).reshape(B, N, -1))


class Norm(nn.Module):
    """Layer normalisation with a gain and no bias, in float32."""

    def __init__(self, dim: int, divide_by_maximum: bool = False) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))
        self.divide_by_maximum = divide_by_maximum

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.divide_by_maximum:
            wide = wide / wide.amax(dim=-1, keepdim=True).detach()
        return F.layer_norm(wide, x.shape[-1:], self.g.to(wide.dtype)).to(x.dtype)


class SwiGlu(nn.Module):
    """[..., 2 n] -> [..., n]: the first half times the SiLU of the second."""

    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, dim=-1)
        return value * F.silu(gate)


class Rotary(nn.Module):
    """Rotary positions: pairs of neighbouring channels are rotated by an angle proportional to the position; channels
    after `dim` are not."""

    freqs: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("freqs", 10_000.0 ** (-torch.arange(0, dim, 2).float() / dim))

    def forward(self, x: Tensor) -> Tensor:
        """[B, heads, N, d] -> the same."""
        angle = torch.arange(x.shape[2], device=x.device)[:, None] * self.freqs.float()  # [N, dim / 2]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        turned, rest = x.split([2 * len(self.freqs), x.shape[-1] - 2 * len(self.freqs)], dim=-1)
        first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)  # [B, heads, N, dim / 2] each
        pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([pairs.flatten(-2), rest], dim=-1)


class RelativePositions(nn.Module):
    """Learned bias of each head for each bucket of distances (Raffel et al. 2020, T5)."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.relative_attention_bias = nn.Embedding(_BUCKETS, num_heads)

    def forward(self, num_queries: int, num_keys: int) -> Tensor:
        """[heads, num_queries, num_keys]."""
        device = self.relative_attention_bias.weight.device
        offset = torch.arange(num_keys, device=device) - torch.arange(num_queries, device=device)[:, None]
        bias: Tensor = self.relative_attention_bias(bucket_of(offset))
        return bias.permute(2, 0, 1)


def bucket_of(offset: Tensor) -> Tensor:
    """Return the bucket, 0 … 31, of a key `offset` positions after the query: 0 for keys after the query, one for each
    distance below 16, and increasingly wide ones up to 128."""
    exact = _BUCKETS // 2
    distance = (-offset).clamp(min=0)
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(_MAX_DISTANCE / exact)
    wide = (exact + (ratio * (_BUCKETS - exact)).long()).clamp(max=_BUCKETS - 1)
    return torch.where(distance < exact, distance, wide)


class _Waves(nn.Module):
    """Times [B] -> [B, dim]: [sin | cos]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, t: Tensor) -> Tensor:
        return sinusoid(t, self.dim, endpoint=True).roll(self.dim // 2, dims=1)


def _time_embedding(dim: int, config: PriorConfig) -> nn.Module:
    out = dim * config.num_time_embeds
    if config.num_timesteps is not None:
        return nn.Embedding(config.num_timesteps, out)
    first, second = nn.Linear(dim, 2 * out), nn.Linear(2 * out, 2 * out)
    layers = nn.Sequential(nn.Sequential(first, nn.SiLU()), nn.Sequential(second, nn.SiLU()), nn.Linear(2 * out, out))
    return nn.Sequential(_Waves(dim), nn.Sequential(OrderedDict(net=layers)))


def _several(dim: int, count: int) -> nn.Module:
    return nn.Linear(dim, count * dim) if count > 1 else nn.Identity()
