"""DiT: a transformer over patches, usually of latents (Peebles & Xie 2023); with a flow path: SiT (Ma et al. 2024).

Defaults that differ from those of facebookresearch/DiT (docs/systems.md has all):

    key                              original  here       why
    system.network.time_frequencies  dit       diffusers  exports to diffusers are exact with its own spacing
    train.ema.warmup.type            none      ramp_up    without it a short training ends in its initial weights
    sample.guidance.guidance_scale   1.5       1          what it is worth depends on the data; none needs no labels
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from image_diffusion.codecs.codec import Codec
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit import DiT, DiTConfig
from image_diffusion.networks.dit_weights import is_dit
from image_diffusion.objectives import Objective
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.samplers.ancestral import Ddpm
from image_diffusion.systems.diffusion.dit_export import check_pipeline, latents_of, read_published, write_pipeline
from image_diffusion.systems.diffusion.family import DiffusionSystem
from image_diffusion.systems.diffusion.sampling import SampleConfig
from image_diffusion.systems.given import CardUse, Described, Foreign, Model, Others, Section, Sections


class DiTSystem(DiffusionSystem):
    """A transformer over patches of x."""

    type: Literal["dit"] = "dit"
    """A transformer over patches."""
    network: DiTConfig = DiTConfig(size="DiT-XL/2")
    """Size of the network."""
    objective: Objective = Denoising(variance="learned_range", loss="hybrid", label_drop_probability=0.1)
    """What the network predicts, and how its error is weighed. Labels are dropped where the data have any."""

    sections: ClassVar[Mapping[str, Section]] = {
        **DiffusionSystem.sections,
        "sample": Section(SampleConfig, SampleConfig(sampler=Ddpm(num_steps=250))),
    }

    exports: ClassVar[tuple[str, ...]] = ("diffusers",)
    class_rows: ClassVar[tuple[str, ...]] = ("y_embedder.embedding_table.weight",)
    positions: ClassVar[tuple[str, ...]] = ("pos_embed",)

    def check(self, experiment: Sections, others: Others) -> None:
        super().check(experiment, others)
        if self.drops_labels and not self.network.null_label:
            raise ValueError(
                f"system.objective.label_drop_probability is {self.objective.label_drop_probability:g}, but "
                f"system.network.null_label is false: no label stands for none. Set null_label to true, or drop none."
            )
        if experiment.section("export").format == "diffusers":
            check_pipeline(self, experiment.codec)

    def build_network(self, spec: DataSpec) -> DiT:
        """The network, randomly initialised. Raises ValueError when it does not fit the data."""
        return self.network.build(spec, learned_variance=self.learns_variance)

    def export(self, model: Model, codec: Codec, format_: str, folder: Path) -> CardUse:
        return write_pipeline(self, model, codec, folder)

    @classmethod
    def read_foreign(cls, content: Mapping[str, Any], path: Path, codec: str, described: Described) -> Foreign | None:
        if not path.is_dir() and not is_dit(content):
            return None
        weights, objective = read_published(content, path)
        vae, identity = latents_of(codec)
        system = cls(network=weights.config, objective=objective)
        return Foreign(weights.tensors, system, weights.spec, vae, identity)
