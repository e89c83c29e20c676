"""The U-Net against the original: outputs for given weights, the start, names and counts of the published networks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from image_diffusion.core.types import DataSpec
from image_diffusion.foreign.diffusion import read_iddpm
from image_diffusion.networks.unet import UNet, UNetConfig
from image_diffusion.systems.diffusion.conditions.degradations import Small

RESOLUTIONS = {
    "cifar10_uncond_50M_500K.pt": 32,
    "imagenet64_uncond_100M_1500K.pt": 64,
    "imagenet64_cond_270M_250K.pt": 64,
    "lsun_uncond_100M_1200K_bs128.pt": 256,
    "upsample_cond_500K.pt": 256,
}


def network_of(params: dict) -> UNet:
    """Return the network of a golden case."""
    resolution = params["image_size"]
    config = UNetConfig(
        channels=params["model_channels"],
        multipliers=params["channel_mult"],
        num_res_blocks=params["num_res_blocks"],
        attention_resolutions=[resolution // factor for factor in params["attention_resolutions"]],
        num_heads=params["num_heads"],
        num_heads_upsample=params.get("num_heads_upsample"),
        scale_shift_norm=params.get("use_scale_shift_norm", False),
    )
    channels, small = params["in_channels"], params["low_res_size"]
    conditions = {"image": (channels, small, small)} if small else {}
    num_classes = params.get("num_classes") or 0
    spec = DataSpec(channels=channels, resolution=resolution, num_classes=num_classes, conditions=conditions)
    return config.build(spec, learned_variance=params["out_channels"] == 2 * params["in_channels"]).eval()


@pytest.mark.parametrize("case", ["plain", "cond_ssn", "sr"])
def test_outputs_of_the_original(golden, case):
    file = golden("m02_unet.npz")
    network = network_of(file.params(case))
    network.load_state_dict(file.tensors(f"{case}/sd"))
    inputs = {"label": "y", "image": "low_res"}
    cond = {name: file[f"{case}/{theirs}"] for name, theirs in inputs.items() if f"{case}/{theirs}" in file}
    x, t = file[f"{case}/x"], file[f"{case}/t"]
    hidden = {}
    places = {
        "feat_middle": network.middle_block,
        "feat_down_1": network.input_blocks[1],
        "feat_up_last": network.output_blocks[-1],
    }
    for name, block in places.items():
        block.register_forward_hook(lambda _, __, out, name=name: hidden.update({name: out}))
    with torch.no_grad():
        torch.testing.assert_close(network(x, t, **cond), file[f"{case}/out"], rtol=1e-3, atol=5e-5)
        for name in places:
            if f"{case}/{name}" in file:
                torch.testing.assert_close(hidden[name], file[f"{case}/{name}"], rtol=1e-3, atol=5e-5)
        network.double()
        cond = {name: value.double() if value.is_floating_point() else value for name, value in cond.items()}
        torch.testing.assert_close(network(x.double(), t, **cond), file[f"{case}/out_f64"], rtol=1e-6, atol=1e-6)


def test_the_start_is_that_of_the_original(golden):
    file = golden("m02_unet.npz")
    network = network_of(file.params("plain"))
    zero = [n for n, p in network.named_parameters() if not p.any() and n.endswith("weight")]
    assert sorted(zero) == sorted(file.params("zero_init")["zero_initialised"])


def test_enlarged_input_of_the_original(golden):
    file = golden("m02_unet.npz")
    network = network_of(file.params("sr"))
    seen = []
    network.input_blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    network(file["sr/x"], file["sr/t"], image=file["sr/low_res"])
    assert torch.equal(seen[0][:, :3], file["sr/x"])
    torch.testing.assert_close(seen[0][:, 3:], file["sr/upsampled_low_res"], rtol=1e-5, atol=1e-6)


def network_config(flags: dict) -> UNetConfig:
    """Return the network that the original's flags describe."""
    return UNetConfig(
        channels=flags["num_channels"],
        num_res_blocks=flags["num_res_blocks"],
        num_heads=flags.get("num_heads", 4),
        scale_shift_norm=flags.get("use_scale_shift_norm", True),
        attention_resolutions=[int(each) for each in flags.get("attention_resolutions", "16,8").split(",")],
        dropout=flags.get("dropout", 0.0),
    )


@pytest.mark.parametrize("name", RESOLUTIONS)
def test_names_shapes_and_counts_of_the_published_networks(golden_names, name):
    expected = golden_names("names_iddpm.json.gz")["configs"][name]
    flags = expected["flags"]
    config = network_config(flags)
    num_classes = 1000 if flags.get("class_cond") else 0
    conditions = {"image": (3, 64, 64)} if name.startswith("upsample") else {}
    spec = DataSpec(channels=3, resolution=RESOLUTIONS[name], num_classes=num_classes, conditions=conditions)
    with torch.device("meta"):
        network = config.build(spec, learned_variance=flags["learn_sigma"])
    shapes = {key: list(tensor.shape) for key, tensor in network.state_dict().items()}
    assert list(shapes.items()) == list(expected["state_dict"].items())
    assert sum(p.numel() for p in network.parameters()) == expected["n_parameters"]


@pytest.mark.parametrize("name", RESOLUTIONS)
def test_published_network_is_recognised_by_shapes_and_name(golden_names, name):
    expected = golden_names("names_iddpm.json.gz")["configs"][name]
    flags = expected["flags"]
    tensors = {key: torch.empty(shape, device="meta") for key, shape in expected["state_dict"].items()}
    found = read_iddpm(tensors, Path(name), "", lambda kind: None)
    system, spec = found.system, found.spec
    assert spec.resolution == RESOLUTIONS[name]
    assert spec.num_classes == (1000 if flags.get("class_cond") else 0)
    assert system.network == network_config(flags)
    assert (system.conditioning.image is not None) == name.startswith("upsample")


def test_small_images_of_the_original(golden):
    file = golden("m02_unet.npz")
    side = file.params("sr_train_lowres")["small_size"]
    large = file["sr_train_lowres/large_batch"]
    low_res = Small(large.shape[2] // side)(large, None)
    torch.testing.assert_close(low_res, file["sr_train_lowres/low_res"], rtol=1e-5, atol=1e-6)
