"""DiT against the original: outputs for given weights, names and counts of all sizes, and a few training steps."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers.models.embeddings import get_timestep_embedding
from torch import Tensor

from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit import SIZES, DiT, DiTConfig
from image_diffusion.nn.sinusoid import grid_positions, sinusoid


def network_of(params: dict) -> DiT:
    """The network a golden case describes."""
    config = DiTConfig(
        depth=params["depth"],
        width=params["hidden_size"],
        num_heads=params["num_heads"],
        patch=params["patch_size"],
        mlp_ratio=params.get("mlp_ratio", 4.0),
        null_label=params.get("class_dropout_prob", 0.1) > 0,
        time_frequencies="dit",
    )
    spec = DataSpec(channels=params["in_channels"], resolution=params["input_size"], num_classes=params["num_classes"])
    return config.build(spec, learned_variance=params["learn_sigma"])


@pytest.mark.parametrize("case", ["a", "nosigma_p4"])
def test_outputs_of_the_original(golden, case):
    file = golden("m01_dit.npz")
    network = network_of(file.params(case)).eval()
    network.load_state_dict(file.tensors(f"{case}/sd"))
    x, t, y = file[f"{case}/x"], file[f"{case}/t"], file[f"{case}/y"]
    with torch.no_grad():
        torch.testing.assert_close(network(x, t, label=y), file[f"{case}/out"], rtol=1e-3, atol=2e-5)
        tokens = network.x_embedder(x) + network.pos_embed
        torch.testing.assert_close(tokens, file[f"{case}/tokens_after_embed"], rtol=1e-3, atol=2e-5)
        time = network.t_embedder(t, x.dtype)
        torch.testing.assert_close(time, file[f"{case}/t_emb"], rtol=1e-3, atol=2e-5)
        first = network.blocks[0](tokens, time + network.y_embedder(y))
        torch.testing.assert_close(first, file[f"{case}/block0_out"], rtol=1e-3, atol=2e-5)
        network.double()
        torch.testing.assert_close(network(x.double(), t, label=y), file[f"{case}/out_f64"], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("scale", [1.0, 1.5, 4.0])
def test_guided_outputs_of_the_original(golden, scale):
    file = golden("m01_dit.npz")
    network = network_of(file.params("a")).eval()
    network.load_state_dict(file.tensors("a/sd"))
    half = file["a/x"][:2]
    x, t, y = torch.cat([half, half]), file["a/cfg_t"], file["a/cfg_y"]
    with torch.no_grad():
        out = network(x, t, label=y)
    conditional, null = out[:2, :3], out[2:, :3]
    guided = null + scale * (conditional - null)
    out[:, :3] = torch.cat([guided, guided])
    torch.testing.assert_close(out, file[f"a/cfg_{scale}"], rtol=1e-3, atol=5e-5)


def test_a_dropped_label_is_the_last_row(golden):
    """The original was told to drop the first three labels of [2, 10, 3, 5]; 10 classes, so 10 is no label."""
    file = golden("m01_dit.npz")
    network = network_of(file.params("a"))
    network.load_state_dict(file.tensors("a/sd"))
    drop = torch.tensor([True, True, True, False])
    rows = network.y_embedder(torch.where(drop, network.spec.num_classes, file["a/y"]))
    torch.testing.assert_close(rows, file["a/label_emb_forced_drop"], rtol=0, atol=0)


def test_position_and_time_embeddings(golden):
    file = golden("m01_dit.npz")
    torch.testing.assert_close(grid_positions(48, 4).double(), file["pos_embed_48_4/pos_embed"], rtol=0, atol=1e-6)
    torch.testing.assert_close(grid_positions(1152, 16), file["pos_embed_1152_16/pos_embed"], rtol=0, atol=1e-6)
    t, expected = file["timestep_embedding_256/t"], file["timestep_embedding_256/emb"]
    torch.testing.assert_close(sinusoid(t, 256), expected, rtol=0, atol=5e-4)


def test_difference_from_the_original_frequencies_reach_one_in_ten_thousand(golden):
    """Unless told otherwise, a network has the frequencies of diffusers' DiT, so that it can be exported there."""
    file = golden("m01_dit.npz")
    t, original = file["timestep_embedding_256/t"], file["timestep_embedding_256/emb"]
    assert DiTConfig(size="DiT-XL/2").time_frequencies == "diffusers"
    ours, theirs = sinusoid(t, 256, endpoint=True), get_timestep_embedding(t, 256, flip_sin_to_cos=True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-4)
    assert (ours - original).abs().max() > 0.1


def test_the_start_is_that_of_the_original(golden):
    facts = golden("m01_dit.npz").params("init_facts")
    network = DiTConfig(depth=3, width=48, num_heads=3, patch=2).build(
        DataSpec(channels=4, resolution=8, num_classes=10), learned_variance=True
    )
    zero = sorted(name for name, parameter in network.named_parameters() if not parameter.any())
    assert zero == facts["zero_initialised"]
    assert not network.pos_embed.requires_grad
    for name, bound in facts["xavier_uniform_bound_example"].items():
        if name in network.state_dict():
            assert network.state_dict()[name].abs().max().item() == pytest.approx(bound, rel=1e-3)


