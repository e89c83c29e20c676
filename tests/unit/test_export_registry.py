"""The registry of exports: the formats of each system type, and of unregistered types."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest

from image_diffusion.core.config.base import merged, read_yaml, to_yaml
from image_diffusion.experiments.resolve import load_all
from image_diffusion.export import export_of, exports_of
from image_diffusion.foreign import READERS
from image_diffusion.systems import SYSTEMS
from image_diffusion.systems.base import System, name_of
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.rin import RinSystem

EXPERIMENTS = Path(__file__).parents[2] / "config/experiments"


class Variant(DiTSystem):
    """A system that is not in the registry."""

    type: Literal["variant"] = "variant"  # type: ignore[assignment]


def test_each_system_type_has_its_export_formats() -> None:
    assert {name_of(system): list(exports_of(system)) for system in SYSTEMS} == {
        "dit": ["diffusers", "pipeline"],
        "iddpm": ["diffusers", "pipeline"],
        "rin": ["pipeline"],
        "autoencoder": ["diffusers"],
        "dvae": ["pipeline"],
        "prior": ["diffusers", "pipeline"],
        "tokens": ["pipeline"],
    }


def test_system_types_inherit_export_formats() -> None:
    assert exports_of(Variant) == exports_of(DiTSystem)
    assert exports_of(System) == {}


def test_unsupported_export_formats_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"export.format is diffusers, but a system of type rin .*: pipeline, none\."):
        export_of(RinSystem(), "diffusers")


def test_readers_belong_to_registered_systems() -> None:
    assert set(READERS) <= set(SYSTEMS)


def dit_of(folder: Path, changes: dict[str, Any]) -> Path:
    """A latent flow matching DiT experiment exported to diffusers, with changes."""
    raw = merged(read_yaml(EXPERIMENTS / "demo_flow.yaml"), {"export": {"format": "diffusers"}})
    raw["codec"] = {"type": "stability_vae"}
    (folder / "x.yaml").write_text(to_yaml(merged(raw, changes)))
    return folder / "x.yaml"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"system": {"network": {"qk_norm": True, "rope": True}}}, "has no qk_norm true and no rope true"),
        ({"system": {"network": {"class_tokens": 2}}}, "has no class_tokens"),
        ({"system": {"network": {"mlp_ratio": 2}}}, "network.mlp_ratio is 2.0"),
        ({"system": {"process": {"time_scale": 10}}}, "flow times multiplied by 10; diffusers needs velocity and 1000"),
        ({"system": {"objective": {"prediction": "x0"}}}, "predicts x0 at flow times"),
        ({"data": {"resolution": [32, 64]}}, "diffusers' DiT takes squares alone"),
        (
            {"data": {"source": {"type": "tar_stream", "urls": ["pipe:x"], "classes": 1001}}},
            "has 1001 classes",
        ),
    ],
)
def test_dit_unsupported_by_diffusers_is_rejected_before_any_work(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    load_all([dit_of(tmp_path, {})])
    with pytest.raises(ValueError, match=re.escape(told)):
        load_all([dit_of(tmp_path, changes)])
