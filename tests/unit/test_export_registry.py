"""The registry of exports: the formats of each type of system, and of types that it does not list."""

from __future__ import annotations

from typing import Literal

import pytest

from image_diffusion.export.registry import export_of, exports_of
from image_diffusion.foreign.registry import READERS
from image_diffusion.systems import SYSTEMS
from image_diffusion.systems.base import System, name_of
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.rin import RinSystem


class Variant(DiTSystem):
    """A system that no registry lists."""

    type: Literal["variant"] = "variant"  # type: ignore[assignment]


def test_the_formats_of_each_type() -> None:
    assert {name_of(system): list(exports_of(system)) for system in SYSTEMS} == {
        "dit": ["diffusers", "pipeline"],
        "iddpm": ["diffusers", "pipeline"],
        "rin": ["pipeline"],
        "autoencoder": ["diffusers"],
        "dvae": ["pipeline"],
        "prior": ["diffusers", "pipeline"],
        "tokens": ["pipeline"],
    }


def test_a_type_has_the_formats_of_its_bases() -> None:
    assert exports_of(Variant) == exports_of(DiTSystem)
    assert exports_of(System) == {}


def test_a_format_that_a_system_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"export.format is diffusers, but a system of type rin .*: pipeline, none\."):
        export_of(RinSystem(), "diffusers")


def test_readers_are_of_systems_that_experiments_can_name() -> None:
    assert set(READERS) <= set(SYSTEMS)
