"""The smallest file that names a system gives its original's recipe; docs/systems.md shows differences and reasons.

The page's tables, and the differences in the docstring of each system's own page, are made from the code:
IMAGE_DIFFUSION_WRITE=1 pytest tests/unit/test_defaults.py writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from image_diffusion.core.config.base import dump
from image_diffusion.core.types import DataSpec
from image_diffusion.experiments.experiment import Experiment, parse_experiment

PAGE = Path(__file__).parents[2] / "docs" / "systems.md"
SOURCE = Path(__file__).parents[2] / "src" / "image_diffusion" / "systems"
DATA = {"name": "flowers", "source": {"type": "folder", "path": "flowers"}, "resolution": 64}

# By system and key: the original's default, and the reason if ours differs. Read in the originals' code
# (facebookresearch/DiT, openai/improved-diffusion, lucidrains' RIN, DALLE-pytorch and DALLE2-pytorch).
SEEDS: dict[str, dict[str, tuple[Any, str]]] = {
    "dit": {
        "system.network.size": ("DiT-XL/2", ""),
        "system.process.schedule.type": ("linear", ""),
        "system.process.num_timesteps": (1000, ""),
        "system.objective.prediction": ("eps", ""),
        "system.objective.variance": ("learned_range", ""),
        "system.objective.loss": ("hybrid", ""),
        "system.objective.label_drop_probability": (0.1, ""),
        "system.network.time_frequencies": ("dit", "diffusers' spacing makes exports exact"),
        "train.optimizer.type": ("adamw", ""),
        "train.optimizer.lr": (1e-4, ""),
        "train.optimizer.weight_decay": (0.0, ""),
        "train.grad_clip": (None, ""),
        "train.ema.rates": ([0.9999], ""),
        "train.ema.warmup.type": ("none", "otherwise initial weights dominate short averages"),
        "train.flip_probability": (0.5, ""),
        "train.global_batch": (256, ""),
        "sample.sampler.type": ("ddpm", ""),
        "sample.sampler.num_steps": (250, ""),
        "sample.guidance.guidance_scale": (1.5, "the best scale depends on the data; 1 works without labels"),
    },
    "iddpm": {
        "system.network.channels": (128, ""),
        "system.network.num_res_blocks": (2, ""),
        "system.network.num_heads": (4, ""),
        "system.network.dropout": (0.0, ""),
        "system.process.schedule.type": ("linear", "the paper's improvement over the script's default"),
        "system.process.num_timesteps": (1000, "as in the paper's recipes"),
        "system.process.rescale_timesteps": (True, ""),
        "system.objective.prediction": ("eps", ""),
        "system.objective.variance": ("fixed_large", "the paper's learned variance"),
        "system.objective.loss": ("simple", "the paper's hybrid loss, which trains the variance"),
        "train.optimizer.type": ("adamw", ""),
        "train.optimizer.lr": (1e-4, ""),
        "train.optimizer.weight_decay": (0.0, ""),
        "train.grad_clip": (None, ""),
        "train.ema.rates": ([0.9999], ""),
        "train.ema.warmup.type": ("none", "otherwise initial weights dominate short averages"),
        "train.flip_probability": (0.0, ""),
        "train.global_batch": (1, "a batch of one is too noisy to train on"),
        "sample.sampler.type": ("ddpm", ""),
        "sample.sampler.num_steps": ("all", "250 of the 4,000 steps, as in the paper's comparisons"),
    },
    "rin": {
        "system.network.patch": (16, ""),
        "system.network.depth": (6, ""),
        "system.network.num_latents": (256, ""),
        "system.network.latent_depth": (2, ""),
        "system.network.num_heads": (4, ""),
        "system.network.head_width": (32, ""),
        "system.process.schedule.type": ("sigmoid", ""),
        "system.process.scale": (1.0, ""),
        "system.objective.prediction": ("v", ""),
        "system.objective.weighting.type": ("min_snr", ""),
        "system.objective.weighting.gamma": (5.0, ""),
        "system.self_conditioning.probability": (0.9, ""),
        "train.optimizer.type": ("adam", ""),
        "train.optimizer.lr": (1e-4, ""),
        "train.optimizer.betas": ([0.9, 0.99], ""),
        "train.grad_clip": (1.0, ""),
        "train.ema.rates": ([0.995], ""),
        "train.ema.update_every": (10, ""),
        "train.ema.warmup.update_after_step": (100, ""),
        "train.flip_probability": (0.5, ""),
        "train.global_batch": (16, "one batch size for all systems; set it to what your machine holds"),
        "sample.sampler.type": ("ddim", ""),
        "sample.sampler.num_steps": (1000, ""),
        "data.crop.type": ("resize", "ADM's crop for all systems, so that they can share their data"),
    },
    "dvae": {
        "system.network.num_tokens": (8192, ""),
        "system.network.num_layers": (3, ""),
        "system.network.num_resnet_blocks": (2, ""),
        "system.network.hidden_dim": (256, ""),
        "system.network.codebook_dim": (512, ""),
        "system.objective.kl_weight": (0.0, ""),
        "system.objective.temperature.start": (1.0, ""),
        "train.optimizer.type": ("adam", ""),
        "train.optimizer.lr": (1e-3, ""),
        "train.schedule.type": ("exponential", ""),
        "train.schedule.decay": (0.98, ""),
        "train.schedule.every_steps": (100, ""),
        "train.grad_clip": (None, ""),
        "train.ema.rates": ([], ""),
        "train.weights": ("raw", ""),
        "train.flip_probability": (0.0, ""),
        "train.global_batch": (8, "one batch size for all systems; set it to what your machine holds"),
        "data.crop.type": ("resize", "ADM's crop for all systems, so that they can share their data"),
    },
    "prior": {
        "system.network.max_text_len": (256, ""),
        "system.network.num_heads": (8, ""),
        "system.process.schedule.type": ("cosine", ""),
        "system.process.num_timesteps": (1000, ""),
        "system.objective.prediction": ("x0", ""),
        "system.objective.loss": ("l2", ""),
        "system.objective.text_drop_probability": (0.0, "needed for guidance; DALL-E 2, section 2.2"),
        "system.objective.image_drop_probability": (0.0, "as above"),
        "train.optimizer.type": ("adamw", ""),
        "train.optimizer.lr": (1.1e-4, ""),
        "train.optimizer.weight_decay": (6.02e-2, ""),
        "train.optimizer.betas": ([0.9, 0.99], ""),
        "train.optimizer.eps": (1e-6, ""),
        "train.grad_clip": (0.5, ""),
        "train.ema.rates": ([0.99], ""),
        "train.ema.update_every": (10, ""),
        "train.flip_probability": (0.0, ""),
        "prediction.num_steps": ([64], ""),
        "prediction.num_candidates": (2, ""),
    },
}


ORIGINALS = {
    "dit": "facebookresearch/DiT",
    "iddpm": "openai/improved-diffusion",
    "rin": "lucidrains/recurrent-interface-network-pytorch",
    "dvae": "lucidrains/DALLE-pytorch",
    "prior": "lucidrains/DALLE2-pytorch",
}


def smallest(name: str, **sections: Any) -> Experiment:
    """Return the smallest experiment that names a system."""
    needed = {"pairs": {"type": "hashed"}} if name == "prior" else {}
    raw = {"data": DATA, "system": {"type": name}, "train": {"steps": 10}, **needed, **sections}
    return parse_experiment(raw, "smallest.yaml")


def value_at(experiment: Experiment, key: str) -> Any:
    """Return the value of an experiment at a dotted key."""
    section, *names = key.split(".")
    found: Any = dump(experiment.section(section))
    for name in names:
        found = found[name]
    return found


def table(system: str) -> str:
    """Return a Markdown table of our and the original's defaults by key."""
    rows = ["| Key | Original | Here | Reason for the difference |", "| --- | --- | --- | --- |"]
    for key, (theirs, why) in SEEDS[system].items():
        rows.append(f"| `{key}` | {_text(theirs)} | {_text(value_at(smallest(system), key))} | {why} |")
    return "\n".join(rows)


