"""Where tensors live and how precise they are."""

from __future__ import annotations

import torch


def best_device() -> torch.device:
    """The GPU this process is to use, or the CPU: torchrun's LOCAL_RANK chooses among several."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
