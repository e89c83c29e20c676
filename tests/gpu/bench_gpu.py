"""A GPU's speed with this package in one table: training, parts of a step, noise, sampling, encoding, checkpoints.

    python tests/gpu/bench_gpu.py --results tests/bench/RESULTS.md      # `make bench-gpu`
    python tests/gpu/bench_gpu.py --only train --only sample

Every number is a median of several timings after warming up, of work that has ended on the GPU. Next to it is its share
of the GPU's limit: counted operations, over the rate of a large product in the same precision; or bytes that must move,
over the rate of a large copy; both limits are measured first, in the same run. Weights that are initialised as zeros
are made random, since products of zeros are faster. A part that fails is reported, and the others run.
"""

from __future__ import annotations

import argparse
import gc
import math
import re
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
import yaml
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from image_diffusion.codecs.diffusers import KlCodec
from image_diffusion.core.config.base import parse
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec, Network
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.nn.blocks import compile_by_block
from image_diffusion.nn.linear import register_operations
from image_diffusion.nn.precision import Precision, computing_in, tf32
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process.discrete import Discrete
from image_diffusion.systems import AnySystem
from image_diffusion.training.checkpoint.capture import capture
from image_diffusion.training.checkpoint.manager import State
from image_diffusion.training.checkpoint.stop_signal import Stop
from image_diffusion.training.config import CheckpointConfig, TrainConfig
from image_diffusion.training.loop import train
from image_diffusion.training.monitor.meter import flops_per_example, product_rate
from image_diffusion.training.monitor.reports import Reports
from image_diffusion.training.optim.numerics import switches
from image_diffusion.training.parallel.world import World
from image_diffusion.training.trainer import Task, Trainer

GPU = torch.device("cuda", 0)
ALONE = World(0, 1, GPU)
RECIPES = Path(__file__).parents[2] / "config/experiments"
LATENTS = DataSpec(channels=4, resolution=32, num_classes=1000)
XL = "DiT-XL/2"


class Row(NamedTuple):
    """share: of the GPU's limit. goal: target of `share`."""

    what: str
    value: float
    unit: str
    share: float | None = None
    goal: float | None = None


def seconds_of(function: Callable[[], Any], count: int, rounds: int = 3) -> float:
    """Return the median seconds of one call, timed `count` calls at a time, after one to warm up."""
    function()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            function()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / count)
    return statistics.median(times)


class Limits:
    """Limits of the GPU, measured once for each kind."""

    def __init__(self) -> None:
        self._peaks: dict[str, float] = {}

    def peak(self, precision: str) -> float:
        """Operations a second of a large product: float32, tf32 or bf16."""
        if precision not in self._peaks:
            with tf32(precision == "tf32"):
                self._peaks[precision] = product_rate(GPU, torch.bfloat16 if precision == "bf16" else torch.float32)
        return self._peaks[precision]

    def bandwidth(self) -> float:
        """Bytes a second, read and written, of a large copy."""
        if "copy" not in self._peaks:
            one, other = (torch.empty(2**31, dtype=torch.uint8, device=GPU) for _ in range(2))
            self._peaks["copy"] = 2 * one.numel() / seconds_of(lambda: other.copy_(one), 10)
        return self._peaks["copy"]


class Stored:
    """Samples in memory, with the interface of shards."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, num_classes: int, num_samples: int = 1024) -> None:
        self.num_samples, self.shape, self.dtype = num_samples, shape, dtype
        self.labels = np.arange(num_samples, dtype=np.int64) % max(1, num_classes)
        self.stored = torch.randn(num_samples, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)

    beside: ClassVar[dict[str, Any]] = {}

    def gather(self, indices: Any, flip: Any = None, out: Tensor | None = None) -> Tensor:
        rows = self.stored[torch.from_numpy(indices)]
        return rows if out is None else out[: len(indices)].copy_(rows)

    def gather_joined(self, indices: Any, flip: Any = None) -> tuple[Tensor, ...]:
        return ()


def no_zeros(network: nn.Module) -> nn.Module:
    """Return the network with random numbers for the weights that are initialised as zeros."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
    return network


