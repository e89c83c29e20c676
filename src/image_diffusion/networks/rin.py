"""RIN: a recurrent interface network (Jabri et al. 2023, "Scalable adaptive computation for iterative generation").

A few latents do most of the computation: in each block they read from the patches, attend to one another, and write
back to the patches. The latents of an earlier call can initialise those of the next: self-conditioning of the latents
(section 3.2). Parameter names, a depthwise convolution for positions, linear attention among the patches, and
self-conditioning of the image are those of lucidrains' recurrent-interface-network-pytorch.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.resolution import Size
from image_diffusion.core.types import DataSpec
from image_diffusion.nn.blocks import set_num_maps
from image_diffusion.nn.inputs import add_numbers, check_inputs, grid_of, input_channels, with_added, with_image


class RinConfig(Config):
    """Network of RIN."""

    type: Literal["rin"] = "rin"

    width: int = Field(256, ge=2, multiple_of=2)
    """Channels of a patch. Even."""
    patch: int = Field(8, gt=0)
    """Height and width of a patch in pixels of x."""
    depth: int = Field(6, gt=0)
    """Number of blocks, in each of which the latents read from and write to the patches once."""
    num_latents: int = Field(256, gt=0)
    """Number of latents."""
    latent_width: int | None = Field(None, gt=0)
    """Channels of a latent; unset: `width`."""
    latent_depth: int = Field(2, ge=0)
    """Layers of self-attention among the latents in each block."""
    num_heads: int = Field(4, gt=0)
    """Number of heads of each attention layer."""
    head_width: int = Field(32, gt=0)
    """Channels of a head."""
    num_frequencies: int = Field(8, gt=0)
    """Learned frequencies of the time embedding."""
    time_as_latent: bool = False
    """Condition on time and label by an additional latent, instead of a scale and shift in every attention layer."""
    dual_patch_norm: bool = True
    """Normalise patches before and after they are embedded (Kumar et al. 2023, "Dual PatchNorm")."""
    patch_self_attention: bool = True
    """Linear attention among the patches in each block (Shen et al. 2021, "Efficient attention")."""
    qk_norm: bool = False
    """Normalise queries and keys of each head, for stable long training."""
    label_init_std: float = Field(0.02, ge=0)
    """Initial standard deviation of the label table. On small data, labels are learned faster with a larger value."""

    def build(self, spec: DataSpec) -> Rin:
        """Build the network for data of this kind, freshly initialised from torch's global generator. Raises ValueError
        if the patch does not divide the resolution.
        """
        return Rin(self, spec)


class Rin(nn.Module):
    """RIN: x_t, t, label and an earlier call's estimate and latents -> prediction [B, C, H, W], and optionally latents
    [B, N, D]."""

    behind = ("to_pixels",)
    """Modules after the blocks that are defined before them: `train.layer_decay` gives them the full rate."""

    def __init__(self, config: RinConfig, spec: DataSpec) -> None:
        super().__init__()
        width, latent_width = config.width, config.latent_width or config.width
        self.config, self.spec = config, spec
        self.grid_size = grid_of(spec, config.patch)
        condition_width = self.condition_width
        patch_values = spec.channels * config.patch**2
        input_values = (spec.channels + input_channels(spec)) * config.patch**2  # an earlier estimate comes first

        self.time_mlp = nn.Sequential(
            LearnedWaves(config.num_frequencies),
            nn.Linear(1 + 2 * config.num_frequencies, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, condition_width),
        )
        if spec.num_classes:
            self.label_embedding = nn.Embedding(spec.num_classes + 1, condition_width)
            nn.init.normal_(self.label_embedding.weight, std=config.label_init_std)
        add_numbers(self, spec, condition_width)
        self.axial_pos_emb_height_mlp = _line_positions(width)
        self.axial_pos_emb_width_mlp = _line_positions(width)

        self.to_patches = nn.Sequential(
            nn.Identity(),  # in the original, layer 0 cuts the patches
            *([nn.LayerNorm(input_values)] if config.dual_patch_norm else []),
            nn.Linear(input_values, width),
            *([nn.LayerNorm(width)] if config.dual_patch_norm else []),
        )
        self.to_pixels = nn.Sequential(Norm(width), nn.Linear(width, patch_values))

        self.latents = nn.Parameter(torch.empty(config.num_latents, latent_width))
        nn.init.normal_(self.latents, std=0.02)
        self.init_self_cond_latents = nn.Sequential(FeedForward(latent_width), Norm(latent_width, gain=0.0))

        scale_width = None if config.time_as_latent else condition_width
        self.blocks = nn.ModuleList(Block(config, width, latent_width, scale_width) for _ in range(config.depth))

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        /,
        label: Tensor | None = None,
        self_cond: Tensor | None = None,
        latents: Tensor | None = None,
        numbers: Tensor | None = None,
        image: Tensor | None = None,
        augment: Tensor | None = None,
        return_latents: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """x [B, C, H, W], t [B] in [0, 1], label int64 [B] (num_classes: no label) -> the prediction [B, C, H, W].

        self_cond [B, C, H, W], latents [B, N, D]: an earlier estimate of x0, and its latents; absent, or zeros in a
        sample's row: none. numbers [B, columns, 2]: of the image; zeros: none. image [B, C', h, w]: another image;
        zeros: none. augment [B, L]: labels of an augmentation, in training. return_latents: return (prediction,
        latents, norm), norm [B] the root-mean-square of each sample's latents before their last normalisation. A
        network of unlabelled data takes no label. Raises ValueError if shapes do not fit the network."""
        check_inputs(self.spec, x, label, numbers=numbers, image=image)
        condition = self.time_mlp(t.to(self.latents.dtype))  # [B, E]
        if label is not None:
            condition = condition + self.label_embedding(label)  # [B, E]
        condition = with_added(self, condition, numbers, augment)

        earlier = torch.zeros_like(x) if self_cond is None else self_cond
        cut = F.pixel_unshuffle(torch.cat([earlier, with_image(x, image)], dim=1), self.config.patch)
        patches = self.to_patches(cut.flatten(2).transpose(1, 2).contiguous())  # [B, (H/p)(W/p), width], row by row
        patches = patches + self._positions()

        held = self.latents.expand(len(x), -1, -1)  # [B, N, D]
        if latents is not None:
            exists = latents.ne(0).flatten(1).any(1)[:, None, None]  # [B, 1, 1]
            held = held + self.init_self_cond_latents(latents) * exists
        if self.config.time_as_latent:
            held = torch.cat([held, condition[:, None, :]], dim=1)  # [B, N + 1, D]

        for block in cast("list[Block]", self.blocks):
            patches, computed, held = block(patches, held, condition, self.grid_size)

        joined = self.to_pixels(patches).transpose(1, 2).unflatten(2, self.grid_size)  # [B, C p p, H/p, W/p]
        prediction = F.pixel_shuffle(joined, self.config.patch)  # [B, C, H, W]
        if not return_latents:
            return prediction
        norm = computed.float().square().flatten(1).mean(1).sqrt()  # [B]
        return prediction, held[:, : len(self.latents)], norm

    @property
    def condition_width(self) -> int:
        """Return the number of channels of the embedding of time and label."""
        width, latent_width = self.config.width, self.config.latent_width or self.config.width
        return latent_width if self.config.time_as_latent else 4 * width

    def _positions(self) -> Tensor:
        """Return the positions [(H/p)(W/p), width], row by row."""
        options: Any = {"device": self.latents.device, "dtype": self.latents.dtype}
        lines = (torch.linspace(0, 1, side, **options)[:, None] for side in self.grid_size)
        rows, columns = self.axial_pos_emb_height_mlp(next(lines)), self.axial_pos_emb_width_mlp(next(lines))
        return (rows[:, None] + columns[None, :]).flatten(0, 1)


class Block(nn.Module):
    """Latents read from the patches, compute, and are written to the patches (figure 3)."""

    def __init__(self, config: RinConfig, width: int, latent_width: int, scale_width: int | None) -> None:
        super().__init__()
        heads = (config.num_heads, config.head_width)
        norm = config.qk_norm
        self.has_patch_attention = config.patch_self_attention
        self.patches_peg = DepthwiseConv(width)
        self.latents_attend_to_patches = Attention(latent_width, *heads, norm, scale_width, context_width=width)
        self.latents_cross_attn_ff = FeedForward(latent_width)
        self.latent_self_attns = nn.ModuleList(
            nn.ModuleList([Attention(latent_width, *heads, norm, scale_width), FeedForward(latent_width)])
            for _ in range(config.latent_depth)
        )
        if config.patch_self_attention:
            self.patches_self_attn = LinearAttention(width, *heads, norm, scale_width)
            self.patches_self_attn_ff = FeedForward(width)
        self.patches_attend_to_latents = Attention(width, *heads, norm, scale_width, context_width=latent_width)
        self.patches_cross_attn_ff = FeedForward(width)
        self.latent_final_norm = Norm(latent_width)

    def forward(
        self, patches: Tensor, latents: Tensor, condition: Tensor, grid_size: Size
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Patches [B, P, width], row by row, latents [B, N, D], condition [B, E] -> patches, latents, and the latents
        after their last normalisation."""
        patches = patches + self.patches_peg(patches, grid_size)

        latents = latents + self.latents_attend_to_patches(latents, condition, patches)
        latents = latents + self.latents_cross_attn_ff(latents)
        for attention, feed_forward in cast("list[list[nn.Module]]", self.latent_self_attns):
            latents = latents + attention(latents, condition)
            latents = latents + feed_forward(latents)

        if self.has_patch_attention:
            patches = patches + self.patches_self_attn(patches, condition)
            patches = patches + self.patches_self_attn_ff(patches)
        patches = patches + self.patches_attend_to_latents(patches, condition, latents)
        patches = patches + self.patches_cross_attn_ff(patches)
        return patches, latents, self.latent_final_norm(latents)


