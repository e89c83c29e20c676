"""Weights of priors: DALLE2-pytorch's, with the settings of the published ones; and those of Karlo and Kandinsky,
diffusers' folders of a `PriorTransformer`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.types import DataSpec
from image_diffusion.foreign.weights import Described, ForeignWeights, checked_weights
from image_diffusion.networks.prior import PriorConfig
from image_diffusion.networks.prior_transformer import STATISTICS, config_of_diffusers
from image_diffusion.networks.weights import check_fit, num_blocks
from image_diffusion.networks.weights.dit import folder_tensors
from image_diffusion.process.discrete import Cosine, Discrete
from image_diffusion.systems.prior.prior import PriorSystem

_QUERY, _LAYER = "learned_query", "causal_transformer.layers"

_LAION = {
    "network": {"attention_dropout": 0.05, "ff_dropout": 0.05},
    "objective": {"text_drop_probability": 0.1, "image_drop_probability": 0.1},
}

PUBLISHED: dict[str, dict[str, Any]] = {"prior_aes_finetune": _LAION, "ema472M": _LAION}
"""Training settings of the published priors (LAION's conditioned-prior), by file name without suffix. The first is for
ViT-L/14 and ViT-B/32, which differ in their shapes; the second for ViT-B/32."""


def read_dalle2_prior(
    content: Mapping[str, Any], path: Path, codec: str, described: Described
) -> ForeignWeights | None:
    """Return a prior of DALLE2-pytorch, of a published name or as an experiment describes it."""
    tensors = named_tensors(content)
    if not tensors:
        return None
    experiment = described(PriorSystem)
    system = PriorSystem(**published(tensors, path)) if experiment is None else experiment.system
    spec = DataSpec(channels=tensors[_QUERY].shape[0], resolution=1)
    weights = checked_weights(system, spec, tensors, path, "prior")
    unread = tuple(name for name in content if name != average) if (average := entry_of(content)) else ()
    description = "a prior" if average is None else f"a prior, its entry {average}"
    return ForeignWeights(weights, system, spec, description, unread)


def published(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """Return the network, process and objective of a published prior. tensors: from `named_tensors`. path: the file,
    whose name identifies the prior. Raises ValueError for an unknown name.
    """
    if path.stem not in PUBLISHED:
        raise ValueError(
            f"{path} is a prior without a published name, and its tensors do not determine how it was trained. Give an "
            f"experiment file that describes it (--experiment), or the file its published name: "
            f"{', '.join(f'{name}.pth' for name in PUBLISHED)}."
        )
    recipe = PUBLISHED[path.stem]
    network = network_of_shapes(tensors).model_copy(update=recipe["network"])
    process = Discrete(schedule=Cosine(), num_timesteps=network.num_timesteps or 1000)
    return {"network": network, "process": process, "objective": recipe["objective"]}


def network_of_shapes(tensors: Mapping[str, Tensor]) -> PriorConfig:
    """Return the configuration of the network, as far as the tensors' shapes determine it; like the original, it
    divides by the maximum."""
    dim = tensors[_QUERY].shape[0]
    depth = num_blocks(tensors, f"{_LAYER}.")
    num_heads = tensors["causal_transformer.rel_pos_bias.relative_attention_bias.weight"].shape[1]
    table, last = tensors.get("to_time_embeds.0.weight"), tensors.get("to_time_embeds.0.1.net.2.weight")
    image = tensors.get("to_image_embeds.0.weight")
    time_rows = table.shape[1] if table is not None else last.shape[0] if last is not None else dim
    return PriorConfig(
        depth=depth,
        num_heads=num_heads,
        head_width=tensors[f"{_LAYER}.0.0.null_kv"].shape[1],
        ff_mult=tensors[f"{_LAYER}.0.1.5.weight"].shape[1] // dim,
        max_text_len=tensors["null_text_encodings"].shape[1],
        num_timesteps=None if table is None else table.shape[0],
        num_time_embeds=time_rows // dim,
        num_image_embeds=1 if image is None else image.shape[0] // dim,
        num_text_embeds=tensors["null_text_embeds"].shape[1],
        norm_in="causal_transformer.init_norm.g" in tensors,
        norm_out="causal_transformer.norm.g" in tensors,
        divide_by_maximum="causal_transformer.norm.g" in tensors,
        final_proj="causal_transformer.project_out.weight" in tensors,
        normformer=f"{_LAYER}.0.1.3.g" in tensors,
        rotary=f"{_LAYER}.0.0.rotary_emb.freqs" in tensors,
    )


def named_tensors(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of the network in a file's content, under its own names: plain weights of `DiffusionPrior`, or
    the average in a file of its trainer. Empty if the file contains no prior."""
    entry = entry_of(content)
    if entry is not None:
        return named_tensors(content[entry])
    for prefix in ("net.", ""):
        entries = {name.removeprefix(prefix): value for name, value in content.items() if name.startswith(prefix)}
        if isinstance(entries.get(_QUERY), Tensor):
            return {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    return {}


def entry_of(content: Mapping[str, Any]) -> str | None:
    """Return the entry of a trainer's file with the network, preferring the average to the raw weights. None if the
    file is the network itself."""
    inner = ((key, content.get(key)) for key in ("ema_model", "model"))
    return next((key for key, value in inner if isinstance(value, Mapping) and named_tensors(value)), None)


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
