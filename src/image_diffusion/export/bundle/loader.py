"""Load a model of image-diffusion without that package: this file contains the code that it needs.

PACKAGE is the name that this code is imported under, SOURCES has its modules by their names, in lines. All of it is
Copyright (c) 2026 the image-diffusion authors. SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pydantic  # noqa: F401 - reported if missing, before anything else is loaded
import torch
from torch import nn

PACKAGE = ""
SOURCES: dict[str, list[str]] = {}


class _Importer(importlib.abc.InspectLoader, importlib.abc.MetaPathFinder):
    """Import a package from the text of its modules. Folders without a module here are empty packages."""

    def __init__(self, package: str, sources: dict[str, list[str]]) -> None:
        self._package, self._sources = package, sources

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not self._is_here(fullname):
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=self.is_package(fullname))

    def is_package(self, fullname: str) -> bool:
        inside = self._inside(fullname)
        return not inside or any(name.startswith(f"{inside}.") for name in self._sources)

    def get_source(self, fullname: str) -> str:
        return "".join(self._sources.get(self._inside(fullname), ()))

    def _is_here(self, fullname: str) -> bool:
        in_package = fullname.partition(".")[0] == self._package
        return in_package and (self.is_package(fullname) or self._inside(fullname) in self._sources)

    def _inside(self, fullname: str) -> str:
        return fullname.partition(".")[2]


class Exported:
    """Class named in model_index.json; `from_pretrained` returns the model itself."""

    @classmethod
    def from_pretrained(cls, folder: str, torch_dtype: torch.dtype | None = None, **_: Any) -> nn.Module:
        """Return the model of a folder with config.json and weights, in float32. Raises ValueError for another
        dtype."""
        if torch_dtype not in (None, torch.float32):
            raise ValueError(
                f"torch_dtype is {torch_dtype}, but the weights stay float32. Leave it out, and call the pipeline with "
                f'precision="bf16" to compute in that.'
            )
        if PACKAGE not in sys.modules:
            sys.meta_path.append(_Importer(PACKAGE, SOURCES))
        module, name = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["loaded_by"]
        model: nn.Module = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name).load(Path(folder))
        return model
