"""U-Net of IDDPM (Nichol and Dhariwal 2021, arXiv:2102.09672) and, with its options, of ADM (Dhariwal and Nichol 2021,
arXiv:2105.05233).

Parameters have the names of the published weights (`networks/weights/unet.py` reads those).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from image_diffusion.core.config.base import Config
from image_diffusion.core.resolution import divided, size_text
from image_diffusion.core.types import DataSpec
from image_diffusion.nn.blocks import set_num_maps
from image_diffusion.nn.inputs import add_numbers, check_inputs, input_channels, with_added, with_image
from image_diffusion.nn.positions import sinusoid

GROUPS = 32

MULTIPLIERS: dict[int, tuple[float, ...]] = {
    32: (1, 2, 2, 2),
    64: (1, 2, 3, 4),
    128: (1, 1, 2, 3, 4),
    256: (1, 1, 2, 2, 4, 4),
    512: (0.5, 1, 1, 2, 2, 4, 4),
}
"""Channels of each level, as multiples of the base channels, by the resolution of the images."""


class UNetConfig(Config):
    """U-Net of IDDPM. ADM uses residual_resampling, head_channels 64 and, at 64 x 64, attention_order new."""

    type: Literal["unet"] = "unet"

    channels: int = Field(128, gt=0)
    """Base number of channels. The channels of each level, this times its multiplier, must be multiples of 32."""
    multipliers: tuple[float, ...] | None = None
    """Channels of each level, from the finest to the coarsest, as multiples of `channels`; unset: the published ones
    for images of 32, 64, 128, 256 or 512 pixels. Each level has half the resolution of the one before."""
    stem: Literal["adm", "iddpm"] = "adm"
    """Output channels of the first convolution if the first multiplier is not 1. adm: those of the finest level, as in
    guided-diffusion. iddpm: `channels`, as in improved-diffusion, whose last convolution then fails, since it also
    expects `channels`; here it accepts the actual channels."""
    num_res_blocks: int = Field(2, gt=0)
    """Residual blocks of a level in the downsampling path; the upsampling path has one more."""
    attention_resolutions: tuple[int, ...] = (16, 8)
    """Resolutions with attention after each residual block; for rectangles, of the shorter side. The middle block
    always has attention."""
    num_heads: int = Field(4, gt=0)
    """Attention heads."""
    num_heads_upsample: int | None = Field(None, gt=0)
    """Attention heads in the upsampling path; unset: num_heads."""
    head_channels: int | None = Field(None, gt=0)
    """Channels of a head, instead of the number of heads."""
    attention_order: Literal["legacy", "new"] = "legacy"
    """Order of queries, keys and values in one tensor. legacy: grouped by head. new: all queries, all keys, all
    values."""
    scale_shift_norm: bool = True
    """Scale and shift the normalised features of a block by time and label; otherwise add them before normalisation."""
    residual_resampling: bool = False
    """Halve and double the resolution in residual blocks, instead of in convolutions."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout inside residual blocks."""
    low_resolution: None = None
    """Unused. To enlarge images, set `system.condition`: {type: image, from: self, shrink: 4}."""
    gradient_checkpointing: bool = False
    """Recompute the blocks in the backward pass, with the same dropout: about a third more time, far less memory."""

    @field_validator("low_resolution", mode="before")
    @classmethod
    def _is_a_condition(cls, value: Any) -> None:
        if value is not None:
            raise ValueError(
                f"small images of {value} x {value} are a part of the condition now. Leave it out, and write "
                "system.condition: [{type: label}, {type: image, from: self, shrink: N}], with the resolution over "
                f"{value} as N."
            )

    @field_validator("multipliers")
    @classmethod
    def _positive(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and (not value or min(value) <= 0):
            raise ValueError(f"{list(value)} are not multipliers. Use a positive number for each level.")
        return value

    def build(self, spec: DataSpec, learned_variance: bool = False, null_label: bool = False) -> UNet:
        """Build the network for data of this kind, freshly initialised from torch's global generator.

        null_label: True for an additional row of the label table, for no label. Raises ValueError if the data do not
        fit.
        """
        return UNet(self, spec, learned_variance, null_label)

    def levels(self, spec: DataSpec) -> dict[int, int]:
        """Return the channels by resolution (for rectangles, of the shorter side), from the finest level to the
        coarsest. Raises ValueError if the data do not fit."""
        shorter = min(spec.size)
        multipliers = self.multipliers or MULTIPLIERS.get(shorter)
        if multipliers is None:
            raise ValueError(
                f"There are no published multipliers for images of {size_text(spec.resolution)} pixels, only "
                f"for {', '.join(map(str, MULTIPLIERS))}. Set network.multipliers, or use one of these."
            )
        coarsest = 2 ** (len(multipliers) - 1)
        if divided(spec.resolution, coarsest) is None:
            raise ValueError(
                f"Images of {size_text(spec.resolution)} pixels cannot be halved {len(multipliers) - 1} "
                f"times, as {len(multipliers)} multipliers require. Use fewer, or a multiple of {coarsest} pixels."
            )
        levels = {shorter >> i: int(multiplier * self.channels) for i, multiplier in enumerate(multipliers)}
        self._check_widths([self.stem_channels(levels), *levels.values()])
        self._check_attention(levels)
        return levels

    def stem_channels(self, levels: dict[int, int]) -> int:
        """Return the number of output channels of the first convolution. levels: the result of `levels`."""
        return self.channels if self.stem == "iddpm" else next(iter(levels.values()))

    def heads(self, channels: int, upward: bool) -> int:
        """Return the number of attention heads for a number of channels. upward: True in the upsampling path."""
        if self.head_channels is not None:
            return channels // self.head_channels
        return self.num_heads_upsample or self.num_heads if upward else self.num_heads

    def _check_widths(self, widths: list[int]) -> None:
        odd = next((width for width in widths if width % GROUPS or width == 0), None)
        if odd is not None:
            raise ValueError(
                f"channels {self.channels} gives a level {odd} channels, but features are normalised in {GROUPS} "
                f"groups. Choose channels so that every level has a multiple of {GROUPS}."
            )

    def _check_attention(self, levels: dict[int, int]) -> None:
        absent = [edge for edge in self.attention_resolutions if edge not in levels]
        if absent:
            raise ValueError(
                f"attention_resolutions names {absent[0]}, but the network works at "
                f"{', '.join(str(resolution) for resolution in levels)}. Choose from these."
            )
        attended = {levels[resolution] for resolution in self.attention_resolutions} | {list(levels.values())[-1]}
        for name in ("head_channels",) if self.head_channels else ("num_heads", "num_heads_upsample"):
            divisor = getattr(self, name)
            odd = next((width for width in sorted(attended) if divisor and width % divisor), None)
            if odd is not None:
                raise ValueError(
                    f"{name} {divisor} does not divide the {odd} channels of a level with attention. Use a divisor."
                )


class UNet(nn.Module):
    """U-Net: x_t, t and conditions -> prediction [B, C, H, W], or [B, 2C, H, W] with learned variance."""

    ends = ("input_blocks.0",)

    def __init__(self, config: UNetConfig, spec: DataSpec, learned_variance: bool, null_label: bool) -> None:
        super().__init__()
        levels = config.levels(spec)
        self.config, self.spec = config, spec
        width = 4 * config.channels
        self.time_embed = nn.Sequential(nn.Linear(config.channels, width), nn.SiLU(), nn.Linear(width, width))
        if spec.num_classes:
            self.label_emb = nn.Embedding(spec.num_classes + null_label, width)
        add_numbers(self, spec, width)

        first, last = config.stem_channels(levels), list(levels.values())[-1]
        self.input_blocks = nn.ModuleList([Stage(nn.Conv2d(input_channels(spec), first, 3, padding=1))])
        skips, channels = [first], first
        for resolution, out_channels in levels.items():
            for _ in range(config.num_res_blocks):
                layers: list[nn.Module] = [ResidualBlock(config, channels, out_channels)]
                channels = out_channels
                if resolution in config.attention_resolutions:
                    layers.append(Attention(config, channels))
                self.input_blocks.append(Stage(*layers))
                skips.append(channels)
            if resolution != min(levels):
                halve = ResidualBlock(config, channels, channels, nn.AvgPool2d(2))
                self.input_blocks.append(Stage(halve if config.residual_resampling else Halve(channels)))
                skips.append(channels)

        self.middle_block = Stage(
            ResidualBlock(config, last, last), Attention(config, last), ResidualBlock(config, last, last)
        )

        self.output_blocks = nn.ModuleList()
        for resolution, out_channels in reversed(levels.items()):
            for i in range(config.num_res_blocks + 1):
                layers = [ResidualBlock(config, channels + skips.pop(), out_channels)]
                channels = out_channels
                if resolution in config.attention_resolutions:
                    layers.append(Attention(config, channels, upward=True))
                if i == config.num_res_blocks and resolution != max(levels):
                    double = ResidualBlock(config, channels, channels, nn.Upsample(scale_factor=2))
                    layers.append(double if config.residual_resampling else Double(channels))
                self.output_blocks.append(Stage(*layers))

        out_channels = spec.channels * (2 if learned_variance else 1)
        self.out = nn.Sequential(
            nn.GroupNorm(GROUPS, channels), nn.SiLU(), zero(nn.Conv2d(channels, out_channels, 3, padding=1))
        )

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        /,
        label: Tensor | None = None,
        numbers: Tensor | None = None,
        image: Tensor | None = None,
        augment: Tensor | None = None,
    ) -> Tensor:
        """x [B, C, H, W], t [B] as the process counts time, label int64 [B] (num_classes: no label).

        numbers: [B, columns, 2], of the image; zeros: none. image: [B, C', h, w], another image, such as a small one to
        enlarge; zeros: none. augment: [B, L], labels of an augmentation, in training. A network of unlabelled data
        takes no label. Raises ValueError if shapes do not fit the network."""
        check_inputs(self.spec, x, label, numbers=numbers, image=image)
        emb = self.time_embed(sinusoid(t, self.config.channels).to(x.dtype))  # [B, E]
        if label is not None:
            emb = emb + self.label_emb(label)  # [B, E]
        emb = with_added(self, emb, numbers, augment)
        x = with_image(x, image)  # [B, C + C', H, W]
        skips = []
        for block in self.input_blocks:
            x = self._run(block, x, emb)  # [B, C_i, H_i, W_i]
            skips.append(x)
        x = self._run(self.middle_block, x, emb)
        for block in self.output_blocks:
            x = self._run(block, torch.cat([x, skips.pop()], dim=1), emb)
        return self.out(x)

    @property
    def condition_width(self) -> int:
        """Return the number of channels of the embedding of time and label."""
        return 4 * self.config.channels

    def _run(self, block: nn.Module, x: Tensor, emb: Tensor) -> Tensor:
        if self.config.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, emb, use_reentrant=False, preserve_rng_state=self.config.dropout > 0)
        return block(x, emb)