def differences(system: str) -> str:
    """Return the differing defaults as docstring lines in columns."""
    rows = [("key", "original", "here", "why")]
    for key, (theirs, why) in SEEDS[system].items():
        if why:
            rows.append((key, _text(theirs), _text(value_at(smallest(system), key)), why))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]) for row in rows
    ]
    return "\n".join(
        [
            f"Defaults that differ from those of {ORIGINALS[system]} (docs/systems.md has all):",
            "",
            *(f"    {each}" for each in lines),
        ]
    )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("system", SEEDS)
def test_smallest_config_equals_the_original_recipe_except_listed_differences(system: str) -> None:
    for key, (theirs, why) in SEEDS[system].items():
        ours = value_at(smallest(system), key)
        assert (ours == theirs) == (why == ""), f"{key}: {ours} here, {theirs} there"


def test_systems_page_shows_the_defaults_of_the_code() -> None:
    text = PAGE.read_text()
    for system in SEEDS:
        before, after = (f"<!-- {system}: made by tests/unit/test_defaults.py -->", f"<!-- end of {system} -->")
        start, end = text.index(before) + len(before), text.index(after)
        if os.environ.get("IMAGE_DIFFUSION_WRITE"):
            PAGE.write_text(f"{text[:start]}\n{table(system)}\n{text[end:]}")
            text = PAGE.read_text()
            end = text.index(after)
        assert text[start:end].strip() == table(system)


