"""DiT: a transformer over patches, usually of latents (Peebles & Xie 2023); with a flow path: SiT (Ma et al. 2024).

Defaults that differ from those of facebookresearch/DiT (docs/systems.md has all):

    key                              original  here       why
    system.network.time_frequencies  dit       diffusers  diffusers' spacing makes exports exact
    train.ema.warmup.type            none      ramp_up    otherwise initial weights dominate short averages
    sample.guidance.guidance_scale   1.5       1          the best scale depends on the data; 1 works without labels
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from image_diffusion.core.types import DataSpec
from image_diffusion.core.types import Objective as ObjectiveFunction
from image_diffusion.data.shards.reader import Shards
from image_diffusion.networks.dit import DiT, DiTConfig
from image_diffusion.objectives import Objective
from image_diffusion.objectives.alignment import Aligned, Alignment
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.samplers.ancestral import Ddpm
from image_diffusion.systems.base import Others, Sections
from image_diffusion.systems.diffusion.base import NOT_IN_PREVIEWS, DiffusionSystem
from image_diffusion.systems.diffusion.conditioning import AnyCondition
from image_diffusion.systems.diffusion.conditions.vector import LabelCondition
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.interface import Section, all_but
from image_diffusion.systems.pairs.config import SeveralImagePairs
from image_diffusion.systems.warm_start import WarmStart


class DiTSystem(DiffusionSystem):
    """A transformer over patches of x."""

    type: Literal["dit"] = "dit"
    """A transformer over patches."""
    network: DiTConfig = DiTConfig(size="DiT-XL/2")
    """Size of the network."""
    objective: Objective = Denoising(variance="learned_range", loss="hybrid", label_drop_probability=0.1)
    """Prediction of the network, and the weighting of its error. Labels are dropped where the data have any."""
    condition: AnyCondition = LabelCondition()
    """Condition of the network: a class, a text, an image embedding, numbers or an image; or a list of several, which
    apply together."""
    alignment: Alignment | None = None
    """Alignment of the network's tokens with the features of a teacher (section pairs) during training. Unset: no
    alignment."""

    sections: ClassVar[Mapping[str, Section]] = {
        **DiffusionSystem.sections,
        "pairs": Section(SeveralImagePairs, None, example="{type: captions}", optional=True),
        "preview": Section(SampleConfig, SampleConfig(), all_but(SampleConfig, "embeddings", *NOT_IN_PREVIEWS)),
        "sample": Section(SampleConfig, SampleConfig(sampler=Ddpm(num_steps=250))),
    }

    takes_augmentation: ClassVar[bool] = True
    takes_intervals: ClassVar[bool] = True
    warm_start: ClassVar = WarmStart(
        class_rows=("y_embedder.embedding_table.weight",), positions=("pos_embed",), new_layers=("interval_embedder.",)
    )

    @property
    def joined_kinds(self) -> tuple[str, ...]:
        return (*super().joined_kinds, *(() if self.alignment is None else ("features",)))

    def started_shape(self) -> tuple[int, int, int, int]:
        if not isinstance(self.condition, LabelCondition):
            raise ValueError("are conditioned on more than a class")
        return self.network.shape

    def check(self, experiment: Sections, others: Others) -> None:
        if self.alignment is not None:
            self.alignment.check(self.network.shape.depth, self.objective)
            if experiment.train.augment is not None:
                raise ValueError(
                    "train.augment is set, but so is system.alignment, whose features do not move with the images. "
                    "Leave one of the two out."
                )
        super().check(experiment, others)
        if self.conditioning.takes_classes and self.has_null_label and not self.network.null_label:
            probability = self.objective.label_drop_probability or self.objective.drop_probabilities["label"]
            key = "label_drop_probability" if self.reading.drops_labels else "drop_probabilities.label"
            raise ValueError(
                f"system.objective.{key} is {probability:g}, but "
                f"system.network.null_label is false: the network has no null label. "
                f"Set null_label to true, or the probability to 0."
            )

        if tokens := self.network.class_tokens:
            self._check_class_tokens(tokens, experiment)

    def _check_class_tokens(self, tokens: int, experiment: Sections) -> None:
        """Raise ValueError for class tokens if there is no class."""
        if not self.conditioning.takes_classes:
            raise ValueError(
                f"system.network.class_tokens is {tokens}, but system.condition has no class. Leave it out, or add "
                "{type: label}."
            )
        if experiment.data.source.known_classes() == []:
            raise ValueError(f"system.network.class_tokens is {tokens}, but the data have no classes. Leave it out.")

    def spec(self, data: Shards) -> DataSpec:
        spec = super().spec(data)
        if self.alignment is None:
            return spec
        return spec.model_copy(update={"features": data.joined_sets["features"].shape})

    @property
    def build_options(self) -> dict[str, Any]:
        return {"learned_variance": self.learns_variance} | (
            {"interval": True} if self.objective.learns_intervals else {}
        )

    def build_network(self, spec: DataSpec) -> DiT:
        return self.network.build(spec, **self.build_options)

    def build_objective(self, spec: DataSpec) -> ObjectiveFunction:
        """Build the objective, with alignment if the data have features. Raises ValueError if it does not fit the
        process or the data."""
        objective = super().build_objective(spec)
        if self.alignment is None or spec.features is None:
            return objective
        return Aligned(self.alignment, objective, self.network.shape.width, spec.features)
