"""Weights of the priors of Karlo and Kandinsky: diffusers' folders of a `PriorTransformer`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.types import DataSpec
from image_diffusion.foreign.weights import Described, ForeignWeights
from image_diffusion.networks.prior_transformer import STATISTICS, config_of_diffusers
from image_diffusion.networks.weights.dit import folder_tensors
from image_diffusion.networks.weights.fit import check_fit
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.schedules import Cosine
from image_diffusion.systems.prior.prior import PriorSystem


def read_prior_transformer(
    content: Mapping[str, Any], path: Path, codec: str, described: Described
) -> ForeignWeights | None:
    """Return a prior in a folder of diffusers.

    The prior predicts x0 on the 1,000 cosine timesteps of Karlo and Kandinsky. Its unconditional input is an empty
    caption, so guidance is not available; an experiment may describe other settings. Raises ValueError for another
    network, and if mean and standard deviation are unset.
    """
    folder = _folder_of(path) if path.is_dir() else None
    if folder is None:
        return None
    experiment = described(PriorSystem)
    network, dim = config_of_diffusers(read_json(folder / "config.json"), f"{folder}/config.json")
    tensors = {name: tensor.float() for name, tensor in folder_tensors(folder).items()}
    spec = DataSpec(channels=dim, resolution=1)
    with torch.device("meta"):
        expected = network.build(spec).state_dict()
    statistics_of_shape = dict.fromkeys(STATISTICS, torch.empty(1, dim, device="meta"))
    check_fit({**expected, **statistics_of_shape}, tensors, folder, "prior")
    mean, std = (tensors.pop(name)[0] for name in STATISTICS)
    if not (std > 0).all():
        raise ValueError(
            f"{folder} has a clip_std that is not above 0, as one that was never set. Set it, and clip_mean."
        )
    process: Any = Discrete(schedule=Cosine())
    objective: Any = {"prediction": "x0", "text_drop_probability": 0.0, "image_drop_probability": 0.0}
    if experiment is not None:
        process, objective = experiment.system.process, experiment.system.objective
    statistics = {"mean": mean.tolist(), "std": std.tolist()}
    system = PriorSystem(network=network, process=process, objective=objective, image_statistics=statistics)
    return ForeignWeights(tensors, system, spec, f"diffusers' PriorTransformer of depth {network.depth}")


def _folder_of(path: Path) -> Path | None:
    """Return the folder of a PriorTransformer: the folder itself, or `prior` in a pipeline's folder; None: neither."""
    for folder in (path, path / "prior"):
        file = folder / "config.json"
        if file.is_file() and read_json(file).get("_class_name") == "PriorTransformer":
            return folder
    return None