class Attention(nn.Module):
    """Attention to a context or to the tokens themselves, without biases; the condition scales and shifts its input.

    In self-attention, keys and values are computed before this scale and shift, queries after it.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_width: int,
        qk_norm: bool,
        scale_width: int | None,
        context_width: int | None = None,
    ) -> None:
        super().__init__()
        inner = num_heads * head_width
        self.num_heads = num_heads
        self.norm = Norm(width)
        self.norm_context = None if context_width is None else Norm(context_width)
        self.time_cond = None if scale_width is None else _scale_and_shift(scale_width, width)
        self.q_norm = HeadNorm(num_heads, head_width) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(num_heads, head_width) if qk_norm else nn.Identity()
        self.to_q = nn.Linear(width, inner, bias=False)
        self.to_kv = set_num_maps(nn.Linear(context_width or width, 2 * inner, bias=False), 2)
        self.to_out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, condition: Tensor, context: Tensor | None = None) -> Tensor:
        """[B, N, width], [B, E], [B, M, context_width] -> [B, N, width]."""
        x = self.norm(x)
        source = x if context is None or self.norm_context is None else self.norm_context(context)
        if self.time_cond is not None:
            x = _modulate(x, self.time_cond(condition))
        q = _heads(self.to_q(x), self.num_heads)  # [B, heads, N, d]
        k, v = (_heads(part, self.num_heads) for part in self.to_kv(source).chunk(2, dim=-1))  # [B, heads, M, d]
        out = F.scaled_dot_product_attention(self.q_norm(q).to(v), self.k_norm(k).to(v), v)  # [B, heads, N, d]
        return self.to_out(out.transpose(1, 2).flatten(2))


class LinearAttention(nn.Module):
    """Attention at a cost linear in the number of tokens: softmax(q) over features, softmax(k) over tokens."""

    def __init__(self, width: int, num_heads: int, head_width: int, qk_norm: bool, scale_width: int | None) -> None:
        super().__init__()
        inner = num_heads * head_width
        self.num_heads, self.scale = num_heads, head_width**-0.5
        self.norm = Norm(width)
        self.time_cond = None if scale_width is None else _scale_and_shift(scale_width, width)
        self.q_norm = HeadNorm(num_heads, head_width) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(num_heads, head_width) if qk_norm else nn.Identity()
        self.to_qkv = set_num_maps(nn.Linear(width, 3 * inner, bias=False), 3)
        self.to_out = nn.Sequential(nn.Linear(inner, width, bias=False), Norm(width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """[B, N, width], [B, E] -> [B, N, width]."""
        x = self.norm(x)
        if self.time_cond is not None:
            x = _modulate(x, self.time_cond(condition))
        q, k, v = (_heads(part, self.num_heads) for part in self.to_qkv(x).chunk(3, dim=-1))  # [B, heads, N, d] each
        q = self.q_norm(q).softmax(dim=-1) * self.scale
        k = self.k_norm(k).softmax(dim=-2)
        out = q @ (k.transpose(-1, -2) @ v)  # [B, heads, N, d]
        return self.to_out(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """LayerNorm, Linear to four times the width, GELU, Linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return self.net(self.norm(x))


