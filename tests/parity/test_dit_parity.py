"""DiT against the original: outputs for given weights, names and counts of all sizes, and a few training steps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.networks.dit import SIZES, DiT, DiTConfig
from image_diffusion.nn.positions import grid_positions, sinusoid
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process.discrete import Cosine, Discrete, Linear
from image_diffusion.training.optim.adam import AdamW
from image_diffusion.training.optim.ema import Averages, ExponentialEma
from image_diffusion.training.parallel.flat_parameters import Flat


def network_of(params: dict) -> DiT:
    """Return the network of a golden case."""
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


@pytest.mark.usefixtures("golden_sinusoids")
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


def test_dropped_label_uses_last_row(golden):
    """The original was set to drop the first three labels of [2, 10, 3, 5]; 10 classes, so 10 is no label."""
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


def test_difference_from_original_frequencies_reach_one_in_ten_thousand(golden):
    """By default, a network has the frequencies of diffusers' DiT, so that it can be exported there."""
    from diffusers.models.embeddings import get_timestep_embedding

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


@dataclass(frozen=True)
class GivenDraws(Streams):
    """Streams that return the original's random numbers of a step: t, noise, and u, by which a label is dropped."""

    t: Tensor
    noise: Tensor
    u: Tensor

    def integers(self, purpose: str, high: int, shape: tuple[int, ...] = ()) -> Tensor:
        assert (purpose, shape) == ("timestep", ()) and self.t.max() < high
        return self.t

    def normal(self, purpose: str, shape: tuple[int, ...] = ()) -> Tensor:
        assert purpose == "noise" and self.noise.shape[1:] == shape
        return self.noise

    def uniform(self, purpose: str, shape: tuple[int, ...] = ()) -> Tensor:
        assert (purpose, shape) == ("label_drop", ())
        return self.u


def in_double(network: DiT) -> Flat:
    """The parameters laid end to end in float64, as the original was run here; training itself keeps float32."""
    flat = Flat(network)
    flat.values, flat.gradient = flat.values.double(), flat.gradient.double()
    views = zip(flat.parameters.values(), flat.views(flat.values), flat.views(flat.gradient), strict=True)
    for parameter, value, gradient in views:
        parameter.grad = None
        parameter.data, parameter.grad = value, gradient
    network.double()
    return flat


M06 = {  # loss, vb and parameters: of the manifest; after four steps of 1e-4 a parameter has moved up to 4e-4
    torch.float64: ({"rtol": 1e-7, "atol": 1e-9}, {"rtol": 1e-7, "atol": 1e-9}),
    torch.float32: ({"rtol": 1e-4, "atol": 1e-4}, {"rtol": 0, "atol": 3e-4}),
}


def test_sinusoids_are_the_original_s_to_the_last_bits_of_an_angle(golden):
    file = golden("m07_sinusoids.npz")
    t, expected = file["dit/t"], file["dit/out"]
    ours = sinusoid(t, expected.shape[1])
    assert ((ours - expected).abs() <= (1 + t[:, None]) * 2.0**-22).all()


@pytest.mark.usefixtures("golden_sinusoids")
@pytest.mark.parametrize("dtype", M06)
@pytest.mark.parametrize("case", ["default", "cosine_rescaled"])
def test_training_steps_of_the_original(golden, case, dtype):
    """Four steps with our objective, our AdamW and our average of the weights: every draw is given.

    The network, its optimizer and its average have `dtype`, what the objective computes around it is in float64: the
    probability of a bin at t = 0 is a small difference of tanh, which float32 has to one digit in places.
    """
    file = golden("m06_train_steps.npz")
    params, (of_losses, of_weights) = file.params(case), M06[dtype]
    network = network_of(params)
    network.load_state_dict(file.tensors(f"{case}/sd0"))
    flat = in_double(network) if dtype == torch.float64 else Flat(network)
    optimizer = AdamW(lr=params["lr"]).build(flat)
    averages = Averages(ExponentialEma(rates=(params["ema_decay"],)), flat.values)
    rescaled = params.get("rescale_learned_sigmas", False)
    objective = Denoising(
        variance="learned_range",
        loss="rescaled_hybrid" if rescaled else "hybrid",
        label_drop_probability=params["class_dropout_prob"],
    ).build(Discrete(schedule=Cosine() if "noise_schedule" in params else Linear()).build(), network.spec)
    losses = []
    for step in range(params["steps"]):
        x, noise, t, y, u = (file[f"{case}/{name}"][step] for name in ("x", "noise", "t", "y", "u"))
        streams = GivenDraws(0, torch.zeros_like(t), torch.arange(len(t)), t, noise.double(), u)
        found = objective(
            lambda x, t, label: network(x.to(dtype), t, label=label), Batch(x.double(), {"label": y}, streams)
        )
        expected = file[f"{case}/loss_mse_vb_per_sample"][step]
        parts = torch.stack([found.loss.detach(), found.parts["mse"], found.parts["vb"]])
        torch.testing.assert_close(parts, expected, **of_losses)
        flat.gradient.zero_()
        found.loss.mean().backward()
        optimizer.torch.step()
        averages.update(step + 1)
        losses.append(found.loss.mean().item())
    assert losses == pytest.approx(file[f"{case}/losses"].tolist(), rel=of_losses["rtol"])
    (average,) = averages.vectors.values()
    for result, kind in ((flat.named(flat.values), "sd_end"), (flat.named(average), "ema_end")):
        for name, tensor in result.items():
            torch.testing.assert_close(tensor, file[f"{case}/{kind}/{name}"].to(dtype), **of_weights)
    fixed = {name for name in file.tensors(f"{case}/sd_end") if name not in flat.parameters}
    assert fixed == {"pos_embed"}
    torch.testing.assert_close(network.pos_embed.float(), file[f"{case}/ema_end/pos_embed"].float())
