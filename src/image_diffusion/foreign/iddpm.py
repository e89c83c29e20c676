"""Weights of improved-diffusion and guided-diffusion, and the settings of the published ones. Shapes do not determine
these settings; they come from the READMEs of both repositories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from image_diffusion.core.types import DataSpec
from image_diffusion.foreign.weights import Described, ForeignWeights, checked_weights
from image_diffusion.networks.weights.unet import is_unet, num_label_rows, unet_of_shapes
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.objectives.timestep_sampling import LossSecondMoment
from image_diffusion.process.discrete import Cosine, Discrete, Linear
from image_diffusion.systems.diffusion.iddpm import IddpmSystem


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
