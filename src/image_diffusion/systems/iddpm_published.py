"""The published weights of improved-diffusion and guided-diffusion, as systems: what their shapes do not tell.

The settings are those of the two repositories' READMEs for each file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from image_diffusion.core.types import DataSpec
from image_diffusion.networks.unet_weights import check_fit, num_label_rows, unet_of_shapes
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.objectives.timestep_sampling import LossSecondMoment
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.schedules import Cosine, Linear
from image_diffusion.systems.iddpm import IddpmSystem


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


def read_iddpm(
    tensors: Mapping[str, Tensor], path: Path, described: tuple[IddpmSystem, DataSpec] | None
) -> tuple[IddpmSystem, DataSpec]:
    """The system and the data that the tensors of a U-Net are of.

    path: the file they are from, by whose name the published ones are known. described: the system and data of an
    experiment, for any other file; its number of classes is not looked at, since the label table tells it.

    Raises ValueError for a file nothing is known of, or with what is missing, unexpected or of another shape.
    """
    if described is not None:
        system, spec = described
        num_classes = max(num_label_rows(tensors) - system.drops_labels, 0)
        spec = spec.model_copy(update={"num_classes": num_classes})
    elif path.stem in PUBLISHED:
        recipe = PUBLISHED[path.stem]
        network, spec = unet_of_shapes(tensors, recipe.network, path)
        system = IddpmSystem(network=network, process=recipe.process, objective=recipe.objective)
    else:
        raise ValueError(
            f"{path} is a U-Net, but of no published name, and its tensors do not tell its heads or its noise. Give "
            f"--experiment, the experiment file that describes it, or the file its published name, such as "
            f"{next(iter(PUBLISHED))}.pt."
        )
    with torch.device("meta"):
        expected = system.build_network(spec).state_dict()
    check_fit(expected, tensors, path)
    return system, spec
