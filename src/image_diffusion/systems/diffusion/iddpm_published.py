"""The published weights of improved-diffusion and guided-diffusion, as systems: what their shapes do not tell.

The settings are those of the two repositories' READMEs for each file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from image_diffusion.core.types import DataSpec
from image_diffusion.networks.unet_weights import unet_of_shapes
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.objectives.timestep_sampling import LossSecondMoment
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.schedules import Cosine, Linear


@dataclass(frozen=True)
class Recipe:
    """How a published network was trained. network: what its shapes do not tell (`unet_of_shapes`)."""

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
"""By the name of the file, without its suffix."""


def published(tensors: Mapping[str, Tensor], path: Path) -> tuple[dict[str, Any], DataSpec]:
    """The network, process and objective of a published U-Net, and the data it is of.

    path: the file they are from, by whose name it is known. Raises ValueError for a file nothing is known of.
    """
    if path.stem not in PUBLISHED:
        raise ValueError(
            f"{path} is a U-Net, but of no published name, and its tensors do not tell its heads or its noise. Give "
            f"--experiment, the experiment file that describes it, or the file its published name, such as "
            f"{next(iter(PUBLISHED))}.pt."
        )
    recipe = PUBLISHED[path.stem]
    network, spec = unet_of_shapes(tensors, recipe.network, path)
    return {"network": network, "process": recipe.process, "objective": recipe.objective}, spec
