"""DiT: a transformer over patches, usually of latents (Peebles & Xie 2023); with a flow path: SiT (Ma et al. 2024).

Defaults that differ from those of facebookresearch/DiT (docs/systems.md has all):

    key                              original  here       why
    system.network.time_frequencies  dit       diffusers  exports to diffusers are exact with its own spacing
    train.ema.warmup.type            none      ramp_up    without it a short training ends in its initial weights
    sample.guidance.guidance_scale   1.5       1          what it is worth depends on the data; none needs no labels
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from image_diffusion.codecs.codec import Codec
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.core.types import Objective as ObjectiveFunction
from image_diffusion.data.shards import Shards
from image_diffusion.networks.dit import DiT, DiTConfig
from image_diffusion.networks.dit_weights import is_dit, is_dit_folder
from image_diffusion.objectives import Objective
from image_diffusion.objectives.alignment import Aligned, Alignment
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.samplers.ancestral import Ddpm
from image_diffusion.systems.diffusion.asked import Asked
from image_diffusion.systems.diffusion.conditions import Condition, LabelCondition
from image_diffusion.systems.diffusion.dit_export import check_pipeline, latents_of, read_published, write_pipeline
from image_diffusion.systems.diffusion.family import DiffusionSystem
from image_diffusion.systems.diffusion.sampling import SampleConfig
from image_diffusion.systems.embedding.captions import CaptionPairs
from image_diffusion.systems.embedding.features import FeaturePairs
from image_diffusion.systems.embedding.pairs import ClipPairs, ContrastivePairs, HashedPairs
from image_diffusion.systems.given import (
    CardUse,
    Described,
    Foreign,
    Inputs,
    Model,
    Others,
    Section,
    Sections,
    all_but,
)

_NOT_PREVIEWED = ("small_images", "embeddings", "compile")


class DiTSystem(DiffusionSystem):
    """A transformer over patches of x."""

    type: Literal["dit"] = "dit"
    """A transformer over patches."""
    network: DiTConfig = DiTConfig(size="DiT-XL/2")
    """Size of the network."""
    objective: Objective = Denoising(variance="learned_range", loss="hybrid", label_drop_probability=0.1)
    """What the network predicts, and how its error is weighed. Labels are dropped where the data have any."""
    condition: Condition = LabelCondition()
    """What the network is told of an image, beside the noise: its class, words, or its embedding."""
    alignment: Alignment | None = None
    """What its tokens are held against while it learns: the features of a teacher, in the section pairs. Unset:
    nothing."""

    sections: ClassVar[Mapping[str, Section]] = {
        **DiffusionSystem.sections,
        "pairs": Section(
            Annotated[
                CaptionPairs | FeaturePairs | HashedPairs | ContrastivePairs | ClipPairs, Field(discriminator="type")
            ],
            None,
            example="{type: captions}",
            optional=True,
        ),
        "preview": Section(
            SampleConfig, SampleConfig(), all_but(SampleConfig, "small_images", "embeddings", "compile", "keep")
        ),
        "sample": Section(SampleConfig, SampleConfig(sampler=Ddpm(num_steps=250))),
    }

    takes_intervals: ClassVar[bool] = True
    exports: ClassVar[tuple[str, ...]] = ("diffusers", "pipeline")
    class_rows: ClassVar[tuple[str, ...]] = ("y_embedder.embedding_table.weight",)
    positions: ClassVar[tuple[str, ...]] = ("pos_embed",)
    new_layers: ClassVar[tuple[str, ...]] = ("interval_embedder.",)

    @property
    def reads_beside(self) -> str | None:
        return self.condition.reads if self.alignment is None else "features"

    @property
    def told_words(self) -> bool:
        return self.condition.reads is not None

    def check(self, experiment: Sections, others: Others) -> None:
        self._check_pairs(experiment.section("pairs"))
        if self.told_words:
            self.condition.check_pairs(experiment.section("pairs"))
        if self.alignment is not None:
            self.alignment.check(self.network.shape.depth, self.objective)
        super().check(experiment, others)
        if self.told_words and experiment.section("evaluate").likelihood is not None:
            raise ValueError(
                "evaluate.likelihood is set, but is not measured of networks that are told words or embeddings."
            )
        if not self.told_words and self.drops_labels and not self.network.null_label:
            raise ValueError(
                f"system.objective.label_drop_probability is {self.objective.label_drop_probability:g}, but "
                f"system.network.null_label is false: no label stands for none. Set null_label to true, or drop none."
            )
        if experiment.section("export").format == "diffusers":
            if self.told_words:
                raise ValueError(
                    "Diffusers' DiTPipeline is told classes, but this network words or embeddings. Set export.format "
                    "to pipeline."
                )
            check_pipeline(self, experiment.codec)

    def inputs(self, experiment: Sections) -> Inputs:
        return replace(super().inputs(experiment), embeddings=self.condition.draws(experiment.section("sample")))

    def _check_pairs(
        self, pairs: CaptionPairs | FeaturePairs | HashedPairs | ContrastivePairs | ClipPairs | None
    ) -> None:
        """Raise ValueError unless there is what the system reads beside its data, and nothing else."""
        if self.told_words and self.alignment is not None:
            raise ValueError(
                f"system.condition.type is {self.condition.type} and system.alignment is set, but one set is read "
                f"beside the images: {self.condition.reads} or features. Leave one of the two out."
            )
        wanted = self.reads_beside
        if pairs is not None and wanted is None:
            raise ValueError(
                "pairs is set, but system.condition.type is label: nothing reads it. Leave it out, or set the "
                f"condition to {'text' if pairs.kind == 'captions' else 'embedding'}."
                if pairs.kind != "features"
                else "pairs is set, but system.alignment is not: nothing reads it. Leave it out, or add "
                "system.alignment: {block: 1}, say."
            )
        if wanted is not None and (pairs is None or pairs.kind != wanted):
            of = self.condition.type
            key = f"system.condition.type is {of}" if self.told_words else "system.alignment is set"
            there = "pairs is missing" if pairs is None else f"pairs.type is {pairs.type}"
            example = "hashed" if wanted == "pairs" else wanted
            raise ValueError(
                f"{key}, but {there}: where are the {wanted}? Add a section, such as pairs: {{type: {example}}}."
            )

    def check_asked(self, section: str, settings: SampleConfig) -> None:
        self.condition.check(section, settings)

    def spec(self, data: Shards) -> DataSpec:
        spec = self.condition.spec(super().spec(data), data.beside)
        if self.alignment is None:
            return spec
        assert data.beside is not None
        return spec.model_copy(update={"features": data.beside.shape})

    def with_beside(self, batch: Batch, beside: Tensor) -> Batch:
        if self.alignment is not None:
            return replace(batch, features=beside)
        return replace(batch, cond=batch.cond | self.condition.told(beside, batch.streams))

    def asked(
        self, settings: SampleConfig, pairs: Mapping[str, Any] | None, count: int, given: Shards | Sequence[Path] = ()
    ) -> Asked:
        return self.condition.asked(settings, pairs, count, given)

    @property
    def build_options(self) -> dict[str, Any]:
        return {"learned_variance": self.learns_variance} | (
            {"interval": True} if self.objective.learns_intervals else {}
        )

    def build_network(self, spec: DataSpec) -> DiT:
        """The network, randomly initialised. Raises ValueError when it does not fit the data."""
        return self.network.build(spec, **self.build_options)

    def build_objective(self, spec: DataSpec) -> ObjectiveFunction:
        """The objective, aligned where the data have features. Raises ValueError where it does not fit the process or
        the data."""
        objective = super().build_objective(spec)
        if self.alignment is None or spec.features is None:
            return objective
        return Aligned(self.alignment, objective, self.network.shape.width, spec.features)

    def export(self, model: Model, codec: Codec, format_: str, folder: Path) -> CardUse:
        if format_ != "diffusers":
            return super().export(model, codec, format_, folder)
        return write_pipeline(self, model, codec, folder)

    @classmethod
    def read_foreign(cls, content: Mapping[str, Any], path: Path, codec: str, described: Described) -> Foreign | None:
        if not (is_dit_folder(path) if path.is_dir() else is_dit(content)):
            return None
        experiment = described(cls)
        system = None if experiment is None else experiment.system
        assert system is None or isinstance(system, DiTSystem)
        weights, parts, told = read_published(content, path, system)
        vae, identity = latents_of(codec)
        unread = tuple(name for name in content if name != "ema") if "ema" in content else ()
        return Foreign(weights.tensors, cls(network=weights.config, **parts), weights.spec, vae, identity, told, unread)
