"""Trainable parameters of a network and their learning rates: frozen ones, adapters, and rates by depth and by name."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from image_diffusion.nn.blocks import inner_matrices
from image_diffusion.training.finetune.lora import add_adapters, check_lora, plain_name
from image_diffusion.training.finetune.name_patterns import matching

if TYPE_CHECKING:
    from image_diffusion.training.config import TrainConfig


def check_tuning(network: nn.Module, config: TrainConfig) -> None:
    """Raise ValueError for a pattern of `config` that matches nothing in the network, impossible adapters, rates by
    depth without blocks, or an optimizer without parameters."""
    parameters = dict(network.named_parameters())
    frozen = matching(parameters, config.freeze, "train.freeze", "parameter")
    config.optimizer.check(inner_matrices(network).keys() - set(frozen))
    if len(frozen) == len(parameters) and config.lora is None:
        raise ValueError("train.freeze names every parameter, so that nothing is trained. Leave some out.")
    trained = {name: parameter for name, parameter in parameters.items() if name not in frozen}
    matching(trained, config.lr_factors, "train.lr_factors", "trained parameter" if frozen else "parameter")
    if config.layer_decay is not None and not list(_members(network)):
        raise ValueError(
            f"train.layer_decay is {config.layer_decay:g}, but the network has no list of blocks. Leave it out, or use "
            "train.lr_factors."
        )
    if config.lora is not None:
        check_lora(network, config.lora)


def tune(network: nn.Module, config: TrainConfig) -> dict[str, float]:
    """Freeze parameters and add adapters, in place. Returns the factor of each trained parameter's learning rate, by
    name. Raises ValueError as `check_tuning` does."""
    check_tuning(network, config)
    parameters = dict(network.named_parameters())
    for name in matching(parameters, config.freeze, "train.freeze", "parameter"):
        parameters[name].requires_grad_(False)
    if config.lora is not None:
        add_adapters(network, config.lora)
    factors = _by_depth(network, config.layer_decay)
    for pattern, factor in config.lr_factors.items():
        for name in factors:
            if fnmatchcase(plain_name(name), pattern):
                factors[name] *= factor
    return {name: factors[name] for name, parameter in network.named_parameters() if parameter.requires_grad}


def _by_depth(network: nn.Module, decay: float | None) -> dict[str, float]:
    """Return decay^(L + 1 - l) for parameters in block l = 1 … L of the network, l = 0 for those before the blocks and
    L + 1 for those after them (Bao et al. 2022, "BEiT"; He et al. 2022, "Masked autoencoders", util/lr_decay.py).

    The order is that of the network's definition, except that modules in the network's `behind` count as after the
    blocks. Parameters between two blocks have the depth of the first of the two.
    """
    of = {parameter: i for i, block in enumerate(_members(network), 1) for parameter in block.parameters()}
    behind = {p for name in getattr(network, "behind", ()) for p in network.get_submodule(name).parameters()}
    last, depth = max(of.values(), default=0), 0
    factors = {}
    for name, parameter in network.named_parameters():
        depth = of.get(parameter, last + 1 if depth >= last else depth)
        factors[name] = 1.0 if decay is None or parameter in behind else decay ** (last + 1 - depth)
    return factors


def _members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost lists of modules."""
    if isinstance(module, nn.ModuleList):
        yield from module
    else:
        for child in module.children():
            yield from _members(child)
