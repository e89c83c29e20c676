"""RIN against the original: outputs for given weights, and one training step's losses with self-conditioning.

Different on purpose, each with its own test: which samples are self-conditioned is drawn for each sample on its own
(tests/unit/test_rin_self_conditioning.py), and label conditions are new (tests/unit/test_rin_network.py).
"""

from __future__ import annotations

import pytest
import torch

from image_diffusion.core.types import DataSpec
from image_diffusion.networks.rin import Rin, RinConfig

NAMES = {
    "dim": "width",
    "patch_size": "patch",
    "depth": "depth",
    "latent_self_attn_depth": "latent_depth",
    "dim_latent": "latent_width",
    "num_latents": "num_latents",
    "heads": "num_heads",
    "dim_head": "head_width",
    "latent_token_time_cond": "time_as_latent",
    "dual_patchnorm": "dual_patch_norm",
    "patches_self_attn": "patch_self_attention",
    "qk_norm": "qk_norm",
}


def network_of(file, case: str) -> Rin:
    """The network a golden case describes, with its weights."""
    params = file.params(case)
    config = RinConfig(**{ours: params[theirs] for theirs, ours in NAMES.items() if theirs in params})
    network = config.build(DataSpec(channels=params.get("channels", 3), resolution=params["image_size"]))
    network.load_state_dict(file.tensors(f"{case}/sd"))
    return network.eval()


@pytest.mark.parametrize("case", ["adaln", "token_qknorm"])
def test_outputs_of_the_original(golden, case):
    file = golden("m03_rin.npz")
    network = network_of(file, case)
    x, t, self_cond, latents = (file[f"{case}/{name}"] for name in ("x", "t", "x_self_cond", "latent_self_cond"))
    with torch.no_grad():
        for suffix, given in {"": {}, "_self_cond": {"self_cond": self_cond, "latents": latents}}.items():
            out, new_latents = network(x, t, **given, return_latents=True)
            torch.testing.assert_close(out, file[f"{case}/out{suffix}"], rtol=1e-3, atol=5e-5)
            torch.testing.assert_close(new_latents, file[f"{case}/latents{suffix}"], rtol=1e-3, atol=5e-5)
        network.double()
        out = network(x.double(), t.double(), self_cond=self_cond.double(), latents=latents.double())
    torch.testing.assert_close(out, file[f"{case}/out_self_cond_f64"], rtol=1e-6, atol=1e-6)
