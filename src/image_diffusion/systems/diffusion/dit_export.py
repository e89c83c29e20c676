"""A DiT for diffusers, and DiTs that were trained elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from image_diffusion.codecs.codec import Codec
from image_diffusion.codecs.kl import KlCodec
from image_diffusion.codecs.stability_vae import StabilityVae
from image_diffusion.networks.dit import DiT
from image_diffusion.networks.dit_diffusers import ddim_scheduler, flow_scheduler, write_dit_pipeline
from image_diffusion.networks.dit_weights import DiTWeights, read_dit
from image_diffusion.networks.sit_weights import as_flow
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.flow import Flow
from image_diffusion.systems.given import CardUse, Model

if TYPE_CHECKING:
    from image_diffusion.systems.dit import DiTSystem

_CODE = 'pipeline = DiTPipeline.from_pretrained(".")\nimage = pipeline(class_labels=[0]).images[0]'


def check_pipeline(system: DiTSystem, codec: Any) -> None:
    """Raise ValueError for what diffusers' DiTPipeline has no place for. codec: its configuration."""
    if codec.type == "rgb":
        raise ValueError(
            "Diffusers' DiTPipeline works on latents, but this model works on pixels. Set export.format to pipeline."
        )
    if codec.type == "diffusers":
        raise ValueError(
            "Diffusers' DiTPipeline scales latents by one factor, but codec.type diffusers normalises each channel. "
            "Set export.format to pipeline, or use codec.type stability_vae."
        )
    process = system.process
    whole = isinstance(process, Discrete) and process.respacing == "" and not process.rescale_timesteps
    if not whole and not isinstance(process, Flow):
        raise ValueError(
            "Diffusers' DiTPipeline has no scheduler for this process. Train on a discrete process with all its "
            "timesteps or on a flow process, or set export.format to pipeline."
        )


def write_pipeline(system: DiTSystem, model: Model, codec: Codec, folder: Path) -> CardUse:
    """Write a folder that `DiTPipeline.from_pretrained` loads. Raises ValueError for a codec that it has not."""
    if not isinstance(codec, KlCodec):
        raise ValueError(
            "Diffusers' DiTPipeline decodes by an AutoencoderKL, but this model's codec is none. Set export.format to "
            "pipeline."
        )
    assert isinstance(model.network, DiT)
    process, prediction = system.process, system.objective.prediction
    scheduler: Any
    if isinstance(process, Flow):
        scheduler = flow_scheduler(process.time_scale, prediction)
    else:
        assert isinstance(process, Discrete)
        scheduler = ddim_scheduler(process.build().betas, prediction)
    write_dit_pipeline(folder, model.network, codec.vae, codec.scale, scheduler, model.classes)
    return CardUse("unconditional-image-generation", "DiTPipeline", _CODE)


def read_published(
    content: Mapping[str, Any], path: Path, described: DiTSystem | None
) -> tuple[DiTWeights, dict[str, Any], str]:
    """The weights of a DiT, its process and objective, and what they were taken for.

    described: what the user says that it is; one on a flow process is a SiT, whose names and shapes are those of a DiT.
    Without it, it predicts eps on 1,000 linear steps, with a learned variance where it returns one. Raises ValueError
    for a description that does not fit.
    """
    weights = read_dit(
        path, num_heads=None if described is None else described.network.shape.num_heads, content=content
    )
    learned = weights.learned_variance
    size = weights.config.size or f"of depth {weights.config.shape.depth}"
    if described is None:
        objective = Denoising(
            prediction="eps",
            variance="learned_range" if learned else "fixed_large",
            loss="hybrid" if learned else "simple",
            label_drop_probability=0.1 if weights.spec.num_classes else 0.0,
        )
        return (
            weights,
            {"objective": objective},
            f"a DiT {size} that predicts eps; if it is a SiT, say so: --experiment",
        )
    if isinstance(described.process, Flow):
        process = described.process.model_copy(update={"time_scale": 1.0})
        parts = {"process": process, "objective": described.objective}
        return as_flow(weights), parts, f"a SiT {size}, as --experiment says"
    if described.learns_variance != learned:
        raise ValueError(
            f"{path} returns {'a' if learned else 'no'} variance, but system.objective.variance of the experiment is "
            f"{described.variance}. Use {'learned_range' if learned else 'fixed_large'}."
        )
    return weights, {"process": described.process, "objective": described.objective}, f"a DiT {size}"


def latents_of(codec: str) -> tuple[StabilityVae, dict[str, Any]]:
    """The autoencoder of a published DiT's latents, and what tells it from others. codec: its folder or name."""
    vae = StabilityVae(weights=codec)
    return vae, vae.build(None, None, torch.device("cpu"), torch.float32).identity
