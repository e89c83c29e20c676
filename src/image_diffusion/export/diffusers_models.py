"""Models in the form of diffusers' own classes, which need no other code: a DiT for DiTPipeline, a U-Net on pixels for
DDPMPipeline, a KL autoencoder, and a prior that is a PriorTransformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from image_diffusion.codecs.base import Codec
from image_diffusion.codecs.diffusers import KlCodec
from image_diffusion.core.files.atomic import atomic_folder
from image_diffusion.export.descriptions import CardUse
from image_diffusion.networks.autoencoder import Autoencoder
from image_diffusion.networks.dit import DiT
from image_diffusion.networks.prior_transformer import PriorTransformer, to_diffusers_prior
from image_diffusion.networks.unet import UNet
from image_diffusion.networks.weights.dit_diffusers import (
    check_flow,
    check_transformer,
    ddim_scheduler,
    flow_scheduler,
    prediction_type,
    write_dit_pipeline,
)
from image_diffusion.networks.weights.unet import (
    check_diffusers_unet,
    ddpm_scheduler,
    to_diffusers_unet,
    write_ddpm_pipeline,
)
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.flow import Flow
from image_diffusion.systems.base import Others, Sections, spec_of
from image_diffusion.systems.codec.autoencoder import AutoencoderSystem
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.iddpm import IddpmSystem
from image_diffusion.systems.interface import TrainedNetwork
from image_diffusion.systems.prior.prior import PriorSystem

_DIT_CODE = 'pipeline = DiTPipeline.from_pretrained(".")\nimage = pipeline(class_labels=[0]).images[0]'
_UNET_CODE = (
    'pipeline = DDPMPipeline.from_pretrained(".")\n'
    "image = pipeline(num_inference_steps=250, generator=torch.manual_seed(0)).images[0]"
)
_TRANSFORMER_CODE = (
    'prior = PriorTransformer.from_pretrained(".")\n'
    "# x: noisy embeddings, normalised; tokens: of a caption, [N, L, dim], and which of them there are, [N, L]\n"
    "x0 = prior(x, t, text_embed, tokens, token_mask).predicted_image_embedding\n"
    "image_embeds = prior.post_process_latents(x0)"
)


def check_dit(system: DiTSystem, experiment: Sections, others: Others) -> None:
    """Raise ValueError for settings that diffusers' DiTPipeline does not support."""
    codec = experiment.codec
    if system.conditioning.reads or system.conditioning.image is not None:
        raise ValueError(
            "Diffusers' DiTPipeline takes classes, but this network takes words, embeddings or images. Set "
            "export.format to pipeline."
        )
    if codec.type == "rgb":
        raise ValueError(
            "Diffusers' DiTPipeline works on latents, but this model works on pixels. Set export.format to pipeline."
        )
    if codec.type == "diffusers":
        raise ValueError(
            "Diffusers' DiTPipeline scales latents by one factor, but codec.type diffusers normalises each channel. "
            "Set export.format to pipeline, or use codec.type stability_vae."
        )
    _dit_process(system)
    classes = experiment.data.source.known_classes() or []
    spec = spec_of(experiment, others.codec).model_copy(update={"num_classes": len(classes)})
    check_transformer(system.network, spec)


def write_dit(system: DiTSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder that `DiTPipeline.from_pretrained` loads. Raises ValueError for a codec that DiTPipeline does not
    have."""
    if not isinstance(codec, KlCodec):
        raise ValueError(
            "Diffusers' DiTPipeline decodes by an AutoencoderKL, but this model's codec is none. Set export.format to "
            "pipeline."
        )
    assert isinstance(model.network, DiT)
    process, prediction = _dit_process(system), system.objective.prediction
    scheduler: Any
    if isinstance(process, Flow):
        scheduler = flow_scheduler(process.time_scale, prediction)
    else:
        scheduler = ddim_scheduler(process.build().betas, prediction)
    write_dit_pipeline(folder, model.network, codec.network, codec.scale, scheduler, model.classes)
    return CardUse("unconditional-image-generation", "DiTPipeline", _DIT_CODE)


def _dit_process(system: DiTSystem) -> Discrete | Flow:
    """Return the process of the system. Raises ValueError for a process or prediction without a scheduler in
    diffusers."""
    process, prediction = system.process, system.objective.prediction
    if isinstance(process, Flow):
        check_flow(process.time_scale, prediction)
        return process
    if not isinstance(process, Discrete) or process.respacing != "" or process.rescale_timesteps:
        raise ValueError(
            "Diffusers' DiTPipeline has no scheduler for this process. Train on a discrete process with all its "
            "timesteps or on a flow process, or set export.format to pipeline."
        )
    prediction_type(prediction, "DDIM")
    return process


def check_unet(system: IddpmSystem, experiment: Sections, others: Others) -> None:
    """Raise ValueError for settings that diffusers' DDPMPipeline does not support."""
    classes = experiment.data.source.known_classes() or []
    _unet_process(system, experiment.codec.type)
    spec = spec_of(experiment, others.codec)
    conditions = {*spec.conditions, *system.conditioning.reads}
    check_diffusers_unet(system.network, spec, len(classes), conditions, experiment.data.dtype is not None)


def write_unet(system: IddpmSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder that `DDPMPipeline.from_pretrained` loads. Raises ValueError for settings that it does not
    support."""
    assert isinstance(model.network, UNet)
    process = _unet_process(system, model.codec["config"]["type"]).build()
    times = process.network_time(torch.arange(process.num_timesteps))
    scheduler = ddpm_scheduler(process.betas, system.objective.prediction, system.objective.variance)
    write_ddpm_pipeline(folder, to_diffusers_unet(model.network, times), scheduler)
    return CardUse("unconditional-image-generation", "DDPMPipeline", _UNET_CODE)


def _unet_process(system: IddpmSystem, codec_type: str) -> Discrete:
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


def write_vae(system: AutoencoderSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Atomically write a folder that `AutoencoderKL.from_pretrained` loads."""
    assert isinstance(model.network, Autoencoder)
    with atomic_folder(folder) as written:
        model.network.vae.save_pretrained(written)
    return CardUse("image-to-image", "AutoencoderKL", 'vae = AutoencoderKL.from_pretrained(".")')


def write_prior_transformer(system: PriorSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder that `PriorTransformer.from_pretrained` loads. Raises ValueError for another network."""
    check_prior_transformer(system)
    assert isinstance(model.network, PriorTransformer)
    moments = system.reading(model.spec).scaling.moments(torch.zeros(model.spec.channels))
    prior = to_diffusers_prior(model.network, *moments)
    with atomic_folder(folder) as written:
        prior.save_pretrained(written)
    return CardUse("feature-extraction", "PriorTransformer", _TRANSFORMER_CODE)


def check_prior_transformer(system: PriorSystem, *_: Any) -> None:
    """Raise ValueError for a network other than diffusers' PriorTransformer."""
    if system.network.type != "prior_transformer":
        raise ValueError(
            "Diffusers' PriorTransformer is another network than network.type prior. Set export.format to pipeline, or "
            "train with system.network.type prior_transformer."
        )
