"""Weights of discrete VAEs: OpenAI's two files, and lucidrains/DALLE-pytorch's `vae.pt`.

The entry `hparams` of the latter suffices to build the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from image_diffusion.core.types import DataSpec
from image_diffusion.foreign.weights import Described, ForeignWeights, checked_weights
from image_diffusion.networks.dvae import DVAEConfig
from image_diffusion.networks.weights.openai_dvae import is_openai_folder, read_openai
from image_diffusion.systems.codec.dvae import DVAESystem

_SIZES = ("num_tokens", "codebook_dim", "num_layers", "num_resnet_blocks", "hidden_dim")
_READ = (*_SIZES, "image_size", "channels", "straight_through", "reinmax", "normalization")
_NO_MATTER = ("smooth_l1_loss", "temperature", "kl_div_loss_weight")  # settings of the training only


def read_dvae(content: Mapping[str, Any], path: Path, codec: str, described: Described) -> ForeignWeights | None:
    """Read a discrete VAE of DALLE-pytorch, or OpenAI's two files in a folder; both contain the settings they are built
    with. The size of OpenAI's images is that of an experiment's data, or 256 by default.
    """
    if path.is_dir() and is_openai_folder(path):
        experiment, (sizes, tensors) = described(DVAESystem), read_openai(path)
        resolution = experiment.data.resolution if experiment else 256
        spec = DataSpec(channels=sizes.pop("channels"), resolution=resolution)
        config = DVAEConfig(layout="openai", **sizes)
    elif is_dvae(content):
        config, spec, tensors = dvae_of(content, path)
    else:
        return None
    system = DVAESystem(network=config)
    weights = checked_weights(system, spec, tensors, path, "discrete VAE")
    unread = tuple(name for name in content if name not in ("hparams", "weights"))
    return ForeignWeights(weights, system, spec, "a discrete VAE", unread)


def is_dvae(content: Mapping[str, Any]) -> bool:
    """True if a file's content is a discrete VAE of DALLE-pytorch."""
    weights = content.get("weights")
    return isinstance(weights, Mapping) and "codebook.weight" in weights


def dvae_of(content: Mapping[str, Any], path: Path) -> tuple[DVAEConfig, DataSpec, dict[str, Tensor]]:
    """Return the network, the data spec of its images, and its tensors. Raises ValueError for entries that are missing
    or unknown."""
    hparams, weights = content.get("hparams"), content["weights"]
    hparams = hparams if isinstance(hparams, Mapping) else {}
    missing = [name for name in (*_SIZES, "image_size") if name not in hparams]
    unknown = [str(name) for name in hparams if name not in (*_READ, *_NO_MATTER)]
    if missing or unknown:
        problems = {"missing": missing, "not known": unknown}
        listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in problems.items() if names)
        raise ValueError(
            f"{path} is a discrete VAE, but its hparams do not say how to build it ({listed}). Use a vae.pt as "
            f"DALLE-pytorch's train_vae writes it."
        )
    estimator = "gumbel_softmax"
    if hparams.get("straight_through"):
        estimator = "reinmax" if hparams.get("reinmax") else "straight_through"
    mean, std = hparams.get("normalization") or (None, None)
    sizes = {name: hparams[name] for name in _SIZES}
    config = DVAEConfig(**sizes, estimator=estimator, mean=mean, std=std)
    spec = DataSpec(channels=hparams.get("channels", 3), resolution=hparams["image_size"])
    return config, spec, {str(name): tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
