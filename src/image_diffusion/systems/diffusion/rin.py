"""RIN: a recurrent interface network in continuous time, conditioned on its own estimates (Jabri et al. 2023).

Defaults that differ from those of lucidrains/recurrent-interface-network-pytorch (docs/systems.md has all):

    key                 original  here  why
    train.global_batch  16        256   one batch size for all systems; set it to what your machine holds
    data.crop.type      resize    adm   ADM's crop for all systems, so that they can share their data
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.types import DataSpec
from image_diffusion.core.types import Objective as ObjectiveFunction
from image_diffusion.networks.rin import Rin, RinConfig
from image_diffusion.objectives.denoising import Denoising, MinSnrWeighting, SelfConditionedObjective, SelfConditioning
from image_diffusion.process.continuous import Continuous
from image_diffusion.samplers.ancestral import Ddim
from image_diffusion.systems.base import Others, Sections
from image_diffusion.systems.diffusion.base import VectorConditioned
from image_diffusion.systems.diffusion.generator import Reading, SampleConfig
from image_diffusion.systems.interface import Section
from image_diffusion.systems.warm_start import WarmStart


class RinSystem(VectorConditioned):
    """Latents that read from patches of x and write to them."""

    type: Literal["rin"] = "rin"
    """A recurrent interface network."""
    network: RinConfig = RinConfig(patch=16)
    """Size of the network."""
    process: Continuous = Continuous()
    """Noise process."""
    objective: Denoising = Denoising(prediction="v", weighting=MinSnrWeighting())
    """Prediction of the network, and the weighting of its error."""
    self_conditioning: SelfConditioning = SelfConditioning()
    """Conditioning of the network on its own earlier estimate."""

    sections: ClassVar[Mapping[str, Section]] = {
        **VectorConditioned.sections,
        "sample": replace(VectorConditioned.sections["sample"], default=SampleConfig(sampler=Ddim(num_steps=1000))),
    }
    recipe: ClassVar[Mapping[str, Any]] = {
        "optimizer": {"type": "adam", "lr": 1e-4, "betas": (0.9, 0.99)},
        "grad_clip": 1.0,
        "ema": {
            "type": "exponential",
            "rates": (0.995,),
            "update_every": 10,
            "warmup": {"type": "inverse_power", "update_after_step": 100},
        },
    }

    warm_start: ClassVar = WarmStart(class_rows=("label_embedding.weight",))

    def check(self, experiment: Sections, others: Others) -> None:
        if self.objective.prediction == "previous_x":
            raise ValueError(
                "system.objective.prediction is previous_x, but in continuous time there is no previous x. Use eps, x0 "
                "or v."
            )
        if not isinstance(experiment.codec, Rgb):
            self.self_conditioning.check_latents()
        super().check(experiment, others)

    def build_network(self, spec: DataSpec) -> Rin:
        return self.network.build(spec)

    def build_objective(self, spec: DataSpec) -> ObjectiveFunction:
        process = self.process.build()
        objective = SelfConditionedObjective(self.self_conditioning, self.objective, process, spec)
        return self.objective.timestep_sampling.wrap(objective, process)

    @property
    def reading(self) -> Reading:
        settings = self.self_conditioning
        estimates = "none" if settings.probability == 0 else "clamped" if settings.clamp else "free"
        return super().reading.model_copy(update={"estimates": estimates})
