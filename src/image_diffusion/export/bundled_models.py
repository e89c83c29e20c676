"""Models for diffusers with the code that diffusers does not have: those that make images from noise or tokens,
discrete VAEs, and priors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from image_diffusion.codecs.base import Codec
from image_diffusion.core.config.base import Config, dump
from image_diffusion.core.types import EMBEDDING, IMAGE, NUMBERS, TEXT, DataSpec
from image_diffusion.export.bundle.base import NETWORK
from image_diffusion.export.bundle.codec_model import ExportedTokens
from image_diffusion.export.bundle.embedding_model import ExportedPrior
from image_diffusion.export.bundle.folder import Network, place_of, write_hub_folder
from image_diffusion.export.bundle.image_model import CODEC, ExportedDiffusion
from image_diffusion.export.bundle.token_image_model import ExportedTokenModel
from image_diffusion.export.model_card import PIPELINE, CardUse
from image_diffusion.samplers.ode import FlowMap, Heun
from image_diffusion.systems.codec.dvae import DVAESystem
from image_diffusion.systems.diffusion.base import DiffusionSystem
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.interface import TrainedNetwork
from image_diffusion.systems.prior.prior import PriorSystem
from image_diffusion.systems.tokens.generator import TokenSampleConfig, fitted
from image_diffusion.systems.tokens.tokens import TokensSystem

_TOKEN_CODE = (
    f"{PIPELINE}tokens = pipeline.encode([image])  # PIL -> int64 [1, h, w]\nimage = pipeline.decode(tokens)[0]"
)
_PRIOR_CODE = f"{PIPELINE}image_embeds = pipeline(text_embed)  # float [N, dim] -> [N, dim]"


def write_diffusion_model(system: DiffusionSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    return _write_image_model(ExportedDiffusion, system, _usual(system), model, codec, folder)


def _usual(system: DiffusionSystem) -> SampleConfig:
    """Return the default sampling settings of a type of system, with another sampler if the default does not fit its
    process."""
    usual = system.sections["sample"].default
    assert isinstance(usual, SampleConfig)
    try:
        usual.sampler.grid(system.process)
    except ValueError:
        sampler = FlowMap() if system.objective.learns_intervals else Heun(num_steps=25)
        return usual.model_copy(update={"sampler": sampler})
    return usual


def write_token_model(system: TokensSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    usual = fitted(TokenSampleConfig(), system.objective.causal)
    return _write_image_model(ExportedTokenModel, system, usual, model, codec, folder)


def _write_image_model(
    exported: type[ExportedDiffusion],
    system: DiffusionSystem | TokensSystem,
    usual: SampleConfig,
    model: TrainedNetwork,
    codec: Codec,
    folder: Path,
) -> CardUse:
    """Write a folder with its own pipeline.py.

    exported: the class that samples the images. usual: the default sampling settings.
    """
    from image_diffusion.export.bundle import image_pipeline

    packed, vae = codec.packed(), None
    config: Config = getattr(system, "network")  # noqa: B009 - each system has one of its own type
    networks = {NETWORK: Network(model.network, config, model.spec, system.build_options)}
    if packed.network is not None and hasattr(packed.network, "save_pretrained"):
        vae = packed.network
    elif packed.network is not None:
        of_codec: Any = packed.network
        networks[CODEC] = Network(packed.network, of_codec.config, of_codec.spec)
    described = {
        "reading": dump(system.reading),
        "codec": {"class": place_of(type(codec)), "settings": packed.settings},
        "classes": model.classes,
        **({"untrained": list(model.untrained)} if model.untrained else {}),
        "pairs": model.pairs,
        "sample": dump(usual),
    }
    write_hub_folder(folder, exported, image_pipeline, networks, described, (type(codec),), vae)
    return CardUse("unconditional-image-generation", "DiffusionPipeline", _code(model.spec))


_TOLD = {
    TEXT: ', prompt="a photo of a dog"',
    EMBEDDING: ", image_embeds=embeddings",
    NUMBERS: ", numbers=[{NAME: VALUE}]",
    IMAGE: ", image=images",
}


def _code(spec: DataSpec) -> str:
    words = "".join(_TOLD[name] for name in spec.conditions)
    condition = (", class_labels=[0]" if spec.num_classes else "") + words
    return f"{PIPELINE}image = pipeline(seeds=[0]{condition}).images[0]"


def write_dvae(system: DVAESystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    from image_diffusion.export.bundle import token_pipeline

    networks = {NETWORK: Network(model.network, system.network, model.spec)}
    write_hub_folder(folder, ExportedTokens, token_pipeline, networks, {})
    return CardUse("image-to-image", "DiffusionPipeline", _TOKEN_CODE)


def write_prior(system: PriorSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    from image_diffusion.export.bundle import embedding_pipeline

    networks = {NETWORK: Network(model.network, system.network, model.spec)}
    described = {"reading": dump(system.reading(model.spec))}
    write_hub_folder(folder, ExportedPrior, embedding_pipeline, networks, described)
    return CardUse("feature-extraction", "DiffusionPipeline", _PRIOR_CODE)