def dit(size: str) -> nn.Module:
    torch.manual_seed(0)
    with GPU:
        return no_zeros(DiTConfig.model_validate({"size": size}).build(LATENTS, learned_variance=True))


Parts = tuple[Trainer, TrainConfig]
"""A training that has begun, and its configuration."""


def dit_parts(size: str, batch: int, **settings: Any) -> Parts:
    """The recipe of DiT on latents of 256 x 256 pixels."""

    def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
        mean, std = stored.to(torch.float32).unbind(dim=1)
        return Batch(mean + 0.1 * std * streams.normal("posterior", (4, 32, 32)), {"label": label}, streams)

    objective = Denoising(variance="learned_range", loss="hybrid", label_drop_probability=0.1)
    data: Any = Stored((2, 4, 32, 32), torch.float16, 1000)
    task = Task(dit(size), objective.build(Discrete().build(), LATENTS), prepare, data)
    config = TrainConfig.model_validate({"steps": 1, "global_batch": batch, **settings})
    return Trainer(task, config, ALONE), config


def recipe_parts(name: str, spec: DataSpec, batch: int, **settings: Any) -> Parts:
    """The system of a recipe, on pixels."""
    system: Any = parse(AnySystem, yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["system"], name)

    def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
        return Batch(stored, {"label": label} if spec.num_classes else {}, streams)

    torch.manual_seed(0)
    data: Any = Stored((spec.channels, spec.resolution, spec.resolution), torch.float32, spec.num_classes)
    task = Task(no_zeros(system.build_network(spec)), system.build_objective(spec), prepare, data)
    config = TrainConfig.model_validate({"steps": 1, "global_batch": batch, **settings})
    return Trainer(task, config, ALONE), config


def steps_of(parts: Parts) -> Callable[[int], None]:
    """Return the package's training loop, some steps at a time; its last log line waits for the GPU."""
    (trainer, config), done = parts, 0

    def steps(count: int) -> None:
        nonlocal done
        trainer.steps = done + count
        with switches(config.deterministic, config.tf32, bool(config.compile)):
            stop = Stop(ALONE, None)
            train(trainer, Reports(trainer, stop, done), stop, done)
        done += count

    return steps


def trained(what: str, parts: Parts, precision: str, limits: Limits, count: int, goal: float | None) -> Iterator[Row]:
    """Return the rate of a training, its memory, and the seconds until the first step is done."""
    torch.cuda.reset_peak_memory_stats()
    steps = steps_of(parts)
    started = time.perf_counter()
    steps(1)
    first_s = time.perf_counter() - started
    steps(2)
    trainer, config = parts
    rate = config.global_batch / (seconds_of(partial(steps, count), 1) / count)
    with trainer.eagerly():
        flops = flops_per_example(next(trainer.batches(0)), partial(trainer.losses, 0))
    yield Row(what, rate, "images/s", flops * rate / limits.peak(precision), goal)
    yield Row(f"{what}: memory", torch.cuda.max_memory_reserved() / 2**30, "GiB")
    yield Row(f"{what}: the first step", first_s, "s")


def bench_train(limits: Limits) -> Iterator[Row]:
    compiled, graphs = {"tf32": True, "compile": True}, {"compile": "cuda_graphs"}
    variants: list[tuple[str, str, int, dict[str, Any], float | None]] = [
        ("bf16, compiled, batch 256", "bf16", 256, {"precision": "bf16", **compiled}, 0.6),
        ("bf16, compiled, batch 32", "bf16", 32, {"precision": "bf16", **compiled}, None),
        ("bf16, CUDA graphs, batch 256", "bf16", 256, {"precision": "bf16", "tf32": True, **graphs}, 0.6),
        ("bf16, CUDA graphs, batch 32", "bf16", 32, {"precision": "bf16", "tf32": True, **graphs}, None),
        ("bf16, batch 256", "bf16", 256, {"precision": "bf16", "tf32": True}, None),
        ("tf32, compiled, 4 x 64", "tf32", 256, {"microbatch": 64, **compiled}, None),
        ("float32, batch 64", "float32", 64, {"tf32": False}, None),
    ]
    for name, precision, batch, settings, goal in variants:
        yield from _told(partial(_train_dit, f"{XL}, {name}", precision, batch, settings, goal, limits))


