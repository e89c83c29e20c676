"""Checks before the first step: every process computes correctly, about as fast as the others, and has enough memory.

The computations use integers so small that the known answer is exact in every precision and in any order of addition.
No random numbers are drawn, and no memory remains in use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import torch
import torch.distributed as dist
from torch import Tensor, nn

from image_diffusion.core.devices import driver
from image_diffusion.core.process.errors import log_line
from image_diffusion.nn.linear import linear
from image_diffusion.training.monitor.meter import seconds_of
from image_diffusion.training.parallel.world import World

_SLOW = 2.0
"""A process is reported as slow above this multiple of the median time."""
_LENGTH, _PERIOD = 256, 64  # a sum of 256 numbers of size 1 is exact in bf16, and so is every part of it
_SIDES, _AT_ONCE = {"cuda": 4096, "cpu": 256}, {"cuda": 20, "cpu": 1}


@dataclass(frozen=True)
class PreflightResult:
    """Results of one process's checks. product_s: seconds of a product, the minimum of several."""

    host: str
    device: str
    driver: str
    product_is_right: bool
    sum_is_right: bool
    product_s: float


def check(world: World, dtype: torch.dtype) -> None:
    """Compute a product in every process and a sum over all processes, in a fraction of a second, and print the
    hardware if the run has several processes or a GPU. dtype: dtype of the factors of the training's products.

    Raises ValueError in every process, with the names of the processes whose answers are wrong. A slow process is
    reported.
    """
    results = [_try(world, dtype)]
    if world.size > 1:
        results *= world.size
        dist.all_gather_object(results, results[0], group=world.control)
    if wrong := [rank for rank, result in enumerate(results) if not result.product_is_right]:
        hosts = ",".join(dict.fromkeys(results[rank].host for rank in wrong))
        raise ValueError(
            f"A product of known numbers is wrong on {_named(results, wrong)}. Take what computes wrongly out of use "
            f"(on Slurm with --exclude={hosts}), and run the same command again."
        )
    if wrong := [rank for rank, result in enumerate(results) if not result.sum_is_right]:
        raise ValueError(
            f"A sum of known numbers over all processes is wrong on {_named(results, wrong)}. Look at what connects "
            f"them, which NCCL_DEBUG=INFO shows, and run the same command again."
        )
    if not world.is_main:
        return
    if world.size > 1 or world.device.type == "cuda":
        print(_hardware_line(results), flush=True)
    usual = median_low(result.product_s for result in results)
    for rank, result in enumerate(results):
        if result.product_s > _SLOW * usual:
            log_line(
                f"warning: A product takes {result.product_s / usual:.1f} times as long as usual on "
                f"{_named(results, [rank])}, and every step waits for it. Does something else run there, or is it hot?"
            )


def check_memory(world: World, network: nn.Module, num_averages: int, sharding: str) -> None:
    """Raise ValueError if the free memory of this process's GPU is too small for the weights, gradient and averages in
    float32, a lower bound without moments and activations. Of sharded weights, all are in memory before they are cut,
    then only this process's part."""
    if world.device.type != "cuda":
        return
    weights = sum(parameter.numel() for parameter in network.parameters())
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    averages = trained * num_averages / (world.size if sharding != "none" else 1)
    numbers = weights + trained + averages
    if sharding in ("full", "machine") and world.size > 1:
        numbers = max(weights, (weights + trained) / world.size + averages)
    least = 4 * numbers / 2**30
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info(world.device))
    if least > free:
        raise ValueError(
            f"Weights, gradient and averages need {least:.1f} GiB, but only {free:.1f} of {total:.1f} GiB of "
            f"{torch.cuda.get_device_name(world.device)} are free on {world.hosts[world.rank]}. End what uses the "
            "rest, choose another GPU (CUDA_VISIBLE_DEVICES), or divide them among several GPUs (train.sharding)."
        )


def _try(world: World, dtype: torch.dtype) -> PreflightResult:
    device = world.device
    left, right, expected = _exact_product(_SIDES[device.type], device, dtype)
    times = _AT_ONCE[device.type]
    seconds = seconds_of(lambda: [linear(left, right, None) for _ in range(times)], device, 10) / times
    is_right = torch.equal(linear(left, right, None), expected)
    numbers, shares = expected[:_PERIOD].float(), [1 + rank % 8 for rank in range(world.size)]
    total = numbers * shares[world.rank]
    if world.size > 1:
        dist.all_reduce(total)
    sum_is_right = torch.equal(total, numbers * sum(shares))
    index = "" if device.index is None else f"GPU {device.index}, "
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    version = driver() if device.type == "cuda" else ""
    return PreflightResult(world.hosts[world.rank], f"{index}{kind}", version, is_right, sum_is_right, seconds)


def _exact_product(side: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return two matrices [side, 256] of the numbers -1, 0 and 1, and the product of one with the other's transpose.
    They are periodic, so that the expected product follows from a small product of integers."""
    count = _PERIOD * _LENGTH
    mixed = torch.arange(2 * count).pow(2) * 40503 % 65521  # a prime, so that the numbers spread
    left, right = (mixed % 3 - 1).view(2, _PERIOD, _LENGTH)
    times = side // _PERIOD
    product = (left @ right.T).to(device, dtype)
    left, right = left.to(device, dtype), right.to(device, dtype)
    return left.repeat(times, 1), right.repeat(times, 1), product.repeat(times, times)


def _named(results: Sequence[PreflightResult], ranks: Sequence[int]) -> str:
    return " and ".join(f"{results[rank].host} (process {rank}, {results[rank].device})" for rank in ranks)


def _hardware_line(results: Sequence[PreflightResult]) -> str:
    """Return one line on the hardware of each machine of a training, with identical machines grouped."""
    machines: dict[str, Counter[str]] = {}
    for result in results:
        driver = f" (driver {result.driver})" if result.driver else ""
        machines.setdefault(result.host, Counter())[result.device.split(", ")[-1] + driver] += 1
    alike: dict[str, list[str]] = {}
    for host, kinds in machines.items():
        alike.setdefault(", ".join(f"{count} x {kind}" for kind, count in kinds.items()), []).append(host)
    parts = [f"{what} on {'each of ' * (len(hosts) > 1)}{', '.join(hosts)}" for what, hosts in alike.items()]
    return f"Training with {len(results)} process{'es' * (len(results) > 1)}: {'; '.join(parts)}."
