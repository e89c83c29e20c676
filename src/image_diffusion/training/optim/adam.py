"""Adam and AdamW, through PyTorch's fused kernel; and AdamW with 8-bit moments (Dettmers et al. 2022, "8-bit optimizers
via block-wise quantization", arXiv:2110.02861), by the kernels of bitsandbytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from image_diffusion.core.process.errors import package
from image_diffusion.training.optim.base import FlatOptimizer, Kind, OptimizerConfig, Piece, Probability, pieces
from image_diffusion.training.parallel.flat_parameters import Flat, Vector

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamBase(OptimizerConfig):
    """Settings that all variants of Adam share."""

    lr: float = Field(1e-4, gt=0, le=10)
    """Learning rate, before the schedule."""
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0, le=1)
    """Added to the root of the second moment."""

    def _fused(self, kind: Kind, flat: Flat, cut: Sequence[Piece]) -> FlatOptimizer:
        moments = dict.fromkeys(MOMENTS, flat)
        return FlatOptimizer(flat, cut, moments, self.lr, kind, betas=self.betas, eps=self.eps, fused=True)


class AdamW(AdamBase):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    type: Literal["adamw"] = "adamw"
    """Adam with decoupled weight decay."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """Decoupled weight decay: each step subtracts this share of the weights, times the learning rate."""
    decay_vectors: bool = False
    """Also apply the weight decay to biases and gains."""

    def build(self, flat: Flat, factors: Mapping[str, float] | None = None) -> FlatOptimizer:
        return self._fused(torch.optim.AdamW, flat, pieces(flat, factors, self.weight_decay, self.decay_vectors))


class Adam(AdamBase):
    """Adam (Kingma and Ba 2015), without weight decay."""

    type: Literal["adam"] = "adam"
    """Adam, without weight decay."""

    def build(self, flat: Flat, factors: Mapping[str, float] | None = None) -> FlatOptimizer:
        return self._fused(torch.optim.Adam, flat, pieces(flat, factors))


BLOCK = 256  # numbers that share a scale: the size that the library's kernels have


class AdamW8bit(AdamW):
    """AdamW whose moments take one byte per weight instead of four. Weights, gradients and averages stay in float32."""

    conflicts: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("optimizer", "full", "machine"), "keeps the scales of its moments whole in every process"
    )

    type: Literal["adamw_8bit"] = "adamw_8bit"  # type: ignore[assignment]
    """AdamW with 8-bit moments. Needs the package bitsandbytes."""
    needs_network: ClassVar[bool] = True

    def check(self, trained: Collection[str]) -> None:
        """Raise ValueError if the package bitsandbytes is missing."""
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError(f"train.optimizer adamw_8bit needs {package('bitsandbytes', 'adam8bit')} Or use adamw.")

    def build(self, flat: Flat, factors: Mapping[str, float] | None = None) -> FlatOptimizer:
        check_library(flat.values.device)
        return _Flat8bit(flat, pieces(flat, factors, self.weight_decay, self.decay_vectors), self)


class _Flat8bit(FlatOptimizer):
    """AdamW with 8-bit moments on flat vectors. scales: float32, scales of the blocks of all pieces, by moment."""

    torch: _AdamW8bit

    def __init__(self, flat: Flat, cut: list[Piece], config: AdamW8bit) -> None:
        settings = {"betas": config.betas, "eps": config.eps}
        layouts = dict.fromkeys(MOMENTS, flat)
        super().__init__(flat, cut, layouts, config.lr, _AdamW8bit, stored=torch.uint8, **settings)
        parts = [part for group in self.torch.param_groups for part in group["params"]]
        counts = [-(-part.numel() // BLOCK) for part in parts]
        self.scales = {name: flat.values.new_zeros(sum(counts)) for name in MOMENTS}
        for name, vector in self.scales.items():
            for part, own in zip(parts, vector.split(counts), strict=True):
                self.torch.state[part][f"{name}_scale"] = own

    def state_dict(self) -> dict[str, Tensor | Vector]:
        """Return the moments, their scales and the number of updates, which a checkpoint is loaded into."""
        self.torch.recount()
        return {**super().state_dict(), **{f"{name}_scale": vector for name, vector in self.scales.items()}}


class _AdamW8bit(torch.optim.Optimizer):
    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.recount()

    def recount(self) -> None:
        """Read the number of updates from the device in the next step, since a checkpoint may replace it."""
        self._updates: dict[Tensor, int] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters: one kernel for each piece."""
        for group in self.param_groups:
            for theta in group["params"]:
                state = self.state[theta]
                # The kernel takes the count from the host: only the first step waits for the device.
                if theta not in self._updates:
                    self._updates[theta] = int(state["step"])
                self._updates[theta] += 1
                state["step"].fill_(self._updates[theta])
                _update(theta, theta.grad, state, self._updates[theta], group)


def _update(theta: Tensor, g: Tensor, state: Mapping[str, Tensor], count: int, group: Mapping[str, Any]) -> None:
    from bitsandbytes.functional import create_dynamic_map, optimizer_update_8bit_blockwise

    if theta.device not in _LEVELS:
        _LEVELS[theta.device] = [create_dynamic_map(signed).to(theta.device) for signed in (True, False)]
    m, v = (state[name] for name in MOMENTS)
    m_scale, v_scale = (state[f"{name}_scale"] for name in MOMENTS)
    beta1, beta2 = group["betas"]
    unused = 0.0  # of optimizers with a third moment
    optimizer_update_8bit_blockwise(
        "adam", g, theta, m, v, beta1, beta2, unused, unused, group["eps"], count, group["lr"],
        *_LEVELS[theta.device], m_scale, v_scale, weight_decay=group["weight_decay"],
    )  # fmt: skip


_LEVELS: dict[torch.device, list[Tensor]] = {}
"""The 256 numbers that the codes of the first and of the second moment stand for, float32 [256], by device."""


def check_library(device: torch.device) -> None:
    """Update one block on a GPU. Raises ValueError if bitsandbytes has no kernels for it."""
    import bitsandbytes

    if device.type == "cpu":
        return
    theta, g = (torch.zeros(BLOCK, device=device) for _ in range(2))
    state = {name: torch.zeros(BLOCK, dtype=torch.uint8, device=device) for name in MOMENTS}
    state |= {f"{name}_scale": torch.zeros(1, device=device) for name in MOMENTS}
    try:
        _update(theta, g, state, 1, {"betas": (0.9, 0.999), "eps": 1e-8, "lr": 1e-4, "weight_decay": 0.0})
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"train.optimizer is adamw_8bit, but bitsandbytes {bitsandbytes.__version__} cannot compute on {device} "
            f"with PyTorch {torch.__version__} ({reason}). Install a version that has kernels for it, or use adamw."
        ) from error
