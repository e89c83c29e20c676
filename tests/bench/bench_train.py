"""The training step of DiT: images a second, TFLOP/s, and the share of a large matrix product's rate.

    python tests/bench/bench_train.py                                      # every size that fits, at 256 pixels
    python tests/bench/bench_train.py --size DiT-XL/2 --batch 256 --precision bf16 --compile
    python tests/bench/bench_train.py --size demo --peer DiT --peer fast-DiT

A step is the product's own loop: batches, noise, loss, backward, norm, AdamW, average, log. Two large matrix products
are measured in turn with the steps, in the same precision: PyTorch's (sgemm, on a CPU), and that of the networks'
linear maps. With one CPU thread the processor's clock counts, so that a busy machine disturbs little. A peer is a
checkout of facebookresearch/DiT, or of one that kept its interface: its network and its diffusion in the loop of its
train.py, on the same latents, also in turn, and given the faster product of this machine as well (`nn/linear.py`).
Needs torch, torchvision, numpy, pillow, safetensors and pydantic, and nothing else.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import bare_machine  # noqa: F401 - first: it stands in for what is not installed
import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.networks.dit import SIZES, DiTConfig
from image_diffusion.nn.linear import Linear, linear, register_operations
from image_diffusion.nn.precision import tf32
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process.discrete import Discrete
from image_diffusion.training.checkpoint.stop_signal import Stop
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.loop import train
from image_diffusion.training.monitor.reports import Reports
from image_diffusion.training.optim.numerics import switches
from image_diffusion.training.parallel.world import World
from image_diffusion.training.trainer import Task, Trainer

DEMO = {"depth": 4, "width": 128, "num_heads": 4, "patch": 2}
"""The network of the demo, on latents of 8 x 8."""

Steps = Callable[[int], None]
"""Do this many steps, and wait until they are done."""


class Latents:
    """Latents in memory, with the interface of shards."""

    def __init__(self, resolution: int, num_samples: int = 4096, channels: int = 4) -> None:
        self.num_samples, self.shape, self.dtype = num_samples, (channels, resolution, resolution), torch.float32
        self.labels = np.arange(num_samples, dtype=np.int64) % 1000
        self.stored = torch.randn(num_samples, *self.shape, generator=torch.Generator().manual_seed(0))

    beside: ClassVar[dict[str, Any]] = {}

    def gather(self, indices: Any, flip: Any = None, out: Tensor | None = None) -> Tensor:
        rows = self.stored[torch.from_numpy(indices)]
        return rows if out is None else out[: len(indices)].copy_(rows)

    def gather_joined(self, indices: Any, flip: Any = None) -> tuple[Tensor, ...]:
        return ()


def network_config(size: str) -> DiTConfig:
    return DiTConfig(**DEMO) if size == "demo" else DiTConfig.model_validate({"size": size})


def parts_of(arguments: argparse.Namespace, size: str, device: torch.device) -> tuple[Trainer, TrainConfig]:
    """Return the parts of the package's training, and its configuration."""
    data = Latents(arguments.latent)
    spec = DataSpec(channels=4, resolution=arguments.latent, num_classes=1000)
    torch.manual_seed(0)
    objective = Denoising(variance="learned_range", loss="hybrid", label_drop_probability=0.1)

    def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
        return Batch(stored, {"label": label}, streams)

    task = Task(
        network_config(size).build(spec, learned_variance=True),
        objective.build(Discrete().build(), spec),
        prepare,
        data,  # type: ignore[arg-type]
    )
    world = World(0, 1, device)
    settings = {
        "steps": 1,
        "global_batch": arguments.batch,
        "microbatch": arguments.microbatch,
        "precision": arguments.precision,
        "tf32": arguments.tf32,
        "compile": arguments.compile,
        "flip_probability": 0.0,
    }
    config = TrainConfig.model_validate(settings)
    return Trainer(task, config, world), config


