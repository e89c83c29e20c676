"""What the diffusion systems share: a process, an objective, and all that follows from learning to remove noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from image_diffusion.codecs import CodecConfig
from image_diffusion.codecs.codec import Codec
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.streams import Streams
from image_diffusion.core.types import Batch, DataSpec, Network
from image_diffusion.core.types import Objective as ObjectiveFunction
from image_diffusion.data.encoding import EncodeConfig
from image_diffusion.data.shards import Shards
from image_diffusion.metrics import DetectorConfig
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.nn.precision import Precision
from image_diffusion.objectives import Objective
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process import Process
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.grid import Denoiser, Grid
from image_diffusion.process.parameterization import LEARNED_VARIANCES, Variance
from image_diffusion.systems.diffusion.asked import Asked
from image_diffusion.systems.diffusion.checks import check_diffusion, check_embeddings, check_small_images
from image_diffusion.systems.diffusion.enlarging import shrink
from image_diffusion.systems.diffusion.evaluation import judge_diffusion
from image_diffusion.systems.diffusion.exported import ExportedDiffusion
from image_diffusion.systems.diffusion.hub_export import write_images
from image_diffusion.systems.diffusion.making import Generates, Images, image_columns, make_images, preview_images
from image_diffusion.systems.diffusion.reading import Reading
from image_diffusion.systems.diffusion.sampling import Generator, SampleConfig
from image_diffusion.systems.diffusion.sweep import SweepConfig
from image_diffusion.systems.given import (
    CardUse,
    Embed,
    Inputs,
    Maker,
    Model,
    Others,
    Predict,
    Preview,
    Section,
    Sections,
    Served,
    ToJudge,
    ToPreview,
    ToSample,
    all_but,
)
from image_diffusion.systems.system import System

_IN_WORDS = ("prompts", "negative_prompt", "embeddings")


class DiffusionSystem(System):
    """A system that learns to remove noise. A page of its own says which network it uses."""

    process: Process = Discrete()
    """How noise is added."""
    objective: Objective = Denoising()
    """What the network predicts, and how its error is weighed."""

    takes_intervals: ClassVar[bool] = False
    """Whether its network can be told of intervals of time, as the objective mean_flow asks."""

    sections: ClassVar[Mapping[str, Section]] = {
        "codec": Section(CodecConfig, Rgb()),
        "encode": Section(EncodeConfig, EncodeConfig(), all_but(EncodeConfig, "tokens")),
        "preview": Section(
            SampleConfig, SampleConfig(), all_but(SampleConfig, *_IN_WORDS, "small_images", "compile", "keep")
        ),
        "sample": Section(SampleConfig, SampleConfig(), all_but(SampleConfig, *_IN_WORDS)),
        "evaluate": Section(EvaluateConfig, EvaluateConfig(), all_but(EvaluateConfig, "lpips")),
        "sweep": Section(SweepConfig, SweepConfig()),
    }

    @property
    def learns_variance(self) -> bool:
        """Whether the network returns the variance of the reverse process beside its prediction."""
        return self.objective.variance in LEARNED_VARIANCES

    @property
    def variance(self) -> Variance:
        """What the network says of the variance of the reverse process."""
        return self.objective.variance

    @property
    def drops_labels(self) -> bool:
        """Whether the network also learns to do without a label, which guidance needs."""
        return self.objective.label_drop_probability > 0

    @property
    def reading(self) -> Reading:
        """What sampling has to know of it."""
        return Reading(
            process=self.process,
            prediction=self.objective.prediction,
            variance=self.variance,
            drops_labels=self.drops_labels,
        )

    @property
    def told_words(self) -> bool:
        """Whether its network is told words or embeddings, in place of classes."""
        return False

    @property
    def build_options(self) -> dict[str, Any]:
        """What its network is built with (`network.build`), beside the data."""
        return {}

    @property
    def low_resolution(self) -> int | None:
        """Side of the small images that the network enlarges; None: it makes images from noise alone."""
        return None

    def check(self, experiment: Sections, others: Others) -> None:
        check_diffusion(self, experiment, others)
        super().check(experiment, others)
        check_small_images(self, experiment, others)
        check_embeddings(self.inputs(experiment).embeddings, experiment, others.embeddings)

    def inputs(self, experiment: Sections) -> Inputs:
        return Inputs(experiment.section("sample").small_images, experiment.section("evaluate").against)

    def headline(self, experiment: Sections) -> str:
        return str(experiment.section("evaluate").detectors[0].metric_name("fd"))

    def detectors(self, experiment: Sections) -> Sequence[DetectorConfig]:
        found: Sequence[DetectorConfig] = experiment.section("evaluate").detectors
        return found

    def looks_at_splits(self, experiment: Sections) -> bool:
        return experiment.section("evaluate").against is None

    def build_objective(self, spec: DataSpec) -> ObjectiveFunction:
        """The objective. Raises ValueError where it does not fit the process or the data."""
        objective = self.objective
        nothing = spec.num_classes == 0 and not spec.conditions
        if nothing and self._drops_as_usual():  # what a system does by default it does where it can
            objective = objective.model_copy(update={"label_drop_probability": 0.0})
        return objective.build(self.process.build(), spec)

    def _drops_as_usual(self) -> bool:
        usual = type(self).model_fields["objective"].default.label_drop_probability
        return bool(self.objective.label_drop_probability == usual)

    def batch(self, stored: Tensor, label: Tensor, streams: Streams, spec: DataSpec, codec: Codec) -> Batch:
        x = codec.draw(stored, streams)
        cond = {"label": label} if spec.num_classes else {}
        if self.low_resolution is not None:
            cond["low_res"] = shrink(x, self.low_resolution)
        return Batch(x, cond, streams)

    def asked(
        self, settings: SampleConfig, pairs: Mapping[str, Any] | None, count: int, given: Shards | Sequence[Path] = ()
    ) -> Asked:
        """What `count` images of a section are asked for with, beside seeds and classes. pairs: what the manifest of
        the shards beside the training data says of itself. given: `ToSample.embeddings`, or the held-out data of a
        training. Raises ValueError for what cannot be asked."""
        return Asked()

    def check_asked(self, section: str, settings: SampleConfig) -> None:
        """Raise ValueError where a section asks in a way that the network does not understand."""

    def preview(self, given: ToPreview) -> Preview | None:
        return preview_images(self, given)

    def denoiser(
        self,
        network: Network,
        grid: Grid,
        cond: Mapping[str, Tensor],
        guide: Callable[[Network], Network] = lambda network: network,
    ) -> Denoiser:
        """The network as a sampler on `grid` sees it, for one batch of images. guide: a network -> the guided one."""
        return self.reading.denoiser(network, grid, cond, guide)

    def generator(
        self,
        network: nn.Module,
        spec: DataSpec,
        codec: Codec,
        settings: SampleConfig,
        weaker: nn.Module | None = None,
        null: Mapping[str, Tensor] | None = None,
    ) -> Generates:
        """What makes images. Raises ValueError for a sampler or guidance that do not fit."""
        return Generator(network, self, spec, codec, settings, weaker, null)

    def maker(self, given: ToSample) -> Maker:
        return make_images(self, given)

    def evaluations(self, settings: SampleConfig) -> int:
        grid: Grid = settings.sampler.grid(self.process)
        calls: int = settings.sampler.calls(grid)
        return round(calls * (1 + settings.guidance.share(grid)))

    def sampled_in(self, settings: SampleConfig) -> Precision:
        return settings.precision

    def judge(self, given: ToJudge) -> dict[str, Any]:
        return judge_diffusion(given)

    def export(self, model: Model, codec: Codec, format_: str, folder: Path) -> CardUse:
        if format_ != "pipeline":
            return super().export(model, codec, format_, folder)
        usual = self.sections["sample"].default
        assert isinstance(usual, SampleConfig)
        return write_images(self, model, codec, usual, ExportedDiffusion, folder)

    def served(self, spec: DataSpec, classes: list[str], embeds: bool = False) -> Served | None:
        return image_columns(self, spec, classes, embeds)

    def predictor(
        self,
        model: Model,
        settings: SampleConfig,
        codec: Callable[[], Codec],
        weaker: Model | None,
        embed: Embed | None = None,
    ) -> Predict:
        return Images(self, model, settings, codec(), weaker, embed)
