"""A Gaussian for each pixel of each class: the smallest model of images there is, and a kind of system of its own.

`test_workflow_new_system` puts this page into a copy of the package. `docs/extending.md` quotes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor, nn

from image_diffusion.codecs.base import Codec, from_uint8, to_uint8
from image_diffusion.core.config.base import Config, dump
from image_diffusion.core.files.atomic import digest
from image_diffusion.core.pictures import image_grid
from image_diffusion.core.random.streams import Streams, image_streams
from image_diffusion.core.types import Batch, DataSpec, Losses, Objective
from image_diffusion.metrics.distances.jackknife import mean_estimate
from image_diffusion.systems.base import System
from image_diffusion.systems.evaluation import Evaluation, EvaluationInputs
from image_diffusion.systems.interface import Section
from image_diffusion.systems.sampling import Sampling, SamplingInputs


class Pixels(nn.Module):
    """The mean and the logarithm of the standard deviation of every pixel, [K, C, H, W] each."""

    def __init__(self, num_classes: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(num_classes, *shape))
        self.log_std = nn.Parameter(torch.zeros(num_classes, *shape))

    def forward(self, label: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean[label], self.log_std[label]


class Nats(Objective):
    """-log p(x), nats per value."""

    def __call__(self, network: Any, batch: Batch) -> Losses:
        mean, log_std = network(batch.cond["kind"])
        terms = 0.5 * ((batch.x - mean) / log_std.exp()).square() + log_std + 0.5 * math.log(2 * math.pi)
        loss = terms.flatten(1).mean(dim=1)
        return Losses(loss, {"nats": loss.detach()})


class Drawing(Config):
    """Which images are drawn, and how far from the mean."""

    num_samples: int = Field(16, ge=1)
    """Number of images."""
    first_seed: int = Field(0, ge=0)
    """Seed of the first image."""
    temperature: float = Field(1.0, ge=0)
    """What standard deviations are multiplied with."""
    batch_size: int = Field(8, ge=1)
    """Images drawn at once."""
    pictures: bool = False
    """Also keep each image as a PNG."""
    grid_images: int = Field(16, ge=1)
    """Images in the picture grid.png."""

    @property
    def num_jobs(self) -> int:
        """Small enough for one."""
        return 1

    @property
    def num_stored(self) -> int:
        """All of them."""
        return self.num_samples


class Judging(Config):
    """How the likelihood of images is measured."""

    batch_size: int = Field(64, ge=1)
    """Images at a time."""


class Drawn:
    """Draws the images of the stage `sample`."""

    def __init__(self, inputs: SamplingInputs) -> None:
        settings = inputs.settings
        self._network, self._temperature, self._codec = inputs.model.network, settings.temperature, inputs.codec
        self._seeds = torch.arange(settings.first_seed, settings.first_seed + settings.num_samples)
        self.labels = self._seeds % len(inputs.model.classes)
        self.titles: list[str] = []
        self.described: dict[str, Any] = {}

    def __call__(self, rows: slice, temperature: float | None = None) -> Tensor:
        mean, log_std = self._network(self.labels[rows])
        noise = image_streams(self._seeds[rows]).normal("pixels", tuple(mean.shape[1:]))
        scale = self._temperature if temperature is None else temperature
        return self._codec.decode(mean + scale * log_std.exp() * noise).cpu()

    def pictures(self) -> dict[str, Image.Image]:
        """From the mean to the sample."""
        steps = [self(slice(8), self._temperature * part / 4) for part in range(5)]
        return {"steps": image_grid(torch.stack(steps, dim=1).flatten(0, 1), columns=5)}


class GaussianSampling(Sampling):
    """Sampling by drawing around the mean."""

    def maker(self, inputs: SamplingInputs) -> Drawn:
        return Drawn(inputs)


class GaussianEvaluation(Evaluation):
    """The likelihood of held-out images."""

    def headline(self, settings: Judging) -> str:
        return "nats"

    def evaluate(self, inputs: EvaluationInputs) -> dict[str, Any]:
        assert inputs.model is not None
        data, settings = inputs.splits["validation"], inputs.settings
        parts = []
        for start in range(0, data.num_samples, settings.batch_size):
            rows = np.arange(start, min(start + settings.batch_size, data.num_samples))
            x, label = from_uint8(data.gather(rows)), torch.from_numpy(data.labels[rows])
            assert torch.equal(to_uint8(x), data.gather(rows))
            streams = Streams(0, torch.from_numpy(rows), torch.from_numpy(rows))
            with torch.no_grad():
                parts.append(Nats()(inputs.model.network, Batch(x, {"kind": label}, streams)).loss.double())
        each = torch.cat(parts)
        entry = mean_estimate(each).as_dict()
        how = {"data": data.digest, "settings": dump(settings)}
        protocol = {**how, "digest": digest(how), "num_samples": len(each)}
        return {"metrics": {"nats": entry}, "curve": [], "classes": {}, "protocol": protocol}


class GaussianSystem(System):
    """A Gaussian for each pixel of each class."""

    type: Literal["gaussian"] = "gaussian"
    """Gaussians of pixels."""

    sections: ClassVar[Mapping[str, Section]] = {
        "sample": Section(Drawing, Drawing()),
        "evaluate": Section(Judging, Judging()),
    }
    reads: ClassVar = ("crops",)

    def build_network(self, spec: DataSpec) -> Pixels:
        return Pixels(max(spec.num_classes, 1), (spec.channels, spec.resolution, spec.resolution))

    def build_objective(self, spec: DataSpec) -> Nats:
        return Nats()

    def batch(
        self,
        stored: Tensor,
        label: Tensor,
        streams: Streams,
        spec: DataSpec,
        codec: Codec,
        beside: Mapping[str, Tensor] | None = None,
    ) -> Batch:
        return Batch(codec.draw(stored, streams), {"kind": label}, streams)

    def sampling(self) -> Sampling:
        return GaussianSampling()

    def evaluation(self) -> Evaluation:
        return GaussianEvaluation()