@pytest.mark.parametrize("resolution", [256, 512])
@pytest.mark.parametrize("size", SIZES)
def test_names_shapes_and_counts_of_every_size(golden_names, size, resolution):
    configs = golden_names("names_dit.json.gz")["configs"]
    expected = configs[f"{size}@{resolution}"]
    expected_shapes = configs[f"{size}@256"]["state_dict"] | expected["state_dict"]  # 512 lists what differs from 256
    with torch.device("meta"):
        network = DiTConfig(size=size).build(
            DataSpec(channels=4, resolution=resolution // 8, num_classes=1000), learned_variance=True
        )
    shapes = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    assert list(shapes.items()) == list(expected_shapes.items())
    assert sum(p.numel() for p in network.parameters()) == expected["n_parameters_total"]
    assert sum(p.numel() for p in network.parameters() if p.requires_grad) == expected["n_parameters_trainable"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", ["default", "cosine_rescaled"])
def test_training_steps_of_the_original(golden, case, dtype):
    """Four steps of AdamW on the hybrid loss, with the average of the weights: every draw is given."""
    file = golden("m06_train_steps.npz")
    params = file.params(case)
    network = network_of(params).to(dtype)
    network.load_state_dict(file.tensors(f"{case}/sd0"))
    average = {name: p.detach().clone() for name, p in network.named_parameters()}
    optimizer = torch.optim.AdamW(
        [p for p in network.parameters() if p.requires_grad], lr=params["lr"], weight_decay=0.0
    )
    betas = cosine_betas() if case == "cosine_rescaled" else torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    losses = []
    for step in range(params["steps"]):
        x, noise, t, y, u = (file[f"{case}/{name}"][step] for name in ("x", "noise", "t", "y", "u"))
        label = torch.where(u < params["class_dropout_prob"], params["num_classes"], y)
        mse, vb = hybrid_loss(network, betas, x.double(), noise.double(), t, label, dtype)
        per_sample = mse + vb
        expected = file[f"{case}/loss_mse_vb_per_sample"][step]
        tolerance = {"rtol": 1e-7, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(torch.stack([per_sample, mse, vb]).detach(), expected, **tolerance)
        optimizer.zero_grad()
        per_sample.mean().backward()
        optimizer.step()
        for name, p in network.named_parameters():
            if p.requires_grad:
                average[name].lerp_(p.detach(), 1 - params["ema_decay"])
        losses.append(per_sample.mean().item())
    assert losses == pytest.approx(file[f"{case}/losses"].tolist(), rel=1e-7 if dtype == torch.float64 else 1e-4)
    tolerance = {"rtol": 1e-7, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 0, "atol": 3e-4}
    for name, p in network.named_parameters():
        torch.testing.assert_close(p.detach(), file[f"{case}/sd_end/{name}"].to(dtype), **tolerance)
        torch.testing.assert_close(average[name], file[f"{case}/ema_end/{name}"].to(dtype), **tolerance)


def cosine_betas() -> Tensor:
    """The cosine schedule of 1000 steps (Nichol and Dhariwal 2021, equation 17)."""
    alpha_bar = torch.cos((torch.arange(1001, dtype=torch.float64) / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=0.999)


def hybrid_loss(
    network: DiT, betas: Tensor, x0: Tensor, noise: Tensor, t: Tensor, label: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The squared error and the variational term in bits of each sample, [B] both (Nichol and Dhariwal 2021, 3.1).

    The network computes in `dtype`, everything else in float64.
    """
    alpha_bar = torch.cumprod(1 - betas, 0)
    previous = torch.cat([torch.ones(1, dtype=torch.float64), alpha_bar[:-1]])
    posterior = betas * (1 - previous) / (1 - alpha_bar)

    def at(table: Tensor) -> Tensor:
        return table[t].to(x0.dtype)[:, None, None, None]

    x_t = at(alpha_bar.sqrt()) * x0 + at((1 - alpha_bar).sqrt()) * noise
    eps, v = network(x_t.to(dtype), t, label=label).double().chunk(2, dim=1)
    mse = (noise - eps).square().flatten(1).mean(1)
    log_low, log_high = at(torch.cat([posterior[1:2], posterior[1:]]).log()), at(betas.log())
    log_variance = (v + 1) / 2 * log_high + (1 - v) / 2 * log_low
    predicted = at((1 / alpha_bar).sqrt()) * x_t - at((1 / alpha_bar - 1).sqrt()) * eps.detach()
    c1 = at(betas * previous.sqrt() / (1 - alpha_bar))
    c2 = at((1 - previous) * (1 - betas).sqrt() / (1 - alpha_bar))
    true_mean, mean = c1 * x0 + c2 * x_t, c1 * predicted + c2 * x_t
    kl = 0.5 * (
        log_variance - log_low - 1 + (log_low - log_variance).exp() + (true_mean - mean) ** 2 / log_variance.exp()
    )
    scale = (-0.5 * log_variance).exp()

    def cdf(z: Tensor) -> Tensor:
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    upper, lower = cdf(scale * (x0 - mean + 1 / 255)), cdf(scale * (x0 - mean - 1 / 255))
    probability = torch.where(x0 < -0.999, upper, torch.where(x0 > 0.999, 1 - lower, upper - lower))
    nll = -probability.clamp(min=1e-12).log()
    vb = torch.where(t[:, None, None, None] == 0, nll, kl).flatten(1).mean(1) / math.log(2)
    return mse, vb
