"""Image embeddings from captions: noise -> several candidates -> the one that is nearest to the caption."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config import Config
from image_diffusion.core.streams import Streams
from image_diffusion.core.types import DataSpec, Network
from image_diffusion.objectives.embedding import with_norm
from image_diffusion.process.parameterization import clamp
from image_diffusion.samplers.ancestral import Ddpm
from image_diffusion.samplers.ddim import Ddim
from image_diffusion.samplers.guidance import guided
from image_diffusion.samplers.legacy_ddim import LegacyDdim
from image_diffusion.samplers.noise import image_streams, initial_noise

if TYPE_CHECKING:
    from image_diffusion.systems.embedding.reading import EmbeddingReading
    from image_diffusion.systems.prior import PriorSystem


class EmbeddingSampling(Config):
    """How an image embedding is made from a caption."""

    sampler: Annotated[Ddim | Ddpm | LegacyDdim, Field(discriminator="type")] = Ddim(num_steps=64)
    """The sampler and its number of steps."""
    guidance_scale: float = Field(1.0, ge=0, allow_inf_nan=False)
    """1: no guidance. Above 1: away from what is predicted without caption and image."""
    num_candidates: int = Field(2, ge=1)
    """Embeddings made of each caption, of which the one of the highest cosine to its text embedding is kept: sensible
    where texts and images share a space, as those of CLIP do."""
    clamp_x0: bool = False
    """Give each predicted x0 the norm of a scaled embedding."""
    clamp_start: bool = False
    """Give the noise that sampling starts from that norm."""
    clamp_result: bool = False
    """Give the result that norm."""
    seed: int = Field(0, ge=0)
    """Of all noise; caption number i draws its own."""
    batch_size: int = Field(256, ge=1)
    """Embeddings made at once. Does not change them."""


def check_guided(section: str, settings: EmbeddingSampling, system: PriorSystem) -> None:
    """Raise ValueError where a section guides a network that never learns to do without its conditions."""
    if settings.guidance_scale != 1 and not system.learns_nulls:
        raise ValueError(
            f"{section}.guidance_scale is {settings.guidance_scale}, but the network never learns to do without "
            f"caption and image. Use 1, or set system.objective.text_drop_probability and image_drop_probability "
            f"above 0."
        )


class EmbeddingGenerator:
    """Makes image embeddings on the device of the network.

    Raises ValueError when the sampler or the guidance do not fit the system.
    """

    def __init__(
        self, network: nn.Module, system: PriorSystem | EmbeddingReading, spec: DataSpec, settings: EmbeddingSampling
    ) -> None:
        if settings.guidance_scale != 1 and not system.learns_nulls:
            raise ValueError(
                f"guidance_scale is {settings.guidance_scale}, but the network never learnt to do without caption and "
                f"image. Use 1, or train with system.objective.text_drop_probability and image_drop_probability above "
                f"0."
            )
        self._network, self._system, self._spec, self._settings = cast("Network", network), system, spec, settings
        self._device = next(network.parameters()).device
        self._grid = settings.sampler.grid(system.process)
        sampler = settings.sampler.fitted(variance="fixed_small", bounded=False)
        # clamping is left to `_restrict`, so that a network which is given its own estimate is given the clamped one
        self._sampler = sampler.model_copy(update={"clip_denoised": False})
        self._clips = sampler.clip_denoised
        self._norm = system.scale(spec)

    def __call__(self, cond: dict[str, Tensor], numbers: Tensor) -> Tensor:
        """The embeddings, float32 [N, dim] on the CPU, in the scale of the stored ones.

        cond: "text_embed" [N, dim] and perhaps "text_encodings" [N, L, dim] (`PriorSystem.caption`). numbers: int64
        [N], which captions these are: they key the noise.
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
        made = self.candidates({name: value.repeat_interleave(count, 0) for name, value in cond.items()}, seeds)
        made = made.view(-1, count, made.shape[1])  # [N, candidates, dim]
        nearness = F.cosine_similarity(made, cond["text_embed"].to(made)[:, None], dim=-1)
        rows = torch.arange(len(made), device=made.device)
        return made[rows, nearness.argmax(1)]

    @torch.no_grad()
    def candidates(self, cond: dict[str, Tensor], seeds: Tensor) -> Tensor:
        """One embedding a row, float32 [N, dim] on the device, of these seeds, int64 [N]."""
        settings = self._settings
        streams = image_streams(seeds.to(self._device), settings.seed)
        noise = initial_noise(streams, (self._spec.channels,))
        return self.from_noise(cond, noise, streams)

    @torch.no_grad()
    def from_noise(self, cond: dict[str, Tensor], noise: Tensor, streams: Streams) -> Tensor:
        """The same from given noise [N, dim]."""
        settings = self._settings

        keep = torch.ones(len(noise), dtype=torch.bool, device=self._device)
        given = {name: value.to(self._device) for name, value in cond.items()}
        given |= {"text_keep": keep, "image_keep": keep}
        null = {"text_keep": keep[:1].logical_not(), "image_keep": keep[:1].logical_not()}
        denoiser = self._system.denoiser(
            self._network,
            self._grid,
            given,
            lambda plain: guided(plain, settings.guidance_scale, null),
            self._restrict if self._clips or settings.clamp_x0 else None,
        )
        start = with_norm(noise, self._norm) if settings.clamp_start else noise
        x = self._sampler(denoiser, self._grid, start, streams)
        return self._system.stored(with_norm(x, self._norm) if settings.clamp_result else x, self._spec)

    def _restrict(self, x0: Tensor) -> Tensor:
        """What is done to each predicted embedding."""
        x0 = with_norm(x0, self._norm) if self._settings.clamp_x0 else x0
        return clamp(x0) if self._clips else x0
