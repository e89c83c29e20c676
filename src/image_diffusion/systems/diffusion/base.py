"""Common base of the diffusion systems: a process, an objective, and the sampling and evaluation of denoising
networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from image_diffusion.codecs import CodecConfig
from image_diffusion.codecs.base import Codec
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import Sparse
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.core.types import Objective as ObjectiveFunction
from image_diffusion.data.encoded.latents import EncodeConfig
from image_diffusion.data.shards.reader import Shards
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.objectives import Objective
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process import Process
from image_diffusion.process.base import Grid
from image_diffusion.process.denoiser import LEARNED_VARIANCES
from image_diffusion.process.discrete import Discrete
from image_diffusion.samplers.from_images import first_point
from image_diffusion.systems.base import Others, Sections, System, spec_of
from image_diffusion.systems.diffusion.checks import (
    check_classes_of_rows,
    check_condition,
    check_drops,
    check_embeddings,
    check_guided_channels,
    check_negative_prompt,
    check_objective,
    check_pairs,
    check_sections,
    check_settings,
    check_small_images,
    check_tiles,
)
from image_diffusion.systems.diffusion.conditioning import Conditions, VectorCondition
from image_diffusion.systems.diffusion.conditions.vector import LabelCondition
from image_diffusion.systems.diffusion.evaluation import DiffusionEvaluation
from image_diffusion.systems.diffusion.generator import Generator, Reading, SampleConfig
from image_diffusion.systems.diffusion.image_generation import ImageSampling
from image_diffusion.systems.diffusion.sweep import SweepConfig, checked_points
from image_diffusion.systems.interface import Section, all_but
from image_diffusion.systems.pairs.config import SeveralVectorPairs
from image_diffusion.systems.pairs.inputs import sets_of
from image_diffusion.systems.pictures import Pictures

_IN_WORDS = ("prompts", "negative_prompt", "embeddings")
NOT_IN_PREVIEWS = ("small_images", "compile", "keep", "given", "start", "tiles", "weaker_weights")
"""Keys of the section sample without effect in the section preview."""


@dataclass(frozen=True, kw_only=True)
class DiffusionSampling(ImageSampling):
    """Sampling by removing noise. reading: the properties of the system that it depends on."""

    reading: Reading

    def generator(
        self,
        network: nn.Module,
        spec: DataSpec,
        codec: Codec,
        settings: SampleConfig,
        weaker: nn.Module | None = None,
        null: Mapping[str, Tensor] | None = None,
        pictures: Pictures | None = None,
    ) -> Generator:
        check_tiles(settings, self.condition.image)
        return Generator(network, self.reading, spec, codec, settings, weaker, null, pictures)

    def num_evaluations(self, settings: SampleConfig) -> int:
        grid: Grid = settings.sampler.grid(self.reading.process)
        steps = grid if settings.start is None else grid.starting_at(first_point(grid, settings.start.strength))
        calls: int = settings.sampler.calls(steps)
        repeats = 1 if settings.given is None else settings.given.resamplings
        tiles = 1 if settings.tiles is None else settings.tiles.number
        return round(max(calls, 0) * repeats * tiles * (1 + settings.guidance.share(grid)))


class DiffusionSystem(System):
    """Base of the systems that learn to remove noise. Each derived class adds its network."""

    process: Process = Discrete()
    """Noise process."""
    objective: Objective = Denoising()
    """Prediction of the network, and the weighting of its error."""

    takes_intervals: ClassVar[bool] = False
    """True if the network can be conditioned on intervals of time, as the objective mean_flow requires."""

    sections: ClassVar[Mapping[str, Section]] = {
        "codec": Section(CodecConfig, Rgb()),
        "encode": Section(EncodeConfig, EncodeConfig(), all_but(EncodeConfig, "tokens")),
        "preview": Section(SampleConfig, SampleConfig(), all_but(SampleConfig, *_IN_WORDS, *NOT_IN_PREVIEWS)),
        "sample": Section(SampleConfig, SampleConfig(), all_but(SampleConfig, *_IN_WORDS)),
        "evaluate": Section(EvaluateConfig, EvaluateConfig(), all_but(EvaluateConfig, "lpips")),
        "sweep": Section(SweepConfig, SweepConfig()),
    }

    @property
    def learns_variance(self) -> bool:
        """True if the network also predicts the variance of the reverse process."""
        return self.objective.variance in LEARNED_VARIANCES

    @property
    def has_null_label(self) -> bool:
        """True if labels are dropped in training, with the other parts of the condition or alone."""
        return self.objective.label_drop_probability > 0 or self.objective.drop_probabilities.get("label", 0) > 0

    @property
    def reading(self) -> Reading:
        """Return the properties of the system that sampling depends on."""
        return Reading(
            process=self.process,
            prediction=self.objective.prediction,
            variance=self.objective.variance,
            drops_labels=self.objective.label_drop_probability > 0,
            drops_alone=tuple(name for name, value in self.objective.drop_probabilities.items() if value > 0),
        )

    @property
    def conditioning(self) -> Conditions:
        """Return the condition of the network: the key `condition`, or the class in a system without that key."""
        return Conditions.written_as(getattr(self, "condition", LabelCondition()))

    @property
    def joined_kinds(self) -> tuple[str, ...]:
        return self.conditioning.reads

    def spec(self, data: Shards) -> DataSpec:
        return self.conditioning.spec(super().spec(data), data.joined_sets)

    @property
    def build_options(self) -> dict[str, Any]:
        """Return the options of `network.build` other than the data spec."""
        return {}

    def check(self, experiment: Sections, others: Others) -> None:
        train, reading, condition = experiment.train, self.reading, self.conditioning
        check_pairs(condition, self.joined_kinds, experiment)
        classes = experiment.data.source.known_classes() if condition.takes_classes else None
        check_condition(condition, classes)
        check_objective(self.objective, self.process, train)
        check_drops(self.objective, condition)
        if self.objective.learns_intervals and not self.takes_intervals:
            raise ValueError(
                f"system.objective.type is {self.objective.type}, but the network of the system {self.type} takes no "
                "intervals. Use the system dit, or another objective."
            )

        def check_sampling(section: str, settings: SampleConfig) -> None:
            check_settings(section, settings, reading, self.objective.learns_intervals, experiment.codec, classes)

        sections = ("sample", "preview") if train.grid_every_steps is not None else ("sample",)
        for section in sections:
            settings: SampleConfig = experiment.section(section)
            check_sampling(section, settings)
            condition.check(section, settings, sets_of(experiment.section("pairs")))
            check_negative_prompt(section, settings)
            check_classes_of_rows(section, settings.conditions, classes)
        if condition.reads and experiment.section("evaluate").likelihood is not None:
            raise ValueError(
                "evaluate.likelihood is set, but is not available with text or embedding conditions or numbers. "
                "Remove it."
            )
        sample, sweep = experiment.section("sample"), experiment.section("sweep")
        for key, point in checked_points(sweep, sample, train):
            try:
                check_sampling("sample", point)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
        check_sections(self.process, condition.image, experiment, others)
        if condition.image is not None and train.augment is not None:
            raise ValueError(
                f"train.augment is set, but system.condition is {condition.type}: the images of the condition do not "
                f"move with those they belong to. Leave one of the two out."
            )
        super().check(experiment, others)
        channels = spec_of(experiment, others.codec).channels
        for section in sections:
            check_guided_channels(section, experiment.section(section), channels)
        check_small_images(condition.image, experiment, others)
        check_embeddings(condition, experiment, others.embeddings)

    def build_objective(self, spec: DataSpec) -> ObjectiveFunction:
        objective, default = self.objective, type(self).model_fields["objective"].default
        drops_by_default = objective.label_drop_probability == default.label_drop_probability
        if spec.num_classes == 0 and not spec.conditions and drops_by_default:  # there is nothing to drop
            objective = objective.model_copy(update={"label_drop_probability": 0.0})
        return objective.build(self.process.build(), spec)

    def batch(
        self,
        stored: Tensor,
        label: Tensor,
        streams: Streams,
        spec: DataSpec,
        codec: Codec,
        joined_sets: Mapping[str, Tensor] | None = None,
    ) -> Batch:
        x = codec.draw(stored, streams)
        cond = {"label": label} if spec.num_classes else {}
        if self.conditioning.image is not None:
            cond |= self.conditioning.image.degraded(x, streams)
        joined_sets = joined_sets or {}
        cond |= self.conditioning.training_conditions(joined_sets, streams, spec)
        return Batch(x, cond, streams, features=joined_sets.get("features"))

    def sampling(self) -> DiffusionSampling:
        return DiffusionSampling(condition=self.conditioning, reading=self.reading)

    def evaluation(self) -> DiffusionEvaluation:
        return DiffusionEvaluation(self.reading, self.conditioning.image)


class VectorConditioned(Sparse, DiffusionSystem):
    """Base of the systems whose network takes a class and numbers, added to the embedding of the time, and an image,
    appended to the channels of its input."""

    if_set: ClassVar[frozenset[str]] = frozenset({"condition"})
    takes_augmentation: ClassVar[bool] = True

    condition: VectorCondition = LabelCondition()
    """Condition of the network: a class, numbers, an image, or a list of several, which apply together."""

    sections: ClassVar[Mapping[str, Section]] = {
        **DiffusionSystem.sections,
        "pairs": Section(SeveralVectorPairs, None, example="{type: numbers, columns: [age]}", optional=True),
    }
