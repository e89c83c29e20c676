"""Memory, operations and traffic of a training step on a GPU, counted without one."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.data.shards.loader import Examples
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.nn.blocks import factors
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process.discrete import Discrete
from image_diffusion.stages.doctor import print_estimated_cost
from image_diffusion.systems.codec.dvae import DVAESystem
from image_diffusion.training.checkpoint.capture import capture
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.flops import Counted, _disable_module_to, counted, operations_per_example
from image_diffusion.training.parallel.world import World
from image_diffusion.training.trainer import Task, Trainer

SPEC = DataSpec(channels=4, resolution=32, num_classes=1000)
OBJECTIVE = Denoising(variance="learned_range", loss="hybrid", label_drop_probability=0.1)


class Traffic(TorchDispatchMode):
    """Counts bytes of the enclosed operations. local: read and written by kernels; sent: sent to other processes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.local = self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {arg.name: value for arg, value in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
        if func.namespace == "c10d":
            self.sent += max(size_of(given.get(name)) for name in given)  # the full size of a reduction or gather
        elif func.namespace == "aten" and not func.is_view and "empty" not in func.name():
            changed = {arg.name for arg in func._schema.arguments if arg.alias_info and arg.alias_info.is_write}
            unread = changed if func._opname in ("copy_", "zero_", "fill_") else set()
            self.local += sum(size_of(value) for name, value in given.items() if name not in unread)
            self.local += sum(size_of(given[name]) for name in changed) if changed else size_of(out)
        return out


def size_of(value: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(value) if isinstance(each, Tensor))


class Moments:
    num_samples, shape, dtype = 1, (2, 4, 32, 32), torch.float16
    labels = np.zeros(1, dtype=np.int64)
    joined_sets: ClassVar[dict[str, Any]] = {}


def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
    mean, std = stored.to(torch.float32).unbind(dim=1)
    return Batch(mean + std * streams.normal("posterior", (4, 32, 32)), {"label": label}, streams)


def task(network: nn.Module) -> Task:
    return Task(network, OBJECTIVE.build(Discrete().build(), SPEC), prepare, Moments())  # type: ignore[arg-type]


def build(size: Any, depth: int | None = None) -> Callable[[], nn.Module]:
    """depth: number of blocks, if not that of the size."""
    return partial(DiTConfig(size=size, depth=depth).build, SPEC, learned_variance=True)


@cache
def found(size: Any, processes: int = 1, depth: int | None = None, **settings: Any) -> Counted:
    config = TrainConfig.model_validate({"steps": 1, "precision": "bf16", **settings})
    return counted(build(size, depth), task, config, processes)


small = partial(found, depth=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "gib"),
    [(32, 25.9), (256, 110.3), *(pytest.param(*case, marks=pytest.mark.long) for case in [(64, 37.9), (128, 62.1)])],
)
def test_memory_of_dit_xl2(batch: int, gib: float) -> None:
    """The expected numbers were counted by other code, with CUDA's bf16 rules."""
    step = found("DiT-XL/2", global_batch=batch)
    assert step.peak / 2**30 == pytest.approx(gib, rel=0.01)
    assert step.fixed / 2**30 == pytest.approx(12.6, rel=0.01)  # weights, gradient, two moments, one average
    assert step.operations == pytest.approx(711.8e9, rel=0.01)


@pytest.mark.slow
def test_each_process_computes_its_share_in_microbatches() -> None:
    alone = small("DiT-S/2", global_batch=8)
    assert small("DiT-S/2", 4, global_batch=32).peak == alone.peak
    fewer = small("DiT-S/2", global_batch=8, microbatch=2)
    assert alone.fixed == fewer.fixed < fewer.peak < 0.8 * alone.peak


def test_strict_mode_computes_whole_chunks_for_any_microbatch() -> None:
    strict = {"deterministic": "strict", "strict_chunk": 4}
    alone = small("DiT-S/8", global_batch=8, **strict)
    assert alone == small("DiT-S/8", global_batch=8, microbatch=4)
    assert alone == small("DiT-S/8", global_batch=8, microbatch=1, **strict)


