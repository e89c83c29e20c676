"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) by PyTorch's implementation, with AdamW for all
parameters that are not matrices.

A matrix moves along its momentum, whose singular values five Newton-Schulz steps bring close to one. Layers that hold
several maps are split first, which "CMuon" (arXiv:2608.02502) found to be necessary in long trainings. PyTorch takes
these steps in bfloat16. CPUs without AVX-512 multiply bfloat16 matrices ten or more times slower than float32: there,
the steps are taken in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from image_diffusion.core.config.base import Config
from image_diffusion.core.devices import multiplies_bf16
from image_diffusion.training.optim.base import FlatOptimizer, OptimizerConfig, Probability, pieces
from image_diffusion.training.parallel.flat_parameters import Flat, Slot

if TYPE_CHECKING:
    from image_diffusion.training.parallel.fsdp import ShardedFlat


class Rest(Config):
    """AdamW for the parameters that Muon does not update."""

    lr: float | None = Field(None, gt=0, le=10)
    """Learning rate, before the schedule; unset: the learning rate of the matrices."""
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0, le=1)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """Decoupled weight decay: each step subtracts this share of the weights other than biases and gains, times the
    learning rate."""


class Muon(OptimizerConfig):
    """Orthogonalised momentum for the linear and convolutional layers in and between the network's blocks, AdamW for
    all other parameters: the layers before and after the blocks, embeddings, biases and gains."""

    needs_network: ClassVar[bool] = True
    conflicts: ClassVar[Mapping[str, str]] = {"optimizer": "needs each parameter whole"}

    type: Literal["muon"] = "muon"
    """Orthogonalised momentum for the matrices in the network's blocks, AdamW for the rest."""
    lr: float = Field(1e-4, gt=0, le=10)
    """Learning rate, before the schedule."""
    momentum: Probability = 0.95
    """Decay of the running mean of the gradient."""
    nesterov: bool = True
    """Use Nesterov momentum: orthogonalise a mixture of mean and gradient instead of the mean."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """Decoupled weight decay: each step subtracts this share of the matrices, times the learning rate."""
    scale: Literal["match_rms_adamw", "original", "spectral_unclamped"] = "match_rms_adamw"
    """Factor of the update of a matrix of m rows and n columns. match_rms_adamw: 0.2 sqrt(max(m, n)), so that learning
    rates of AdamW are suitable (Liu et al. 2025, arXiv:2502.16982); original: sqrt(max(1, m / n)), which needs learning
    rates many times larger; spectral_unclamped: sqrt(m / n)."""
    adamw: Rest = Rest()
    """Settings of AdamW for all parameters other than the matrices of a block."""

    def check(self, trained: Collection[str]) -> None:
        """Raise ValueError if no matrix in a block is trained, or if this PyTorch does not have the scale."""
        if not trained:
            raise ValueError(
                "train.optimizer is muon, but no linear or convolutional layer in the network's blocks is trained. Use "
                "adamw."
            )
        if self.scale != "spectral_unclamped":  # every Muon has the others; to ask imports a compiler
            return
        try:
            torch.optim.Muon([torch.zeros(1, 1)], adjust_lr_fn=self.scale)
        except ValueError as error:
            raise ValueError(
                f"train.optimizer.scale is {self.scale}, which PyTorch {torch.__version__} does not have. Use a newer "
                f"PyTorch, or match_rms_adamw."
            ) from error

    def build(self, flat: Flat, factors: Mapping[str, float] | None = None) -> FlatOptimizer:
        self.check(flat.inner.keys() & flat.parameters.keys())
        return _FlatMuon(flat, self, factors)


class _FlatMuon(FlatOptimizer):
    """Muon and AdamW on the vectors of one layout. The momentum of a matrix is stored in place of AdamW's first moment,
    and only parameters of AdamW have a second moment."""

    def __init__(self, flat: Flat, config: Muon, factors: Mapping[str, float] | None) -> None:
        rest, inner = config.adamw, {slot.start: slot for slot in flat.slots if slot.name in flat.inner}
        cut = pieces(flat, factors, rest.weight_decay, alone=flat.inner)
        ratio = 1.0 if rest.lr is None else rest.lr / config.lr
        others = [p._replace(stop=p.start) if p.start in inner else p._replace(factor=p.factor * ratio) for p in cut]
        settings: dict[str, Any] = {"betas": rest.betas, "eps": rest.eps}
        kept = flat.subset(flat.parameters.keys() - flat.inner.keys())
        super().__init__(flat, others, {"exp_avg": flat, "exp_avg_sq": kept}, config.lr, _adamw, **settings)
        matrices = [
            (inner[piece.start], piece.factor) for piece in cut if piece.start in inner and piece.stop > piece.start
        ]
        kind: Any = _Whole if flat.is_whole else _Shared
        self.torch = _Both(kind(flat, self.moments["exp_avg"], matrices, config), self.torch)


Matrices = Sequence[tuple[Slot, float]]
"""Positions of the parameters, and the factor of the learning rate of each."""


class _Muon(torch.optim.Muon):
    """PyTorch's Muon, in float32 on CPUs that do not multiply bfloat16 matrices fast."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices."""
        if multiplies_bf16(self.param_groups[0]["params"][0].device):
            super().step()  # type: ignore[no-untyped-call]
            return
        for group in self.param_groups:
            for matrix in group["params"]:
                mean = self.state[matrix]["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                update = matrix.grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean
                update = _orthogonalised(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * _FACTORS[group["adjust_lr_fn"]](*matrix.shape))


_FACTORS: Mapping[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}
"""Factor of the update of a matrix, by the name of `Muon.scale`."""


def _orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near one: X becomes aX + (bA + cA^2)X with
    A = XX^T, `steps` times, from the matrix divided by its norm (Jordan et al. 2024)."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


class _Whole(_Muon):
    """Muon on matrices that each process holds completely."""

    def __init__(self, flat: Flat, momentum: Tensor, matrices: Matrices, config: Muon) -> None:
        groups: list[dict[str, Any]] = []
        states: dict[Tensor, Any] = {}
        for slot, factor in matrices:
            parts = _parts(
                [_rows(vector, slot) for vector in (flat.values, flat.gradient, momentum)], flat.inner[slot.name]
            )
            groups.append({"params": list(parts), "factor": factor})
            states |= parts
        super().__init__(groups, lr=config.lr, **_settings(config))
        self.state.update(states)


class _Shared(torch.optim.Optimizer):
    """Muon on matrices whose rows are sharded. Matrix by matrix, all processes gather it, update it, and keep their
    rows."""

    def __init__(self, flat: ShardedFlat, momentum: Tensor, matrices: Matrices, config: Muon) -> None:
        self._flat, self._momentum, self._config = flat, momentum, config
        super().__init__(
            [{"params": [slot.within(flat.values)], "factor": f, "slot": slot} for slot, f in matrices], {}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices. All processes take this step together."""
        flat = self._flat
        for group in self.param_groups:
            slot = group["slot"]
            whole = [flat.gathered(vector, slot) for vector in (flat.values, flat.gradient, self._momentum)]
            parts = _parts([matrix.flatten(1) for matrix in whole], flat.inner[slot.name])
            muon = _Muon(list(parts), lr=group["lr"], **_settings(self._config))
            muon.state.update(parts)
            muon.step()
            flat.keep(flat.values, slot, whole[0])
            flat.keep(self._momentum, slot, whole[2])


def _settings(config: Muon) -> dict[str, Any]:
    return {
        "weight_decay": config.weight_decay,
        "momentum": config.momentum,
        "nesterov": config.nesterov,
        "adjust_lr_fn": config.scale,
    }


def _parts(matrices: Sequence[Tensor], count: int) -> dict[Tensor, dict[str, Tensor]]:
    """Return the separate maps in a matrix, each with its gradient and its momentum as Muon keeps it. matrices: values,
    gradient and momentum, with one row for each output."""
    states: dict[Tensor, dict[str, Tensor]] = {}
    for values, gradient, momentum in zip(*(matrix.chunk(count) for matrix in matrices), strict=True):
        part = nn.Parameter(values)
        part.grad = gradient
        states[part] = {"momentum_buffer": momentum}
    return states


def _rows(vector: Tensor, slot: Slot) -> Tensor:
    """Return a weight as a matrix with one row for each output. The columns are in memory order, which does not matter
    to Muon."""
    return vector[slot.start : slot.start + math.prod(slot.shape)].view(slot.shape[0], -1)


def _adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """AdamW; without parameters if only adapters are trained."""
    return torch.optim.AdamW(groups or [{"params": [], "factor": 1.0}], fused=True, **settings)


class _Both(torch.optim.Optimizer):
    """Two optimizers as one, so that both skip a step that overflowed."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self._members = members
        super().__init__([group for member in members for group in member.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of both."""
        for member in self._members:
            member.step()
