"""IDDPM: a U-Net on pixels, which learns the variance of each step (Nichol & Dhariwal 2021, arXiv:2102.09672).

Defaults that differ from those of openai/improved-diffusion (docs/systems.md has all):

    key                           original     here             why
    system.process.schedule.type  linear       cosine           the paper's improvement over the script's default
    system.process.num_timesteps  1000         4000             as in the paper's recipes
    system.objective.variance     fixed_large  learned_range    the paper's learned variance
    system.objective.loss         simple       rescaled_hybrid  the paper's hybrid loss, which trains the variance
    train.ema.warmup.type         none         ramp_up          otherwise initial weights dominate short averages
    train.global_batch            1            256              a batch of one is too noisy to train on
    sample.sampler.num_steps      all          250              250 of the 4,000 steps, as in the paper's comparisons
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from image_diffusion.core.types import DataSpec
from image_diffusion.networks.unet import UNet, UNetConfig
from image_diffusion.objectives import Objective
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process import Process
from image_diffusion.process.discrete import Cosine, Discrete
from image_diffusion.samplers.ancestral import Ddpm
from image_diffusion.systems.diffusion.base import VectorConditioned
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.interface import Section
from image_diffusion.systems.warm_start import WarmStart


class IddpmSystem(VectorConditioned):
    """A U-Net on pixels. The defaults are the paper's cosine schedule of 4,000 timesteps and its hybrid loss."""

    type: Literal["iddpm"] = "iddpm"
    """A U-Net, usually on pixels."""
    network: UNetConfig = UNetConfig()
    """Size of the network."""
    process: Process = Discrete(schedule=Cosine(), num_timesteps=4000, rescale_timesteps=True)
    """Noise process."""
    objective: Objective = Denoising(variance="learned_range", loss="rescaled_hybrid")
    """Prediction of the network, and the weighting of its error."""

    sections: ClassVar[Mapping[str, Section]] = {
        **VectorConditioned.sections,
        "sample": replace(VectorConditioned.sections["sample"], default=SampleConfig(sampler=Ddpm(num_steps=250))),
    }
    recipe: ClassVar[Mapping[str, Any]] = {"flip_probability": 0.0}
    warm_start: ClassVar = WarmStart(class_rows=("label_emb.weight",))

    @property
    def build_options(self) -> dict[str, Any]:
        return {"learned_variance": self.learns_variance, "null_label": self.has_null_label}

    def build_network(self, spec: DataSpec) -> UNet:
        """Build the randomly initialised network, with a label for none where labels are dropped.

        Raises ValueError when it does not fit the data.
        """
        return self.network.build(spec, **self.build_options)
