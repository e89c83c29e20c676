"""Compiled by block: no graph breaks, nothing compiled after the first step, and gradients that complete one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each_system
from comparison import points
from tiny_runs import SYSTEMS, config, start
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.nn.blocks import blocks, compile_by_block
from image_diffusion.training.parallel.flat_parameters import Flat
from image_diffusion.training.parallel.world import World
from image_diffusion.training.trainer import Task, Trainer

pytestmark = pytest.mark.slow

ALONE = World(0, 1, torch.device("cpu"))
QUICK = {"steps": 50, "validate_every_steps": 10, "grid_every_steps": 20, "checkpoint": {"every_steps": 25}}
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled_with(patch: pytest.MonkeyPatch, backend: Any) -> None:
    """Let torch.compile use this backend instead of inductor, which takes a minute per system and alone has modes."""
    whole, modes = nn.Module.compile, {} if backend == "inductor" else {"mode": None}
    patch.setattr(nn.Module, "compile", lambda module, **options: whole(module, backend=backend, **options | modes))


def previewed(task: Task) -> Task:
    """Return the task with previews on seven samples."""

    def grid(network: nn.Module, step: int, folder: Path) -> dict[str, float]:
        rows = np.arange(7)
        ids = torch.from_numpy(rows)
        stored, label = task.data.gather(rows), torch.from_numpy(task.data.labels[rows])
        batch = task.prepare(stored, label, Streams(0, torch.zeros_like(ids), ids))
        return {"preview": task.objective(network, batch).loss.mean().item()}  # type: ignore[arg-type]

    return replace(task, grid=grid)


@pytest.mark.parametrize("system", each_system(SYSTEMS))
def test_every_system_is_compiled_once(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty steps with validations and previews between: no graph break, at most one graph after the first step."""
    from torch._dynamo.utils import counters

    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    whole, after_first = Trainer.update, []

    def update(self: Trainer, step: int) -> None:
        whole(self, step)
        if step == 1:
            after_first.append(len(graphs))

    compiled_with(monkeypatch, count)
    monkeypatch.setattr(Trainer, "update", update)
    monkeypatch.setitem(SYSTEMS, system, lambda world, build=SYSTEMS[system]: previewed(build(world)))
    counters.clear()
    start(tmp_path, system, compile=True, **QUICK)
    assert counters["graph_break"] == {}
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
    """Return how many matrix products of a backward pass remain when each gradient is complete, in that order."""
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


def test_gradients_are_complete_during_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the network were compiled as a whole, all gradients would come at the end: 0 products left for any."""
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
    """Parametrize over all systems with inductor if a test may take minutes (--soak); otherwise over the smallest,
    which has dropout, and another one with inductor's front end."""
    soak = metafunc.config.getoption("--soak")
    if "recorded" in metafunc.fixturenames:
        metafunc.parametrize("recorded", SYSTEMS if soak else ["mlp", "vector_dvae", "adversarial"])
    if {"system", "backend"} <= set(metafunc.fixturenames):
        cases: list[tuple[str, str, bool | str]] = [("mlp", "inductor", "cuda_graphs")]
        cases += [(system, "inductor", True) for system in (SYSTEMS if soak else ["mlp"])]
        cases += [] if soak else [("dit", "aot_eager", True)]
        metafunc.parametrize(("system", "backend", "how"), cases)


def test_compiled_steps_give_the_losses_of_eager_ones(
    system: str, backend: str, how: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    compiled_with(monkeypatch, backend)
    losses = {}
    counters.clear()
    for compiled in (False, how):
        torch.manual_seed(0)
        settings = config(compile=compiled, microbatch=None, optimizer={"type": "adamw", "lr": 1e-4})
        parts = Trainer(SYSTEMS[system](ALONE), settings, ALONE)
        batches, losses[compiled] = parts.batches(0), []
        for step in range(1, 4):
            found = parts.gradients(next(batches), partial(parts.losses, step))
            parts.clip_gradients()
            parts.update(step)
            losses[compiled].append(found.loss.mean().item())
        batches.close()  # type: ignore[attr-defined]
    assert losses[how] == pytest.approx(losses[False], rel=1e-3)
    left_out = counters["inductor"]["cudagraph_skips"]  # there are none on a CPU
    assert (left_out > 0) == (how == "cuda_graphs")


@pytest.mark.parametrize("how", [True, "cuda_graphs"])
@pytest.mark.parametrize("mode", ["run", "strict"])
def test_cuda_graphs_are_recorded_on_request_with_one_mark_per_step(
    how: bool | str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of a step stay valid until its end, for any number of microbatches."""
    asked: list[Any] = []
    happened: list[str] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: asked.append(options["mode"]))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: happened.append("step"))
    settings = config(compile=how, microbatch=2, strict_chunk=2, deterministic=mode)
    parts = Trainer(SYSTEMS["mlp"](ALONE), settings, ALONE)
    losses = type(parts.task.objective).__call__

    def noted(*given: Any) -> Any:
        happened.append("losses")
        return losses(*given)

    monkeypatch.setattr(type(parts.task.objective), "__call__", noted)
    batches = parts.batches(0)
    for step in (1, 2):
        parts.gradients(next(batches), partial(parts.losses, step))
    batches.close()  # type: ignore[attr-defined]
    of_a_step = ["losses"] * (settings.global_batch // 2)
    assert len(of_a_step) > 1
    records = how == "cuda_graphs"
    assert asked and set(asked) == {"reduce-overhead" if records else None}
    assert happened == (["step", *of_a_step] * 2 if records else of_a_step * 2)


class Overwritten:
    """Compiles like CUDA graphs: outputs of compiled code are overwritten when the next step begins."""

    def __init__(self) -> None:
        self._given: list[Tensor] = []
        self.overwritten = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

        def compiled(made: Any, _: Any) -> Callable[..., Any]:
            @make_boxed_func
            def run(*arguments: Any) -> Any:
                found = made(*arguments)
                own = {each.untyped_storage().data_ptr() for each in arguments if isinstance(each, Tensor)}
                new = [each.detach() for each in found if isinstance(each, Tensor)]
                self._given += [each for each in new if each.untyped_storage().data_ptr() not in own]
                return found

            return run  # type: ignore[no-any-return]

        return aot_module_simplified(graph, inputs, fw_compiler=compiled, bw_compiler=compiled)  # type: ignore[no-any-return]

    def step(self) -> None:
        for each in self._given:
            each.fill_(math.nan if each.is_floating_point() else -1)
        self.overwritten += len(self._given)
        self._given.clear()


def test_no_step_reads_compiled_outputs_of_earlier_step(recorded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbatches pass to the end of a step the values from which a quantiser's codebook learns."""
    compiled = Overwritten()
    compiled_with(monkeypatch, compiled)
    losses = {}
    for how in (False, "cuda_graphs"):
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", compiled.step)
        torch.manual_seed(0)
        parts = Trainer(SYSTEMS[recorded](ALONE), config(compile=how, optimizer={"type": "adamw", "lr": 1e-4}), ALONE)
        batches, losses[how] = parts.batches(0), []
        for step in range(1, 4):
            found = parts.gradients(next(batches), partial(parts.losses, step))
            norm = parts.clip_gradients()
            parts.update(step)
            parts.observe(step, found, norm)
            losses[how] += [found.loss.mean().item(), norm.item()]
        losses[how] += parts.meter.take().values()
        batches.close()  # type: ignore[attr-defined]
    assert losses["cuda_graphs"] == pytest.approx(losses[False], rel=1e-3)
    assert compiled.overwritten > 0
