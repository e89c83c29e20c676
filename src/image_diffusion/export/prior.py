"""A prior for diffusers: as its own `PriorTransformer`, or with the code that diffusers does not have."""

from __future__ import annotations

from pathlib import Path

import torch

from image_diffusion.codecs.base import Codec
from image_diffusion.core.config.base import dump
from image_diffusion.core.files.atomic import atomic_folder
from image_diffusion.export.bundle.embedding_model import ExportedPrior
from image_diffusion.export.bundle.folder import trained, write_hub_folder
from image_diffusion.export.model_card import PIPELINE, CardUse
from image_diffusion.networks.prior_transformer import PriorTransformer, to_diffusers_prior
from image_diffusion.systems.base import Others, Sections
from image_diffusion.systems.interface import TrainedNetwork
from image_diffusion.systems.prior.prior import PriorSystem

_CODE = f"{PIPELINE}image_embeds = pipeline(text_embed)  # float [N, dim] -> [N, dim]"
_TRANSFORMER_CODE = (
    'prior = PriorTransformer.from_pretrained(".")\n'
    "# x: noisy embeddings, normalised; tokens: of a caption, [N, L, dim], and which of them there are, [N, L]\n"
    "x0 = prior(x, t, text_embed, tokens, token_mask).predicted_image_embedding\n"
    "image_embeds = prior.post_process_latents(x0)"
)


def write_prior(system: PriorSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    from image_diffusion.export.bundle import embedding_pipeline

    networks = trained(model.network, system.network, model.spec, {})
    described = {"reading": dump(system.reading(model.spec))}
    write_hub_folder(folder, ExportedPrior, embedding_pipeline, networks, described)
    return CardUse("feature-extraction", "DiffusionPipeline", _CODE)


def check_prior_transformer(system: PriorSystem, experiment: Sections, others: Others) -> None:
    """Raise ValueError for a network other than diffusers' PriorTransformer."""
    _check_network(system)


def write_prior_transformer(system: PriorSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder that `PriorTransformer.from_pretrained` loads. Raises ValueError for another network."""
    _check_network(system)
    assert isinstance(model.network, PriorTransformer)
    moments = system.reading(model.spec).scaling.moments(torch.zeros(model.spec.channels))
    prior = to_diffusers_prior(model.network, *moments)
    with atomic_folder(folder) as written:
        prior.save_pretrained(written)
    return CardUse("feature-extraction", "PriorTransformer", _TRANSFORMER_CODE)


def _check_network(system: PriorSystem) -> None:
    if system.network.type != "prior_transformer":
        raise ValueError(
            "Diffusers' PriorTransformer is another network than network.type prior. Set export.format to pipeline, or "
            "train with system.network.type prior_transformer."
        )