def ours(arguments: argparse.Namespace, size: str, device: torch.device) -> Steps:
    """Return the package's training loop."""
    (parts, config), done = parts_of(arguments, size, device), 0

    def steps(count: int) -> None:
        nonlocal done
        parts.steps = done + count
        # the last log line waits for the device
        with switches(config.deterministic, config.tf32, bool(config.compile)):
            stop = Stop(parts.world, None)
            train(parts, Reports(parts, stop, done), stop, done)
        done += count

    return steps


def peer(folder: Path, arguments: argparse.Namespace, size: str, device: torch.device) -> Steps:
    """Return the loop of the original's train.py on latents, with a checkout's network, diffusion and average."""
    models = _import_from(folder, "models")
    models.nn = _WithLinear(models.nn)
    diffusion = _import_from(folder, "diffusion").create_diffusion(timestep_respacing="")
    update_ema = _function_of(folder / "train.py", "update_ema")
    torch.manual_seed(0)
    shape = network_config(size).shape
    build = {"depth": shape.depth, "hidden_size": shape.width, "patch_size": shape.patch, "num_heads": shape.num_heads}
    network = models.DiT(input_size=arguments.latent, num_classes=1000, **build).to(device).train()
    average = models.DiT(input_size=arguments.latent, num_classes=1000, **build).to(device).requires_grad_(False)
    update_ema(average, network, decay=0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0)
    data = Latents(arguments.latent)
    labels = torch.from_numpy(data.labels)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(arguments.precision)

    def steps(count: int) -> None:
        running_loss = 0.0
        for step in range(count):
            rows = torch.arange(step * arguments.batch, (step + 1) * arguments.batch) % data.num_samples
            x, y = data.stored[rows].to(device), labels[rows].to(device)
            t = torch.randint(0, diffusion.num_timesteps, (x.shape[0],), device=device)
            with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
                loss = diffusion.training_losses(network, x, t, {"y": y})["loss"].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update_ema(average, network)
            running_loss += loss.item()
        assert running_loss == running_loss

    return steps


