"""Low-rank adapters on the linear layers of a pretrained network: LoRA (Hu et al. 2021, arXiv:2106.09685).

In training, a layer of weight W computes with W + alpha / rank B A, of which only A [rank, in] and B [out, rank] are
trained; B is initialised with zeros. The adapted layers are those of the package peft. Written weights contain W +
alpha / rank B A under the layer's own name, so that later stages need no adapters.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from image_diffusion.core.config.base import Config
from image_diffusion.core.process.errors import package
from image_diffusion.nn.conditioning import AUGMENTATION
from image_diffusion.objectives.alignment import PROJECTOR
from image_diffusion.objectives.codec_terms import DISCRIMINATOR
from image_diffusion.training.finetune.name_patterns import matching

_ADDED = f"{PROJECTOR}.", f"{DISCRIMINATOR}.", f"{AUGMENTATION}."
_BASE, _A, _B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


class Lora(Config):
    """Adapters that are trained instead of the weights. Needs the package peft."""

    rank: int = Field(16, gt=0)
    """Rank of an adapter's update of a weight."""
    alpha: float = Field(16.0, gt=0)
    """The update of an adapter is multiplied by alpha / rank."""
    layers: tuple[str, ...] = Field(("*",), min_length=1)
    """Linear layers with an adapter, by name: ["blocks.*.attn.*"]. * matches any characters."""
    whole: tuple[str, ...] = ()
    """Parameters to train directly, in addition to the adapters, by name, such as a table of new classes."""

    @property
    def scale(self) -> float:
        """Return alpha / rank, the factor of the product B A."""
        return self.alpha / self.rank


def check_lora(network: nn.Module, lora: Lora) -> None:
    """Raise ValueError if the package peft is missing, or a pattern matches nothing in a network without adapters."""
    _layers(network, lora)
    matching(_parameters(network), lora.whole, "train.lora.whole", "parameter")
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"train.lora needs {package('peft', 'lora')} Or leave train.lora out.")


def add_adapters(network: nn.Module, lora: Lora) -> None:
    """Add adapters to a network's linear layers, on the device of its weights, and freeze all other parameters but
    `whole`.

    A is drawn from PyTorch's global generator. Call `check_lora` first.
    """
    import peft  # what it imports takes seconds

    whole = matching(_parameters(network), lora.whole, "train.lora.whole", "parameter")
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
            product = tensors[layer + _B].double() @ tensors[name].double()
            weight = plain[f"{layer}.weight"]
            plain[f"{layer}.weight"] = (weight.double() + lora.scale * product.to(weight.device)).to(weight.dtype)
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


def _parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters, which a table of fixed positions is not."""
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


def _layers(network: nn.Module, lora: Lora) -> Sequence[str]:
    """Return the names of the layers to adapt."""
    linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    return matching(linear, lora.layers, "train.lora.layers", "linear layer")
