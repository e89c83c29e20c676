"""What the systems share that are trained on pixels to be the codec of others: they reconstruct, and make nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from image_diffusion.codecs.codec import Codec, LatentShape
from image_diffusion.core.types import DataSpec, Objective
from image_diffusion.metrics import DetectorConfig
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.objectives.adversarial import Adversarial, Discriminated
from image_diffusion.objectives.perceptual import Perceptual
from image_diffusion.systems.codec.evaluation import judge_codec
from image_diffusion.systems.codec.perceptual import PerceptualConfig
from image_diffusion.systems.codec.reconstruction import Reconstructions, preview_reconstructions
from image_diffusion.systems.diffusion.sampling import SampleConfig
from image_diffusion.systems.given import (
    Embed,
    Model,
    Others,
    Predict,
    Preview,
    Section,
    Sections,
    Served,
    ToJudge,
    ToPreview,
)
from image_diffusion.systems.system import System, spec_of


class CodecSystem(System):
    """A system that learns to encode and decode images. A page of its own says which network it uses."""

    perceptual: PerceptualConfig | None = None
    """A term of the loss for how different an image and its reconstruction look. Unset: there is none."""
    adversarial: Adversarial | None = None
    """A term of the loss for whether a discriminator tells reconstructions from images. Unset: there is none."""

    sections: ClassVar[Mapping[str, Section]] = {
        "preview": Section(SampleConfig, SampleConfig(), frozenset({"batch_size"})),
        "evaluate": Section(EvaluateConfig, EvaluateConfig(), frozenset({"detectors", "lpips"})),
    }
    reads: ClassVar = ("crops",)
    decoded: ClassVar[str]
    """The reconstruction that it is judged by, of the ways that the network has to decode."""

    def check(self, experiment: Sections, others: Others) -> None:
        super().check(experiment, others)
        spec = spec_of(experiment, others.codec)
        if self.perceptual is not None:
            self.perceptual.check(spec)
        if self.adversarial is not None:
            self.adversarial.check(spec.resolution)

    def build_objective(self, spec: DataSpec) -> Objective:
        """The objective for images of `spec`, with the terms beside it."""
        objective = self.build_own_objective(spec)
        if self.perceptual is not None:
            objective = Perceptual(objective, self.perceptual.distance(), self.perceptual.weight)
        return objective if self.adversarial is None else Discriminated(self.adversarial, objective, spec)

    @abstractmethod
    def build_own_objective(self, spec: DataSpec) -> Objective:
        """The objective for images of `spec`, without the terms that every codec may have beside it."""

    @property
    def latents(self) -> LatentShape:
        network: LatentShape = getattr(self, "network")  # noqa: B009 - each page has one of its own type
        return network

    def headline(self, experiment: Sections) -> str:
        return f"{experiment.section('evaluate').detectors[0].metric_name('reconstruction_fd')}_{self.decoded}"

    def detectors(self, experiment: Sections) -> Sequence[DetectorConfig]:
        found: Sequence[DetectorConfig] = experiment.section("evaluate").detectors
        return found

    def preview(self, given: ToPreview) -> Preview | None:
        return preview_reconstructions(given)

    def judge(self, given: ToJudge) -> dict[str, Any]:
        return judge_codec(given)

    def served(self, spec: DataSpec, classes: list[str], embeds: bool = False) -> Served | None:
        return Served(images=(spec.resolution, spec.resolution, spec.channels))

    def predictor(
        self,
        model: Model,
        settings: Any,
        codec: Callable[[], Codec],
        weaker: Model | None,
        embed: Embed | None = None,
    ) -> Predict:
        return Reconstructions(model, self.decoded)
