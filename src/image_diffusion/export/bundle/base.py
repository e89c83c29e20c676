"""An exported model: its networks, and plain data that describes how to build and use them. Every exported folder
contains this file and loads the model with it.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch
from torch import nn

from image_diffusion.core.types import DataSpec

NETWORK = "diffusion_pytorch_model"


class ExportedModel(nn.Module):
    """Base class of the models that pipelines call. described: content of config.json. networks: by file name; NETWORK
    is the trained one."""

    def __init__(self, described: dict[str, Any], networks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.described = described
        self.networks = nn.ModuleDict(networks).eval().requires_grad_(False)
        self.spec = DataSpec(**described["networks"][NETWORK]["spec"])

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Return the model of a folder."""
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        networks = {}
        for name, network in described["networks"].items():
            config = named(network["config"])(**network["settings"])
            networks[name] = config.build(DataSpec(**network["spec"]), **network["options"])
            networks[name].load_state_dict(safetensors.torch.load_file(folder / f"{name}.safetensors"))
        return cls(described, networks)

    @property
    def network(self) -> nn.Module:
        """Return the trained network."""
        return self.networks[NETWORK]

    @property
    def device(self) -> torch.device:
        """Return the device of the network."""
        return next(self.network.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the network's weights."""
        return next(self.network.parameters()).dtype


def named(place: list[str]) -> Any:
    """Return the object with this name in a module of this file's package. place: module, without the package, and
    name."""
    module, name = place
    return getattr(importlib.import_module(f"{__name__.partition('.')[0]}.{module}"), name)
