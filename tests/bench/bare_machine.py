"""Replaces packages that the package imports but a benchmark does not use, if they are not installed."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

for name in ("yaml", "tqdm", "psutil"):
    try:
        importlib.import_module(name)
    except ImportError:
        sys.modules[name] = module_from_spec(ModuleSpec(name, None))  # PyTorch looks for tqdm's specification
        sys.modules[name].tqdm = None  # type: ignore[attr-defined]
