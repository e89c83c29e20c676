"""A U-Net on pixels for diffusers' DDPMPipeline."""

from __future__ import annotations

from pathlib import Path

import torch

from image_diffusion.codecs.base import Codec
from image_diffusion.export.model_card import CardUse
from image_diffusion.networks.unet import UNet
from image_diffusion.networks.weights.dit_diffusers import prediction_type
from image_diffusion.networks.weights.unet import (
    check_diffusers_unet,
    ddpm_scheduler,
    to_diffusers_unet,
    write_ddpm_pipeline,
)
from image_diffusion.process.discrete import Discrete
from image_diffusion.systems.base import Others, Sections, spec_of
from image_diffusion.systems.diffusion.iddpm import IddpmSystem
from image_diffusion.systems.interface import TrainedNetwork

_CODE = (
    'pipeline = DDPMPipeline.from_pretrained(".")\n'
    "image = pipeline(num_inference_steps=250, generator=torch.manual_seed(0)).images[0]"
)


def check_unet(system: IddpmSystem, experiment: Sections, others: Others) -> None:
    """Raise ValueError for settings that diffusers' DDPMPipeline does not support."""
    classes = experiment.data.source.known_classes() or []
    _process_of(system, experiment.codec.type)
    spec = spec_of(experiment, others.codec)
    conditions = {*spec.conditions, *system.conditioning.reads}
    check_diffusers_unet(system.network, spec, len(classes), conditions, experiment.data.dtype is not None)


def write_unet(system: IddpmSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder that `DDPMPipeline.from_pretrained` loads. Raises ValueError for settings that it does not
    support."""
    assert isinstance(model.network, UNet)
    process = _process_of(system, model.codec["config"]["type"]).build()
    times = process.network_time(torch.arange(process.num_timesteps))
    scheduler = ddpm_scheduler(process.betas, system.objective.prediction, system.objective.variance)
    write_ddpm_pipeline(folder, to_diffusers_unet(model.network, times), scheduler)
    return CardUse("unconditional-image-generation", "DDPMPipeline", _CODE)


def _process_of(system: IddpmSystem, codec_type: str) -> Discrete:
    """Return the process of the system. Raises ValueError for a process, prediction or codec that diffusers'
    DDPMPipeline does not have."""
    if codec_type != "rgb":
        raise ValueError(
            "Diffusers' DDPMPipeline works on pixels, but this model on latents. Set export.format to pipeline."
        )
    process = system.process
    if not isinstance(process, Discrete) or process.respacing != "":
        raise ValueError(
            "Diffusers' DDPMPipeline has no scheduler for this process. Train on a discrete process with all its "
            "timesteps, or set export.format to pipeline."
        )
    prediction_type(system.objective.prediction, "DDPM")
    return process
