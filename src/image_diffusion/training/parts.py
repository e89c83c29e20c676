"""What a training run consists of, put together from its configuration, and taken apart for a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from image_diffusion.core.streams import Streams
from image_diffusion.core.types import Batch, ChoosesTimes, Losses, Network, Objective
from image_diffusion.data.batches import Batches, Examples
from image_diffusion.data.shards import Shards
from image_diffusion.nn.blocks import compile_by_block
from image_diffusion.training.checkpoint import Checkpoint
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.distributed import World
from image_diffusion.training.ema import Averages
from image_diffusion.training.flat import Flat, Layout
from image_diffusion.training.gradients import Ordered, Shared, gather_losses, shares
from image_diffusion.training.lora import written
from image_diffusion.training.meter import Health, Meter
from image_diffusion.training.optimizers.flat import FlatOptimizer
from image_diffusion.training.precision import Precision, dtype_of
from image_diffusion.training.sliced import SlicedFlat
from image_diffusion.training.speed import Speed
from image_diffusion.training.tuning import tune


@runtime_checkable
class Remembers(Protocol):
    """An objective that learns from the losses it gave, as the importance sampler of timesteps does."""

    def observe(self, losses: Losses) -> None:
        """Take in the losses of one step's whole global batch, in the order of the batch."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """What it learnt."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state_dict` gave."""
        ...


