"""DiT: a transformer over patches, usually of latents (Peebles & Xie 2023); with a flow path: SiT (Ma et al. 2024)."""

from __future__ import annotations

from typing import Literal

from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit import DiT, DiTConfig
from image_diffusion.systems.diffusion import DiffusionSystem


class DiTSystem(DiffusionSystem):
    """A transformer over patches of x."""

    type: Literal["dit"] = "dit"
    """A transformer over patches."""
    network: DiTConfig = DiTConfig(size="DiT-XL/2")
    """Size of the network."""

    def build_network(self, spec: DataSpec) -> DiT:
        """The network, randomly initialised. Raises ValueError when it does not fit the data."""
        return self.network.build(spec, learned_variance=self.learns_variance)
