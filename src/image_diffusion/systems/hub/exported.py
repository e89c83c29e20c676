"""A model as an exported folder keeps it: its networks, and plain data that says how they are built and used.

This file goes out with every model, and is what reads it again.
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
    """Base of what a pipeline calls. described: config.json. networks: by the name of their file; NETWORK is the one
    that was trained."""

    def __init__(self, described: dict[str, Any], networks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.described = described
        self.networks = nn.ModuleDict(networks).eval().requires_grad_(False)
        self.spec = DataSpec(**described["networks"][NETWORK]["spec"])

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The model of a folder."""
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        networks = {}
        for name, each in described["networks"].items():
            config = named(each["config"])(**each["settings"])
            networks[name] = config.build(DataSpec(**each["spec"]), **each["options"])
            networks[name].load_state_dict(safetensors.torch.load_file(folder / f"{name}.safetensors"))
        return cls(described, networks)

    @property
    def network(self) -> nn.Module:
        """The network that was trained."""
        return self.networks[NETWORK]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.network.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return next(self.network.parameters()).dtype


def named(place: list[str]) -> Any:
    """What has a name in a module of the package that this file is in. place: module, without the package, and name."""
    module, name = place
    return getattr(importlib.import_module(f"{__name__.partition('.')[0]}.{module}"), name)
