"""Prior of Karlo and Kandinsky, as in diffusers: a causal transformer over a caption's tokens, its embedding, a time
and a noisy image embedding.

Ramesh et al. 2022, "Hierarchical text-conditional image generation with CLIP latents", section 2.2. Parameters have the
names of diffusers' `PriorTransformer` (models/transformers/prior_transformer.py), which computes the same numbers.
Dropped captions or images are replaced by zeros.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.prior import check_dimensions
from image_diffusion.nn.positions import sinusoid

_BESIDE = 4  # further tokens: the caption's embedding, the time, the image, and the token that becomes the prediction
_HIDDEN = -10_000.0  # added at masked positions, as in diffusers
STATISTICS = ("clip_mean", "clip_std")
"""Mean and standard deviation of image embeddings, which diffusers stores among the parameters."""


class PriorTransformerConfig(Config):
    """diffusers' PriorTransformer, the prior of Karlo and Kandinsky."""

    type: Literal["prior_transformer"] = "prior_transformer"
    """The prior of diffusers."""
    depth: int = Field(20, gt=0)
    """Number of blocks."""
    num_heads: int = Field(32, gt=0)
    """Number of attention heads."""
    head_width: int = Field(64, gt=0)
    """Channels of a head; the width is this times the number of heads."""
    max_text_len: int = Field(77, gt=0)
    """Number of positions for token encodings: longer captions are cut, and unused positions are masked."""
    norm_in: bool = False
    """Normalise the tokens before the first block."""
    norm_text: bool = False
    """Normalise the text embedding."""
    time_width: int | None = Field(None, gt=0)
    """Hidden channels of the time embedding; unset: the width."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout after attention and inside the feed-forward layers."""

    self_cond: ClassVar[bool] = False
    """The network takes no earlier estimate."""
    num_timesteps: ClassVar[None] = None
    """The network has no table of times."""

    def build(self, spec: DataSpec) -> PriorTransformer:
        """Build the network for embeddings of this dimension, freshly initialised from torch's global generator."""
        return PriorTransformer(self, spec)


class PriorTransformer(nn.Module):
    """x_t, t, a caption -> prediction [B, dim]."""

    def __init__(self, config: PriorTransformerConfig, spec: DataSpec) -> None:
        super().__init__()
        dim, width = spec.channels, config.num_heads * config.head_width
        self.config, self.spec = config, spec
        hidden = config.time_width or width
        self.time_embedding = nn.Sequential(
            OrderedDict(linear_1=nn.Linear(width, hidden), act=nn.SiLU(), linear_2=nn.Linear(hidden, width))
        )
        self.proj_in = nn.Linear(dim, width)
        self.embedding_proj_norm = nn.LayerNorm(dim) if config.norm_text else nn.Identity()
        self.embedding_proj = nn.Linear(dim, width)
        self.encoder_hidden_states_proj = nn.Linear(dim, width)
        self.positional_embedding = nn.Parameter(torch.zeros(1, config.max_text_len + _BESIDE, width))
        self.prd_embedding = nn.Parameter(torch.zeros(1, 1, width))
        self.transformer_blocks = nn.ModuleList(_Block(config, width) for _ in range(config.depth))
        self.norm_in = nn.LayerNorm(width) if config.norm_in else nn.Identity()
        self.norm_out = nn.LayerNorm(width)
        self.proj_to_clip_embeddings = nn.Linear(width, dim)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        /,
        text_embed: Tensor,
        text_encodings: Tensor | None = None,
        text_keep: Tensor | None = None,
        image_keep: Tensor | None = None,
    ) -> Tensor:
        """x [B, dim], t [B] in timesteps, text_embed [B, dim] -> the prediction [B, dim].

        text_encodings [B, L, dim]: one for each token of the caption; rows of zeros mark missing tokens. text_keep,
        image_keep: bool [B], false where the caption, or x, is replaced by zeros; default: true. Raises ValueError if
        shapes do not fit the network.
        """
        B, dim, places = len(x), self.spec.channels, self.config.max_text_len
        encodings = x.new_zeros(B, places, dim) if text_encodings is None else text_encodings
        check_dimensions(dim, x, text_embed, encodings)
        encodings = F.pad(encodings, (0, 0, 0, places - encodings.shape[1]))  # a negative room cuts
        if text_keep is not None:
            encodings = encodings * text_keep[:, None, None]
            text_embed = text_embed * text_keep[:, None]
        if image_keep is not None:
            x = x * image_keep[:, None]
        tokens = torch.cat(
            [
                self.encoder_hidden_states_proj(encodings),  # [B, max_text_len, width]
                self.embedding_proj(self.embedding_proj_norm(text_embed))[:, None],
                self.time_embedding(sinusoid(t, self.proj_in.out_features).to(x.dtype))[:, None],
                self.proj_in(x)[:, None],
                self.prd_embedding.expand(B, 1, -1),
            ],
            dim=1,
        )
        hidden = F.pad((~(encodings != 0).any(dim=-1)).to(x.dtype) * _HIDDEN, (0, _BESIDE))  # [B, N]
        N = places + _BESIDE
        ahead = torch.full((N, N), _HIDDEN, device=x.device, dtype=x.dtype).triu(1)
        bias = hidden[:, None, None] + ahead  # [B, 1, N, N]
        tokens = self.norm_in(tokens + self.positional_embedding)
        for block in self.transformer_blocks:
            tokens = block(tokens, bias)
        return self.proj_to_clip_embeddings(self.norm_out(tokens)[:, -1])


