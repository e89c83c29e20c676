"""DiT: a transformer over patches, conditioned by adaLN-Zero (Peebles and Xie 2023, arXiv:2212.09748).

With a text condition, every block attends to the caption's tokens, and the caption's embedding is added to the time
embedding. The tokens are additional keys and values, which no block changes. This is the design of PRX (Photoroom 2025,
"Text-to-image architectural experiments"), which compared it with cross-attention, U-ViT, MMDiT and DiT-Air. DiT-Air
(Chen et al. 2025, arXiv:2503.10618) also found that one sequence performs as well as two streams, with fewer
parameters.

With an image embedding as condition, the embedding is added to the time embedding, and every block attends to a few
tokens computed from it, as in the decoder of unCLIP (Ramesh et al. 2022, arXiv:2204.06125, section 2.1).

Parameters have the names of the published weights (`networks/weights/dit.py` reads and writes those). Off by default:
normalised queries and keys, RMSNorm and SwiGLU, as in LightningDiT (Yao et al. 2025, arXiv:2501.01423); with these, and
rotary positions, a bottleneck in the patch embedding and class tokens in the sequence, it is the network of JiT (Li and
He 2025, "Back to basics: let denoising generative models denoise", arXiv:2511.13720).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import EMBEDDING, TEXT, DataSpec
from image_diffusion.nn.blocks import set_num_maps
from image_diffusion.nn.inputs import (
    ImageEmbedder,
    LabelEmbedder,
    PatchEmbedder,
    TextEmbedder,
    TimeEmbedder,
    add_numbers,
    check_inputs,
    grid_of,
    input_channels,
    unpatchify,
    with_added,
    with_image,
)
from image_diffusion.nn.linear import Linear
from image_diffusion.nn.positions import check_rope, grid_positions, rotary_angles
from image_diffusion.nn.transformer import Mlp, SelfAttention, SwiGlu

SizeName = Literal[
    "DiT-XL/2", "DiT-XL/4", "DiT-XL/8", "DiT-L/2", "DiT-L/4", "DiT-L/8",
    "DiT-B/2", "DiT-B/4", "DiT-B/8", "DiT-S/2", "DiT-S/4", "DiT-S/8",
]  # fmt: skip


class Size(NamedTuple):
    """Dimensions of a named size in the paper's table 1."""

    depth: int
    width: int
    num_heads: int
    patch: int


SIZES: dict[SizeName, Size] = {
    "DiT-XL/2": Size(28, 1152, 16, 2),
    "DiT-XL/4": Size(28, 1152, 16, 4),
    "DiT-XL/8": Size(28, 1152, 16, 8),
    "DiT-L/2": Size(24, 1024, 16, 2),
    "DiT-L/4": Size(24, 1024, 16, 4),
    "DiT-L/8": Size(24, 1024, 16, 8),
    "DiT-B/2": Size(12, 768, 12, 2),
    "DiT-B/4": Size(12, 768, 12, 4),
    "DiT-B/8": Size(12, 768, 12, 8),
    "DiT-S/2": Size(12, 384, 6, 2),
    "DiT-S/4": Size(12, 384, 6, 4),
    "DiT-S/8": Size(12, 384, 6, 8),
}


