"""U-Net weights of improved-diffusion and guided-diffusion: determine the network of a state dict from its shapes.
Export of a U-Net to diffusers: UNet2DModel, and the folder that `DDPMPipeline.from_pretrained` loads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from image_diffusion.core.files.atomic import atomic_folder
from image_diffusion.core.types import IMAGE, DataSpec
from image_diffusion.networks.unet import (
    GROUPS,
    MULTIPLIERS,
    Attention,
    Double,
    Halve,
    ResidualBlock,
    Stage,
    UNet,
    UNetConfig,
)
from image_diffusion.networks.weights import listed, num_blocks
from image_diffusion.networks.weights.dit_diffusers import prediction_type
from image_diffusion.nn.positions import sinusoid

if TYPE_CHECKING:  # diffusers takes seconds to import
    from diffusers.models.unets.unet_2d import UNet2DModel
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler


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


_RESIDUAL = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}


def check_diffusers_unet(
    config: UNetConfig, spec: DataSpec, num_classes: int, conditions: Collection[str], is_array: bool
) -> None:
    """Raise ValueError for what UNet2DModel and DDPMPipeline do not have. num_classes: of the data. conditions: the
    names of those beside the class, or the kinds of their shards. is_array: True if the images are arrays."""
    levels = config.levels(spec)
    attended = {levels[resolution] for resolution in config.attention_resolutions} | {list(levels.values())[-1]}
    heads = {width // config.heads(width, upward) for width in attended for upward in (False, True)}
    first = next(iter(levels.values()))
    foreign = {
        "classes": num_classes > 0,
        **{f"conditions on {name.removesuffix('s')}s": True for name in sorted(conditions)},
        "arrays": is_array,
        f"images of {spec.channels} channels": spec.channels not in (1, 3, 4),
        "network.residual_resampling": config.residual_resampling,
        f"attention heads of several widths ({', '.join(map(str, sorted(heads)))})": len(heads) > 1,
        "other width than network.channels at the first level": first != config.channels,
    }
    unsupported = [name for name, used in foreign.items() if used]
    if unsupported:
        raise ValueError(
            f"Diffusers' DDPMPipeline has no {' and no '.join(unsupported)}. Set export.format to pipeline."
        )


def to_diffusers_unet(network: UNet, times: Tensor) -> UNet2DModel:
    """Return an equivalent UNet2DModel for timesteps 0 … T - 1.

    times: float32 [T], the network's time at each timestep; if the times differ from the timesteps, their sines and
    cosines become a table (time_embedding_type learned). Raises ValueError as `check_diffusers_unet` does.
    """
    from diffusers.models.unets.unet_2d import UNet2DModel

    config, spec = network.config, network.spec
    check_diffusers_unet(config, spec, spec.num_classes, spec.conditions, spec.levels is not None)
    levels = config.levels(spec)
    attends = [side in config.attention_resolutions for side in levels]
    middle = network.middle_block[1]
    assert isinstance(middle, Attention)
    plain = torch.equal(times, torch.arange(len(times)).float())
    tensors = {name: tensor.detach().cpu().float() for name, tensor in network.state_dict().items()}
    unet = UNet2DModel(
        sample_size=spec.resolution if isinstance(spec.resolution, int) else list(spec.resolution),
        in_channels=spec.channels,
        out_channels=len(tensors["out.2.bias"]),
        time_embedding_type="positional" if plain else "learned",
        num_train_timesteps=None if plain else len(times),
        down_block_types=tuple("AttnDownBlock2D" if attended else "DownBlock2D" for attended in attends),
        up_block_types=tuple("AttnUpBlock2D" if attended else "UpBlock2D" for attended in reversed(attends)),
        block_out_channels=tuple(levels.values()),
        layers_per_block=config.num_res_blocks,
        dropout=config.dropout,
        attention_head_dim=middle.qkv.in_channels // middle.num_heads,
        norm_num_groups=GROUPS,
        attn_norm_num_groups=GROUPS,
        norm_eps=1e-5,
        resnet_time_scale_shift="scale_shift" if config.scale_shift_norm else "default",
    )
    theirs = _outside(tensors)
    if not plain:
        theirs["time_proj.weight"] = sinusoid(times, config.channels)
    for ours, layer, place in _places(network):
        theirs |= (
            _attention(layer, ours, place, tensors) if isinstance(layer, Attention) else _layer(ours, place, tensors)
        )
    unet.load_state_dict(theirs)
    return unet.eval()


def ddpm_scheduler(betas: Tensor, prediction: str, variance: str) -> DDPMScheduler:
    """Return ancestral sampling: our Ddpm with the same number of steps. betas: float64 [T], of every timestep.

    prediction: eps, x0 or v. variance: fixed_small, fixed_large or learned_range. Raises ValueError for others.
    """
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

    return DDPMScheduler(
        num_train_timesteps=len(betas),
        trained_betas=betas.tolist(),
        variance_type=variance,
        prediction_type=prediction_type(prediction, "DDPM"),
        clip_sample=True,
        timestep_spacing="linspace",
    )


def write_ddpm_pipeline(folder: Path, unet: UNet2DModel, scheduler: DDPMScheduler) -> None:
    """Write a folder that `DDPMPipeline.from_pretrained` loads. It is completed before it replaces an existing one."""
    from diffusers.pipelines.ddpm.pipeline_ddpm import DDPMPipeline

    pipeline: Any = DDPMPipeline(unet=unet, scheduler=scheduler)
    with atomic_folder(folder) as written:
        pipeline.save_pretrained(written)


def _places(network: UNet) -> list[tuple[str, nn.Module, str]]:
    """Return each layer of the network's blocks: its name in our network, itself, its name in diffusers."""
    count, num_levels = network.config.num_res_blocks, len(network.config.levels(network.spec))
    places = []
    for i, stage in enumerate(network.input_blocks):
        level, k = divmod(i - 1, count + 1)
        places += [] if i == 0 else _of_stage(f"input_blocks.{i}", stage, f"down_blocks.{level}", k)
    for k, layer in enumerate(network.middle_block):
        there = "mid_block.attentions.0" if k == 1 else f"mid_block.resnets.{k // 2}"
        places.append((f"middle_block.{k}", layer, there))
    for i, stage in enumerate(network.output_blocks):
        level, k = divmod(i, count + 1)
        assert level < num_levels
        places += _of_stage(f"output_blocks.{i}", stage, f"up_blocks.{level}", k)
    return places