class DepthwiseConv(nn.Module):
    """A 3 x 3 convolution of each channel over the grid of patches, which encodes positions (Chu et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ds_conv = nn.Conv2d(width, width, kernel_size=3, padding=1, groups=width)

    def forward(self, x: Tensor, grid_size: Size) -> Tensor:
        """[B, rows · columns, width] -> the same shape."""
        image = x.transpose(1, 2).unflatten(2, grid_size)  # [B, width, rows, columns]
        return cast("Tensor", self.ds_conv(image)).flatten(2).transpose(1, 2)


class Norm(nn.Module):
    """LayerNorm with a gain and no bias. `beta` is a buffer of zeros, kept for the names of the original."""

    beta: Tensor

    def __init__(self, width: int, gain: float = 1.0) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), gain))
        self.register_buffer("beta", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return F.layer_norm(x, x.shape[-1:], self.gamma, self.beta)


class HeadNorm(nn.Module):
    """Normalisation of queries or keys to root-mean-square 1, times a gain for each head and channel."""

    def __init__(self, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.scale = math.sqrt(head_width)
        self.gamma = nn.Parameter(torch.ones(num_heads, 1, head_width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, heads, N, d] -> the same shape."""
        return F.normalize(x, dim=-1) * self.scale * self.gamma


class LearnedWaves(nn.Module):
    """Time embedding: t and its sines and cosines at learned frequencies."""

    def __init__(self, num_frequencies: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(num_frequencies))

    def forward(self, t: Tensor) -> Tensor:
        """[B] -> [B, 1 + 2 num_frequencies]."""
        t = t[:, None]
        angle = 2 * math.pi * t * self.weights  # [B, num_frequencies]
        return torch.cat([t, angle.sin(), angle.cos()], dim=1)


def _line_positions(width: int) -> nn.Sequential:
    """Build the layers that map positions [n, 1] along a line -> [n, width]. In the original, layer 0 reshapes the
    input."""
    half = width // 2
    return nn.Sequential(
        nn.Identity(), nn.Linear(1, half), nn.SiLU(), nn.Linear(half, half), nn.SiLU(), nn.Linear(half, width)
    )


def _scale_and_shift(condition_width: int, width: int) -> nn.Sequential:
    """Build the layers that map the condition [B, E] -> scale and shift [B, 2 width], initially zero."""
    linear = set_num_maps(nn.Linear(condition_width, 2 * width), 2)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.SiLU(), linear)


def _modulate(x: Tensor, scale_and_shift: Tensor) -> Tensor:
    """Return x [B, N, width] (1 + scale) + shift, from [B, 2 width]."""
    scale, shift = scale_and_shift[:, None, :].chunk(2, dim=-1)
    return x * (1 + scale) + shift


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """Split heads: [B, N, heads · d] -> [B, heads, N, d]."""
    B, N, inner = x.shape
    return x.view(B, N, num_heads, inner // num_heads).transpose(1, 2)