def _train_dit(
    what: str, precision: str, batch: int, settings: dict[str, Any], goal: float | None, limits: Limits
) -> Iterator[Row]:
    yield from trained(what, dit_parts(XL, batch, **settings), precision, limits, 5 if batch > 64 else 15, goal)


def bench_modes(limits: Limits) -> Iterator[Row]:
    """Measure the cost of each mode of `train.deterministic`."""
    for mode in ("off", "run", "strict"):
        for size, batch in (("DiT-S/2", 256), (XL, 64)):
            parts = dit_parts(size, batch, precision="bf16", deterministic=mode, strict_chunk=64)
            yield next(trained(f"{size}, bf16, batch {batch}, deterministic {mode}", parts, "bf16", limits, 10, None))


def bench_small(limits: Limits) -> Iterator[Row]:
    """Measure networks and batches that are bound by launches rather than by the GPU's computation."""
    for size, batch in (("DiT-S/2", 32), ("DiT-S/2", 256), ("DiT-B/2", 256)):
        for told, how in (("", False), (", compiled", True), (", CUDA graphs", "cuda_graphs")):
            parts = dit_parts(size, batch, precision="bf16", tf32=True, compile=how)
            rate, memory, _ = trained(f"{size}, bf16{told}, batch {batch}", parts, "bf16", limits, 20, None)
            yield from (rate, memory)


def bench_recipes(limits: Limits) -> Iterator[Row]:
    chosen = {
        "cifar10": (DataSpec(channels=3, resolution=32, num_classes=10), 256),
        "rin_imagenet64": (DataSpec(channels=3, resolution=64, num_classes=1000), 64),
        "iddpm_imagenet64": (DataSpec(channels=3, resolution=64), 64),
    }
    modes: dict[str, dict[str, Any]] = {
        "uncompiled": {},
        "compiled": {"compile": True},
        "CUDA graphs": {"compile": "cuda_graphs"},
        "channels last": {"channels_last": True},
    }
    for name, (spec, batch) in chosen.items():
        for mode, settings in modes.items():
            if "channels_last" in settings and not name.startswith("iddpm"):
                continue
            parts = recipe_parts(name, spec, batch, precision="bf16", tf32=True, **settings)
            what = f"`{name}`, bf16, {mode}, batch {batch}"
            yield from trained(what, parts, "bf16", limits, 10, None)


KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "convolutions": ("conv", "cudnn"),
    "optimizer": ("adam",),
    "average": ("lerp",),
    "compiled, between the products": ("triton",),
    "copies and zeros": ("memcpy", "memset", "copy_kernel", "fillfunctor"),
}
"""Purposes of kernels, by words in their names; the first match counts."""


def bench_shares(_: Limits) -> Iterator[Row]:
    """Measure the purposes on which the GPU spends the time of a step."""
    steps = steps_of(dit_parts(XL, 256, precision="bf16", tf32=True, compile=True))
    steps(3)
    started = time.perf_counter()
    steps(3)
    wall = (time.perf_counter() - started) / 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        steps(3)
    spent: Counter[str] = Counter()
    kernels = 0.0
    for event in profiler.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
        spent[kind] += event.self_device_time_total / 3e3
        kernels += event.count / 3 if event.self_device_time_total else 0  # calls of CUDA are events, too
    busy = sum(spent.values())
    yield Row(f"a step of {XL}, batch 256", 1e3 * wall, "ms")
    yield Row("of it, the GPU computes", busy, "ms", busy / (1e3 * wall))
    yield Row("launches", kernels, "")
    for kind, milliseconds in spent.most_common():
        yield Row(kind, milliseconds, "ms")


