"""Common base of the systems that are trained on pixels to be the codec of others: they reconstruct, and make no
samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from image_diffusion.codecs.base import LatentShape
from image_diffusion.core.types import DataSpec, Objective
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.objectives.codec.adversarial import Adversarial, Discriminated
from image_diffusion.objectives.codec.perceptual import Perceptual
from image_diffusion.systems.base import Others, Sections, System, spec_of
from image_diffusion.systems.codec.evaluation import CodecEvaluation
from image_diffusion.systems.codec.perceptual import PerceptualConfig
from image_diffusion.systems.codec.reconstruction import CodecSampling
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.interface import Section


class CodecSystem(System):
    """Base of the systems that learn to encode and decode images. Each derived class adds its network."""

    perceptual: PerceptualConfig | None = None
    """A term of the loss for how different an image and its reconstruction look. Unset: the loss has no such term."""
    adversarial: Adversarial | None = None
    """A term of the loss from a discriminator between reconstructions and images. Unset: the loss has no such term."""

    sections: ClassVar[Mapping[str, Section]] = {
        "preview": Section(SampleConfig, SampleConfig(), frozenset({"batch_size"})),
        "evaluate": Section(EvaluateConfig, EvaluateConfig(), frozenset({"detectors", "lpips"})),
    }
    reads: ClassVar = ("crops",)
    decoded: ClassVar[str]
    """Name of the reconstruction that is evaluated, one of the network's ways to decode."""

    def check(self, experiment: Sections, others: Others) -> None:
        super().check(experiment, others)
        spec = spec_of(experiment, others.codec)
        if self.perceptual is not None:
            self.perceptual.check(spec)
        if self.adversarial is not None:
            self.adversarial.check(min(spec.size))

    def build_objective(self, spec: DataSpec) -> Objective:
        """Build the objective for images of `spec`, with the additional terms."""
        objective = self.build_own_objective(spec)
        if self.perceptual is not None:
            objective = Perceptual(objective, self.perceptual.distance(), self.perceptual.weight)
        return objective if self.adversarial is None else Discriminated(self.adversarial, objective, spec)

    @abstractmethod
    def build_own_objective(self, spec: DataSpec) -> Objective:
        """Build the objective for images of `spec`, without the terms that every codec may have in addition."""

    @property
    def latents(self) -> LatentShape:
        network: LatentShape = getattr(self, "network")  # noqa: B009 - each page has one of its own type
        return network

    def sampling(self) -> CodecSampling:
        return CodecSampling(self.decoded)

    def evaluation(self) -> CodecEvaluation:
        return CodecEvaluation(self.decoded)
