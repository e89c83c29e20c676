"""Blocks of a network: the units of compilation and of gathering when a network is spread, and which of its weights are
matrices."""

from __future__ import annotations

import os
import shutil
from typing import Any, TypeVar, cast

import torch
from torch import nn

L = TypeVar("L", bound=nn.Module)


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost lists of modules, lists in lists opened, that have parameters."""
    if isinstance(module, nn.ModuleList):
        return [block for member in module for block in (blocks(member) if _is_list(member) else [member])]
    return [block for child in module.children() for block in blocks(child)]


def of_parts(layer: L, count: int) -> L:
    """Record that the outputs of a layer are `count` maps of equal size, such as queries, keys and values."""
    cast("Any", layer).parts = count
    return layer


def inner_matrices(network: nn.Module) -> dict[str, int]:
    """Return the weights of the linear and convolutional layers in the network's blocks and between them, by name, and
    of how many maps each is (`of_parts`).

    Not among them: what stands before and behind the blocks in the network's definition, embeddings, convolutions of
    each channel on its own, and the blocks that the network names in `ends`, because they are its first or last layer.
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
    """Return the weights that their layers use for nothing but products with their inputs, which autocast rounds, by
    name."""
    kinds = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
    return {f"{name}.weight" for name, module in network.named_modules() if isinstance(module, kinds)}


def _is_map(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv1d | nn.Conv2d) and module.groups == 1)


def compile_by_block(network: nn.Module, records: bool = False) -> None:
    """Compile the network's blocks, and the layers beside them, each on its own with torch.compile.

    records: on a GPU the kernels of each are recorded (CUDA graphs) and then launched together, which takes memory of
    its own. Weights have to stay where they are; what a block gives is overwritten in the next step, which
    `torch.compiler.cudagraph_mark_step_begin` begins. Equal blocks share their graph and are recorded one by one.

    Compiled as a whole, a network gives every gradient after its whole backward pass, when nothing is left during which
    processes could add them up; by block, each gradient is there when its block is done. Equal blocks share one graph,
    so that compiling takes the time of one of them. Shapes are taken as they come: a microbatch of another size is
    compiled anew. Dropout leaves out what it leaves out without compiling, from PyTorch's own generator, though it is
    then a kernel of its own: a training may be compiled from one start to the next.

    Raises ValueError if there is no compiler that torch.compile could use.
    """
    check_compiler(next(network.parameters()).device)
    from torch._inductor import config as inductor

    inductor.fallback_random = True
    parts = _parts(network)
    # Blocks of one class share their limit of graphs, those of a U-Net have many shapes, and RIN calls each twice.
    limit = max(torch._dynamo.config.recompile_limit, 4 * len(parts))
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit, 4 * limit)
    for part in parts:
        part.compile(dynamic=False, mode="reduce-overhead" if records else None)


def check_compiler(device: torch.device) -> None:
    """Raise ValueError without a compiler for what calls kernels: of C for a GPU (Triton), of C++ for a CPU."""
    variable, names = ("CXX", ["g++", "clang++"]) if device.type == "cpu" else ("CC", ["gcc", "clang"])
    if not any(shutil.which(name) for name in (os.environ.get(variable, "").split()[:1] or names)):
        raise ValueError(
            f"compile needs a compiler, and there is none: neither {' nor '.join(names)} is on PATH, and {variable} "
            "names none. Install one, or set compile to false."
        )


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return the blocks, and whatever else lies beside the lists and consists of several layers."""
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
