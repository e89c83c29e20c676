"""RIN: a recurrent interface network in continuous time, conditioned on its own estimates (Jabri et al. 2023).

Defaults that differ from those of lucidrains/recurrent-interface-network-pytorch (docs/systems.md has all):

    key                 original  here  why
    train.global_batch  16        256   one batch size for all systems; say what the machine holds
    data.crop.type      resize    adm   ADM's crop for every system, so that their data are the same
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.types import DataSpec
from image_diffusion.core.types import Objective as ObjectiveFunction
from image_diffusion.networks.rin import Rin, RinConfig
from image_diffusion.networks.unet_weights import check_fit
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.objectives.self_conditioning import SelfConditionedObjective, SelfConditioning
from image_diffusion.objectives.weighting import MinSnrWeighting
from image_diffusion.process.continuous import Continuous
from image_diffusion.samplers.ddim import Ddim
from image_diffusion.systems.diffusion.family import DiffusionSystem
from image_diffusion.systems.diffusion.reading import Reading
from image_diffusion.systems.diffusion.rin_trained import rin_of
from image_diffusion.systems.diffusion.sampling import SampleConfig
from image_diffusion.systems.given import Described, Foreign, Others, Section, Sections


class RinSystem(DiffusionSystem):
    """Latents that read from patches of x and write to them."""

    type: Literal["rin"] = "rin"
    """A recurrent interface network."""
    network: RinConfig = RinConfig(patch=16)
    """Size of the network."""
    process: Continuous = Continuous()
    """How noise is added."""
    objective: Denoising = Denoising(prediction="v", weighting=MinSnrWeighting())
    """What the network predicts, and how its error is weighed."""
    self_conditioning: SelfConditioning = SelfConditioning()
    """How the network is conditioned on its own earlier estimate."""

    sections: ClassVar[Mapping[str, Section]] = {
        **DiffusionSystem.sections,
        "sample": Section(
            SampleConfig, SampleConfig(sampler=Ddim(num_steps=1000)), DiffusionSystem.sections["sample"].keys
        ),
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

    exports: ClassVar[tuple[str, ...]] = ("pipeline",)
    class_rows: ClassVar[tuple[str, ...]] = ("label_embedding.weight",)

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
        """The network, randomly initialised. Raises ValueError when it does not fit the data."""
        return self.network.build(spec)

    def build_objective(self, spec: DataSpec) -> ObjectiveFunction:
        """The objective. Raises ValueError where it does not fit the process or the data."""
        process = self.process.build()
        objective = SelfConditionedObjective(self.self_conditioning, self.objective, process, spec)
        return self.objective.timestep_sampling.wrap(objective, process)

    @property
    def reading(self) -> Reading:
        """What sampling has to know of it."""
        given = self.self_conditioning
        estimates = "none" if given.probability == 0 else "clamped" if given.clamp else "free"
        return super().reading.model_copy(update={"estimates": estimates})

    @classmethod
    def read_foreign(cls, content: Mapping[str, Any], path: Path, codec: str, described: Described) -> Foreign | None:
        """A RIN of lucidrains' trainer, as an experiment describes it."""
        found = rin_of(content)
        if found is None:
            return None
        entry, tensors = found
        experiment = described(cls)
        if experiment is None:
            raise ValueError(
                f"{path} is a RIN, but its tensors tell neither the size of its images nor its heads or its noise. "
                f"Give --experiment, the experiment file that describes it."
            )
        assert isinstance(experiment.system, cls)
        spec = DataSpec(channels=experiment.data.channels, resolution=experiment.data.resolution)
        with torch.device("meta"):
            expected = experiment.system.build_network(spec).state_dict()
        check_fit(expected, tensors, path, "RIN")
        unread = tuple(name for name in content if name != entry) if entry else ()
        told = f"a RIN, its entry {entry}" if entry else "a RIN"
        weights = {name: each.float() for name, each in tensors.items()}
        return Foreign(weights, experiment.system, spec, Rgb(), Rgb().identity, told, unread)
