"""Image embeddings from captions: noise -> several candidates -> the candidate nearest to the caption. And the
properties of a prior that sampling depends on: its noise, the meaning of the output of its network, and the inputs of
the network, from stored pairs of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.devices import to_device
from image_diffusion.core.random.streams import Streams, image_streams, initial_noise
from image_diffusion.core.types import Batch, DataSpec, Network
from image_diffusion.data.encoded.pairs import IMAGE, TEXT, TOKENS
from image_diffusion.objectives.embedding import with_norm
from image_diffusion.process.base import Denoised, Denoiser, Grid
from image_diffusion.process.denoiser import NetworkDenoiser, clamp
from image_diffusion.process.discrete import Discrete
from image_diffusion.samplers.ancestral import Ddim, Ddpm, LegacyDdim
from image_diffusion.samplers.guidance import guided


class ImageStatistics(Config):
    """Statistics that image embeddings are normalised by: x = (embedding - mean) / std."""

    mean: tuple[float, ...]
    """Mean of each dimension."""
    std: tuple[Annotated[float, Field(gt=0)], ...]
    """Standard deviation of each dimension."""

    @model_validator(mode="after")
    def _of_one_dimension(self) -> ImageStatistics:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} numbers, but std {len(self.std)}. Give one a dimension.")
        return self


@dataclass(frozen=True)
class Scaling:
    """Conversion of image embeddings to the network's scale, and back. norm: the factor of the embeddings. statistics:
    mean and standard deviation that normalise the embeddings in place of the factor."""

    norm: float
    statistics: ImageStatistics | None = None

    def x(self, embeddings: Tensor) -> Tensor:
        """Return image embeddings [..., dim] in the network's scale."""
        if self.statistics is None:
            return embeddings * self.norm
        mean, std = self.moments(embeddings)
        return (embeddings - mean) / std

    def stored(self, x: Tensor) -> Tensor:
        """Return the embeddings of x [..., dim], in the scale of the stored ones."""
        if self.statistics is None:
            return x / self.norm
        mean, std = self.moments(x)
        return x * std + mean

    def moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation [dim], for embeddings of a tensor's dimension, on its device. Raises
        ValueError for statistics of another dimension."""
        dim = like.shape[-1]
        if self.statistics is None:
            return like.new_zeros(dim), like.new_full((dim,), 1 / self.norm)
        if len(self.statistics.mean) != dim:
            raise ValueError(
                f"system.image_statistics has {len(self.statistics.mean)} dimensions, but embeddings have {dim}. Give "
                f"those of the same embeddings."
            )
        moments = torch.tensor([self.statistics.mean, self.statistics.std], dtype=like.dtype)
        mean, std = to_device(moments, like.device)
        return mean, std


class EmbeddingReading(Config):
    """Properties of a system that `EmbeddingGenerator` needs. An exported model contains them instead of the system."""

    process: Discrete
    """Process by which noise was added."""
    prediction: Literal["x0", "eps", "v"]
    """Prediction of the network."""
    drops_conditions: bool
    """True if conditions were dropped in training, so that guidance is possible."""
    self_cond: bool
    """True if the network is conditioned on its own earlier x0."""
    norm: float
    """Factor by which image embeddings are multiplied; for normalised embeddings, their approximate norm."""
    statistics: ImageStatistics | None = None
    """Statistics that normalise image embeddings in place of the factor."""

    @property
    def scaling(self) -> Scaling:
        """Return the conversion of image embeddings to x, and back."""
        return Scaling(self.norm, self.statistics)

    def denoiser(
        self,
        network: Network,
        grid: Grid,
        cond: Mapping[str, Tensor],
        guide: Callable[[Network], Network] = lambda network: network,
        restrict: Callable[[Tensor], Tensor] | None = None,
    ) -> Denoiser:
        """Return the denoiser for a sampler on `grid`, for one batch. guide: maps a network to the guided one.
        restrict: the function applied to each predicted x0 before eps is computed from it."""
        process, prediction = self.process.build(), self.prediction
        guided = guide(network)
        if not self.self_cond:
            return NetworkDenoiser(guided, process, grid, prediction, cond=cond, restrict=restrict)
        return _Carrying(
            guided, lambda plain: NetworkDenoiser(plain, process, grid, prediction, cond=cond, restrict=restrict)
        )


class _Carrying:
    """Denoiser whose network receives the x0 of the previous call; a call at the first point resets it."""

    def __init__(self, network: Network, denoiser: Callable[[Network], Denoiser]) -> None:
        self._network, self._x0 = network, cast("Tensor | None", None)
        self._denoiser = denoiser(self._call)

    def __call__(self, x_t: Tensor, i: int) -> Denoised:
        if i == 0:
            self._x0 = None
        denoised = self._denoiser(x_t, i)
        self._x0 = denoised.x0
        return denoised

    def _call(self, x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor:
        earlier = torch.zeros_like(x) if self._x0 is None else self._x0
        return self._network(x, t, **cond, self_cond=earlier)


def caption_inputs(pairs: Tensor, token_encodings: bool) -> dict[str, Tensor]:
    """Return the conditions of the network from stored pairs [B, 2 + L, dim]: "text_embed" [B, dim], and
    "text_encodings" [B, L, dim] if `token_encodings` is true and the pairs contain them."""
    cond = {"text_embed": pairs[:, TEXT].float()}
    if token_encodings and pairs.shape[1] > TOKENS:
        cond["text_encodings"] = pairs[:, TOKENS:].float()
    return cond


def pair_batch(pairs: Tensor, streams: Streams, scaling: Scaling, token_encodings: bool) -> Batch:
    """Return the batch of stored pairs [B, 2 + L, dim]. Raises ValueError for another shape."""
    if pairs.ndim != 3 or pairs.shape[1] < TOKENS:
        raise ValueError(
            f"The prior learns from pairs of embeddings, [B, 2 or more, dim], but the data set holds "
            f"{list(pairs.shape[1:])}. Train on what embed wrote."
        )
    return Batch(scaling.x(pairs[:, IMAGE].float()), caption_inputs(pairs, token_encodings), streams)


class EmbeddingSampling(Config):
    """Settings of making an image embedding from a caption."""

    sampler: Annotated[Ddim | Ddpm | LegacyDdim, Field(discriminator="type")] = Ddim(num_steps=64)
    """Sampler and its number of steps."""
    guidance_scale: float = Field(1.0, ge=0, le=1e6)
    """Guidance scale. 1: no guidance. Above 1: away from the prediction without caption and image."""
    num_candidates: int = Field(2, ge=1)
    """Number of embeddings sampled per caption, of which the one with the highest cosine to the text embedding is kept.
    Use more than 1 only if texts and images share a space, as in CLIP."""
    clamp_x0: bool = False
    """Give each predicted x0 the norm of a scaled embedding; for embeddings of norm 1 before scaling."""
    clamp_start: bool = False
    """Give the initial noise the norm of a scaled embedding."""
    clamp_result: bool = False
    """Give the result the norm of a scaled embedding."""
    seed: int = Field(0, ge=0)
    """Seed of all noise; each caption number draws its own noise."""
    batch_size: int = Field(256, ge=1)
    """Number of embeddings made at once. It does not change the embeddings."""


def check_guided(section: str, settings: EmbeddingSampling, drops_conditions: bool) -> None:
    """Raise ValueError for guidance of a network whose conditions training never drops."""
    if settings.guidance_scale != 1 and not drops_conditions:
        raise ValueError(
            f"{section}.guidance_scale is {settings.guidance_scale}, but the network never learns to do without "
            f"caption and image. Use 1, or set system.objective.text_drop_probability and image_drop_probability "
            f"above 0."
        )


class EmbeddingGenerator:
    """Generator of image embeddings on the device of the network.

    Raises ValueError when the sampler or the guidance do not fit the system.
    """

    def __init__(
        self, network: nn.Module, reading: EmbeddingReading, spec: DataSpec, settings: EmbeddingSampling
    ) -> None:
        check_guided("sample", settings, reading.drops_conditions)
        self._network, self._reading, self._spec, self._settings = cast("Network", network), reading, spec, settings
        self._device = next(network.parameters()).device
        self._grid = settings.sampler.grid(reading.process)
        sampler = settings.sampler.fitted(variance="fixed_small", bounded=False)
        # `_restrict` clamps, so that a self-conditioned network receives the clamped estimate
        self._sampler = sampler.model_copy(update={"clip_denoised": False})
        self._clips = sampler.clip_denoised
        self._norm = reading.norm

    def __call__(self, cond: dict[str, Tensor], numbers: Tensor) -> Tensor:
        """Return the embeddings, float32 [N, dim] on the CPU, in the scale of the stored ones.

        cond: "text_embed" [N, dim] and optionally "text_encodings" [N, L, dim] (`inputs.caption_inputs`). numbers:
        int64 [N], of the captions; they key the noise.
        """
        size = max(1, self._settings.batch_size // self._settings.num_candidates)
        parts = []
        for start in range(0, len(numbers), size):
            rows = slice(start, start + size)
            parts.append(self._best({name: value[rows] for name, value in cond.items()}, numbers[rows]).cpu())
        return torch.cat(parts)

    def _best(self, cond: dict[str, Tensor], numbers: Tensor) -> Tensor:
        count = self._settings.num_candidates
        seeds = (numbers[:, None] * count + torch.arange(count)).flatten()
        candidates = self.candidates({name: value.repeat_interleave(count, 0) for name, value in cond.items()}, seeds)
        candidates = candidates.view(-1, count, candidates.shape[1])  # [N, candidates, dim]
        nearness = F.cosine_similarity(candidates, cond["text_embed"].to(candidates)[:, None], dim=-1)
        rows = torch.arange(len(candidates), device=candidates.device)
        return candidates[rows, nearness.argmax(1)]

    @torch.no_grad()
    def candidates(self, cond: dict[str, Tensor], seeds: Tensor) -> Tensor:
        """Return one embedding per row, float32 [N, dim] on the device, of these seeds, int64 [N]."""
        streams = image_streams(seeds.to(self._device), self._settings.seed)
        return self.from_noise(cond, initial_noise(streams, (self._spec.channels,)), streams)

    @torch.no_grad()
    def from_noise(self, cond: dict[str, Tensor], noise: Tensor, streams: Streams) -> Tensor:
        """Return one embedding per row, float32 [N, dim] on the device, from noise [N, dim]."""
        settings = self._settings
        keep = torch.ones(len(noise), dtype=torch.bool, device=self._device)
        inputs = {name: value.to(self._device) for name, value in cond.items()}
        inputs |= {"text_keep": keep, "image_keep": keep}
        null = {"text_keep": keep[:1].logical_not(), "image_keep": keep[:1].logical_not()}
        denoiser = self._reading.denoiser(
            self._network,
            self._grid,
            inputs,
            lambda plain: guided(plain, settings.guidance_scale, null),
            self._restrict if self._clips or settings.clamp_x0 else None,
        )
        start = with_norm(noise, self._norm) if settings.clamp_start else noise
        x = self._sampler(denoiser, self._grid, start, streams)
        return self._reading.scaling.stored(with_norm(x, self._norm) if settings.clamp_result else x)

    def _restrict(self, x0: Tensor) -> Tensor:
        """Return the function that is applied to each predicted embedding."""
        x0 = with_norm(x0, self._norm) if self._settings.clamp_x0 else x0
        return clamp(x0) if self._clips else x0
