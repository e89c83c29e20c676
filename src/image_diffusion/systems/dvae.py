"""The discrete VAE of DALL-E: trained on crops, it is then the codec of other experiments (Ramesh et al. 2021).

Defaults that differ from those of lucidrains/DALLE-pytorch (docs/systems.md has all):

    key                 original  here  why
    train.global_batch  8         256   one batch size for all systems; say what the machine holds
    data.crop.type      resize    adm   ADM's crop for every system, so that their data are the same
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import model_validator

from image_diffusion.codecs.codec import Codec
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.types import DataSpec, Objective
from image_diffusion.data.encoding import EncodeConfig
from image_diffusion.networks.dvae import DVAE, DVAEConfig
from image_diffusion.networks.dvae_openai import is_openai_folder, read_openai
from image_diffusion.networks.unet_weights import check_fit
from image_diffusion.objectives.discrete_autoencoding import DiscreteAutoencodingConfig
from image_diffusion.systems.codec.dvae_trained import dvae_of, is_dvae
from image_diffusion.systems.codec.family import CodecSystem
from image_diffusion.systems.codec.hub_export import write_tokens
from image_diffusion.systems.given import CardUse, Described, Foreign, Model, Section


class DVAESystem(CodecSystem):
    """A discrete VAE of pixels."""

    type: Literal["dvae"] = "dvae"
    """A discrete VAE, to be the codec of other experiments."""
    network: DVAEConfig = DVAEConfig()
    """Size of the network, and how it draws a token."""
    objective: DiscreteAutoencodingConfig = DiscreteAutoencodingConfig()
    """What a reconstruction costs, and how the temperature falls."""

    sections: ClassVar[Mapping[str, Section]] = {
        **CodecSystem.sections,
        "encode": Section(EncodeConfig, EncodeConfig()),
    }
    recipe: ClassVar[Mapping[str, Any]] = {
        "optimizer": {"type": "adam", "lr": 1e-3},
        "schedule": {"type": "exponential", "decay": 0.98, "every_steps": 100},
        "ema": {"type": "exponential", "rates": ()},
        "weights": "raw",
        "flip_probability": 0.0,
    }
    exports: ClassVar[tuple[str, ...]] = ("pipeline",)
    decoded: ClassVar[str] = "hard"

    @model_validator(mode="after")
    def _settings_are_used(self) -> Self:
        self.objective.check(self.network.without_a_choice)
        return self

    def build_network(self, spec: DataSpec) -> DVAE:
        """The network, randomly initialised. Raises ValueError when the images do not fit."""
        return self.network.build(spec)

    def build_own_objective(self, spec: DataSpec) -> Objective:
        """The objective for images of `spec`."""
        if self.network.without_a_choice is not None:
            return self.objective.without_a_choice(commits=self.network.vector_quantiser is not None)
        return self.objective.build(self.network.logits_shape(spec))

    def export(self, model: Model, codec: Codec, format_: str, folder: Path) -> CardUse:
        if format_ != "pipeline":
            return super().export(model, codec, format_, folder)
        return write_tokens(self, model, folder)

    @classmethod
    def read_foreign(cls, content: Mapping[str, Any], path: Path, codec: str, described: Described) -> Foreign | None:
        """A discrete VAE of DALLE-pytorch, or OpenAI's two files in a folder; both say themselves how they are built.

        The size of OpenAI's images is that of an experiment's data, or 256 as its own.
        """
        if path.is_dir() and is_openai_folder(path):
            experiment, (sizes, tensors) = described(cls), read_openai(path)
            resolution = experiment.data.resolution if experiment else 256
            spec = DataSpec(channels=sizes.pop("channels"), resolution=resolution)
            config = DVAEConfig(layout="openai", **sizes)
        elif is_dvae(content):
            config, spec, tensors = dvae_of(content, path)
        else:
            return None
        system = cls(network=config)
        with torch.device("meta"):
            expected = system.build_network(spec).state_dict()
        check_fit(expected, tensors, path, "discrete VAE")
        unread = tuple(name for name in content if name not in ("hparams", "weights"))
        weights = {name: each.float() for name, each in tensors.items()}
        return Foreign(weights, system, spec, Rgb(), Rgb().identity, "a discrete VAE", unread)
