"""Weights of DiT and SiT: facebookresearch's files, and folders of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from image_diffusion.codecs.diffusers import StabilityVae
from image_diffusion.foreign.weights import Described, ForeignWeights
from image_diffusion.networks.weights import dit
from image_diffusion.networks.weights.dit import as_flow, is_dit, is_dit_folder
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process.flow import Flow
from image_diffusion.systems.diffusion.dit import DiTSystem


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
