"""Base class of the codec systems: they are trained to encode and decode pixels for other systems, and do not
sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.codecs.base import LatentShape
from image_diffusion.core.types import DataSpec, Objective
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.images.reconstruction import LpipsConfig
from image_diffusion.objectives.autoencoding import Adversarial, Discriminated, Perceptual
from image_diffusion.systems.base import Others, Sections, System, spec_of
from image_diffusion.systems.codec.reconstruction import CodecEvaluation, CodecSampling
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.interface import Section

_PERCEPTUAL = "system.perceptual"


class PerceptualConfig(LpipsConfig):
    """LPIPS (Zhang et al. 2018) between an image and its reconstruction, and its factor. Its weights are never
    downloaded."""

    weight: float = Field(1.0, gt=0)
    """Factor of the distance in the loss."""

    def distance(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return LPIPS, [B], of two sets of images [B, C, H, W] in [-1, 1], computed in float32 on their device. Raises
        ValueError for files with other contents."""
        lpips = self.build(torch.device("cpu"), _PERCEPTUAL)

        def measure(first: Tensor, second: Tensor) -> Tensor:
            lpips.to(first.device)
            with torch.autocast(first.device.type, enabled=False):
                return lpips.distance(first.float(), second.float())

        return measure


class CodecSystem(System):
    """Base of the codec systems. Each derived class adds its network."""

    perceptual: PerceptualConfig | None = None
    """Perceptual term of the loss: how different an image and its reconstruction look. Unset: no such term."""
    adversarial: Adversarial | None = None
    """Adversarial term of the loss, from a discriminator between reconstructions and images. Unset: no such term."""

    sections: ClassVar[Mapping[str, Section]] = {
        "preview": Section(SampleConfig, SampleConfig(), frozenset({"batch_size"})),
        "evaluate": Section(EvaluateConfig, EvaluateConfig(), frozenset({"detectors", "lpips"})),
    }
    reads: ClassVar = ("crops",)
    decoded: ClassVar[str]
    """Decoding mode of the network whose reconstructions are evaluated."""

    def check(self, experiment: Sections, others: Others) -> None:
        super().check(experiment, others)
        if experiment.train.layer_decay is not None:
            raise ValueError(
                f"train.layer_decay is {experiment.train.layer_decay:g}, but an encoder and a decoder have no common "
                "order of blocks. Leave it out, or use train.lr_factors."
            )
        spec = spec_of(experiment, others.codec)
        measured = experiment.section("evaluate").lpips
        for key, lpips in ((_PERCEPTUAL, self.perceptual), ("evaluate.lpips", measured)):
            if lpips is not None:
                lpips.check(spec, key)
        if self.adversarial is not None:
            self.adversarial.check(min(spec.size))

    def build_objective(self, spec: DataSpec) -> Objective:
        objective = self.build_own_objective(spec)
        if self.perceptual is not None:
            objective = Perceptual(objective, self.perceptual.distance(), self.perceptual.weight)
        return objective if self.adversarial is None else Discriminated(self.adversarial, objective, spec)

    @abstractmethod
    def build_own_objective(self, spec: DataSpec) -> Objective:
        """Build the objective for images of `spec`, without the optional terms of all codecs."""

    @property
    def latents(self) -> LatentShape:
        return getattr(self, "network")  # noqa: B009 - each system has one of its own type

    def sampling(self) -> CodecSampling:
        return CodecSampling(self.decoded)

    def evaluation(self) -> CodecEvaluation:
        return CodecEvaluation(self.decoded)
