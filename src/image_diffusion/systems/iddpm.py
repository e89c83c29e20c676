"""IDDPM: a U-Net on pixels, which learns the variance of each step (Nichol & Dhariwal 2021, arXiv:2102.09672)."""

from __future__ import annotations

from typing import Literal

from image_diffusion.core.types import DataSpec
from image_diffusion.networks.unet import UNet, UNetConfig
from image_diffusion.objectives import Objective
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process import Process
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.schedules import Cosine
from image_diffusion.systems.diffusion import DiffusionSystem


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

    @property
    def low_resolution(self) -> int | None:
        """Side of the small images that the network enlarges; None: it makes images from noise alone."""
        return self.network.low_resolution

    def build_network(self, spec: DataSpec) -> UNet:
        """The network, randomly initialised, with a label for none where labels are dropped.

        Raises ValueError when it does not fit the data.
        """
        return self.network.build(spec, learned_variance=self.learns_variance, null_label=self.drops_labels)
