"""A network's shapes without the network: to check that it can be built, or to compare names and sizes with a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def shapes_only() -> Iterator[None]:
    """Networks built inside take no memory (torch's meta device), and their initial values are not drawn.

    To draw them on the meta device, torch would first import its compiler: two seconds, when Snakemake starts.
    """
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Initialisation does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return (torch.empty if func is torch.randn else func)(*args, **kwargs)