class _Block(nn.Module):
    """Pre-norm block of attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, config: PriorTransformerConfig, width: int) -> None:
        super().__init__()
        self.norm1, self.attn1 = nn.LayerNorm(width), _Attention(config, width)
        self.norm3, self.ff = nn.LayerNorm(width), _feed_forward(width, config.dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn1(self.norm1(x), bias)
        return x + self.ff(self.norm3(x))


class _Attention(nn.Module):
    def __init__(self, config: PriorTransformerConfig, width: int) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(width, width), nn.Dropout(config.dropout))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Tokens [B, N, D], bias [B, 1, N, N] -> [B, N, D]."""
        layers = (self.to_q, self.to_k, self.to_v)
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in layers)
        out = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype)).transpose(1, 2).flatten(2)
        return self.to_out(out)


def _feed_forward(width: int, dropout: float) -> nn.Sequential:
    """Build Linear, GELU, dropout, Linear, under the names of diffusers."""
    proj = nn.Sequential(OrderedDict(proj=nn.Linear(width, 4 * width), gelu=nn.GELU()))
    return nn.Sequential(OrderedDict(net=nn.Sequential(proj, nn.Dropout(dropout), nn.Linear(4 * width, width))))


def config_of_diffusers(config: Mapping[str, Any], where: str) -> tuple[PriorTransformerConfig, int]:
    """Return the network of a config.json of diffusers' PriorTransformer, and the dimension of its embeddings. where:
    name of the file in messages. Raises ValueError if its parts differ from those of Karlo and Kandinsky.
    """
    dim = config["embedding_dim"]
    supported: dict[str, tuple[Any, ...]] = {
        "encoder_hid_proj_type": ("linear",),
        "added_emb_type": ("prd",),
        "additional_embeddings": (_BESIDE,),
        "time_embed_act_fn": ("silu",),
        "norm_in_type": (None, "layer"),
        "embedding_proj_norm_type": (None, "layer"),
        "embedding_proj_dim": (None, dim),
        "clip_embed_dim": (None, dim),
    }
    usual = {"encoder_hid_proj_type": "linear", "added_emb_type": "prd", "time_embed_act_fn": "silu"}
    for name, allowed in supported.items():
        value = config.get(name, usual.get(name))
        if value not in allowed:
            raise ValueError(
                f"{where} is a PriorTransformer with {name} {value!r}, which is not supported. Supported: "
                f"{', '.join(map(repr, allowed))}."
            )
    network = PriorTransformerConfig(
        depth=config["num_layers"],
        num_heads=config["num_attention_heads"],
        head_width=config["attention_head_dim"],
        max_text_len=config["num_embeddings"],
        norm_in=config.get("norm_in_type") == "layer",
        norm_text=config.get("embedding_proj_norm_type") == "layer",
        time_width=config.get("time_embed_dim"),
        dropout=config.get("dropout", 0.0),
    )
    return network, dim


def to_diffusers_prior(network: PriorTransformer, mean: Tensor, std: Tensor) -> Any:
    """Return an equivalent PriorTransformer of diffusers. mean, std: float32 [dim], the statistics of the image
    embeddings by which x was normalised."""
    from diffusers.models.transformers.prior_transformer import PriorTransformer as Theirs

    config, dim = network.config, network.spec.channels
    theirs = Theirs(
        num_attention_heads=config.num_heads,
        attention_head_dim=config.head_width,
        num_layers=config.depth,
        embedding_dim=dim,
        num_embeddings=config.max_text_len,
        additional_embeddings=_BESIDE,
        dropout=config.dropout,
        norm_in_type="layer" if config.norm_in else None,
        embedding_proj_norm_type="layer" if config.norm_text else None,
        time_embed_dim=config.time_width,
    )
    statistics = dict(zip(STATISTICS, (mean[None], std[None]), strict=True))
    theirs.load_state_dict({**network.state_dict(), **statistics})
    return theirs.eval()
