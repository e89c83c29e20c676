"""Weights of diffusion models: DiT and SiT, the U-Nets of improved-diffusion and guided-diffusion, and RIN.

Shapes do not determine the settings of a U-Net; those of the published ones come from the READMEs of both repositories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from image_diffusion.codecs.diffusers import StabilityVae
from image_diffusion.core.types import DataSpec
from image_diffusion.foreign.weights import Described, ForeignWeights, checked_weights
from image_diffusion.networks.weights import dit
from image_diffusion.networks.weights.dit import as_flow, is_dit, is_dit_folder
from image_diffusion.networks.weights.unet import is_unet, num_label_rows, unet_of_shapes
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.objectives.timestep_sampling import LossSecondMoment
from image_diffusion.process.discrete import Cosine, Discrete, Linear
from image_diffusion.process.flow import Flow
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.iddpm import IddpmSystem
from image_diffusion.systems.diffusion.rin import RinSystem


def read_dit(content: Mapping[str, Any], path: Path, codec: str, described: Described) -> ForeignWeights | None:
    """Read a DiT, or a SiT, which has the names and shapes of a DiT, if the experiment describes a flow process.

    Without an experiment, the network predicts eps on 1,000 linear steps, with a learned variance if it has outputs for
    one. Raises ValueError for an experiment that does not fit.
    """
    if not (is_dit_folder(path) if path.is_dir() else is_dit(content)):
        return None
    experiment = described(DiTSystem)
    theirs = None if experiment is None else experiment.system
    weights = dit.read_dit(path, num_heads=None if theirs is None else theirs.network.shape.num_heads, content=content)
    learned = weights.learned_variance
    size = weights.config.size or f"of depth {weights.config.shape.depth}"
    parts: dict[str, Any]
    if theirs is None:
        objective = Denoising(
            prediction="eps",
            variance="learned_range" if learned else "fixed_large",
            loss="hybrid" if learned else "simple",
            label_drop_probability=0.1 if weights.spec.num_classes else 0.0,
        )
        parts = {"objective": objective}
        description = f"a DiT {size} that predicts eps; if it is a SiT, say so: --experiment"
    elif isinstance(theirs.process, Flow):
        weights = as_flow(weights)
        parts = {"process": theirs.process.model_copy(update={"time_scale": 1.0}), "objective": theirs.objective}
        description = f"a SiT {size}, as --experiment says"
    elif theirs.learns_variance != learned:
        raise ValueError(
            f"{path} returns {'a' if learned else 'no'} variance, but system.objective.variance of the experiment is "
            f"{theirs.objective.variance}. Use {'learned_range' if learned else 'fixed_large'}."
        )
    else:
        parts = {"process": theirs.process, "objective": theirs.objective}
        description = f"a DiT {size}"
    vae = StabilityVae(weights=codec)
    identity = vae.build(None, None, torch.device("cpu"), torch.float32).identity
    system = DiTSystem(network=weights.config, **parts)
    unread = tuple(name for name in content if name != "ema") if "ema" in content else ()
    return ForeignWeights(weights.tensors, system, weights.spec, description, unread, vae, identity)


@dataclass(frozen=True)
class Recipe:
    """Training settings of a published network. network: settings that its shapes do not determine
    (`unet_of_shapes`)."""

    process: Discrete
    objective: Denoising
    network: dict[str, Any] = field(default_factory=dict)


_COSINE = Discrete(schedule=Cosine(), num_timesteps=4000, rescale_timesteps=True)
_LINEAR = Discrete(schedule=Linear(), num_timesteps=1000)
_RESCALED = Denoising(variance="learned_range", loss="rescaled_hybrid")
_HYBRID = Denoising(variance="learned_range", loss="hybrid")
_BOUND = Denoising(variance="learned_range", loss="rescaled_kl", timestep_sampling=LossSecondMoment())
_64_PER_HEAD = {"head_channels": 64}

PUBLISHED: dict[str, Recipe] = {
    # improved-diffusion, March 2021
    "cifar10_uncond_50M_500K": Recipe(_COSINE, _RESCALED, {"dropout": 0.3}),
    "cifar10_uncond_vlb_50M_500K": Recipe(_COSINE, _BOUND, {"dropout": 0.3}),
    "imagenet64_uncond_100M_1500K": Recipe(_COSINE, _RESCALED),
    "imagenet64_uncond_vlb_100M_1500K": Recipe(_COSINE, _BOUND),
    "imagenet64_cond_270M_250K": Recipe(Discrete(schedule=Cosine(), num_timesteps=4000), _HYBRID),
    "upsample_cond_500K": Recipe(Discrete(schedule=Linear(), num_timesteps=4000), _HYBRID),
    "lsun_uncond_100M_1200K_bs128": Recipe(_LINEAR, _HYBRID, {"num_heads": 1}),
    "lsun_uncond_100M_2400K_bs64": Recipe(_LINEAR, _HYBRID, {"num_heads": 1}),
    # guided-diffusion, July 2021
    "64x64_diffusion": Recipe(
        Discrete(schedule=Cosine(), num_timesteps=1000),
        _HYBRID,
        {"head_channels": 64, "attention_order": "new", "dropout": 0.1},
    ),
    "128x128_diffusion": Recipe(_LINEAR, _HYBRID),
    "256x256_diffusion": Recipe(_LINEAR, _HYBRID, _64_PER_HEAD),
    "256x256_diffusion_uncond": Recipe(_LINEAR, _HYBRID, _64_PER_HEAD),
    "512x512_diffusion": Recipe(_LINEAR, _HYBRID, _64_PER_HEAD),
    "64_256_upsampler": Recipe(_LINEAR, _HYBRID),
    "128_512_upsampler": Recipe(_LINEAR, _HYBRID, _64_PER_HEAD),
    "lsun_bedroom": Recipe(_LINEAR, _HYBRID, _64_PER_HEAD | {"dropout": 0.1}),
    "lsun_cat": Recipe(_LINEAR, _HYBRID, _64_PER_HEAD | {"dropout": 0.1}),
    "lsun_horse": Recipe(_LINEAR, _HYBRID, _64_PER_HEAD | {"dropout": 0.1}),
    "lsun_horse_nodropout": Recipe(_LINEAR, _HYBRID, _64_PER_HEAD),
}
"""Recipes by the name of the file, without its suffix."""


_ENLARGES = ({"type": "label"}, {"type": "image", "from": "self", "shrink": 4})
"""Condition of the published upsamplers."""


def read_iddpm(content: Mapping[str, Any], path: Path, codec: str, described: Described) -> ForeignWeights | None:
    """Read a U-Net on pixels, identified by a published name or described by an experiment. The number of classes comes
    from the label table, not from the experiment.
    """
    if not is_unet(content):
        return None
    experiment = described(IddpmSystem)
    if experiment is None:
        parts, spec = published(content, path)
        system = IddpmSystem(**parts)
    else:
        system = experiment.system
        num_classes = max(num_label_rows(content) - system.has_null_label, 0)
        data = experiment.data
        images = DataSpec(channels=data.num_channels, resolution=data.resolution, num_classes=num_classes)
        spec = images.model_copy(update={"conditions": system.sampling().derived_conditions(images)})
    tensors = checked_weights(system, spec, content, path, "U-Net")
    averages = sorted(file.name for file in path.parent.glob("ema_*.pt")) if path.stem.startswith("model") else []
    description = f"a U-Net; averages of it lie beside it: {', '.join(averages)}" if averages else "a U-Net"
    return ForeignWeights(tensors, system, spec, description)


def published(tensors: Mapping[str, Tensor], path: Path) -> tuple[dict[str, Any], DataSpec]:
    """Return the network, process and objective of a published U-Net, and its data. path: the file, whose name
    identifies the network. Raises ValueError for an unknown name.
    """
    if path.stem not in PUBLISHED:
        raise ValueError(
            f"{path} is a U-Net without a published name, and its tensors do not determine its heads and its noise. "
            f"Give an experiment file that describes it (--experiment), or the file its published name, such as "
            f"{next(iter(PUBLISHED))}.pt."
        )
    recipe = PUBLISHED[path.stem]
    network, spec = unet_of_shapes(tensors, recipe.network, path)
    parts = {"network": network, "process": recipe.process, "objective": recipe.objective}
    return parts | ({"condition": _ENLARGES} if spec.conditions else {}), spec


_KEY = "axial_pos_emb_height_mlp.1.weight"
_PLACES = (("ema", "ema_model.model."), ("ema", "ema_model."), ("model", "model."), ("model", ""), (None, "model."))


def read_rin(content: Mapping[str, Any], path: Path, codec: str, described: Described) -> ForeignWeights | None:
    """Return a RIN of lucidrains' trainer, as an experiment describes it."""
    entry_and_tensors = rin_of(content)
    if entry_and_tensors is None:
        return None
    entry, tensors = entry_and_tensors
    experiment = described(RinSystem)
    if experiment is None:
        raise ValueError(
            f"{path} is a RIN, but its tensors do not determine its image size, its heads and its noise. Give an "
            f"experiment file that describes it: --experiment."
        )
    spec = DataSpec(channels=experiment.data.num_channels, resolution=experiment.data.resolution)
    weights = checked_weights(experiment.system, spec, tensors, path, "RIN")
    unread = tuple(name for name in content if name != entry) if entry else ()
    description = f"a RIN, its entry {entry}" if entry else "a RIN"
    return ForeignWeights(weights, experiment.system, spec, description, unread)


def rin_of(content: Mapping[str, Any]) -> tuple[str | None, dict[str, Tensor]] | None:
    """Return the entry with the network, empty if the file is the network itself, and its tensors by name. The average
    is preferred to the raw weights. None if the file contains no RIN.
    """
    for entry, prefix in (*_PLACES, (None, "")):
        inner = content if entry is None else content.get(entry)
        if isinstance(inner, Mapping) and isinstance(inner.get(f"{prefix}{_KEY}"), Tensor):
            named = ((str(name), tensor) for name, tensor in inner.items() if isinstance(tensor, Tensor))
            return entry, {name.removeprefix(prefix): tensor for name, tensor in named if name.startswith(prefix)}
    return None
