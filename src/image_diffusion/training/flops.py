"""Count the operations and the memory of a training on a device that is not present.

A step is run on tensors without contents (PyTorch's `FakeTensorMode`): nothing is computed or stored, but every
operation and every allocation is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from image_diffusion.data.shards.loader import Examples
from image_diffusion.nn.blocks import factors
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.monitor.meter import flops_per_example
from image_diffusion.training.parallel.world import World
from image_diffusion.training.trainer import Task, Trainer

_ROUNDING = 512  # bytes: PyTorch's allocator rounds sizes up to multiples


@dataclass(frozen=True)
class Counted:
    """Counts of a step. parameters: trainable parameters. operations: floating-point operations of the loss of one
    example and its gradient, in the middle of the training, since terms of the loss may begin or end during it.

    Memory of one process in bytes: fixed, persistent between steps (weights, gradient, moments, averages); peak, the
    maximum during the first and the last step. Memory of the driver and libraries is not included. A compiled step
    takes less.
    """

    parameters: int
    operations: int
    fixed: int
    peak: int


def counted(
    network: Callable[[], nn.Module],
    task: Callable[[nn.Module], Task],
    config: TrainConfig,
    processes: int,
    per_machine: int | None = None,
) -> Counted:
    """Count a step of one of several processes. network: builds the network; task: builds the task of a network.
    per_machine: number of processes on each machine; unset: all."""
    with _fake_training(network, task, config, config.share_of(processes)) as (trainer, examples, memory):
        memory.peak = memory.live
        for step in (1, config.steps):
            trainer.backward(examples, step)
            trainer.clip_gradients()
        peak = memory.peak
        operations = _operations(trainer, examples)
        fixed = memory.fixed
    elsewhere = bytes_on_other_processes(trainer, config, processes, per_machine)
    parameters = sum(parameter.numel() for parameter in trainer.flat.parameters.values())
    return Counted(parameters, operations, fixed - elsewhere, peak - elsewhere)


def operations_per_example(
    network: Callable[[], nn.Module], task: Callable[[nn.Module], Task], config: TrainConfig
) -> int:
    """Return only the `operations` of `counted`, in a third of the time."""
    with _fake_training(network, task, config, 1) as (trainer, examples, _):
        return _operations(trainer, examples)


def _operations(trainer: Trainer, examples: Examples) -> int:
    return flops_per_example(examples, partial(trainer.losses, 1 + trainer.steps // 2))


@contextmanager
def _fake_training(
    network: Callable[[], nn.Module], task: Callable[[nn.Module], Task], config: TrainConfig, share: int
) -> Iterator[tuple[Trainer, Examples, Memory]]:
    """Build a trainer of one process and a batch of `share` examples; all tensors made in this context are fake."""
    plain = {"global_batch": share, "compile": False, "sharding": "none", "deterministic": "off"}
    if config.deterministic == "strict":
        plain["microbatch"] = config.strict_chunk
    fake, memory = FakeTensorMode(allow_non_fake_inputs=True), Memory()
    with fake, memory:
        built = network()
    whole = task(built)
    with fake, memory, _disable_module_to():
        trainer = Trainer(whole, config.model_copy(update=plain), World(0, 1, torch.device("cpu")))
        memory.fixed = memory.live
        ids = torch.zeros(share, dtype=torch.int64)
        sets = [whole.data, *whole.data.joined_sets.values()]
        stored, *joined_sets = (torch.empty(share, *split.shape, dtype=split.dtype) for split in sets)
        yield trainer, Examples(stored, ids, ids, ids, tuple(joined_sets)), memory


def bytes_on_other_processes(
    trainer: Trainer, config: TrainConfig, processes: int, per_machine: int | None = None
) -> int:
    """Return the bytes that sharding moves to other processes: parts of the moments and averages, and of the gradient
    if weights are sharded. Weights count in full, since a validation gathers them. With several microbatches, so does
    the gradient, in addition to its share, until the last one of a step."""
    own = config.share_of(processes)
    if config.sharding == "machine":
        processes = min(processes, per_machine or processes)
    if config.sharding == "none" or processes == 1:
        return 0
    vectors = [*trainer.optimizer.moments.values(), *trainer.averages.vectors.values()]
    gradient = trainer.flat.gradient.nbytes
    elsewhere = sum(vector.nbytes for vector in vectors) * (processes - 1) // processes
    if config.shards_weights:
        waits = config.microbatch is not None and config.microbatch < own and config.reduce == "float32"
        return elsewhere + gradient * (processes - 1) // processes - waits * gradient
    rounded: set[str] = set()
    if config.precision != "float32" and config.deterministic != "strict":
        rounded = factors(trainer.network) & trainer.flat.parameters.keys()  # stored here in half as many bytes
    halves = sum(trainer.flat.parameters[name].nbytes for name in rounded) // 2
    return elsewhere + halves - 2 * gradient // processes  # plus slices of the weights and of the sum


@contextmanager
def _disable_module_to() -> Iterator[None]:
    """Disable `nn.Module.to` in this context, since fake tensors cannot be moved in place."""
    moves, module = nn.Module.to, cast("Any", nn.Module)
    module.to = lambda self, *_, **__: self
    try:
        yield
    finally:
        module.to = moves


class Memory(TorchDispatchMode):
    """Bytes of all allocated tensors that were made in this context, and their maximum. fixed: bytes that persist
    between steps."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.fixed = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // _ROUNDING) * _ROUNDING
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