def bench_pieces(limits: Limits) -> Iterator[Row]:
    """Measure the parts of a step outside the network, for any batch, against the bytes they must move."""
    parts = dit_parts(XL, 32, precision="bf16", tf32=True)
    parts.backward(next(parts.batches(0)), 1)
    pieces: list[tuple[str, Callable[[], Any], int]] = [
        ("norm of the gradient", parts.clip_gradients, 4),
        ("AdamW", parts.optimizer.torch.step, 28),
        ("average", partial(parts.averages.update, 1), 12),
        ("zeros", parts.flat.gradient.zero_, 4),
    ]
    for name, piece, bytes_each in pieces:
        spent = seconds_of(piece, 5)
        least = bytes_each * parts.flat.size / limits.bandwidth()
        yield Row(f"{XL}: {name}", 1e3 * spent, "ms", least / spent)


def bench_noise(limits: Limits) -> Iterator[Row]:
    """Measure random numbers, against the bytes they are written in."""
    for rows, shape, kind in (
        (256, (4, 32, 32), "normal"),
        (32, (3, 256, 256), "normal"),
        (4, (8192, 32, 32), "gumbel"),
    ):
        sample = torch.arange(rows, device=GPU)
        streams = Streams(0, torch.zeros_like(sample), sample)
        spent = seconds_of(partial(getattr(streams, kind), "noise", shape), 10)
        written = 4 * rows * math.prod(shape)
        size = " x ".join(map(str, shape))
        yield Row(f"{kind} noise {size}", 1e6 * spent / rows, "µs an image", written / limits.bandwidth() / spent)


def bench_sample(limits: Limits) -> Iterator[Row]:
    """Measure passes of DiT-XL/2 without gradient, of which sampling with guidance does two a step."""
    network = dit(XL).to(GPU).eval()
    x, label = torch.randn(256, 4, 32, 32, device=GPU), torch.arange(256, device=GPU)
    t = torch.full((256,), 500.0, device=GPU)
    register_operations()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(x[:1], t[:1], label=label[:1])

    precisions: list[tuple[Precision, bool]] = [(name, False) for name in ("float32", "tf32", "bf16")]
    for precision, compiled in [*precisions, ("tf32", True), ("bf16", True)]:
        if compiled:
            compile_by_block(network)
        evaluate = torch.no_grad()(computing_in(cast("Network", network), precision))
        spent = seconds_of(partial(evaluate, x, t, label=label), 3)
        share = 256 * counter.get_total_flops() / spent / limits.peak(precision)
        what = f"{XL}, a pass without gradient, {precision}{', compiled' * compiled}"
        yield Row(what, 256 / spent, "images/s", share)
        yield Row("so 50,000 images of 250 steps with guidance", 50_000 * 500 * spent / 256 / 3600, "hours")


def sd_vae(dtype: torch.dtype) -> Any:
    """Return an autoencoder of Stable Diffusion's shape, with random weights."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=4,
        sample_size=256,
    )
    return vae.to(GPU, dtype).eval().requires_grad_(False)


def bench_codec(_: Limits) -> Iterator[Row]:
    """Measure Stable Diffusion's autoencoder at 256 x 256."""
    images = torch.randint(0, 256, (32, 3, 256, 256), dtype=torch.uint8)
    latents = torch.randn(128, 4, 32, 32, device=GPU)
    for name, dtype, layout, rounds in (
        ("float32", torch.float32, torch.contiguous_format, False),
        ("tf32", torch.float32, torch.contiguous_format, True),
        ("tf32, channels last", torch.float32, torch.channels_last, True),
        ("bf16, channels last", torch.bfloat16, torch.channels_last, True),
    ):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = rounds
        vae = sd_vae(dtype).to(memory_format=layout)
        codec = KlCodec({}, lambda vae=vae: vae, 0.18215)
        yield Row(f"VAE, {name}: encoding", 32 / seconds_of(partial(codec.encode, images), 2), "images/s")
        torch.cuda.reset_peak_memory_stats()
        spent = seconds_of(partial(codec.decode, latents), 2, rounds=2)
        yield Row(f"VAE, {name}: decoding 128", 128 / spent, "images/s")
        yield Row(f"VAE, {name}: memory", torch.cuda.max_memory_reserved() / 2**30, "GiB")
        del vae, codec
        gc.collect()
        torch.cuda.empty_cache()


