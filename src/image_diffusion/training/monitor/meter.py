"""Measurements of a training: losses between two log lines and on held-out samples, waiting times, and speed.

They stay on the device until they are read. Speed is in operations per second, relative to those of a large matrix
product. The loss on held-out samples, always with the same noise and timesteps, decides an early end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from image_diffusion.core.types import Losses
from image_diffusion.data.shards.loader import Examples
from image_diffusion.data.shards.reader import Shards
from image_diffusion.nn.linear import linear, register_operations
from image_diffusion.training.parallel.world import World

_QUARTILES = 4


def sums_of(losses: Losses) -> dict[str, Tensor]:
    """Return float64 [2, 5] for the loss and each part: sums over all examples and over each quartile of the time, and
    the numbers of these examples."""
    rows = torch.stack([losses.loss.detach().double(), *(part.detach().double() for part in losses.parts.values())])
    weights = rows.new_zeros(rows.shape[1], 1 + _QUARTILES)
    weights[:, 0] = 1
    if losses.time is not None:
        quartile = (losses.time * _QUARTILES).long().clamp(0, _QUARTILES - 1)
        weights[:, 1:] = torch.nn.functional.one_hot(quartile, _QUARTILES)
    # Row by row and not as a matrix product, whose order of addition would depend on the number of examples.
    sums = torch.stack([(row.unsqueeze(1) * weights).sum(0) for row in rows])
    counted = torch.stack([sums, weights.sum(0).expand_as(sums)], dim=1)
    return dict(zip(["loss", *losses.parts], counted, strict=True))


def means_of(sums: dict[str, Tensor]) -> dict[str, float]:
    """Return means from sums: "loss", "loss_q0" … "loss_q3" for quartiles with examples, and the same for each part."""
    values = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}
    means = {}
    for key, (totals, counts) in values.items():
        for i, (total, count) in enumerate(zip(totals, counts, strict=True)):
            if count:
                means[key if i == 0 else f"{key}_q{i - 1}"] = total / count
    return means


class Meter:
    """Means of the loss and its parts, also by quartile of the noise scale, and of the gradient's norm since the last
    log.

    Sums are float64 on the device; only `take` waits for it. strict: True if `add` gets the losses of all processes in
    every process.
    """

    def __init__(self, world: World, strict: bool) -> None:
        self._world, self._strict = world, strict
        self._sums: dict[str, Tensor] = {}
        self._norm = torch.zeros(2, dtype=torch.float64, device=world.device)

    def add(self, losses: Losses, norm: Tensor) -> None:
        """Add the losses of a step and its gradient's norm, unless the norm overflowed."""
        for key, total in sums_of(losses).items():
            self._sums[key] = self._sums[key] + total if key in self._sums else total
        finite = torch.isfinite(norm)
        self._norm = self._norm + torch.stack([torch.where(finite, norm, 0.0).double(), finite.double()])

    @property
    def parts(self) -> set[str]:
        """Return "loss" and the names of its parts since the last log; empty if no step was added since."""
        return set(self._sums)

    def take(self) -> dict[str, float]:
        """Return the means by name, including "grad_norm", in every process, and reset the meter."""
        if self._world.size > 1 and not self._strict:
            for key in sorted(self._sums):  # in a fixed order: loaded sums are in any order
                dist.all_reduce(self._sums[key])
        means = means_of(self._sums)
        norm, steps = self._norm.tolist()
        self._sums = {}
        self._norm.zero_()
        return means | ({"grad_norm": norm / steps} if steps else {})

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums of every process, [size, …] each; for a strict meter [1, …], since all processes have the
        same sums. All processes call it together."""
        gather = partial(torch.unsqueeze, dim=0) if self._strict else self._world.gather
        return {key: gather(total) for key, total in sorted([*self._sums.items(), ("norm", self._norm)])}

    def load_state_dict(self, rows: dict[str, Tensor]) -> None:
        """Load the result of `state_dict`, also from a world of another size."""
        if "count" in rows:  # older checkpoints have one count for all sums, although a part may have begun or ended
            count = rows["count"]
            sums = {key: torch.stack([row, count], 1) for key, row in rows.items() if key not in ("count", "norm")}
            rows = {"norm": rows["norm"], **sums}
        own = {}
        for key, row in rows.items():
            if key == "norm" or self._strict:  # the same in every process
                own[key] = row[0]
            elif len(row) == self._world.size:
                own[key] = row[self._world.rank]
            else:
                own[key] = row.sum(0) * float(self._world.is_main)
        self._norm = own.pop("norm").to(self._world.device)
        self._sums = {key: total.to(self._world.device) for key, total in own.items()}


class Health:
    """Detects the first step whose loss or gradient is not finite, without waiting for the device at each step."""

    def __init__(self, world: World) -> None:
        self._world = world
        # The failed step (0: none), what failed (1 the loss, 2 the gradient), the last finite loss, its step.
        self._record = torch.tensor([0.0, 0.0, math.nan, 0.0], dtype=torch.float64, device=world.device)

    def watch(self, step: int, loss: Tensor, norm: Tensor, norm_may_overflow: bool) -> None:
        """Record the mean loss of a step and its gradient's norm."""
        bad_norm = torch.zeros_like(norm, dtype=torch.bool) if norm_may_overflow else ~torch.isfinite(norm)
        failure = torch.where(torch.isfinite(loss), torch.where(bad_norm, 2.0, 0.0), 1.0).double()
        at = torch.full_like(failure, step)
        ill = torch.stack([at, failure, self._record[2], self._record[3]])
        well = torch.stack([torch.zeros_like(at), failure, loss.double(), at])
        now = torch.where(failure > 0, ill, well)
        self._record = torch.where(self._record[0] > 0, self._record, now)

    def check(self, advice: Callable[[], str], waited_s: float = 0.0) -> list[float]:
        """Raise ValueError in every process if any process failed; `advice` gives the end of the message. Returns
        `waited_s` of every process."""
        records = self._world.gather(torch.cat([self._record, self._record.new_tensor([waited_s])])).tolist()
        failed = [(int(record[0]), rank) for rank, record in enumerate(records) if record[0] > 0]
        if failed:
            step, rank = min(failed, key=lambda pair: (pair[0], records[pair[1]][1], pair[1]))
            _, what, last, at, _ = records[rank]
            words = (
                f"Last finite: {last:.4g} at step {int(at):,}." if at else "No earlier step of this start was finite."
            )
            name = "Loss" if what == 1 else "Gradient"
            raise ValueError(f"{name} is not finite at step {step:,} (rank {rank}). {words} {advice()}".rstrip())
        return [record[4] for record in records]


