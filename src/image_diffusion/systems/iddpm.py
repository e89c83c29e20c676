"""IDDPM: a U-Net on pixels, which learns the variance of each step (Nichol & Dhariwal 2021, arXiv:2102.09672).

Defaults that differ from those of openai/improved-diffusion (docs/systems.md has all):

    key                           original     here             why
    system.process.schedule.type  linear       cosine           the paper's improvement over the script's default
    system.process.num_timesteps  1000         4000             as in the paper's recipes
    system.objective.variance     fixed_large  learned_range    the paper's learned variance
    system.objective.loss         simple       rescaled_hybrid  the paper's hybrid loss, which teaches it
    train.ema.warmup.type         none         ramp_up          without it a short training ends in its initial weights
    train.global_batch            1            256              a batch of one trains nothing
    sample.sampler.num_steps      every one    250              250 of the 4,000 steps, as in the paper's comparisons
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from image_diffusion.codecs.codec import Codec
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config import dump
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.unet import UNet, UNetConfig
from image_diffusion.networks.unet_weights import check_fit, is_unet, num_label_rows
from image_diffusion.objectives import Objective
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process import Process
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.schedules import Cosine
from image_diffusion.samplers.ancestral import Ddpm
from image_diffusion.systems.diffusion.family import DiffusionSystem
from image_diffusion.systems.diffusion.iddpm_published import published
from image_diffusion.systems.diffusion.sampling import SampleConfig
from image_diffusion.systems.diffusion.unet_export import check_ddpm, write_ddpm
from image_diffusion.systems.given import CardUse, Described, Foreign, Model, Others, Section, Sections
from image_diffusion.systems.system import spec_of


class IddpmSystem(DiffusionSystem):
    """A U-Net on pixels. By default with the paper's cosine schedule of 4,000 timesteps and its hybrid loss."""

    type: Literal["iddpm"] = "iddpm"
    """A U-Net, usually on pixels."""
    network: UNetConfig = UNetConfig()
    """Size of the network."""
    process: Process = Discrete(schedule=Cosine(), num_timesteps=4000, rescale_timesteps=True)
    """How noise is added."""
    objective: Objective = Denoising(variance="learned_range", loss="rescaled_hybrid")
    """What the network predicts, and how its error is weighed."""

    sections: ClassVar[Mapping[str, Section]] = {
        **DiffusionSystem.sections,
        "sample": Section(
            SampleConfig, SampleConfig(sampler=Ddpm(num_steps=250)), DiffusionSystem.sections["sample"].keys
        ),
    }
    recipe: ClassVar[Mapping[str, Any]] = {"flip_probability": 0.0}
    exports: ClassVar[tuple[str, ...]] = ("diffusers", "pipeline")
    class_rows: ClassVar[tuple[str, ...]] = ("label_emb.weight",)

    @property
    def low_resolution(self) -> int | None:
        """Side of the small images that the network enlarges; None: it makes images from noise alone."""
        return self.network.low_resolution

    def check(self, experiment: Sections, others: Others) -> None:
        super().check(experiment, others)
        if experiment.section("export").format == "diffusers":
            classes = experiment.data.source.known_classes() or []
            check_ddpm(self, dump(experiment.codec), spec_of(experiment, others.codec), len(classes))

    def export(self, model: Model, codec: Codec, format_: str, folder: Path) -> CardUse:
        if format_ != "diffusers":
            return super().export(model, codec, format_, folder)
        return write_ddpm(self, model, folder)

    @property
    def build_options(self) -> dict[str, Any]:
        return {"learned_variance": self.learns_variance, "null_label": self.drops_labels}

    def build_network(self, spec: DataSpec) -> UNet:
        """The network, randomly initialised, with a label for none where labels are dropped.

        Raises ValueError when it does not fit the data.
        """
        return self.network.build(spec, **self.build_options)

    @classmethod
    def read_foreign(cls, content: Mapping[str, Any], path: Path, codec: str, described: Described) -> Foreign | None:
        """A U-Net on pixels, of a published name or as an experiment describes it.

        The experiment's number of classes is not looked at, since the label table tells it.
        """
        if not is_unet(content):
            return None
        experiment = described(cls)
        if experiment is None:
            parts, spec = published(content, path)
            system = cls(**parts)
        else:
            assert isinstance(experiment.system, cls)
            system = experiment.system
            num_classes = max(num_label_rows(content) - system.drops_labels, 0)
            data = experiment.data
            spec = DataSpec(channels=data.channels, resolution=data.resolution, num_classes=num_classes)
        with torch.device("meta"):
            expected = system.build_network(spec).state_dict()
        check_fit(expected, content, path)
        averages = sorted(each.name for each in path.parent.glob("ema_*.pt")) if path.stem.startswith("model") else []
        told = f"a U-Net; averages of it lie beside it: {', '.join(averages)}" if averages else "a U-Net"
        tensors = {name: each.float() for name, each in content.items()}
        return Foreign(tensors, system, spec, Rgb(), Rgb().identity, told)