def bench_checkpoint(_: Limits) -> Iterator[Row]:
    """Measure how long a training of DiT-XL/2 waits for a checkpoint, and how long the parallel write takes."""
    parts = dit_parts(XL, 32, precision="bf16", tf32=True)
    with tempfile.TemporaryDirectory() as folder:
        state = State(Path(folder), {}, CheckpointConfig())
        state.claim()
        for step in (1, 2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            state.save(capture(parts, step, False))
            waited = time.perf_counter() - started
            state.wait()
            yield Row(f"checkpoint {step} of {XL}: the loop waits", waited, "s")
            yield Row(f"checkpoint {step} of {XL}: written after", time.perf_counter() - started, "s")


BENCHES: dict[str, Callable[[Limits], Iterator[Row]]] = {
    name.removeprefix("bench_"): value for name, value in list(globals().items()) if name.startswith("bench_")
}


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    lines = ["| | | | Of what the GPU can do | Goal |", "| --- | ---: | --- | ---: | ---: |"]
    for what, value, unit, share, goal in rows:
        shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        given = ["" if each is None else f"{each:.2f}" for each in (share, goal)]
        lines.append(f"| {what} | {shown} | {unit} | {given[0]} | {given[1]} |")
    return "\n".join(lines)


def put(results: Path, text: str) -> None:
    """Replace the text between the two marks in a file."""
    marks = r"(<!-- bench-gpu -->\n).*(<!-- /bench-gpu -->\n)"
    page, found = re.subn(marks, lambda match: match[1] + text + "\n" + match[2], results.read_text(), flags=re.DOTALL)
    if not found:
        raise ValueError(f"{results} has no line <!-- bench-gpu --> with a line <!-- /bench-gpu --> below it.")
    results.write_text(page)


def _told(bench: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Return the rows of a benchmark. A failure is printed, and its memory on the GPU is freed."""
    try:
        yield from bench()
    except Exception:
        print(traceback.format_exc(), flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(BENCHES), help="these parts, in this order (all)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no part after this long (any)")
    parser.add_argument("--results", type=Path, help="page to put the table in, between its marks (printed anyway)")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "bench_gpu.py needs a GPU that PyTorch can use; there is none here.\n")
    started, limits = time.monotonic(), Limits()
    rows = [
        Row(f"product of 8192 x 8192, {name}", limits.peak(name) / 1e12, "TFLOP/s")
        for name in ("bf16", "tf32", "float32")
    ]
    rows.append(Row("copy, read and written", limits.bandwidth() / 1e12, "TB/s"))
    for name in given.only or list(BENCHES):
        if time.monotonic() - started > given.seconds:
            print(f"{name}: not begun after {given.seconds:.0f} s", flush=True)
            continue
        for row in _told(partial(BENCHES[name], limits)):
            rows.append(row)
            print(table([row]).splitlines()[-1], flush=True)
        print(f"{name}: done {time.monotonic() - started:.0f} s after the start", flush=True)
    page = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}.\n\n{table(rows)}"
    print(f"\n{page}")
    if given.results is not None:
        put(given.results, page)


if __name__ == "__main__":
    main()