class DiTConfig(Config):
    """Network of DiT, given by a named size, by depth, width, heads and patch, or by a size of which some are
    overridden."""

    type: Literal["dit"] = "dit"

    size: SizeName | None = None
    """Named size of the paper, which sets depth, width, number of heads and patch."""
    depth: int | None = Field(None, gt=0)
    """Number of blocks; unset: that of `size`."""
    width: int | None = Field(None, gt=0)
    """Channels of a token; unset: those of `size`. Divisible by 4 and by the number of heads."""
    num_heads: int | None = Field(None, gt=0)
    """Number of attention heads of a block; unset: that of `size`."""
    patch: int | None = Field(None, gt=0)
    """Height and width of a patch in pixels of x; unset: that of `size`."""
    mlp_ratio: float = Field(4.0, gt=0, le=1e3)
    """Hidden channels of a block's MLP, as a multiple of the width."""
    qk_norm: bool = False
    """Normalise the queries and keys of each head, for stable training in low precision."""
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    """LayerNorm without parameters, or RMSNorm with a gain."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """MLP of a block. SwiGLU has two thirds of the hidden channels, so that the number of parameters stays the same."""
    rope: bool = False
    """Also use rotary positions: queries and keys are rotated by row and column, so that attention depends on
    differences of positions."""
    patch_bottleneck: int | None = Field(None, gt=0)
    """Channels of a linear bottleneck without bias in the patch embedding; unset: no bottleneck."""
    class_tokens: int = Field(0, ge=0)
    """Number of class tokens before the image tokens. Each has its own learned embedding; the output excludes them. 0:
    the network is conditioned on the class only by adaLN."""
    class_tokens_from: int = Field(0, ge=0)
    """Number of blocks before the first block with class tokens."""
    embedding_tokens: int = Field(4, ge=0)
    """Number of tokens computed from an image embedding, to which every block attends, in a network with this
    condition. 0: the network is conditioned on the embedding only by adaLN."""
    null_label: bool = True
    """Add a row for no label to the label table, which label dropout and guidance need."""
    label_init_std: float = Field(0.02, ge=0)
    """Initial standard deviation of the label table. On small data, labels are learned faster with a larger value."""
    time_frequencies: Literal["diffusers", "dit"] = "diffusers"
    """Frequencies of the time embedding. diffusers: from 1 down to 1/10000, as in diffusers' DiT. dit: the last is
    slightly above 1/10000, as in the original and its published weights. Networks of fewer than 1000 channels can only
    be exported to diffusers with `diffusers`."""
    gradient_checkpointing: bool = False
    """Recompute the blocks in the backward pass, which takes about a third more time and far less memory."""

    @model_validator(mode="before")
    @classmethod
    def _without_a_size_that_says_nothing(cls, data: Any) -> Any:
        is_complete = isinstance(data, dict) and all(data.get(name) is not None for name in Size._fields)
        return {name: value for name, value in data.items() if name != "size"} if is_complete else data

    @model_validator(mode="after")
    def _complete(self) -> Self:
        dimensions = {name: getattr(self, name) for name in Size._fields}
        missing = [name for name, value in dimensions.items() if value is None]
        if self.size is None and missing:
            raise ValueError(
                f"a DiT without size needs depth, width, num_heads and patch; missing: {', '.join(missing)}. "
                f"Set them, or a size such as DiT-S/2."
            )
        width, num_heads = self.shape.width, self.shape.num_heads
        if width % num_heads or width % 4:
            raise ValueError(
                f"width {width} must be divisible by num_heads {num_heads} and by 4. "
                f"Use a width such as {max(1, round(width / (4 * num_heads))) * 4 * num_heads}."
            )
        if self.rope:
            check_rope(width, num_heads)
        if self.class_tokens_from >= self.shape.depth:
            raise ValueError(
                f"class_tokens_from is {self.class_tokens_from}, but there are {self.shape.depth} blocks. Use a "
                f"smaller number."
            )
        return self

    @property
    def shape(self) -> Size:
        """Return depth, width, heads and patch; those that are unset are taken from `size`."""
        preset = SIZES[self.size] if self.size else None
        values = ((name, getattr(self, name)) for name in Size._fields)
        return Size(*(getattr(preset, name) if value is None else value for name, value in values))

    def build(self, spec: DataSpec, learned_variance: bool = False, interval: bool = False) -> DiT:
        """Build the network for data of this kind, freshly initialised from torch's global generator. interval: True to
        condition the network on intervals (`DiT.forward`). Raises ValueError if the patch does not divide the
        resolution.
        """
        return DiT(self, spec, learned_variance, interval)


class DiT(nn.Module):
    """Diffusion transformer: x_t, t and label, caption, embedding, numbers or image -> prediction [B, C, H, W], or [B,
    2C, H, W] with learned variance. `pos_embed` is a parameter without gradient, so that counts and state dicts match
    the published weights.
    """

    def __init__(
        self, config: DiTConfig, spec: DataSpec, learned_variance: bool = False, interval: bool = False
    ) -> None:
        super().__init__()
        depth, width, _, patch = config.shape
        self.grid_size = grid_of(spec, patch)
        if config.class_tokens and not spec.num_classes:
            raise ValueError(
                f"network.class_tokens is {config.class_tokens}, but the data have no classes. Leave it out."
            )
        self.config, self.spec, self.learned_variance = config, spec, learned_variance
        self.patch = patch
        out_channels = spec.channels * (2 if learned_variance else 1)
        self.pos_embed = nn.Parameter(grid_positions(width, self.grid_size)[None], requires_grad=False)
        self.x_embedder = PatchEmbedder(input_channels(spec), width, patch, config.patch_bottleneck)
        self.t_embedder = TimeEmbedder(width, endpoint=config.time_frequencies == "diffusers")
        if interval:
            self.interval_embedder = TimeEmbedder(width, endpoint=config.time_frequencies == "diffusers")
        if spec.num_classes:
            self.y_embedder = LabelEmbedder(spec.num_classes + config.null_label, width)
        if config.class_tokens:
            self.class_tokens = nn.Parameter(torch.empty(1, config.class_tokens, width))
        reads, sees = TEXT in spec.conditions, EMBEDDING in spec.conditions
        if reads:
            self.text_embedder = TextEmbedder(spec.conditions[TEXT][-1], width)
        if sees:
            self.image_embedder = ImageEmbedder(spec.conditions[EMBEDDING][0], width, config.embedding_tokens)
        add_numbers(self, spec, width)
        context = reads or (sees and config.embedding_tokens > 0)
        self.blocks = nn.ModuleList(Block(config, context) for _ in range(depth))
        self.final_layer = FinalLayer(config, patch * patch * out_channels)
        self._initialise()

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        /,
        label: Tensor | None = None,
        text: Tensor | None = None,
        embedding: Tensor | None = None,
        numbers: Tensor | None = None,
        image: Tensor | None = None,
        interval: Tensor | None = None,
        augment: Tensor | None = None,
        tokens_of: int | None = None,
    ) -> Any:
        """x [B, C, H, W], t [B] as the process counts time, label int64 [B] (num_classes: no label), text float
        [B, 1 + L, dim] (a caption's embedding, then its tokens; zeros: none), embedding float [B, dim] (an image's;
        zeros: none), numbers float [B, columns, 2] (an image's; zeros: none), image float [B, C', h, w] (another one;
        zeros: none), interval [B], from t down (none: 0), augment [B, L] (labels of an augmentation, in training).

        A network of unlabelled data takes no label. tokens_of: the number of a block, from 1; returns (prediction,
        image tokens after this block [B, N, D]). Raises ValueError if shapes do not fit the network.
        """
        check_inputs(self.spec, x, label, text=text, embedding=embedding, numbers=numbers, image=image)
        tokens = self.x_embedder(with_image(x, image)) + self.pos_embed  # [B, N, D]
        c = self.t_embedder(t, tokens.dtype)  # [B, D]
        if hasattr(self, "interval_embedder"):
            c = c + self.interval_embedder(torch.zeros_like(t) if interval is None else interval, tokens.dtype)
        elif interval is not None:
            raise ValueError(
                "The network was trained without intervals, which the sampler flow_map needs. Use another sampler."
            )
        if label is not None:
            y = self.y_embedder(label)  # [B, D]
            c = c + y
        words, mask = None, None
        if text is not None:
            caption, words = self.text_embedder(text.to(tokens.dtype))  # [B, D], [B, L, D]
            c, mask = c + caption, present(text, tokens.shape[1])
        if embedding is not None:
            seen, of_image = self.image_embedder(embedding.to(tokens.dtype))  # [B, D], [B, M, D]
            c = c + seen
            if mask is not None and of_image is not None:
                mask = F.pad(mask, (of_image.shape[1], 0), value=True)  # [B, M + L + N]
            both = [some for some in (of_image, words) if some is not None]
            words = torch.cat(both, 1) if both else None  # [B, M + L, D]
        c = with_added(self, c, numbers, augment)
        angles = self._angles(tokens) if self.config.rope else None
        recompute = self.config.gradient_checkpointing and torch.is_grad_enabled()
        num_class_tokens = self.config.class_tokens
        for number, block in enumerate(self.blocks):
            if num_class_tokens and number == self.config.class_tokens_from:
                tokens = torch.cat([y[:, None, :] + self.class_tokens, tokens], 1)  # [B, M + N, D]
                angles = None if angles is None else F.pad(angles, (0, 0, num_class_tokens, 0))  # these are not rotated
                mask = None if mask is None else F.pad(mask, (0, num_class_tokens), value=True)
            inputs = (words, mask, angles)
            if recompute:
                tokens = checkpoint(block, tokens, c, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                tokens = block(tokens, c, *inputs)  # [B, M + N, D]
            if number + 1 == tokens_of:
                patch_tokens = tokens[:, -self.pos_embed.shape[1] :]
        patches = self.final_layer(tokens[:, num_class_tokens:], c)  # [B, N, p · p · C_out]
        prediction = unpatchify(patches, self.patch, x.shape[2], x.shape[3])  # [B, C_out, H, W]
        return prediction if tokens_of is None else (prediction, patch_tokens)

    @property
    def condition_width(self) -> int:
        """Return the number of channels of the embedding of time and conditions."""
        return self.config.shape.width

    def _angles(self, tokens: Tensor) -> Tensor:
        """Return the rotation angles of a head's channels for each token, recomputed so that no copy is stored."""
        return rotary_angles(self.config.shape.width // self.config.shape.num_heads, self.grid_size, tokens.device)

    def _initialise(self) -> None:
        """Initialise every Linear by Xavier, time and class tokens by N(0, 0.02), and the last layer of every residual
        branch by zero, so that the initial output is 0. Intervals initially have no effect."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        for name, parameter in self.named_parameters():
            if name == "x_embedder.proj.weight":
                nn.init.xavier_uniform_(parameter.view(parameter.shape[0], -1))
            elif name == "class_tokens" or (
                name.startswith(("t_embedder", "interval_embedder")) and name.endswith("weight")
            ):
                nn.init.normal_(parameter, std=0.02)
            elif name.startswith("y_embedder"):
                nn.init.normal_(parameter, std=self.config.label_init_std)
            elif "adaLN_modulation" in name or name == "final_layer.linear.weight" or name.endswith("bias"):
                nn.init.zeros_(parameter)
            if name == "interval_embedder.mlp.2.weight":
                nn.init.zeros_(parameter)


class Block(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the condition (adaLN-Zero, section 3.2)."""

    def __init__(self, config: DiTConfig, reads: bool = False) -> None:
        super().__init__()
        _, width, num_heads, _ = config.shape
        hidden = round(width * config.mlp_ratio)
        self.norm1 = _norm(config, width)
        head_norm = (lambda d: _norm(config, d, affine=True)) if config.qk_norm else None
        self.attn = SelfAttention(width, num_heads, head_norm, context=reads)
        self.norm2 = _norm(config, width)
        self.mlp = SwiGlu(width, round(2 * hidden / 3)) if config.mlp == "swiglu" else Mlp(width, hidden)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), set_num_maps(Linear(width, 6 * width), 6))

    def forward(
        self,
        x: Tensor,
        c: Tensor,
        words: Tensor | None = None,
        mask: Tensor | None = None,
        angles: Tensor | None = None,
    ) -> Tensor:
        """Tokens [B, N, D], condition [B, D] -> [B, N, D]. words: tokens of a caption or of an embedding, [B, L, D];
        mask: `present`; angles: [N, d / 2], `rotary_angles`."""
        modulation: Tensor = self.adaLN_modulation(c)[:, None, :]  # [B, 1, 6D]
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=2)  # each [B, 1, D]
        modulated = torch.addcmul(shift1, self.norm1(x), 1 + scale1)  # [B, N, D]
        x = torch.addcmul(x, gate1, self.attn(modulated, words, mask, angles))  # [B, N, D]
        return torch.addcmul(x, gate2, self.mlp(torch.addcmul(shift2, self.norm2(x), 1 + scale2)))  # [B, N, D]


