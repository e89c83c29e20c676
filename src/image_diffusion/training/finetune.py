"""Fine-tuning: which parameters are trained, at which rates, and low-rank adapters instead of them.

LoRA (Hu et al. 2021, arXiv:2106.09685): in training, a linear layer of weight W computes with W + alpha / rank B A, of
which only A [rank, in] and B [out, rank] are trained; B is initialised with zeros. The adapted layers are those of the
package peft. Written weights contain W + alpha / rank B A under the layer's own name, so that later stages need no
adapters.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from image_diffusion.core.process.errors import package
from image_diffusion.nn.blocks import inner_matrices
from image_diffusion.nn.inputs import AUGMENTATION
from image_diffusion.objectives.alignment import PROJECTOR
from image_diffusion.objectives.autoencoding import DISCRIMINATOR
from image_diffusion.training.config import Lora, TrainConfig

_ADDED = f"{PROJECTOR}.", f"{DISCRIMINATOR}.", f"{AUGMENTATION}."
_BASE, _A, _B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def check_tuning(network: nn.Module, config: TrainConfig) -> list[str]:
    """Return the names of the frozen parameters. Raises ValueError for a pattern of `config` that matches nothing in
    the network, impossible adapters, rates by depth without blocks, or an optimizer without parameters."""
    parameters = dict(network.named_parameters())
    frozen = _matching(parameters, config.freeze, "train.freeze", "parameter")
    config.optimizer.check(inner_matrices(network).keys() - set(frozen))
    if len(frozen) == len(parameters) and config.lora is None:
        raise ValueError("train.freeze names every parameter, so that nothing is trained. Leave some out.")
    trained = {name: parameter for name, parameter in parameters.items() if name not in frozen}
    _matching(trained, config.lr_factors, "train.lr_factors", "trained parameter" if frozen else "parameter")
    if config.layer_decay is not None and not list(_members(network)):
        raise ValueError(
            f"train.layer_decay is {config.layer_decay:g}, but the network has no list of blocks. Leave it out, or use "
            "train.lr_factors."
        )
    if config.lora is not None:
        _layers(network, config.lora)
        _whole(network, config.lora)
        if importlib.util.find_spec("peft") is None:
            raise ValueError(f"train.lora needs {package('peft', 'lora')} Or leave train.lora out.")
    return frozen


def tune(network: nn.Module, config: TrainConfig) -> dict[str, float]:
    """Freeze parameters and add adapters, in place. Returns the factor of each trained parameter's learning rate, by
    name. Raises ValueError as `check_tuning` does."""
    for name in check_tuning(network, config):
        network.get_parameter(name).requires_grad_(False)
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


def add_adapters(network: nn.Module, lora: Lora) -> None:
    """Add adapters to a network's linear layers, on the device of its weights, and freeze all other parameters but
    `whole`.

    A is drawn from PyTorch's global generator. Call `check_tuning` first.
    """
    import peft  # what it imports takes seconds

    whole = _whole(network, lora)
    settings = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=_layers(network, lora))
    peft.inject_adapter_in_model(settings, network)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.endswith((_A, _B)) or plain_name(name) in whole)


def merged(tensors: Mapping[str, Tensor], lora: Lora | None) -> dict[str, Tensor]:
    """Return the tensors of a network with its adapters merged into the weights. lora: None: no adapters."""
    if lora is None:
        return dict(tensors)
    plain = {plain_name(name): tensor for name, tensor in tensors.items() if not name.endswith((_A, _B))}
    for name in tensors:
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            update = lora.alpha / lora.rank * (tensors[layer + _B].double() @ tensors[name].double())
            weight = plain[f"{layer}.weight"]
            plain[f"{layer}.weight"] = (weight.double() + update.to(weight.device)).to(weight.dtype)
    return plain


def written(tensors: Mapping[str, Tensor], lora: Lora | None) -> dict[str, Tensor]:
    """Return the tensors of a trained network to write: adapters are merged, and layers that only training needs are
    left out."""
    return {name: tensor for name, tensor in merged(tensors, lora).items() if not name.startswith(_ADDED)}


def plain_name(name: str) -> str:
    """Return the name of a parameter in the network without adapters; for an adapter's factor, the adapted weight."""
    for factor in (_A, _B):
        name = name.replace(factor, ".weight")
    return name.replace(_BASE, ".")


def lora_of(identity: Mapping[str, Any]) -> Lora | None:
    """Return the adapter settings of a checkpoint's training; None without adapters. identity: from the checkpoint's
    record, which in older versions has no adapters."""
    lora = identity.get("train", {}).get("lora")
    return None if lora is None else Lora.model_validate_json(json.dumps(lora))


def _whole(network: nn.Module, lora: Lora) -> list[str]:
    """Return the names of the parameters to train in addition to the adapters: of the trainable ones, which a table of
    fixed positions is not."""
    trainable = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    return _matching(trainable, lora.whole, "train.lora.whole", "parameter")


def _layers(network: nn.Module, lora: Lora) -> list[str]:
    """Return the names of the layers to adapt."""
    linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    return _matching(linear, lora.layers, "train.lora.layers", "linear layer")


def _matching(named: Mapping[str, Any], patterns: Iterable[str], key: str, what: str) -> list[str]:
    """Return the names that match a pattern, in order. key, what: configuration key and kind of part, for messages.
    Raises ValueError for a pattern without a match.
    """
    names: set[str] = set()
    for pattern in patterns:
        fitting = [name for name in named if fnmatchcase(name, pattern)]
        if not fitting:
            begin = ", ".join(dict.fromkeys(name.split(".")[0] for name in named)) or "nothing"
            raise ValueError(f"{key} has {pattern}, which names no {what}. They begin with: {begin}.")
        names.update(fitting)
    return [name for name in named if name in names]
