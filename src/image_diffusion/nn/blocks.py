"""Blocks of a network, which are the units of compilation and of sharding, and its weights that are matrices."""

from __future__ import annotations

import os
import shutil
from typing import Any, TypeVar, cast

import torch
from torch import nn

L = TypeVar("L", bound=nn.Module)


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost lists of modules, with nested lists flattened."""
    if isinstance(module, nn.ModuleList):
        return [block for member in module for block in (blocks(member) if _is_list(member) else [member])]
    return [block for child in module.children() for block in blocks(child)]


def set_num_maps(layer: L, count: int) -> L:
    """Record that the outputs of a layer are `count` maps of equal size, such as queries, keys and values."""
    cast("Any", layer).parts = count
    return layer


def inner_matrices(network: nn.Module) -> dict[str, int]:
    """Return the names of the weights of linear and convolutional layers in and between the network's blocks, each with
    its number of maps (`set_num_maps`).

    Excludes layers before and after the blocks in the network's definition, embeddings, depthwise convolutions, and
    blocks that the network names in `ends` because they are its first or last layer.
    """
    members = {module for block in blocks(network) for module in block.modules()}
    named = list(network.named_modules())
    places = [place for place, (_, module) in enumerate(named) if module in members]
    ends = {module for name in getattr(network, "ends", ()) for module in network.get_submodule(name).modules()}
    return {
        f"{name}.weight": getattr(module, "parts", 1)
        for name, module in named[min(places, default=0) : max(places, default=-1) + 1]
        if module not in ends and _is_map(module)
    }


def factors(network: nn.Module) -> set[str]:
    """Return the names of weights that are used only in products with a layer's input, which autocast rounds."""
    kinds = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
    return {f"{name}.weight" for name, module in network.named_modules() if isinstance(module, kinds)}


def _is_map(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv1d | nn.Conv2d) and module.groups == 1)


def compile_by_block(network: nn.Module, records: bool = False) -> None:
    """Compile each of the network's blocks, and the layers outside of them, with torch.compile.

    records: on a GPU, record the kernels of each block as a CUDA graph and launch them together, which takes additional
    memory. Weights must keep their addresses, and the outputs of a block are overwritten in the next step, which starts
    with `torch.compiler.cudagraph_mark_step_begin`. Equal blocks share compiled code, but are recorded separately.

    A network compiled as a whole has all gradients only after its backward pass, too late to overlap their sum over
    processes; compiled by block, each block's gradients are ready after that block. Equal blocks share one graph, and
    are compiled only once. Shapes are static: a microbatch of another size is recompiled. Dropout draws the same
    numbers as uncompiled, from PyTorch's generator, in a separate kernel, so that compilation may change between
    starts.

    Raises ValueError if torch.compile finds no compiler.
    """
    check_compiler(next(network.parameters()).device)
    from torch._inductor import config as inductor

    inductor.fallback_random = True
    parts = _parts(network)
    # Blocks of one class share one limit; blocks of a U-Net have many shapes, and RIN calls each block twice.
    limit = max(torch._dynamo.config.recompile_limit, 4 * len(parts))
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit, 4 * limit)
    for part in parts:
        part.compile(dynamic=False, mode="reduce-overhead" if records else None)


def check_compiler(device: torch.device) -> None:
    """Raise ValueError without the compiler that torch.compile needs: C for a GPU (Triton), C++ for a CPU."""
    variable, names = ("CXX", ["g++", "clang++"]) if device.type == "cpu" else ("CC", ["gcc", "clang"])
    if not any(shutil.which(name) for name in (os.environ.get(variable, "").split()[:1] or names)):
        raise ValueError(
            f"compile needs a compiler, and there is none: neither {' nor '.join(names)} is on PATH, and {variable} "
            "names none. Install one, or set compile to false."
        )


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return the blocks, and modules of several layers outside of the lists."""
    parts: list[nn.Module] = []
    for child in module.children():
        if _is_list(child):
            parts += blocks(child)
        elif any(_is_list(inner) for inner in child.modules()):
            parts += _parts(child)
        elif next(child.children(), None) is not None:
            parts.append(child)
    return parts or [module]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList)
