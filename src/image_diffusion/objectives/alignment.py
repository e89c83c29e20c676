"""Alignment with a teacher: tokens of a block of the network for a noisy image are compared with features of a
pretrained network for the clean image.

REPA (Yu et al. 2024, "Representation alignment for generation", arXiv:2410.06940) subtracts the mean cosine of the
features and of tokens projected by an MLP. iREPA (Singh et al. 2025, arXiv:2512.10794) found that the spatial structure
of the features matters: it projects by a convolution, and subtracts the features' mean over positions. Both run the
teacher in every step; here the features are encoded once, and come with the batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.resolution import Size
from image_diffusion.core.types import Batch, Losses, Objective

PROJECTOR = "alignment"
"""Name of the projector in the network during training. Saved weights do not contain it."""


class Alignment(Config):
    """Alignment term that compares tokens of the network with reference features of a teacher (section pairs)."""

    block: int = Field(gt=0)
    """Number of the block, from 1, after which tokens are taken: 8 of the 28 of SiT-XL/2 in REPA."""
    weight: float = Field(0.5, gt=0)
    """Factor by which the mean cosine is multiplied before it is subtracted from the loss."""
    projector: Literal["conv", "mlp"] = "conv"
    """Projector from tokens to the channels of the features. conv: a 3 x 3 convolution (iREPA). mlp: three linear
    layers, applied to each token (REPA)."""
    projector_width: int = Field(2048, gt=0)
    """Hidden channels of the projector `mlp`."""
    spatial_norm: float | None = Field(1.0, ge=0)
    """Share of the features' mean over positions that is subtracted; each channel is then divided by its standard
    deviation (iREPA: 1). null: the features are not normalised (REPA)."""
    until_step: int | None = Field(None, gt=0)
    """Last step with the alignment term; unset: all steps."""

    def check(self, depth: int, objective: Any) -> None:
        """Raise ValueError for a block that the network does not have, or an objective that cannot be aligned."""
        if self.block > depth:
            raise ValueError(f"system.alignment.block is {self.block}, but the network has {depth} blocks.")
        if objective.learns_intervals:
            raise ValueError(
                f"system.alignment is set, but {objective.type} calls its network several times in a step. Use "
                f"flow_matching, denoising or edm, or leave it out."
            )
        sampling = getattr(objective, "timestep_sampling", None)
        if sampling is not None and sampling.type != "uniform":
            raise ValueError(
                f"system.alignment is set, but timesteps are drawn by {sampling.type}, which would learn from the "
                f"aligned loss. Set system.objective.timestep_sampling to uniform."
            )


class Aligned(Objective):
    """Objective with an alignment term: the part "alignment", which is -`weight` times the mean cosine, is added to
    the loss of each sample. Validation omits it.

    width: channels of a token. features: [D, h, w].
    """

    def __init__(self, config: Alignment, objective: Objective, width: int, features: tuple[int, int, int]) -> None:
        self._config, self._objective = config, objective
        self.layers = {PROJECTOR: partial(Projector, config, width, features[0])}
        self.pairs_samples = objective.pairs_samples

    def __call__(self, network: Any, batch: Batch) -> Losses:
        """Return the losses of the objective with the alignment term. network: accepts `tokens_of` as `DiT.forward`
        does, and has the projector."""
        config = self._config
        if config.until_step is not None and batch.step > config.until_step:
            return self._objective(network, batch)
        assert batch.features is not None
        tokens: list[Tensor] = []

        def watched(x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor:
            output, features = network(x, t, **cond, tokens_of=config.block)
            tokens.append(features)
            return output

        losses = self._objective(watched, batch)
        grid = network.grid_size
        projected = network.get_submodule(PROJECTOR)(tokens[0].unflatten(1, grid))
        goal = target(batch.features, grid, config.spatial_norm)
        part = -config.weight * F.cosine_similarity(projected.float(), goal, dim=-1).mean((1, 2))
        return Losses(losses.loss + part, losses.parts | {"alignment": part.detach()}, losses.time)

    def uniform(self) -> Objective:
        """Return the objective without the alignment, at times drawn uniformly."""
        return self._objective.uniform()


class Projector(nn.Module):
    """Tokens on their grid [B, h, w, width] -> [B, h, w, channels]."""

    def __init__(self, config: Alignment, width: int, channels: int) -> None:
        super().__init__()
        self._is_conv, inner = config.projector == "conv", config.projector_width
        self.layers: nn.Module = (
            nn.Conv2d(width, channels, 3, padding=1)
            if self._is_conv
            else nn.Sequential(
                nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, inner), nn.SiLU(), nn.Linear(inner, channels)
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Project the tokens, as the class describes."""
        if not self._is_conv:
            return self.layers(tokens)
        return self.layers(tokens.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def target(features: Tensor, grid: Size, spatial_norm: float | None) -> Tensor:
    """Return features [B, D, h, w] on the grid of the tokens, float32 [B, rows, columns, D]: interpolated if the grids
    differ, then minus a share of their mean over the positions, and divided by their standard deviation."""
    x = features.float()
    if x.shape[2:] != grid:
        x = F.interpolate(x, grid, mode="bilinear", antialias=True, align_corners=False)
    if spatial_norm is not None:
        x = (x - spatial_norm * x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + 1e-6)
    return x.permute(0, 2, 3, 1)
