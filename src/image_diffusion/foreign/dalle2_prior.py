"""Weights of DALLE2-pytorch's priors, and the settings of the published priors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from image_diffusion.core.types import DataSpec
from image_diffusion.foreign.weights import Described, ForeignWeights, checked_weights
from image_diffusion.networks.prior import PriorConfig
from image_diffusion.networks.weights.fit import num_blocks
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.schedules import Cosine
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
