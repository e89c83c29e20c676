"""Priors of Karlo and Kandinsky: diffusers' folders of a `PriorTransformer`, in and out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from image_diffusion.core.files import atomic_folder, read_json
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit_weights import folder_tensors
from image_diffusion.networks.prior_transformer import (
    STATISTICS,
    PriorTransformer,
    config_of_diffusers,
    to_diffusers_prior,
)
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.schedules import Cosine
from image_diffusion.systems.embedding.published import check_fit
from image_diffusion.systems.given import CardUse, Model, Sections

if TYPE_CHECKING:
    from image_diffusion.systems.prior import PriorSystem

_CODE = (
    'prior = PriorTransformer.from_pretrained(".")\n'
    "# x: noisy embeddings, normalised; tokens: of a caption, [N, L, dim], and which of them there are, [N, L]\n"
    "x0 = prior(x, t, text_embed, tokens, token_mask).predicted_image_embedding\n"
    "image_embeds = prior.post_process_latents(x0)"
)


def folder_of(path: Path) -> Path | None:
    """The folder of a PriorTransformer, which is a folder itself or the part `prior` of a pipeline's; None: neither."""
    for folder in (path, path / "prior"):
        file = folder / "config.json"
        if file.is_file() and read_json(file).get("_class_name") == "PriorTransformer":
            return folder
    return None


def read_folder(folder: Path, described: Sections | None) -> tuple[dict[str, Tensor], dict[str, Any], DataSpec, str]:
    """The weights, the parts of the system, the embeddings and what it was taken for.

    It predicts x0 on the 1,000 cosine timesteps of Karlo and Kandinsky, and learnt to do without a caption by an empty
    one, so that there is no guidance; described: the experiment that says otherwise. Raises ValueError for another
    network, and where mean and deviation were never set.
    """
    network, dim = config_of_diffusers(read_json(folder / "config.json"), f"{folder}/config.json")
    tensors = {name: tensor.float() for name, tensor in folder_tensors(folder).items()}
    spec = DataSpec(channels=dim, resolution=1)
    with torch.device("meta"):
        expected = network.build(spec).state_dict()
    check_fit({**expected, **dict.fromkeys(STATISTICS, torch.empty(1, dim, device="meta"))}, tensors, folder)
    mean, std = (tensors.pop(name)[0] for name in STATISTICS)
    if not (std > 0).all():
        raise ValueError(
            f"{folder} has a clip_std that is not above 0, as one that was never set. Set it, and clip_mean."
        )
    process: Any = Discrete(schedule=Cosine())
    objective: Any = {"prediction": "x0", "text_drop_probability": 0.0, "image_drop_probability": 0.0}
    if described is not None:
        system: Any = described.system
        process, objective = system.process, system.objective
    statistics = {"mean": mean.tolist(), "std": std.tolist()}
    parts = {"network": network, "process": process, "objective": objective, "image_statistics": statistics}
    return tensors, parts, spec, f"diffusers' PriorTransformer of depth {network.depth}"


def check_diffusers(system: PriorSystem) -> None:
    """Raise ValueError for a network that diffusers' PriorTransformer is not."""
    if system.network.type != "prior_transformer":
        raise ValueError(
            "Diffusers' PriorTransformer is another network than network.type prior. Set export.format to pipeline, or "
            "train with system.network.type prior_transformer."
        )


def write_folder(system: PriorSystem, model: Model, folder: Path) -> CardUse:
    """Write a folder that `PriorTransformer.from_pretrained` loads. Raises ValueError as `check_diffusers` does."""
    check_diffusers(system)
    assert isinstance(model.network, PriorTransformer)
    moments = system.scaling(model.spec).moments(torch.zeros(model.spec.channels))
    prior = to_diffusers_prior(model.network, *moments)
    with atomic_folder(folder) as written:
        prior.save_pretrained(written)
    return CardUse("feature-extraction", "PriorTransformer", _CODE)
