"""The formats that each type of system is exported as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from image_diffusion.codecs.base import Codec
from image_diffusion.export.codecs import write_dvae, write_vae
from image_diffusion.export.dit import check_dit, write_dit
from image_diffusion.export.image_models import write_images
from image_diffusion.export.model_card import CardUse
from image_diffusion.export.prior import check_prior_transformer, write_prior, write_prior_transformer
from image_diffusion.export.tokens import write_token_model
from image_diffusion.export.unet import check_unet, write_unet
from image_diffusion.systems.base import Model, Others, Sections, System
from image_diffusion.systems.codec.autoencoder import AutoencoderSystem
from image_diffusion.systems.codec.dvae import DVAESystem
from image_diffusion.systems.diffusion.base import DiffusionSystem
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.iddpm import IddpmSystem
from image_diffusion.systems.prior.prior import PriorSystem
from image_diffusion.systems.tokens.tokens import TokensSystem


def _fits(experiment: Sections, others: Others) -> None:
    """Accept every experiment."""


@dataclass(frozen=True)
class Export:
    """One export format of a system.

    write: write a model and its codec to a folder; returns what the model card says of it. check: raise ValueError for
    an experiment whose model does not fit the format, before any work.
    """

    write: Callable[[Model, Codec, Path], CardUse]
    check: Callable[[Sections, Others], None] = _fits


EXPORTS: dict[type, dict[str, Export]] = {
    DiTSystem: {"diffusers": Export(write_dit, check_dit)},
    IddpmSystem: {"diffusers": Export(write_unet, check_unet)},
    DiffusionSystem: {"pipeline": Export(write_images)},
    AutoencoderSystem: {"diffusers": Export(write_vae)},
    DVAESystem: {"pipeline": Export(write_dvae)},
    PriorSystem: {
        "diffusers": Export(write_prior_transformer, check_prior_transformer),
        "pipeline": Export(write_prior),
    },
    TokensSystem: {"pipeline": Export(write_token_model)},
}
"""Formats by name, for each type of system. A type also has the formats of its bases; one without an entry has none."""


def exports_of(system: type[System]) -> dict[str, Export]:
    """Return the formats of a type of system, by name."""
    exports: dict[str, Export] = {}
    for base in system.__mro__:
        exports = exports | {name: export for name, export in EXPORTS.get(base, {}).items() if name not in exports}
    return exports


def export_of(system: System, format_: str) -> Export:
    """Return one format of a system. Raises ValueError for a format that the system does not have."""
    exports = exports_of(type(system))
    if format_ not in exports:
        formats = ", ".join([*exports, "none"])
        raise ValueError(
            f"export.format is {format_}, but a system of type {system.type} has no such export. Known for it: "
            f"{formats}."
        )
    return exports[format_]


def check_export(experiment: Sections, others: Others) -> None:
    """Raise ValueError for an experiment whose model does not fit its `export.format`."""
    format_ = experiment.section("export").format
    if format_ != "none":
        export_of(experiment.system, format_).check(experiment, others)