class Waits:
    """Context manager that measures the time this process waits for others. On a GPU, it measures the GPU's time
    without blocking the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._seconds = 0.0

    def __enter__(self) -> None:
        self._mark(-1.0)

    def __exit__(self, *_: object) -> None:
        self._mark(1.0)

    def take_s(self) -> float:
        """Return the seconds waited since the last call. Waits for the device."""
        seconds = self._seconds
        for begun, ended in zip(self._events[::2], self._events[1::2], strict=True):
            ended.synchronize()
            seconds += begun.elapsed_time(ended) / 1000
        self._events, self._seconds = [], 0.0
        return seconds

    def _mark(self, sign: float) -> None:
        if self._device.type == "cuda":
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._seconds += sign * time.perf_counter()


LossesOf = Callable[[Examples, int], Losses]
"""Function of examples, and of a number unique to this part of the step, that returns their losses."""

_aten = torch.ops.aten
_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
"""Attention on a CPU, which has no formula before PyTorch 2.15, and the operation whose formula is used."""
_SIDES = {"cuda": 8192, "cpu": 512}


class Speed:
    """Rate of a training as a share of its devices' rate. dtype: dtype of the factors of its matrix products."""

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self._world, self._dtype = world, dtype
        self._peak, self._flops, self._parts = 0.0, 0, set[str]()

    def values(
        self, examples_per_second: float, examples: Examples, losses_of: LossesOf, parts: set[str]
    ) -> dict[str, float]:
        """Return the values for the journal, in every process. examples: examples of any step. parts: names of the
        parts of the loss, with "loss". If they differ from the previous call, counts the operations of one example,
        whose gradient is added to the network's, and waits for the device."""
        if parts != self._parts:
            self._parts, self._flops = parts, flops_per_example(examples, losses_of)
            self._peak = self._peak or product_rate(self._world.device, self._dtype)
        rate, peak = self._flops * examples_per_second, self._peak
        return {"speed/tflops": rate / 1e12, "speed/share_of_peak": rate / (peak * self._world.size)}