@runtime_checkable
class TakesIn(Protocol):
    """A network that also learns from what it saw, as a codebook of moving averages does."""

    def take_in(self, seen: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Learn from `Losses.seen` of one step's whole global batch. Returns the tensors that it changed in place."""
        ...


@runtime_checkable
class AddsLayers(Protocol):
    """An objective with layers of its own, which learn with the network and are not written."""

    def add_layers(self, network: nn.Module) -> None:
        """Give the network these layers."""
        ...


@runtime_checkable
class HasTeacher(Protocol):
    """An objective that may learn from the network as it is when training begins."""

    @property
    def has_teacher(self) -> bool:
        """Whether it does."""
        ...

    def learn_from(self, teacher: Network) -> None:
        """Learn from this network, which stays as it is."""
        ...


@runtime_checkable
class Pairs(Protocol):
    """An objective that may hold a sample against its neighbour: rows 0 and 1 of a batch, 2 and 3, and so on."""

    @property
    def pairs_samples(self) -> bool:
        """Whether it does."""
        ...


@dataclass(frozen=True)
class Task:
    """What to train on what.

    network: float32, anywhere. objective: batch -> losses. prepare: what the shards hold [B, …], labels [B], the random
    numbers of the batch and, where a set is joined to the data, what that holds -> what the objective is given. data,
    validation: the two splits. grid: the network, with the averaged weights where there are any, and the step ->
    pictures and numbers by name; called in the first process only.
    """

    network: nn.Module
    objective: Objective
    prepare: Callable[..., Batch]
    data: Shards
    validation: Shards | None = None
    grid: Callable[[nn.Module, int, Path], Mapping[str, Path | float]] | None = None


@dataclass(frozen=True)
class Best:
    """The average that counts at the validation with the smallest loss so far. vector: of the flat layout. moving: what
    of the network learns without a gradient, as it was then, by name."""

    loss: float
    step: int
    vector: Tensor
    moving: dict[str, Tensor]


class Parts:
    """A run's moving parts, on this process's device, the same in every process. They compute within
    `determinism.switches`."""

    def __init__(self, task: Task, config: TrainConfig, world: World) -> None:
        strict = config.deterministic == "strict"
        if world.size > config.global_batch:
            raise ValueError(
                f"{world.size} processes cannot share a global batch of {config.global_batch}. "
                f"Use at most {config.global_batch} processes."
            )
        if config.weights == "best" and task.validation is None:
            raise ValueError(
                "train.weights is best, but no sample is held out to tell which are. Hold some out for validation."
            )
        sharded = config.spreads_weights and world.size > 1
        if sharded and config.global_batch % world.size:
            raise ValueError(
                f"train.sharding is {config.sharding}, but {world.size} processes cannot share a global batch of "
                f"{config.global_batch} evenly. Use a number of processes that divides it."
            )
        if isinstance(task.objective, Pairs) and task.objective.pairs_samples:
            check_pairs(config, world)
        layout = torch.channels_last if config.channels_last else torch.preserve_format
        self.task, self.config, self.world = task, config, world
        factors = tune(task.network, config)
        if isinstance(task.objective, AddsLayers):
            if sharded:
                raise ValueError(
                    f"train.sharding is {config.sharding}, but the objective has layers of its own. "
                    f"Set it to optimizer, or to none."
                )
            task.objective.add_layers(task.network)
            trained = (name for name, parameter in task.network.named_parameters() if parameter.requires_grad)
            factors = {name: factors.get(name, 1.0) for name in trained}
        self.network = task.network.to(world.device)
        for tensor in self.network.state_dict().values():  # the first process's may be others, by `init_from`
            world.broadcast(tensor)
        self.network.to(memory_format=layout)
        if isinstance(task.objective, HasTeacher) and task.objective.has_teacher:
            task.objective.learn_from(_teacher(self.network, config))
        self.flat = _flat(self.network, config, world, dtype_of(config.precision), dtype_of(config.reduce))
        self.optimizer: FlatOptimizer = config.optimizer.build(self.flat, factors)
        self.precision = Precision(config.precision, world.device, self.flat.is_whole, not sharded)
        self.meter, self.health = Meter(world, strict), Health(world)
        self.speed = Speed(world, self.precision.dtype)
        self.gradients: Shared | Ordered = (
            Ordered(self.flat, world, config.global_batch, config.strict_chunk, self.precision.scale)
            if strict
            else Shared(self.flat, world, config.global_batch, config.microbatch, self.precision.scale)
        )
        self.averages = Averages(config.ema, self.flat.values)
        self.best: Best | None = None
        self._layout = layout
        if config.compile:
            compile_by_block(self.network, config.records)
        self.network.train()

    def batches(self, step: int) -> Iterator[Examples]:
        """The examples of this process from a step on; with `strict`, of all processes."""
        strict = self.config.deterministic == "strict"
        return iter(
            Batches(
                self.task.data,
                self.config.global_batch,
                self.config.seed,
                rank=0 if strict else self.world.rank,
                world_size=1 if strict else self.world.size,
                start=step * self.config.global_batch,
                flip_probability=self.config.flip_probability,
                balance_classes=self.config.balance_classes,
                device=self.world.device,
            )
        )

    def losses(self, step: int, examples: Examples, part: int) -> Losses:
        """The objective's losses, in the configured precision. step, part: no other examples of the run have both;
        they seed PyTorch's own generator, which only dropout uses."""
        if self.config.records and part < self.world.size:  # the first of this process in the step
            torch.compiler.cudagraph_mark_step_begin()
        _generator(self.world.device).manual_seed(_seed_of(self.config.seed, step, part))
        return self._losses(self.task.objective, self.config.seed, step, examples)

    def validation_losses(self, step: int, examples: Examples, part: int) -> Losses:
        """The same for samples that are not trained on, with numbers that no run, step or earlier loss changes: those
        of seed 0, at times drawn uniformly."""
        objective = self.task.objective
        uniform = objective.uniform() if isinstance(objective, ChoosesTimes) else objective
        return self._losses(uniform, 0, step, examples)

    def _losses(self, objective: Objective, seed: int, step: int, examples: Examples) -> Losses:
        streams = Streams(seed, examples.epoch, examples.sample)
        batch = self.task.prepare(examples.stored, examples.label, streams, *examples.beside)
        batch = replace(batch, x=batch.x.contiguous(memory_format=self._format(batch.x)), step=step)
        with self.precision.autocast():
            return objective(cast("Network", self.network), batch)

    def clip(self) -> Tensor:
        """The norm of the gradient, [] on the device, after which it is at most `grad_clip`."""
        self.precision.scaler.unscale_(self.optimizer.torch)
        norm = self.flat.norm()
        if self.config.grad_clip is not None:
            self.flat.gradient.mul_((self.config.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def update(self, step: int) -> None:
        """Update number `step`, counted from 1: the weights, then their averages."""
        self.precision.scaler.step(self.optimizer.torch)
        self.precision.scaler.update()
        self.flat.show()
        self.averages.update(step)

    def validated(self, step: int, loss: float) -> None:
        """Take in the loss of a validation, the same in every process: the best average is kept, where it is wanted."""
        if self.config.weights == "best" and (self.best is None or loss < self.best.loss):
            self.best = Best(loss, step, self._average().clone(), self._moving())

    def observe(self, step: int, losses: Losses, norm: Tensor) -> None:
        """Take in what a step gave, without waiting for it: for the log, for the alarm, for
        objective and network."""
        self.meter.add(losses, norm)
        self.health.watch(step, losses.loss.mean(), norm, self.precision.skips_overflow)
        objective, network = self.task.objective, self.network
        reads_all = isinstance(objective, Remembers) or isinstance(network, TakesIn)
        if reads_all and self.config.deterministic != "strict":
            losses = gather_losses(losses, shares(self.config.global_batch, self.world), self.world)
        if isinstance(objective, Remembers):
            objective.observe(losses)
        if isinstance(network, TakesIn):
            for tensor in network.take_in(losses.seen):  # sums on a GPU may differ in last bits
                self.world.broadcast(tensor)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The network in evaluation mode, with the average that counts for its weights where there is one. All
        processes begin it together; each may then compute as much as it likes."""
        self.network.eval()
        try:
            with self.flat.holding(self._average()), torch.no_grad(), self.eagerly():
                yield self.network
        finally:
            self.network.train()

    def eagerly(self) -> AbstractContextManager[None]:
        """Without the compiled network, which would be compiled anew for this mode and these shapes."""
        return torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()

    def weights(self) -> dict[str, Tensor]:
        """The tensors that are written at the end, under the network's own names, in the first process. All processes
        call it together."""
        if self.config.weights == "best":
            assert self.best is not None, "the last step is validated"
            return self._written(self.best.vector, self.best.moving)
        return self._written(self.flat.values if self.config.weights == "raw" else self._average())

    def raw_weights(self) -> dict[str, Tensor]:
        """The tensors as trained, likewise."""
        return self._written(self.flat.values)

    def capture(self, step: int, reports_due: bool) -> Checkpoint:
        """A checkpoint of this moment, still on the device, or this process's part of it. All processes call it
        together."""
        objective, optimizer = self.task.objective, self.optimizer
        vectors: dict[tuple[str, str], tuple[Layout, Tensor]] = {("network", ""): (self.flat, self.flat.values)}
        vectors |= {(name, ""): (self.flat, vector) for name, vector in self.averages.vectors.items()}
        vectors |= {
            ("optimizer", f"{moment}/"): (optimizer.layouts[moment], vector)
            for moment, vector in optimizer.moments.items()
        }
        network = self.network.state_dict().items()
        groups = {
            "network": {name: tensor for name, tensor in network if name not in self.flat.parameters},
            "optimizer": {"steps": optimizer.steps},
            "meter": self.meter.state(),
            "objective": objective.state_dict() if isinstance(objective, Remembers) else {},
        }
        extra: dict[str, Any] = {"ended": step == self.config.steps}
        if self.precision.skips_overflow:
            extra["precision"] = self.precision.state()
        if self.best is not None:
            vectors["best", ""] = self.flat, self.best.vector
            groups["best"] = self.best.moving
            extra["best"] = {"loss": self.best.loss, "step": self.best.step}
        rows: dict[str, dict[str, Tensor]] = {}
        for (group, prefix), (layout, vector) in vectors.items():
            whole, own = layout.kept(vector)
            for kept, tensors in ((groups, whole), (rows, own)):
                if tensors:
                    named = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
                    kept[group] = kept.get(group, {}) | named
        examples = step * self.config.global_batch
        part, parts = self.world.rank, self.flat.writers
        return Checkpoint(step, examples, reports_due, groups, extra, rows=rows, part=part, parts=parts)

    def restore(self, checkpoint: Checkpoint | None) -> tuple[int, bool]:
        """Go on from the first process's checkpoint: (step, whether its reports are due); (0, False) without one."""
        small, note = None, json.dumps(None)
        if checkpoint is not None:
            groups = checkpoint.groups
            small = {f"{group}/{n}": t for group in ("meter", "objective") for n, t in groups[group].items()}
            small["steps"] = groups["optimizer"]["steps"]
            note = json.dumps([checkpoint.step, checkpoint.reports_due, checkpoint.extra])
        small, note = self.world.broadcast_small(small, note)
        if small is None:
            return 0, False
        step, reports_due, extra = json.loads(note)

        def given(group: str, prefix: str = "") -> dict[str, Tensor] | None:
            return None if checkpoint is None else _within(prefix, checkpoint.groups[group])

        self._fill_network(given("network"))
        for name, vector in self.averages.vectors.items():
            self.flat.fill(vector, given(name), self.world)
        self.optimizer.steps.copy_(small["steps"])
        for moment, vector in self.optimizer.moments.items():
            self.optimizer.layouts[moment].fill(vector, given("optimizer", f"{moment}/"), self.world)
        if "best" in extra:
            self.best = Best(**extra["best"], vector=torch.zeros_like(self.flat.values), moving=self._moving())
            best = given("best")
            self.flat.fill(self.best.vector, best, self.world)
            for name, tensor in self.best.moving.items():
                if best is not None:
                    tensor.copy_(best[name])
                self.world.broadcast(tensor)
        self.meter.load(_within("meter/", small))
        if isinstance(self.task.objective, Remembers):
            self.task.objective.load_state_dict(_within("objective/", small))
        if "precision" in extra:
            self.precision.load(extra["precision"])
        return step, reports_due or (step == self.config.steps and not extra["ended"])  # it was one on the way then

    def _moving(self) -> dict[str, Tensor]:
        """Copies of what of the network learns without a gradient, by name."""
        if not isinstance(self.network, TakesIn):
            return {}
        fixed = dict(self.network.named_parameters())
        return {name: tensor.clone() for name, tensor in self.network.state_dict().items() if name not in fixed}

    def _written(self, vector: Tensor, moving: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The network's tensors with a vector of the flat layout for what is trained, in the first process with
        adapters added to their weights. moving: in place of what learns without a gradient; unset: as it is now."""
        state = self.network.state_dict() | self.flat.named(vector) | dict(moving or {})
        state = written(state, self.config.lora if self.world.is_main else None)
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def _fill_network(self, tensors: dict[str, Tensor] | None) -> None:
        """Give the network tensors of its names, which the first process has, in every process."""
        self.flat.fill(self.flat.values, tensors, self.world)
        self.flat.show()
        for name, tensor in self.network.state_dict().items():
            if name not in self.flat.parameters:
                if tensors is not None:
                    tensor.copy_(tensors[name])
                self.world.broadcast(tensor)

    def _average(self) -> Tensor:
        """The average that counts; the weights themselves where there is none."""
        return self.flat.values if self.config.average is None else self.averages.vectors[self.config.average]

    def _format(self, x: Tensor) -> torch.memory_format:
        return torch.channels_last if self.config.channels_last and x.ndim == 4 else torch.contiguous_format


def _flat(network: nn.Module, config: TrainConfig, world: World, computes_in: torch.dtype, reduce: torch.dtype) -> Flat:
    if config.sharding == "none" or world.size == 1:
        return Flat(network, reduce)
    if config.sharding == "optimizer":
        return SlicedFlat(network, world, config.deterministic == "strict", computes_in, reduce)
    from image_diffusion.training.sharded import ShardedFlat  # what it imports takes seconds

    return ShardedFlat(network, world, computes_in, reduce, config.sharding == "machine")


def _teacher(network: nn.Module, config: TrainConfig) -> Network:
    """A network that stays as this one is now."""
    if config.init_from is None:
        raise ValueError(
            "system.objective.direction is teacher, but the network begins with random weights. Set train.init_from."
        )
    teacher = deepcopy(network).eval().requires_grad_(False)
    if config.compile:
        compile_by_block(teacher, config.records)
    return cast("Network", teacher)


def check_pairs(config: TrainConfig, world: World) -> None:
    """Raise ValueError where the neighbours of a global batch would be computed apart."""
    strict = config.deterministic == "strict"
    sizes = {"train.global_batch": config.global_batch}
    if strict:
        sizes["train.strict_chunk"] = config.strict_chunk
    else:
        sizes |= {f"the share of process {i}": size for i, size in enumerate(shares(config.global_batch, world))}
        sizes |= {} if config.microbatch is None else {"train.microbatch": config.microbatch}
    for name, size in sizes.items():
        if size % 2:
            raise ValueError(
                f"The objective pairs the samples of a batch, but {name} is {size}, an odd number. Use even numbers, "
                f"and processes that share the global batch evenly; or set objective.contrastive to 0."
            )


def _generator(device: torch.device) -> torch.Generator:
    """What dropout on a device draws from. `torch.manual_seed` would seed every kind of device: 2 ms, and without a GPU
    the call is kept for the day there is one."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _seed_of(*key: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "little")


def _within(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
