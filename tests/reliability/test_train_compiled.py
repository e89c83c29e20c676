"""Compiled by block: no graph breaks, nothing compiled after the first step, and gradients that come one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch._dynamo.utils
from comparison import points
from tiny_runs import SYSTEMS, config, start
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from image_diffusion.core.streams import Streams
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.nn.blocks import blocks, compile_by_block
from image_diffusion.training.distributed import World
from image_diffusion.training.flat import Flat
from image_diffusion.training.parts import Parts, Task

ALONE = World(0, 1, torch.device("cpu"))
QUICK = {"steps": 50, "validate_every_steps": 10, "grid_every_steps": 20, "checkpoint": {"every_steps": 25}}
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled_with(patch: pytest.MonkeyPatch, backend: Any) -> None:
    """torch.compile uses this backend instead of inductor, which takes a minute for each system."""
    whole = nn.Module.compile
    patch.setattr(nn.Module, "compile", lambda module, **options: whole(module, backend=backend, **options))


def previewed(task: Task) -> Task:
    """The same task, tried out on the way on seven samples."""

    def grid(network: nn.Module, step: int, folder: Path) -> dict[str, float]:
        rows = np.arange(7)
        ids = torch.from_numpy(rows)
        stored, label = task.data.gather(rows), torch.from_numpy(task.data.labels[rows])
        batch = task.prepare(stored, label, Streams(0, torch.zeros_like(ids), ids))
        return {"preview": task.objective(network, batch).loss.mean().item()}  # type: ignore[arg-type]

    return replace(task, grid=grid)


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_is_compiled_once(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty steps with validations and previews between: no graph break, at most one graph after the first step."""
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    whole, after_first = Parts.update, []

    def update(self: Parts, step: int) -> None:
        whole(self, step)
        if step == 1:
            after_first.append(len(graphs))

    compiled_with(monkeypatch, count)
    monkeypatch.setattr(Parts, "update", update)
    monkeypatch.setitem(SYSTEMS, system, lambda world, build=SYSTEMS[system]: previewed(build(world)))
    torch._dynamo.utils.counters.clear()
    start(tmp_path, system, compile=True, **QUICK)
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert [step for key, step, _ in points(tmp_path) if key == "validation/preview"] == [0, 20, 40, 50]
    assert after_first[0] > 0
    assert len(graphs) <= after_first[0] + 1


def test_equal_blocks_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    compiled_with(monkeypatch, count)
    network = DiTConfig(depth=20, width=16, num_heads=2, patch=2).build(DataSpec(channels=4, resolution=8))
    compile_by_block(network)
    network(torch.randn(2, 4, 8, 8), torch.rand(2))
    assert len(graphs) == 4  # of patches, times, a block, the final layer


def to_come(compiled: bool) -> list[int]:
    """The matrix products of a backward pass that are still to come when each gradient is complete, in that order."""
    torch.manual_seed(0)
    spec = DataSpec(channels=4, resolution=8, num_classes=10)
    network = DiTConfig(depth=4, width=64, num_heads=4, patch=2).build(spec)
    flat = Flat(network)
    for parameter in flat.parameters.values():
        parameter.register_post_accumulate_grad_hook(_mark)
    if compiled:
        compile_by_block(network)
    x, t, label = torch.randn(2, 4, 8, 8), torch.rand(2), torch.zeros(2, dtype=torch.int64)
    for _ in range(2):  # the first compiles
        loss = network(x, t, label=label).square().mean()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss.backward()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    is_product = [event.name in PRODUCTS for event in events]
    total = sum(is_product)
    assert total >= 40
    done = np.cumsum(is_product)
    return [int(total - done[i]) for i, event in enumerate(events) if event.name == "gradient"]


def _mark(_: Tensor) -> None:
    with record_function("gradient"):
        pass


def test_gradients_come_while_the_backward_pass_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as a whole, all of them would come after it: 0 products left for any."""
    compiled_with(monkeypatch, "aot_eager")
    eager, compiled = to_come(False), to_come(True)
    assert len(compiled) == len(eager)
    assert compiled[len(compiled) // 2] >= 14


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_trainable_block_is_compiled(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = SYSTEMS[system](ALONE).network
    compile_by_block(network)
    compiled = {module for module in network.modules() if module._compiled_call_impl is not None}
    assert compiled
    assert set(blocks(network)) <= compiled
    for module in compiled:
        assert not compiled & (set(module.modules()) - {module}), "compiled inside what is compiled"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All systems through inductor where a test may take minutes (--soak); otherwise the smallest, which has dropout,
    and another through inductor's front end."""
    if {"system", "backend"} <= set(metafunc.fixturenames):
        soak = metafunc.config.getoption("--soak")
        cases = [(system, "inductor") for system in SYSTEMS] if soak else [("mlp", "inductor"), ("dit", "aot_eager")]
        metafunc.parametrize(("system", "backend"), cases)


def test_compiled_steps_give_the_losses_of_eager_ones(
    system: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_with(monkeypatch, backend)
    losses = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        settings = config(compile=compiled, microbatch=None, optimizer={"type": "adamw", "lr": 1e-4})
        parts = Parts(SYSTEMS[system](ALONE), settings, ALONE)
        batches, losses[compiled] = parts.batches(0), []
        for step in range(1, 4):
            found = parts.gradients(next(batches), partial(parts.losses, step))
            parts.clip()
            parts.update(step)
            losses[compiled].append(found.loss.mean().item())
        batches.close()  # type: ignore[attr-defined]
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)
