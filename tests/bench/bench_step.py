"""The parts of a training step of DiT, and the effect of each option on it.

    python tests/bench/bench_step.py --size demo
    python tests/bench/bench_step.py --size DiT-XL/2 --batch 256 --precision bf16 --compile

First the shares of a step that random streams, optimizer and average take, then the whole step with other options, all
in turn. On a GPU a step is also run with PyTorch told to fail at any wait for the device. Needs what bench_train needs.
"""

from __future__ import annotations

import argparse
import json
from functools import partial

import torch
from bench_train import Steps, measure, ours, parts_of

from image_diffusion.core.random.streams import Streams
from image_diffusion.data.shards.loader import Examples
from image_diffusion.training.trainer import Trainer

VARIANTS = {
    "float32": {"precision": "float32"},
    "tf32": {"precision": "float32", "tf32": True},
    "float32, compiled": {"precision": "float32", "compile": True},
    "bf16": {"precision": "bf16"},
    "fp16 with loss scaling": {"precision": "fp16"},
    "bf16, compiled": {"precision": "bf16", "compile": True},
}


def pieces(parts: Trainer, examples: Examples) -> dict[str, Steps]:
    """Return parts of a step, each on its own."""
    shape = tuple(examples.stored.shape[1:])

    def streams() -> None:
        drawn = Streams(0, examples.epoch, examples.sample)
        drawn.normal("noise", shape), drawn.integers("timestep", 1000), drawn.event("label_drop", 0.1)

    def gradients() -> None:
        parts.backward(examples, 1)

    functions = {
        "gradients": gradients,
        "streams": streams,
        "optimizer": parts.optimizer.torch.step,
        "average": partial(parts.averages.update, 1),
    }

    def repeated(function: object, count: int) -> None:
        for _ in range(count):
            function()  # type: ignore[operator]
        if parts.world.device.type == "cuda":
            torch.cuda.synchronize()

    return {name: partial(repeated, function) for name, function in functions.items()}


def waits_for_nothing(parts: Trainer, examples: Examples) -> bool:
    """Return whether the host waits for nothing in a step on a GPU."""
    for mode in ("default", "error"):  # the first step allocates
        torch.cuda.set_sync_debug_mode(mode)
        losses = parts.backward(examples, 1)
        norm = parts.clip_gradients()
        parts.update(1)
        parts.observe(1, losses, norm)
    torch.cuda.set_sync_debug_mode("default")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="demo")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--latent", type=int, help="side of the latents (demo: 8; else 32)")
    parser.add_argument("--precision", choices=["float32", "bf16", "fp16"], default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=7, help="turns of all variants (7)")
    parser.add_argument("--variant", action="append", help=f"of {', '.join(VARIANTS)} (all; CPU: two)")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    latent = given.latent or (8 if given.size == "demo" else 32)
    common = {"batch": given.batch, "latent": latent, "microbatch": None, "tf32": False}
    chosen = argparse.Namespace(**common, precision=given.precision, compile=given.compile)

    parts, _ = parts_of(chosen, given.size, device)
    examples = next(parts.batches(0))
    count = 20 if given.size == "demo" else 2
    whole = {"step": (ours(chosen, given.size, device), count)}
    seconds = measure(whole | {name: (piece, count) for name, piece in pieces(parts, examples).items()}, given.rounds)
    shares = {name: round(value / seconds["step"], 4) for name, value in seconds.items() if name != "step"}
    print(json.dumps({"size": given.size, "step_ms": round(1e3 * seconds["step"], 2), "shares": shares}), flush=True)
    if device.type == "cuda":
        print(json.dumps({"a step waits for nothing": waits_for_nothing(parts, examples)}), flush=True)

    names = given.variant or (list(VARIANTS) if device.type == "cuda" else ["float32", "bf16"])
    options = {name: argparse.Namespace(**{**common, "compile": False, **VARIANTS[name]}) for name in names}
    variants = {name: (ours(option, given.size, device), count) for name, option in options.items()}
    for name, value in measure(variants, given.rounds).items():
        print(json.dumps({"variant": name, "images_per_second": round(given.batch / value, 1)}), flush=True)


if __name__ == "__main__":
    main()