def product(function: Callable[..., Tensor], precision: str, device: torch.device) -> tuple[Steps, float]:
    """Return a square matrix product in the precision of the network, and its floating-point operations."""
    size = 8192 if device.type == "cuda" else 2048
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    @torch.no_grad()
    def steps(count: int) -> None:
        for _ in range(count):
            function(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return steps, 2.0 * size**3


def flops_per_image(size: str, latent: int) -> float:
    """Return floating-point operations of a training step: three times the counted ones of the forward pass."""
    register_operations()
    with FakeTensorMode():
        spec = DataSpec(channels=4, resolution=latent, num_classes=1000)
        network: nn.Module = network_config(size).build(spec, learned_variance=True)
        x, t, label = torch.empty(1, 4, latent, latent), torch.empty(1), torch.zeros(1, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            network(x, t, label=label)
    return 3.0 * counter.get_total_flops()


def measure(variants: dict[str, tuple[Steps, int]], rounds: int) -> dict[str, float]:
    """Warm every variant up, then run all in turn; return the median seconds of one step of each."""
    alone = not torch.cuda.is_available() and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, (steps, count) in variants.items():
            started = clock()
            steps(count)
            if turn:
                seconds[name].append((clock() - started) / count)
    return {name: statistics.median(values) for name, values in seconds.items()}


def bench(size: str, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return one row of the table."""
    sgemm, operations = product(torch.mm, arguments.precision, device)
    fastest, _ = product(lambda a, b: linear(a, b, None), arguments.precision, device)
    variants = {
        "sgemm": (sgemm, 10),
        "product": (fastest, 10),
        "ours": (ours(arguments, size, device), arguments.steps),
    }
    for folder in arguments.peer:
        variants[folder.name] = (peer(folder, arguments, size, device), arguments.steps)
    seconds = measure(variants, arguments.rounds)
    flops = flops_per_image(size, arguments.latent)
    peak = operations / seconds["product"]
    row = {
        "size": size,
        "images_per_second": arguments.batch / seconds["ours"],
        "gflop_per_image": flops / 1e9,
        "tflops": flops * arguments.batch / seconds["ours"] / 1e12,
        "sgemm_tflops": operations / seconds["sgemm"] / 1e12,
        "share_of_sgemm": flops * arguments.batch / seconds["ours"] * seconds["sgemm"] / operations,
        "product_tflops": peak / 1e12,
        "share_of_product": flops * arguments.batch / seconds["ours"] / peak,
    }
    for folder in arguments.peer:
        row[f"times_faster_than_{folder.name}"] = seconds[folder.name] / seconds["ours"]
    return row


def _import_from(folder: Path, name: str) -> Any:
    """Import a module or package of a checkout, with stand-ins for the layers it takes from timm if that is absent."""
    try:
        importlib.import_module("timm.models.vision_transformer")
    except ImportError:
        for each in ("timm", "timm.models", "timm.models.vision_transformer"):
            sys.modules[each] = types.ModuleType(each)
        vars(sys.modules["timm.models.vision_transformer"]).update(PatchEmbed=PatchEmbed, Attention=Attention, Mlp=Mlp)
    for each in [each for each in sys.modules if each.split(".")[0] == name]:
        del sys.modules[each]
    sys.path.insert(0, str(folder.resolve()))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def _function_of(path: Path, name: str) -> Any:
    """Return one function of a file without importing the rest of it."""
    tree = ast.parse(path.read_text())
    chosen = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    space: dict[str, Any] = {"torch": torch}
    exec("from collections import OrderedDict", space)
    exec(compile(ast.Module(chosen, []), str(path), "exec"), space)
    return space[name]


class _WithLinear(types.ModuleType):
    """torch.nn with a Linear that uses the faster product."""

    def __init__(self, plain: types.ModuleType) -> None:
        super().__init__(plain.__name__)
        vars(self).update(vars(plain), Linear=Linear)


class PatchEmbed(nn.Module):
    """timm's patch embedding, as far as DiT uses it."""

    def __init__(self, size: int, patch: int, channels: int, width: int, bias: bool = True) -> None:
        super().__init__()
        self.patch_size, self.num_patches = (patch, patch), (size // patch) ** 2
        self.proj = nn.Conv2d(channels, width, patch, patch, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """timm's attention, which calls the fused kernel."""

    def __init__(self, width: int, num_heads: int, qkv_bias: bool = False, **_: Any) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = num_heads, Linear(width, 3 * width, qkv_bias), Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """timm's MLP, as far as DiT uses it."""

    def __init__(self, in_features: int, hidden_features: int, act_layer: Callable[[], nn.Module], **_: Any) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = (
            Linear(in_features, hidden_features),
            act_layer(),
            Linear(hidden_features, in_features),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", help=f"demo, or one of {', '.join(SIZES)} (all)")
    parser.add_argument("--batch", type=int, help="examples of a step (demo: 32; GPU: 256; CPU: 8)")
    parser.add_argument("--microbatch", type=int, help="examples computed at once (all)")
    parser.add_argument("--latent", type=int, help="side of the latents (demo: 8; else 32, images of 256 pixels)")
    parser.add_argument("--precision", choices=["float32", "bf16", "fp16"], default="float32")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=5, help="steps timed at once (5)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of all variants (5)")
    parser.add_argument("--peer", type=Path, action="append", default=[], help="checkout of facebookresearch/DiT")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, torch {torch.__version__}, {given.precision}{', compiled' if given.compile else ''}", flush=True)
    for size in given.size or ["demo", *SIZES]:
        arguments = argparse.Namespace(**vars(given))
        arguments.batch = given.batch or (32 if size == "demo" else 256 if device.type == "cuda" else 8)
        arguments.latent = given.latent or (8 if size == "demo" else 32)
        try:
            with tf32(given.tf32):
                row = bench(size, arguments, device)
        except (torch.OutOfMemoryError, MemoryError):
            print(f"{size}: does not fit", flush=True)
            continue
        print(json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
