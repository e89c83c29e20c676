"""The likelihood that a diffusion system gives to images, where it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from image_diffusion.codecs.codec import from_uint8
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config import Config
from image_diffusion.core.streams import Streams
from image_diffusion.core.types import DataSpec, Network
from image_diffusion.metrics.likelihood import LikelihoodConfig
from image_diffusion.process.denoiser import NetworkDenoiser
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.likelihood import BitsPerDim, bits_per_dim
from image_diffusion.process.parameterization import clamp
from image_diffusion.systems.diffusion.enlarging import shrink
from image_diffusion.systems.given import Model

if TYPE_CHECKING:
    from image_diffusion.systems.diffusion.family import DiffusionSystem


def check_likelihood(system: DiffusionSystem, codec: Config, settings: LikelihoodConfig) -> None:
    """Raise ValueError for a system without a likelihood of images.

    It takes a chain of steps x_t -> x_s, each a Gaussian p(x_s | x_t) given x_t alone, that ends at pixels: a discrete
    process on pixels, with any prediction and any variance. A flow or a continuous process is a differential equation
    with no steps of its own, an estimate that is carried from step to step makes p depend on more than x_t, and the
    decoder of latents gives no probability to a pixel.
    """
    advice = "Leave out evaluate.likelihood."
    if not isinstance(codec, Rgb):
        raise ValueError(
            f"evaluate.likelihood: the network works on latents, from which no pixel has a probability. {advice}"
        )
    if not isinstance(system.process, Discrete):
        raise ValueError(
            f"evaluate.likelihood: the process {system.process.type} has no steps of which the bound could consist; "
            f"only a discrete process has. {advice}"
        )
    system.process.build().grid(settings.timesteps or None)  # raises for a respacing that cannot be had


def told_label(model: Model, label: int | str | None) -> int | None:
    """The number of the class that a network is told of every image; None: each image's own.

    label: as `LikelihoodConfig` has it. Raises ValueError for one that the network does not know.
    """
    if label is None:
        return None
    system: Any = model.system
    known = model.spec.num_classes
    if not known:
        raise ValueError("evaluate.likelihood.label is set, but the network knows no classes. Leave it out.")
    if label == "none" and label not in model.classes:
        if not system.drops_labels:
            raise ValueError(
                "evaluate.likelihood.label is none, but the network never learned to do without a label. Name a class."
            )
        return known
    number = model.classes.index(label) if label in model.classes else label
    if isinstance(number, str) or not 0 <= number < known:
        names = f", {', '.join(model.classes[:8])}{', …' * (len(model.classes) > 8)}" if model.classes else ""
        raise ValueError(
            f"evaluate.likelihood.label is {label}, which is no class of the network. Known: 0 to {known - 1}{names}."
        )
    return number


class ImageBound:
    """Images -> the bound on their likelihood, on the device of the network. Where the network enlarges, given their
    small images; where it knows labels, given theirs, or one and the same label for all.

    timesteps: of the process's schedule, the most noise first. Raises ValueError as `check_likelihood` does.
    """

    def __init__(
        self,
        network: nn.Module,
        system: DiffusionSystem,
        spec: DataSpec,
        codec: Config,
        settings: LikelihoodConfig,
        label: int | None = None,
    ) -> None:
        check_likelihood(system, codec, settings)
        assert isinstance(system.process, Discrete)
        process = system.process.build()
        self._process = process.respaced(settings.timesteps) if settings.timesteps else process
        self.timesteps: list[int] = self._process.timestep_map.flip(0).tolist()
        self._network, self._system, self._spec, self._settings = network, system, spec, settings
        self._label = label
        self._device = next(network.parameters()).device

    @torch.no_grad()
    def __call__(self, images: Tensor, labels: Tensor, numbers: Tensor) -> BitsPerDim:
        """The bounds of uint8 images [B, C, H, W] with labels, int64 [B]. numbers: int64 [B], whose noise is drawn."""
        x0, objective, grid = from_uint8(images.to(self._device)), self._system.objective, self._process.grid()
        labels = labels if self._label is None else torch.full_like(labels, self._label)
        cond = {"label": labels.to(self._device)} if self._spec.num_classes else {}
        if self._system.low_resolution is not None:
            cond["low_res"] = shrink(x0, self._system.low_resolution)
        denoiser = NetworkDenoiser(
            cast("Network", self._network),
            self._process,
            grid,
            objective.prediction,
            objective.variance,
            cond,
            clamp if self._settings.clip_denoised else None,
        )
        sample = numbers.to(self._device)

        def noise(i: int) -> Tensor:
            streams = Streams(self._settings.seed, torch.full_like(sample, i), sample)
            return streams.normal("likelihood", tuple(x0.shape[1:]))

        return bits_per_dim(
            denoiser, grid, x0, noise, "fixed_large" if objective.variance == "fixed_large" else "fixed_small"
        )
