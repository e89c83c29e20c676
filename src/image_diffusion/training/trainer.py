"""Trainer: the components of a training, built from its configuration."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, Losses, Network, Objective
from image_diffusion.data.augment import NUM_LABELS, Augment, augmented
from image_diffusion.data.shards.loader import Batches, Examples
from image_diffusion.data.shards.reader import Shards
from image_diffusion.nn.blocks import compile_by_block
from image_diffusion.nn.inputs import add_augmentation
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.finetune import tune, written
from image_diffusion.training.monitor.meter import Health, Meter, Patience, Speed
from image_diffusion.training.optim.base import FlatOptimizer
from image_diffusion.training.optim.ema import Averages, BestWeights
from image_diffusion.training.optim.numerics import DTYPES, Precision
from image_diffusion.training.parallel.flat_parameters import Flat
from image_diffusion.training.parallel.gradients import OrderedGradient, SharedGradient, gather_losses, shares
from image_diffusion.training.parallel.preflight import check_memory
from image_diffusion.training.parallel.world import World
from image_diffusion.training.parallel.zero import SlicedFlat


@runtime_checkable
class LearnsWithoutGradient(Protocol):
    """A network that also learns without gradients, such as a codebook of moving averages."""

    def update_from(self, seen: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Learn from `Losses.seen` of one step's whole global batch. Returns the tensors that it changed in place."""
        ...


@dataclass(frozen=True)
class Task:
    """Task of a training: network, objective and data.

    network: float32, on any device. objective: batch -> losses. prepare: stored examples [B, …], labels [B], the random
    numbers of the batch and the contents of joined sets, if any -> batch of the objective. data, validation: the two
    splits. grid: network (with averaged weights, if any), step and folder -> pictures and numbers by name; called only
    in the first process. carried: files to write next to the weights, by name.
    """

    network: nn.Module
    objective: Objective
    prepare: Callable[..., Batch]
    data: Shards
    validation: Shards | None = None
    grid: Callable[[nn.Module, int, Path], Mapping[str, Path | float]] | None = None
    carried: Mapping[str, Path] = field(default_factory=dict)