@pytest.mark.parametrize(("processes", "share"), [(1, 20), (2, 16), (3, 8), (16, 8)])
def test_batch_share_of_a_process(processes: int, share: int) -> None:
    config = TrainConfig.model_validate({"steps": 1, "global_batch": 20, "deterministic": "strict", "strict_chunk": 8})
    assert config.share_of(processes) == share
    assert config.model_copy(update={"deterministic": "run"}).share_of(processes) == -(-20 // processes)


def test_operations_per_example_match_those_of_a_full_step() -> None:
    config = TrainConfig.model_validate({"steps": 1, "precision": "bf16", "global_batch": 8})
    assert operations_per_example(build("DiT-S/2", 2), task, config) == small("DiT-S/2", global_batch=8).operations


def test_fully_sharded_process_stores_its_share() -> None:
    alone = small("DiT-S/2", global_batch=8)
    shared = small("DiT-S/2", 4, global_batch=32, sharding="full")
    assert shared.fixed == pytest.approx(alone.fixed * (1 + 4 / 4) / 5, rel=0.01)


def test_sharded_process_also_stores_gradients_or_weights() -> None:
    alone = found("DiT-S/2", global_batch=8)
    parts = found("DiT-S/2", 4, global_batch=32, sharding="full", microbatch=4)  # with a full gradient in the meantime
    assert parts.fixed == pytest.approx(alone.fixed * (1 + 1 + 4 / 4) / 5, rel=0.01)
    sliced = found("DiT-S/2", 4, global_batch=32, sharding="optimizer")  # the network's own weights are bf16
    assert sliced.fixed == pytest.approx(alone.fixed * (0.5 + 1 + 5 / 4) / 5, rel=0.01)


def test_discriminator_with_a_later_start_is_counted() -> None:
    def of(**adversarial: Any) -> Counted:
        system = DVAESystem.model_validate({"network": {"num_tokens": 64}, "adversarial": adversarial or None})
        spec = DataSpec(channels=3, resolution=64)

        def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
            return Batch(stored.to(torch.float32), {}, streams)

        def task(network: nn.Module) -> Task:
            images = SimpleNamespace(shape=(3, 64, 64), dtype=torch.uint8, joined_sets={})
            return Task(network, system.build_objective(spec), prepare, images)  # type: ignore[arg-type]

        config = TrainConfig.model_validate({"steps": 1000, "global_batch": 4})
        return counted(partial(system.build_network, spec), task, config, 1)

    always, later, never = of(start_step=0), of(start_step=400), of()
    assert later == always
    assert all(getattr(never, name) < getattr(always, name) for name in ("parameters", "operations", "fixed", "peak"))


def test_counting_allocates_no_tensors() -> None:
    """The weights alone would take 2.5 GiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found("DiT-XL/2", global_batch=1024)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


@pytest.fixture
def eight() -> Iterator[World]:
    """Rank 0 of a fake group of eight processes."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield World(0, 8, torch.device("cpu"))
    dist.destroy_process_group()


def fixed_traffic(world: World, size: Any = "DiT-XL/2", **settings: Any) -> tuple[float, float]:
    """GB that a DiT step moves for any batch size: in a process, and between processes. With a dict as size, tensors
    are real, since PyTorch cannot shard fake ones."""
    config = TrainConfig.model_validate({"steps": 1, "precision": "bf16", "global_batch": 16, **settings})
    fake, steps = FakeTensorMode(allow_non_fake_inputs=True) if isinstance(size, str) else nullcontext(), []
    given: Any = {"size": size} if isinstance(size, str) else size
    with fake:
        network = DiTConfig(**given).build(SPEC, learned_variance=True)
    whole = task(network)
    with fake, _disable_module_to():
        parts = Trainer(whole, config, world)
        for batch in (1, 2):
            ids = torch.zeros(batch, dtype=torch.int64)
            examples = Examples(torch.zeros(batch, *Moments.shape, dtype=Moments.dtype), ids, ids, ids)
            with Traffic() as step:
                parts.backward(examples, 1)
                parts.clip_gradients()
                parts.update(1)
            steps.append(step)
    one, two = steps
    return (2 * one.local - two.local) / 1e9, (2 * one.sent - two.sent) / 1e9


@pytest.mark.slow
@pytest.mark.long
def test_sharded_optimizer_reduces_memory_traffic(eight: World) -> None:
    """Weights are 2.70 GB. An all-reduce sends its bytes twice: to add them, and as the result."""
    local, sent = fixed_traffic(eight)
    assert local > 47 and sent == pytest.approx(2.70, rel=0.01)
    local, sent = fixed_traffic(eight, sharding="optimizer")
    assert local < 14 and sent == pytest.approx(2.70 + 1.35, rel=0.02)  # the sum in float32, the weights in bf16
    _, sent = fixed_traffic(eight, sharding="optimizer", reduce="bf16")
    assert sent == pytest.approx(1.35 + 1.35, rel=0.02)


SMALL = {"depth": 4, "width": 64, "num_heads": 2, "patch": 8}


def test_weights_are_gathered_in_the_compute_precision(eight: World) -> None:
    """Matrices of blocks are gathered twice: in the forward pass and in the backward pass."""
    network = DiTConfig.model_validate(SMALL).build(SPEC, learned_variance=True)
    products = {name: network.get_parameter(name).nbytes for name in factors(network)}
    gathered = sum(size * (2 if name.startswith("blocks.") else 1) for name, size in products.items())
    _, exact = fixed_traffic(eight, SMALL, sharding="full", precision="float32")
    _, sent = fixed_traffic(eight, SMALL, sharding="full")
    if hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"):
        assert exact - sent == pytest.approx(gathered / 2 / 1e9, rel=1e-6)
        assert sent < 0.72 * exact  # gradients are reduced in float32
    else:
        assert sent == exact  # PyTorch before 2.15 has no dtype per parameter of a block


def test_gradients_of_microbatches_are_reduced_once(eight: World) -> None:
    """A second microbatch adds only the weights that are gathered for it."""
    network = DiTConfig.model_validate(SMALL).build(SPEC, learned_variance=True)
    gradient = sum(parameter.nbytes for parameter in network.parameters() if parameter.requires_grad)
    _, sent = fixed_traffic(eight, SMALL, sharding="full", microbatch=1)
    assert sent == pytest.approx(gradient / 1e9, rel=0.01)


def test_checkpoint_of_sharded_weights_is_not_sent(eight: World) -> None:
    """Every process stores its own rows."""
    config = TrainConfig.model_validate({"steps": 1, "global_batch": 8, "sharding": "full"})
    with _disable_module_to():
        parts = Trainer(task(DiTConfig.model_validate(SMALL).build(SPEC, learned_variance=True)), config, eight)
    with Traffic() as moved:
        checkpoint = capture(parts, 1, False)
    rows = [tensor for group in checkpoint.rows.values() for tensor in group.values()]
    assert moved.sent < 1000 < size_of(rows)
    assert {each.untyped_storage().data_ptr() for each in rows} == {
        each.untyped_storage().data_ptr()
        for each in (parts.flat.values, *parts.averages.vectors.values(), *parts.optimizer.moments.values())
    }


def test_doctor_estimates_cost_on_other_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = TrainConfig.model_validate({"steps": 1000, "global_batch": 64, "precision": "bf16"})
    stage = SimpleNamespace(train=config, experiment="mine")
    training: Any = SimpleNamespace(stage=stage, network=build("DiT-S/8", 2), task=task)
    print_estimated_cost(training, processes=4, tflops=100.0, output=tmp_path / "doctor.json")
    step = small("DiT-S/8", 4, global_batch=64)
    written = read_json(tmp_path / "doctor.json")
    assert written["peak"] == step.peak
    assert written["train_s"] == pytest.approx(step.operations * 64 * 1000 / 4e14)
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith("1,000 steps of 64 images, counted for 4 GPUs of 100 TFLOP/s")
    assert told[2].startswith(f"memory  {step.peak / 2**30:.1f} GiB of each GPU")