@pytest.mark.parametrize("system", SEEDS)
def test_system_page_lists_defaults_that_differ_from_the_original(system: str) -> None:
    (page,) = SOURCE.rglob(f"{system}.py")
    before, docstring, after = page.read_text().split('"""', 2)
    if os.environ.get("IMAGE_DIFFUSION_WRITE"):
        told = docstring.split("\n\nDefaults that differ")[0].rstrip()
        docstring = f"{told}\n\n{differences(system)}\n"
        page.write_text(f'{before}"""{docstring}"""{after}')
    assert docstring.endswith(f"\n\n{differences(system)}\n")
    assert max(map(len, docstring.splitlines())) <= 120


@pytest.mark.parametrize(
    ("system", "written", "kept"),
    [
        ("iddpm", {"objective": {"type": "denoising", "timestep_sampling": {"type": "loss_second_moment"}}},
         {"objective.variance": "learned_range", "objective.loss": "rescaled_hybrid",
          "objective.timestep_sampling.type": "loss_second_moment"}),
        ("iddpm", {"process": {"type": "discrete", "num_timesteps": 1000}},
         {"process.schedule.type": "cosine", "process.rescale_timesteps": True, "process.num_timesteps": 1000}),
        ("iddpm", {"process": {"respacing": "250"}},
         {"process.schedule.type": "cosine", "process.num_timesteps": 4000, "process.respacing": "250"}),
        ("rin", {"objective": {"label_drop_probability": 0.1}},
         {"objective.prediction": "v", "objective.weighting.type": "min_snr"}),
        ("rin", {"objective": {"prediction": "x0"}},
         {"objective.prediction": "x0", "objective.weighting.type": "min_snr"}),
        ("prior", {"process": {"num_timesteps": 500}},
         {"process.schedule.type": "cosine", "process.num_timesteps": 500}),
        ("dit", {"network": {"patch": 4}}, {"network.size": "DiT-XL/2", "network.patch": 4}),
        ("dit", {"network": {"depth": 2, "width": 32, "num_heads": 2, "patch": 4}}, {"network.size": None}),
        ("dit", {"process": {"type": "flow"}, "objective": {"type": "flow_matching"}},
         {"objective.label_drop_probability": 0.0}),
        ("iddpm", {"process": {"type": "discrete", "schedule": {"type": "linear"}}},
         {"process.schedule.type": "linear", "process.num_timesteps": 4000}),
    ],
)  # fmt: skip
def test_partial_sections_keep_other_defaults_of_the_system(
    system: str, written: dict[str, Any], kept: dict[str, Any]
) -> None:
    sections: dict[str, Any] = {"system": {"type": system} | written}
    if "flow" in str(written):
        sections["sample"] = {"sampler": {"type": "heun"}}
    found = smallest(system, **sections)
    for key, value in kept.items():
        assert value_at(found, f"system.{key}") == value, key
    again = smallest(system, **sections | {"system": dump(found.system)})
    assert again.system == found.system, "what is resolved resolves to itself"


def test_train_and_sample_sections_override_the_recipe() -> None:
    train = {"steps": 10, "optimizer": {"lr": 1e-3}, "ema": {"rates": [0.9]}}
    found = smallest("rin", train=train, sample={"sampler": {"num_steps": 50}})
    assert (
        dump(found.train)["optimizer"] | {"type": "adam", "lr": 1e-3, "betas": [0.9, 0.99]}
        == dump(found.train)["optimizer"]
    )
    assert (found.train.ema.rates, found.train.ema.update_every, found.train.grad_clip) == ((0.9,), 10, 1.0)
    assert (found.sample.sampler.type, found.sample.sampler.num_steps) == ("ddim", 50)
    other = smallest("rin", train={"steps": 10, "optimizer": {"type": "adamw"}}, sample={"sampler": {"type": "ddpm"}})
    assert dump(other.train)["optimizer"]["betas"] == [0.9, 0.999], "another type starts from its own defaults"
    assert other.sample.sampler.num_steps == 250


def test_dit_drops_labels_only_if_the_data_have_labels() -> None:
    system = parse_experiment(
        {"data": DATA, "train": {"steps": 1}, "system": {"type": "dit", "network": {"size": "DiT-S/8"}}}, "x"
    ).system
    for classes in (0, 3):
        objective = system.build_objective(DataSpec(channels=3, resolution=16, num_classes=classes))
        assert (objective._drop_labels._probability > 0) == (classes > 0)
    asked = system.model_copy(update={"objective": system.objective.model_copy(update={"label_drop_probability": 0.2})})
    with pytest.raises(ValueError, match="the data have no classes"):
        asked.build_objective(DataSpec(channels=3, resolution=16))
    assert torch.is_tensor(next(system.build_network(DataSpec(channels=3, resolution=16)).parameters()))
