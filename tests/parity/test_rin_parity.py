"""RIN against the original: outputs for given weights, and one training step's losses with self-conditioning.

Different on purpose, each with its own test: which samples are self-conditioned is drawn for each sample on its own
(tests/unit/test_rin_self_conditioning.py), and label conditions are new (tests/unit/test_rin_network.py).
"""

from __future__ import annotations

import pytest
import torch

from image_diffusion.core.types import DataSpec
from image_diffusion.networks.rin import Rin, RinConfig
from image_diffusion.systems.diffusion.rin import RinSystem
from image_diffusion.training.optim.ema import Averages, ExponentialEma, Warmup

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
    """Return the network of a golden case, with its weights."""
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
            out, new_latents, _ = network(x, t, **given, return_latents=True)
            torch.testing.assert_close(out, file[f"{case}/out{suffix}"], rtol=1e-3, atol=5e-5)
            torch.testing.assert_close(new_latents, file[f"{case}/latents{suffix}"], rtol=1e-3, atol=5e-5)
        network.double()
        out = network(x.double(), t.double(), self_cond=self_cond.double(), latents=latents.double())
    torch.testing.assert_close(out, file[f"{case}/out_self_cond_f64"], rtol=1e-6, atol=1e-6)


def test_the_losses_of_the_original_with_two_passes(golden):
    """D-20: the weights multiply their own sample's error; the original multiplies the means of both."""
    file = golden("m03_rin.npz")
    network, system = network_of(file, "train_e2e"), RinSystem()
    img, noise, t = (file[f"train_e2e/{name}"] for name in ("img", "noise", "times"))
    x0, everyone = 2 * img - 1, torch.ones(len(img), dtype=torch.bool)
    outputs = []

    def recording(*args, **kwargs):
        result = network(*args, **kwargs)
        outputs.append(result[0].detach())
        return result

    losses = system.build_objective(network.spec).losses_at(recording, x0, t, noise, everyone, {})
    tolerance = {"rtol": 1e-3, "atol": 5e-5}
    torch.testing.assert_close(outputs[0], file["train_e2e/pred_first_pass"], **tolerance)
    torch.testing.assert_close(outputs[1], file["train_e2e/pred"], **tolerance)
    expected = file["train_e2e/mse_per_sample"] * file["train_e2e/loss_weight"]
    torch.testing.assert_close(losses.loss.detach(), expected, **tolerance)
    torch.testing.assert_close(losses.loss.mean().detach(), file["train_e2e/loss_correct"], **tolerance)
    assert abs(losses.loss.mean() - file["train_e2e/loss_upstream_defective"]) > 1e-3


def test_d21_the_cosine_schedule_trains(golden):
    """D-21: the original raises as soon as it is given a batch."""
    file = golden("m03_rin.npz")
    network = network_of(file, "train_e2e")
    system = RinSystem(process={"type": "continuous", "schedule": {"type": "cosine"}})
    img, noise, t = (file[f"train_e2e/{name}"] for name in ("img", "noise", "times"))
    everyone = torch.ones(len(img), dtype=torch.bool)
    losses = system.build_objective(network.spec).losses_at(network, 2 * img - 1, t, noise, everyone, {})
    assert losses.loss.isfinite().all() and (losses.loss > 0).all()


def test_the_start_is_that_of_the_original():
    """Nothing is scaled or shifted by the time, and latents given change nothing, until they have learnt to."""
    network = RinConfig(width=16, depth=2, num_latents=4).build(DataSpec(channels=3, resolution=16))
    zero = {name for name, parameter in network.named_parameters() if not parameter.any()}
    modulation = {name for name in network.state_dict() if "time_cond" in name}
    assert len(modulation) == 2 * 2 * 5  # weight and bias of five attentions in two blocks
    assert zero == modulation | {"init_self_cond_latents.1.gamma", "to_patches.1.bias", "to_patches.3.bias"}
    assert 0.01 < network.latents.std() < 0.03


@pytest.mark.parametrize("case", ["rin_default", "prior_default", "fast"])
def test_p03_the_average_of_the_original_with_its_warm_up(golden, case):
    """Every update_every steps, a copy at first, then a decay that rises to its rate."""
    file = golden("p03_ema_schedules.npz")
    params = file.params(case)
    warmup = Warmup(
        update_after_step=params["update_after_step"],
        inv_gamma=params["inv_gamma"],
        power=params["power"],
        min_decay=params["min_value"],
    )
    config = ExponentialEma(rates=(params["beta"],), warmup=warmup, update_every=params["update_every"])
    value = torch.zeros(1, dtype=torch.float64)
    averages = Averages(config, value)
    results = []
    for step, given in enumerate(file[f"{case}/param_values"], start=1):
        value.fill_(given)
        averages.update(step)
        results.append(averages.vectors[config.names[0]].clone())
    torch.testing.assert_close(torch.cat(results), file[f"{case}/ema_value"], rtol=1e-5, atol=1e-7)
    # the original reports the decay that its next update would have
    decays = torch.tensor([warmup.decay(int(step), params["beta"]) for step in file[f"{case}/step_after"]])
    torch.testing.assert_close(decays.double(), file[f"{case}/decay_after"], rtol=1e-5, atol=1e-7)