class FinalLayer(nn.Module):
    """Tokens -> patches, after a norm shifted and scaled by the condition."""

    def __init__(self, config: DiTConfig, out_features: int) -> None:
        super().__init__()
        width = config.shape.width
        self.norm_final = _norm(config, width)
        self.linear = Linear(width, out_features)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), set_num_maps(Linear(width, 2 * width), 2))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Tokens [B, N, D], condition [B, D] -> [B, N, out_features]."""
        shift, scale = self.adaLN_modulation(c)[:, None, :].chunk(2, dim=2)  # each [B, 1, D]
        return self.linear(torch.addcmul(shift, self.norm_final(x), 1 + scale))


def present(text: Tensor, num_patches: int) -> Tensor:
    """Return the mask of tokens, bool [B, L + N]: tokens of a caption [B, 1 + L, dim] if present, and all image
    tokens."""
    words = text[:, 1:].any(dim=2)
    return torch.cat([words, words.new_ones(len(words), num_patches)], dim=1)


def _norm(config: DiTConfig, width: int, affine: bool = False) -> nn.Module:
    """Build a normalisation layer. affine: True if a LayerNorm has a gain and a bias."""
    if config.norm == "rms_norm":
        return nn.RMSNorm(width, eps=1e-6)
    return nn.LayerNorm(width, elementwise_affine=affine, eps=1e-6)