def _of_stage(ours: str, stage: nn.Module, theirs: str, k: int) -> list[tuple[str, nn.Module, str]]:
    assert isinstance(stage, Stage)
    names = {
        ResidualBlock: f"resnets.{k}",
        Attention: f"attentions.{k}",
        Halve: "downsamplers.0",
        Double: "upsamplers.0",
    }
    return [(f"{ours}.{j}", layer, f"{theirs}.{names[type(layer)]}") for j, layer in enumerate(stage)]


def _outside(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors before and after the blocks."""
    names = {
        "time_embed.0": "time_embedding.linear_1",
        "time_embed.2": "time_embedding.linear_2",
        "input_blocks.0.0": "conv_in",
        "out.0": "conv_norm_out",
        "out.2": "conv_out",
    }
    return {f"{there}.{key}": tensors[f"{ours}.{key}"] for ours, there in names.items() for key in ("weight", "bias")}


def _layer(ours: str, theirs: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a residual block, or of a layer that changes the resolution."""
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith(f"{ours}."):
            inner, _, last = name.removeprefix(f"{ours}.").rpartition(".")
            renamed[f"{theirs}.{_RESIDUAL.get(inner, 'conv')}.{last}"] = tensor
    return renamed


def _attention(layer: Attention, ours: str, theirs: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert convolutions of length 1 to linear layers, queries, keys and values apart."""
    renamed = {f"{theirs}.group_norm.{key}": tensors[f"{ours}.norm.{key}"] for key in ("weight", "bias")}
    for key in ("weight", "bias"):
        joined, out = tensors[f"{ours}.qkv.{key}"], tensors[f"{ours}.proj_out.{key}"]
        joined = joined.flatten(1) if key == "weight" else joined[:, None]  # [3C, C] or [3C, 1]
        if layer.order == "legacy":  # each head's three together
            parts = joined.unflatten(0, (layer.num_heads, 3, -1)).transpose(0, 1).flatten(1, 2)
        else:
            parts = joined.unflatten(0, (3, -1))
        for name, part in zip(("to_q", "to_k", "to_v"), parts, strict=True):
            renamed[f"{theirs}.{name}.{key}"] = part if key == "weight" else part[:, 0]
        renamed[f"{theirs}.to_out.0.{key}"] = out.flatten(1) if key == "weight" else out
    return renamed