class Trainer:
    """The components of a training, on this process's device, the same in every process. Use it within
    `numerics.switches`."""

    def __init__(self, task: Task, config: TrainConfig, world: World) -> None:
        check_task(task, config, world)
        self.task, self.world = task, world
        self.steps, self.global_batch, self.seed = config.steps, config.global_batch, config.seed
        self.intervals, self.microbatch = config.intervals, config.microbatch or config.global_batch
        self.average, self.keeps_raw = config.average, config.keep_raw
        self._strict = strict = config.deterministic == "strict"
        self._compiles, self._records = bool(config.compile), config.records
        self._schedule, self._grad_clip, self._lora = config.schedule, config.grad_clip, config.lora
        self._augment, self._flip_probability = config.augment, config.flip_probability
        self._channels_last, self._balances = config.channels_last, config.balance_classes

        rates = tune(task.network, config)
        for name, build in task.objective.layers.items():
            task.network.add_module(name, build())
        if config.augment is not None:
            add_augmentation(task.network, NUM_LABELS)
        factors = {name: rates.get(name, 1.0) for name, p in task.network.named_parameters() if p.requires_grad}
        check_memory(world, task.network, len(config.ema.names), config.sharding)
        self.network = task.network.to(world.device)
        for tensor in self.network.state_dict().values():  # with `init_from` only the first process has loaded weights
            world.broadcast(tensor)
        self.network.to(memory_format=torch.channels_last if config.channels_last else torch.preserve_format)
        compiled = [self.network]
        if task.objective.teacher is not None:
            teacher = deepcopy(self.network).eval().requires_grad_(False)
            task.objective.teacher.network = cast("Network", teacher)
            compiled.append(teacher)

        computes_in, reduce = DTYPES[config.precision], DTYPES[config.reduce]
        if config.sharding == "none" or world.size == 1:
            self.flat = Flat(self.network, reduce)
        elif config.sharding == "optimizer":
            self.flat = SlicedFlat(self.network, world, strict, computes_in, reduce)
        else:
            from image_diffusion.training.parallel.fsdp import ShardedFlat  # its imports take seconds

            self.flat = ShardedFlat(self.network, world, computes_in, reduce, config.sharding == "machine")
        self.optimizer: FlatOptimizer = config.optimizer.build(self.flat, factors)
        self.precision = Precision(config.precision, world.device, self.flat.is_whole, not self.flat.sums_gradients)
        self.patience = Patience(config.steps, config.patience)
        self.meter, self.health = Meter(world, strict), Health(world)
        self.speed = Speed(world, self.precision.dtype)
        kind: type[SharedGradient | OrderedGradient] = OrderedGradient if strict else SharedGradient
        at_once = config.strict_chunk if strict else self.microbatch
        self.gradients = kind(self.flat, world, config.global_batch, at_once, self.precision.scaler.scale)
        self.averages = Averages(config.ema, self.flat.values)
        self.best = BestWeights(self.flat, self._copy_buffers, config.weights == "best")
        if config.compile:
            for network in compiled:
                compile_by_block(network, config.records)
        self.network.train()

    def batches(self, step: int) -> Iterator[Examples]:
        """Yield the examples of this process from a step on; with `strict`, of all processes."""
        return iter(
            Batches(
                self.task.data,
                self.global_batch,
                self.seed,
                rank=0 if self._strict else self.world.rank,
                world_size=1 if self._strict else self.world.size,
                start=step * self.global_batch,
                flip_probability=self._flip_probability,
                balance_classes=self._balances,
                device=self.world.device,
            )
        )

    @property
    def last_step(self) -> int:
        """Return the step at which the training ends, as far as known."""
        return self.steps if self.patience.ended_at is None else self.patience.ended_at

    def set_learning_rate(self, step: int) -> float:
        """Set the learning rate of update number `step`, counted from 1, and return it."""
        return self.optimizer.set_rate(self._schedule.factor(step - 1, self.steps))

    def backward(self, examples: Examples, step: int) -> Losses:
        """Compute the losses of a step and the gradient of their mean over the global batch, in every process."""
        return self.gradients(examples, partial(self.losses, step))

    def losses(self, step: int, examples: Examples, part: int) -> Losses:
        """Return the objective's losses, in the configured precision. step, part: unique to these examples in the run;
        they seed PyTorch's generator, which only dropout uses."""
        if self._records and part < self.world.size:  # the first part of this process in the step
            torch.compiler.cudagraph_mark_step_begin()
        seed = hashlib.sha256(repr((self.seed, step, part)).encode()).digest()[:7]
        _generator(self.world.device).manual_seed(int.from_bytes(seed, "little"))
        augment = self._augment.at((step - 1) / self.steps) if self._augment is not None else None
        return self._losses(self.task.objective, self.seed, step, examples, augment)

    def validation_losses(self, step: int, examples: Examples, part: int) -> Losses:
        """Compute the losses of held-out samples with the same random numbers in every run and step (seed 0), at times
        drawn uniformly."""
        return self._losses(self.task.objective.uniform(), 0, step, examples)

    def _losses(
        self, objective: Objective, seed: int, step: int, examples: Examples, augment: Augment | None = None
    ) -> Losses:
        streams = Streams(seed, examples.epoch, examples.sample)
        batch = self.task.prepare(examples.stored, examples.label, streams, *examples.joined_sets)
        if augment is not None:
            batch = augmented(batch, augment, self._flip_probability)
        batch = replace(batch, x=batch.x.contiguous(memory_format=self._format(batch.x)), step=step)
        with self.precision.autocast():
            return objective(cast("Network", self.network), batch)

    def clip_gradients(self) -> Tensor:
        """Scale the gradient to a norm of at most `grad_clip`, and return its norm before, [] on the device."""
        self.precision.scaler.unscale_(self.optimizer.torch)
        norm = self.flat.norm()
        if self._grad_clip is not None:
            self.flat.gradient.mul_((self._grad_clip / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def update(self, step: int) -> None:
        """Do update number `step`, counted from 1, of the weights and then of their averages."""
        self.precision.scaler.step(self.optimizer.torch)
        self.precision.scaler.update()
        self.flat.update_network()
        self.averages.update(step)

    def validated(self, step: int, loss: float) -> None:
        """Store the average if its validation loss, the same in every process, is the smallest so far, and set the
        early end if the loss has stopped improving. Raises ValueError if either needs a loss that is not finite."""
        if not math.isfinite(loss) and (self.best.wanted or self.patience.share is not None):
            raise ValueError(
                f"The validation loss is {loss} at step {step:,}, but train.weights: best and train.patience compare "
                "it. Lower train.optimizer.lr, or use bf16 in place of fp16."
            )
        self.patience.observe(step, loss)
        if self.best.wanted:
            self.best.offer(loss, step, self._average())

    def observe(self, step: int, losses: Losses, norm: Tensor) -> None:
        """Record the results of a step, without waiting for the device: in the meter, the check for finite losses, the
        objective and the network."""
        self.meter.add(losses, norm)
        self.health.watch(step, losses.loss.mean(), norm, self.precision.skips_overflow)
        memory, network = self.task.objective.memory, self.network
        reads_all = memory is not None or isinstance(network, LearnsWithoutGradient)
        if reads_all and not self._strict:
            losses = gather_losses(losses, shares(self.global_batch, self.world), self.world)
        if memory is not None:
            memory.observe(losses)
        if isinstance(network, LearnsWithoutGradient):
            for tensor in network.update_from(losses.seen):  # sums on a GPU may differ in last bits
                self.world.broadcast(tensor)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Yield the network in evaluation mode, with the weights of the selected average, if any. All processes enter
        together; each may then compute for any length of time."""
        self.network.eval()
        try:
            with self.flat.with_weights(self._average()), torch.no_grad(), self.eagerly():
                yield self.network
        finally:
            self.network.train()

    def eagerly(self) -> AbstractContextManager[None]:
        """Return a context without compiled code, which would be recompiled for this mode and these shapes."""
        return torch.compiler.set_stance("force_eager") if self._compiles else nullcontext()

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to write at the end, under the network's own names, in the first process. All processes
        call it together."""
        if self.best.wanted:
            assert self.best.step, "the last step is validated"
            return self._written(self.best.values, self.best.buffers)
        return self._written(self._average())

    def raw_weights(self) -> dict[str, Tensor]:
        """Return the tensors as trained, in the first process. All processes call it together."""
        return self._written(self.flat.values)

    def _copy_buffers(self) -> dict[str, Tensor]:
        """Copy the network's buffers that are updated outside the optimizer, by name."""
        if not isinstance(self.network, LearnsWithoutGradient):
            return {}
        fixed = dict(self.network.named_parameters())
        return {name: tensor.clone() for name, tensor in self.network.state_dict().items() if name not in fixed}

    def _written(self, vector: Tensor, buffers: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the network's tensors with the trained parameters from a vector of the flat layout; in the first
        process, adapters are merged into the weights. buffers: replace the network's current buffers."""
        state = self.network.state_dict() | self.flat.named(vector) | dict(buffers or {})
        state = written(state, self._lora if self.world.is_main else None)
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def _average(self) -> Tensor:
        """Return the selected average, or the weights if none is selected."""
        return self.flat.values if self.average is None else self.averages.vectors[self.average]

    def _format(self, x: Tensor) -> torch.memory_format:
        return torch.channels_last if self._channels_last and x.ndim == 4 else torch.contiguous_format


def check_task(task: Task, config: TrainConfig, world: World) -> None:
    """Raise ValueError if these processes cannot train this task as configured."""
    sharded = config.shards_weights and world.size > 1
    if world.size > config.global_batch:
        raise ValueError(
            f"{world.size} processes cannot share a global batch of {config.global_batch}. "
            f"Use at most {config.global_batch} processes."
        )
    if config.weights == "best" and task.validation is None:
        raise ValueError(
            "train.weights is best, but no sample is held out to compare them. Hold some out for validation."
        )
    if sharded and config.global_batch % world.size:
        raise ValueError(
            f"train.sharding is {config.sharding}, but {world.size} processes cannot share a global batch of "
            f"{config.global_batch} evenly. Use a number of processes that divides it."
        )
    if sharded and task.objective.layers:
        raise ValueError(
            f"train.sharding is {config.sharding}, but the objective has layers of its own. "
            f"Set it to optimizer, or to none."
        )
    if config.patience is not None and task.validation is None:
        raise ValueError(
            "train.patience is set, but no sample is held out to measure the loss. Hold some out for validation."
        )
    if config.augment is not None:
        config.augment.check(task.data.manifest["kind"], task.data.shape[-3], task.data.shape[-2:])
    if task.objective.pairs_samples:
        config.check_pairs(world.size)
    if task.objective.teacher is not None and config.init_from is None:
        raise ValueError(
            "system.objective.direction is teacher, but the network begins with random weights. Set train.init_from."
        )


def _generator(device: torch.device) -> torch.Generator:
    """Return the generator that dropout on a device draws from. `torch.manual_seed` would seed every kind of device,
    which takes 2 ms, and without a GPU queues the call until a GPU is initialised."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator
