"""Trained models as folders that other programs load: the export formats of each type of system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from image_diffusion.codecs.base import Codec
from image_diffusion.export.bundled_models import write_diffusion_model, write_dvae, write_prior, write_token_model
from image_diffusion.export.descriptions import CardUse
from image_diffusion.export.diffusers_models import (
    check_dit,
    check_prior_transformer,
    check_unet,
    write_dit,
    write_prior_transformer,
    write_unet,
    write_vae,
)
from image_diffusion.systems.base import Others, Sections, System
from image_diffusion.systems.codec.autoencoder import AutoencoderSystem
from image_diffusion.systems.codec.dvae import DVAESystem
from image_diffusion.systems.diffusion.base import DiffusionSystem
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.iddpm import IddpmSystem
from image_diffusion.systems.interface import TrainedNetwork
from image_diffusion.systems.prior.prior import PriorSystem
from image_diffusion.systems.tokens.tokens import TokensSystem

S = TypeVar("S", bound=System)


@dataclass(frozen=True)
class Export(Generic[S]):
    """One export format of a type of system.

    write: write a model of the system and its codec to a folder; returns the text for the model card. check: raise
    ValueError for an experiment whose model does not fit the format, before any work; None: every model fits.
    """

    write: Callable[[S, TrainedNetwork, Codec, Path], CardUse]
    check: Callable[[S, Sections, Others], None] | None = None


EXPORTS: dict[type, dict[str, Export[Any]]] = {
    DiTSystem: {"diffusers": Export(write_dit, check_dit)},
    IddpmSystem: {"diffusers": Export(write_unet, check_unet)},
    DiffusionSystem: {"pipeline": Export(write_diffusion_model)},
    AutoencoderSystem: {"diffusers": Export(write_vae)},
    DVAESystem: {"pipeline": Export(write_dvae)},
    PriorSystem: {
        "diffusers": Export(write_prior_transformer, check_prior_transformer),
        "pipeline": Export(write_prior),
    },
    TokensSystem: {"pipeline": Export(write_token_model)},
}
"""Formats by name, for each type of system. A type also has the formats of its bases; one without an entry has none."""


def exports_of(system: type[System]) -> dict[str, Export[Any]]:
    """Return the formats of a type of system, by name."""
    exports: dict[str, Export[Any]] = {}
    for base in system.__mro__:
        exports = exports | {name: export for name, export in EXPORTS.get(base, {}).items() if name not in exports}
    return exports


def export_of(system: System, format_: str) -> Export[Any]:
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
    if format_ != "none" and (check := export_of(experiment.system, format_).check) is not None:
        check(experiment.system, experiment, others)