class Stage(nn.Sequential):
    """Sequence of layers; residual blocks also receive the embedding."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:  # type: ignore[override]
        """[B, C, H, W], embedding of time and label [B, E] -> [B, C', H', W']."""
        for layer in self:
            x = layer(x, emb) if isinstance(layer, ResidualBlock) else layer(x)
        return x


class ResidualBlock(nn.Module):
    """Two normalised convolutions with a shortcut, the second conditioned on time and label. resample: layer that
    changes the resolution before the first convolution and in the shortcut; unset: none.
    """

    def __init__(self, config: UNetConfig, channels: int, out_channels: int, resample: nn.Module | None = None) -> None:
        super().__init__()
        self.scale_shift_norm = config.scale_shift_norm
        self.in_layers = nn.Sequential(
            nn.GroupNorm(GROUPS, channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1)
        )
        self.resample = resample or nn.Identity()
        maps = 2 if config.scale_shift_norm else 1
        modulation = set_num_maps(nn.Linear(4 * config.channels, maps * out_channels), maps)
        self.emb_layers = nn.Sequential(nn.SiLU(), modulation)
        self.out_layers = nn.Sequential(
            nn.GroupNorm(GROUPS, out_channels),
            nn.SiLU(),
            nn.Dropout(config.dropout),
            zero(nn.Conv2d(out_channels, out_channels, 3, padding=1)),
        )
        self.skip_connection = nn.Identity() if channels == out_channels else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        """[B, C, H, W], [B, E] -> [B, C', H', W']."""
        norm, activation, convolution = self.in_layers
        h = convolution(self.resample(activation(norm(x))))  # [B, C', H', W']
        modulation: Tensor = self.emb_layers(emb)[:, :, None, None]  # [B, C' or 2C', 1, 1]
        norm, activation, dropout, convolution = self.out_layers
        if self.scale_shift_norm:
            scale, shift = modulation.chunk(2, dim=1)  # each [B, C', 1, 1]
            h = norm(h) * (1 + scale) + shift
        else:
            h = norm(h + modulation)
        return self.skip_connection(self.resample(x)) + convolution(dropout(activation(h)))


class Attention(nn.Module):
    """Self-attention over the positions of an image. Its weights are stored as those of convolutions of length 1."""

    def __init__(self, config: UNetConfig, channels: int, upward: bool = False) -> None:
        super().__init__()
        self.num_heads, self.order = config.heads(channels, upward), config.attention_order
        self.norm = nn.GroupNorm(GROUPS, channels)
        maps = 3 * self.num_heads if self.order == "legacy" else 3
        self.qkv = set_num_maps(nn.Conv1d(channels, 3 * channels, 1), maps)
        self.proj_out = nn.Conv1d(channels, channels, 1)
        zero(self.proj_out)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        B, C, H, W = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)  # [B, N, C]
        qkv = F.linear(tokens, self.qkv.weight[:, :, 0], self.qkv.bias)  # [B, N, 3C]
        if self.order == "legacy":
            parts = qkv.view(B, H * W, self.num_heads, 3, -1).permute(3, 0, 2, 1, 4)
        else:
            parts = qkv.view(B, H * W, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)  # each [B, heads, N, d]
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, H * W, C)  # [B, N, C]
        h = F.linear(h, self.proj_out.weight[:, :, 0], self.proj_out.bias)  # [B, N, C]
        return x + h.transpose(1, 2).view(B, C, H, W)


class Halve(nn.Module):
    """Halves the resolution by a strided convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H / 2, W / 2]."""
        return self.op(x)


class Double(nn.Module):
    """Doubles the resolution: repeats every pixel four times, then convolves."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, 2H, 2W]."""
        return self.conv(F.interpolate(x, scale_factor=2))


def zero(module: nn.Module) -> nn.Module:
    """Set all parameters of a module to 0, the initial values of the last layer of a residual branch, and return it."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module
