"""A U-Net on pixels for diffusers' DDPMPipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from image_diffusion.core.types import DataSpec
from image_diffusion.networks.unet import UNet
from image_diffusion.networks.unet_diffusers import (
    check_unet,
    ddpm_scheduler,
    to_diffusers_unet,
    write_ddpm_pipeline,
)
from image_diffusion.process.discrete import Discrete
from image_diffusion.systems.given import CardUse, Model

if TYPE_CHECKING:
    from image_diffusion.systems.iddpm import IddpmSystem

_CODE = (
    'pipeline = DDPMPipeline.from_pretrained(".")\n'
    "image = pipeline(num_inference_steps=250, generator=torch.manual_seed(0)).images[0]"
)


def check_ddpm(system: IddpmSystem, codec: Any, spec: DataSpec, num_classes: int) -> None:
    """Raise ValueError for what diffusers' DDPMPipeline has no place for. codec: its configuration."""
    if codec["type"] != "rgb":
        raise ValueError(
            "Diffusers' DDPMPipeline works on pixels, but this model on latents. Set export.format to pipeline."
        )
    process = system.process
    if not isinstance(process, Discrete) or process.respacing != "":
        raise ValueError(
            "Diffusers' DDPMPipeline has no scheduler for this process. Train on a discrete process with all its "
            "timesteps, or set export.format to pipeline."
        )
    check_unet(system.network, spec, num_classes)


def write_ddpm(system: IddpmSystem, model: Model, folder: Path) -> CardUse:
    """Write a folder that `DDPMPipeline.from_pretrained` loads. Raises ValueError for what that has no place for."""
    check_ddpm(system, model.codec["config"], model.spec, model.spec.num_classes)
    assert isinstance(system.process, Discrete) and isinstance(model.network, UNet)
    process = system.process.build()
    times = process.network_time(torch.arange(process.num_timesteps))
    scheduler = ddpm_scheduler(process.betas, system.objective.prediction, system.variance)
    write_ddpm_pipeline(folder, to_diffusers_unet(model.network, times), scheduler)
    return CardUse("unconditional-image-generation", "DDPMPipeline", _CODE)