def flops_per_example(examples: Examples, losses_of: LossesOf) -> int:
    """Return the floating-point operations of the loss of one example and of its gradient, including recomputation."""
    counter = _Operations()
    with counter:
        losses_of(examples.split(1)[0], 0).loss.sum().backward()
    return counter.total


class _Operations(TorchDispatchMode):
    """Counts the operations in this context. (PyTorch's `FlopCounterMode` also tracks modules, with hooks that fail if
    a network runs without gradient.)"""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry

        register_operations()
        self._formulas, self.total = flop_registry, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        count = self._formulas.get(packet) or self._formulas.get(_COUNTED_AS.get(packet))
        if count is not None:
            self.total += int(count(*args, **(kwargs or {}), out_val=out))
        return out


@torch.no_grad()
def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a large matrix product, the best of three."""
    side = _SIDES[device.type]
    draw = torch.Generator(device).manual_seed(0)  # equal numbers would draw less power, and run faster
    left, right = (torch.randn(side, side, generator=draw, device=device).to(dtype) for _ in range(2))
    return 2.0 * side**3 / seconds_of(lambda: linear(left, right, None), device, 3)


def seconds_of(compute: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the minimum seconds of `times` runs, each with a synchronisation of the device."""
    seconds = []
    for _ in range(1 + times):  # one to warm up
        _wait(device)
        started = time.perf_counter()
        compute()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_EPOCH = 2**31 - 1  # no pass over the training data has this number


def validation_sums(
    data: Shards, num_samples: int, chunk: int, world: World, losses_of: Callable[[Examples, int], Losses]
) -> dict[str, Tensor]:
    """Return the sums of the losses over the first samples of a split: [chunks, 2, 5] by name, one result of `sums_of`
    for each chunk, zero for the chunks of other processes.

    Chunks have a fixed size and are assigned round-robin, so that no result depends on the number of processes.
    """
    total = min(num_samples, data.num_samples)
    starts = list(range(0, total, chunk))
    sums: dict[str, Tensor] = {}
    for i in starts[world.rank :: world.size] or starts[:1]:
        samples = np.arange(i, min(i + chunk, total))
        sample = torch.from_numpy(samples).to(world.device)
        label = torch.from_numpy(data.labels[samples]).to(world.device)
        stored = data.gather(samples).to(world.device)
        joined_sets = tuple(tensor.to(world.device) for tensor in data.gather_joined(samples))
        examples = Examples(stored, label, torch.full_like(sample, _EPOCH), sample, joined_sets)
        for key, value in sums_of(losses_of(examples, i)).items():
            rows = sums.setdefault(key, value.new_zeros(len(starts), *value.shape))
            rows[i // chunk] = value if (i // chunk) % world.size == world.rank else 0.0
    return sums


class Patience:
    """Early stopping: the smallest validation loss of a run, and the step at which the run ends early.

    steps: steps of the run. share: share of the steps after which a run without improvement ends; None: never. loss,
    step: smallest loss and its step; step 0 before any validation. ended_at: step of the early end; None before it.
    """

    def __init__(self, steps: int, share: float | None) -> None:
        self._steps, self.share = steps, share
        self.loss, self.step = math.inf, 0
        self.ended_at: int | None = None

    def observe(self, step: int, loss: float) -> None:
        """Record the loss of a validation, which is the same in every process."""
        if self.share is None:
            return
        if not self.step or loss < self.loss:
            self.loss, self.step = loss, step
        elif (step - self.step) / self._steps >= self.share:  # 7 / 100 is 0.07, but 0.07 * 100 is more than 7
            self.ended_at = step

    def state_dict(self) -> dict[str, Any]:
        """Return plain data; empty before the first validation, and without early stopping."""
        return {"loss": self.loss, "step": self.step, "ended_at": self.ended_at} if self.step else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.loss, self.step, self.ended_at = state["loss"], state["step"], state["ended_at"]
