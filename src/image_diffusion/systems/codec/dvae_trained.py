"""The discrete VAEs of lucidrains/DALLE-pytorch: `vae.pt`, whose entry `hparams` suffices to build the network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dvae import DVAEConfig

_SIZES = ("num_tokens", "codebook_dim", "num_layers", "num_resnet_blocks", "hidden_dim")
_READ = (*_SIZES, "image_size", "channels", "straight_through", "reinmax", "normalization")
_NO_MATTER = ("smooth_l1_loss", "temperature", "kl_div_loss_weight")  # of the training alone


def is_dvae(content: Mapping[str, Any]) -> bool:
    """Whether a file's content holds such a discrete VAE."""
    weights = content.get("weights")
    return isinstance(weights, Mapping) and "codebook.weight" in weights


def dvae_of(content: Mapping[str, Any], path: Path) -> tuple[DVAEConfig, DataSpec, dict[str, Tensor]]:
    """The network, the images it is of, and its tensors. Raises ValueError for entries that are missing or unknown."""
    told, weights = content.get("hparams"), content["weights"]
    told = told if isinstance(told, Mapping) else {}
    missing = [name for name in (*_SIZES, "image_size") if name not in told]
    unknown = [str(name) for name in told if name not in (*_READ, *_NO_MATTER)]
    if missing or unknown:
        problems = {"missing": missing, "not known": unknown}
        listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in problems.items() if names)
        raise ValueError(
            f"{path} is a discrete VAE, but its hparams do not say how to build it ({listed}). Use a vae.pt as "
            f"DALLE-pytorch's train_vae writes it."
        )
    estimator = "gumbel_softmax"
    if told.get("straight_through"):
        estimator = "reinmax" if told.get("reinmax") else "straight_through"
    mean, std = told.get("normalization") or (None, None)
    sizes = {name: told[name] for name in _SIZES}
    config = DVAEConfig(**sizes, estimator=estimator, mean=mean, std=std)
    spec = DataSpec(channels=told.get("channels", 3), resolution=told["image_size"])
    return config, spec, {str(name): each for name, each in weights.items() if isinstance(each, Tensor)}
