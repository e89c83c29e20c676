"""Stands in for packages that the package imports but a benchmark does not use, where they are not installed."""

import importlib
import sys
import types

for name in ("yaml", "tqdm"):
    try:
        importlib.import_module(name)
    except ImportError:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].tqdm = None  # type: ignore[attr-defined]
