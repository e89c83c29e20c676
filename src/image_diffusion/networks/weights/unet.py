"""U-Net weights of improved-diffusion and guided-diffusion: determine the network of a state dict from its shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from image_diffusion.core.types import IMAGE, DataSpec
from image_diffusion.networks.unet import MULTIPLIERS, UNetConfig
from image_diffusion.networks.weights.fit import listed, num_blocks

_LABELS = "label_emb.weight"
_NEEDED = (
    "time_embed.0.weight", "input_blocks.0.0.weight", "input_blocks.1.0.out_layers.3.weight",
    "output_blocks.0.0.out_layers.3.weight", "out.2.weight",
)  # fmt: skip


def is_unet(names: Iterable[str]) -> bool:
    """Return True if the names are those of such a U-Net's parameters."""
    return "input_blocks.0.0.weight" in names


def unet_of_shapes(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], path: Path
) -> tuple[UNetConfig, DataSpec]:
    """Return the network of RGB images whose tensors have these published names and shapes.

    settings: values that shapes do not determine, by the names of `UNetConfig`: the heads, attention_order, dropout.
    The resolution is the published one with these multipliers; the small images of an upsampler have a quarter of it.
    path: the file, for messages.

    Raises ValueError if something is missing, or the resolution cannot be determined.
    """
    absent = [name for name in _NEEDED if name not in tensors]
    if absent:
        raise ValueError(f"{path} is not a complete U-Net: {listed(absent)} missing. Use the complete file.")
    channels = tensors["time_embed.0.weight"].shape[1]
    count = num_blocks(tensors, "output_blocks.")
    doubling = [match for name in tensors if (match := re.match(r"output_blocks\.(\d+)\.[12]\.(conv|in_layers)", name))]
    num_res_blocks = min((int(match[1]) for match in doubling), default=count - 1)
    firsts = [1 + i for i in range(0, count, num_res_blocks + 1)]  # the first residual block of each level
    widths = [tensors[f"input_blocks.{i}.0.out_layers.3.weight"].shape[0] for i in firsts]
    stem = tensors["input_blocks.0.0.weight"].shape[0]
    multipliers = tuple(width / channels for width in widths)
    resolution = next((resolution for resolution, published in MULTIPLIERS.items() if published == multipliers), None)
    if resolution is None:
        raise ValueError(
            f"{path} has {', '.join(str(width) for width in widths)} channels from level to level, as no "
            f"published network, so that the resolution of its images is unknown. Use --experiment with the "
            f"experiment file that describes it."
        )
    in_channels, out_channels = tensors["input_blocks.0.0.weight"].shape[1], tensors["out.2.weight"].shape[0]
    if in_channels not in (3, 6) or out_channels not in (3, 6):
        raise ValueError(
            f"{path} reads {in_channels} channels and returns {out_channels}; a U-Net of RGB images reads and returns "
            f"3 or 6. Use --experiment with the experiment file that describes it."
        )
    config = UNetConfig(
        channels=channels,
        stem="adm" if stem == widths[0] else "iddpm",
        num_res_blocks=num_res_blocks,
        attention_resolutions=tuple(
            resolution >> level for level, i in enumerate(firsts) if f"input_blocks.{i}.1.qkv.weight" in tensors
        ),
        scale_shift_norm=tensors["input_blocks.1.0.emb_layers.1.weight"].shape[0] == 2 * widths[0],
        residual_resampling=any(match[2] == "in_layers" for match in doubling),
        **settings,
    )
    conditions = {IMAGE: (3, resolution // 4, resolution // 4)} if in_channels == 6 else {}
    return config, DataSpec(
        channels=3, resolution=resolution, num_classes=num_label_rows(tensors), conditions=conditions
    )


def num_label_rows(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of rows of the label table; 0 without one."""
    return len(tensors[_LABELS]) if _LABELS in tensors else 0
