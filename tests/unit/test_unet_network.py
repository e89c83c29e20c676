"""U-Nets, except for their agreement with the original code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from image_diffusion.core.config.base import dump, parse
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.unet import Attention, UNet, UNetConfig

TINY = {"channels": 32, "multipliers": (1, 2), "num_res_blocks": 1, "attention_resolutions": (4,), "num_heads": 2}
SPEC = DataSpec(channels=3, resolution=8, num_classes=3)
ADM = {"residual_resampling": True, "head_channels": 16, "attention_order": "new"}


def tiny(spec: DataSpec = SPEC, learned_variance: bool = False, null_label: bool = False, **changes) -> UNet:
    """Build a small U-Net with all parameters non-zero, so that every part affects the output."""
    torch.manual_seed(0)
    network = UNetConfig(**{**TINY, **changes}).build(spec, learned_variance, null_label)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    return network


def inputs(batch: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 3, 8, 8, generator=generator)
    return x, torch.linspace(0, 900, batch), torch.arange(batch) % 3


@pytest.mark.parametrize("changes", [{}, ADM, {"scale_shift_norm": False}], ids=["iddpm", "adm", "added"])
def test_every_input_counts_and_no_row_depends_on_another(changes):
    network = tiny(**changes).eval()
    x, t, label = inputs()
    out = network(x, t, label=label)
    assert out.shape == x.shape
    torch.testing.assert_close(network(x[1:2], t[1:2], label=label[1:2]), out[1:2], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(network(x + 0.1, t, label=label), out, atol=1e-3)
    assert not torch.allclose(network(x, t + 1, label=label), out, atol=1e-3)
    assert not torch.allclose(network(x, t, label=(label + 1) % 3), out, atol=1e-3)


@pytest.mark.parametrize(("stem", "first"), [("adm", 64), ("iddpm", 32)])
def test_stem_width_matches_the_named_original(stem, first):
    """Widths of the original networks with multipliers 2 and 1; that of improved-diffusion then fails at `out`."""
    network = tiny(multipliers=(2, 1), stem=stem)
    widths = [
        network.input_blocks[0][0].out_channels,
        network.input_blocks[1][0].in_layers[0].num_channels,
        network.output_blocks[-1][0].in_layers[0].num_channels,  # features from below and the stem's output
        network.out[0].num_channels,
    ]
    assert widths == [first, first, 64 + first, 64]
    x, t, label = inputs()
    assert network(x, t, label=label).shape == x.shape
    plain = tiny(stem=stem)
    assert {name: each.shape for name, each in plain.state_dict().items()} == {
        name: each.shape for name, each in tiny().state_dict().items()
    }


def test_a_learned_variance_doubles_the_channels_returned():
    x, t, label = inputs()
    assert tiny(learned_variance=True)(x, t, label=label).shape == (3, 6, 8, 8)


@pytest.mark.parametrize(("null_label", "rows"), [(False, 3), (True, 4)])
def test_the_label_table_has_a_row_for_no_label_where_it_is_wanted(null_label, rows):
    assert tiny(null_label=null_label).label_emb.weight.shape == (rows, 128)


def test_unlabelled_data_need_no_label_table():
    network = tiny(SPEC.model_copy(update={"num_classes": 0}), null_label=True)
    x, t, label = inputs()
    assert not any("label_emb" in name for name in network.state_dict())
    assert network(x, t).shape == x.shape
    with pytest.raises(ValueError, match="built for 0 classes but was called with labels"):
        network(x, t, label=label)


def test_small_images_affect_the_output():
    network = tiny(SPEC.model_copy(update={"conditions": {"image": (3, 4, 4)}}))
    x, t, label = inputs()
    small = F.interpolate(x, 4, mode="area")
    out = network(x, t, label=label, image=small)
    assert out.shape == x.shape
    assert not torch.allclose(network(x, t, label=label, image=small + 0.1), out, atol=1e-3)


@pytest.mark.parametrize("order", ["legacy", "new"])
def test_attention_is_softmax_of_scaled_products(order):
    """legacy: the 3C channels are (q, k, v) of each head; new: q, k and v, each of all heads."""
    torch.manual_seed(0)
    attention = Attention(UNetConfig(num_heads=2, attention_order=order), 32)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 32, 4, 4)
    qkv = attention.qkv(attention.norm(x).flatten(2))  # [B, 3C, N]
    if order == "legacy":
        q, k, v = qkv.view(2, 2, 3, 16, 16).unbind(2)  # each [B, heads, d, N]
    else:
        q, k, v = (part.view(2, 2, 16, 16) for part in qkv.chunk(3, dim=1))
    weights = (q.transpose(2, 3) @ k / 4).softmax(dim=-1)  # [B, heads, N, N]
    mixed = (v @ weights.transpose(2, 3)).reshape(2, 32, 16)
    expected = x + attention.proj_out(mixed).view(2, 32, 4, 4)
    torch.testing.assert_close(attention(x), expected, rtol=1e-4, atol=1e-4)


def test_heads_by_number_or_by_their_channels():
    config = UNetConfig(num_heads=4, num_heads_upsample=2)
    assert (config.heads(64, upward=False), config.heads(64, upward=True)) == (4, 2)
    assert UNetConfig(num_heads=4).heads(64, upward=True) == 4
    assert UNetConfig(head_channels=16).heads(64, upward=True) == 4


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing_changes_no_number_and_no_dropout(dropout):
    """Recomputed blocks drop the same features, unlike those of the original code."""
    x, t, label = inputs()
    gradients = []
    for saving in (False, True):
        network = tiny(gradient_checkpointing=saving, dropout=dropout)
        torch.manual_seed(7)
        network(x, t, label=label).square().mean().backward()
        gradients.append([p.grad for p in network.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_gradient_checkpointing_keeps_fewer_tensors():
    kept = {}
    x, t, label = inputs()
    for saving in (False, True):
        sizes: list[int] = []
        network = tiny(gradient_checkpointing=saving)
        with torch.autograd.graph.saved_tensors_hooks(lambda s, into=sizes: into.append(s.numel()) or s, lambda s: s):
            network(x, t, label=label)
        kept[saving] = sum(sizes)
    assert kept[True] < 0.5 * kept[False]


def test_dropout_acts_in_training_only():
    network = tiny(dropout=0.5)
    x, t, label = inputs()
    assert not torch.equal(network(x, t, label=label), network(x, t, label=label))
    network.eval()
    assert torch.equal(network(x, t, label=label), network(x, t, label=label))


def test_one_graph_without_breaks():
    network = tiny(**ADM)
    x, t, label = inputs()
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, t, label=label), network(x, t, label=label), rtol=1e-5, atol=1e-5)


def test_half_the_precision_gives_about_the_same():
    network = tiny().eval()
    x, t, label = inputs()
    with torch.no_grad():
        expected = network(x, t, label=label)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = network(x, t, label=label)
    assert (mixed.float() - expected).norm() < 0.05 * expected.norm()


def test_channels_last_changes_nothing():
    network = tiny().eval()
    x, t, label = inputs()
    expected = network(x, t, label=label)
    network = network.to(memory_format=torch.channels_last)
    out = network(x.to(memory_format=torch.channels_last), t, label=label)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("resolution", "millions", "options"),
    [
        (64, 296, {"channels": 192, "num_res_blocks": 3, "head_channels": 64, "attention_order": "new"}),
        (128, 422, {"channels": 256, "num_heads": 4}),
        (256, 554, {"channels": 256, "head_channels": 64}),
        (512, 559, {"channels": 256, "head_channels": 64}),
    ],
)
def test_adm_has_as_many_parameters_as_published(resolution, millions, options):
    """Dhariwal and Nichol 2021, model sizes of the class-conditional networks for ImageNet."""
    config = UNetConfig(attention_resolutions=(32, 16, 8), residual_resampling=True, **options)
    with torch.device("meta"):
        network = config.build(DataSpec(channels=3, resolution=resolution, num_classes=1000), learned_variance=True)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6) == millions
    assert not any(name.endswith(("op.weight", "conv.weight")) for name in network.state_dict())


@pytest.mark.parametrize("config", [UNetConfig(), UNetConfig(**TINY), UNetConfig(**ADM)])
def test_a_configuration_returns_from_plain_data(config):
    assert parse(UNetConfig, dump(config), "x.yaml") == config


@pytest.mark.parametrize(
    ("changes", "resolution", "message"),
    [
        ({"multipliers": None}, 48, "published multipliers for images of 48 x 48 pixels, only for 32, 64, 128"),
        ({"multipliers": (1, 1, 1, 1)}, 12, "12 x 12 pixels cannot be halved 3 times.*a multiple of 8 pixels"),
        ({"channels": 48}, 8, "channels 48 gives a level 48 channels, but features are normalised in 32 groups"),
        ({"multipliers": (0.5, 1)}, 8, "channels 32 gives a level 16 channels"),
        ({"attention_resolutions": (4, 16)}, 8, "attention_resolutions names 16, but the network works at 8, 4"),
        ({"num_heads": 3}, 8, "num_heads 3 does not divide the 64 channels"),
        ({"num_heads_upsample": 5}, 8, "num_heads_upsample 5 does not divide the 64 channels"),
        ({"head_channels": 48}, 8, "head_channels 48 does not divide the 64 channels"),
    ],
)
def test_configurations_that_do_not_fit_the_data_are_rejected(changes, resolution, message):
    spec = SPEC.model_copy(update={"resolution": resolution})
    with pytest.raises(ValueError, match=message):
        UNetConfig(**{**TINY, **changes}).build(spec)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"multipliers": []}, r"\[\] are not multipliers. Use a positive number for each level"),
        ({"multipliers": [1, 0]}, "are not multipliers"),
        ({"channels": 0}, "channels is 0: input should be greater than 0"),
        ({"dropout": 1.0}, "dropout is 1.0: input should be less than 1"),
        ({"attention_order": "old"}, "Unknown attention_order 'old'. Known: legacy or new"),
        ({"chanels": 1}, "chanels is not a known key. Did you mean channels?"),
    ],
)
def test_mistakes_in_the_configuration_are_told(data, message):
    with pytest.raises(ValueError, match=message):
        parse(UNetConfig, data, "network")


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (1, 3, 16, 16), (1, 3, 8, 6)])
def test_x_of_another_shape_is_told(shape):
    with pytest.raises(ValueError, match=r"x has .* but the network was built for 3 x 8 x 8\. Use data of the"):
        tiny()(torch.zeros(shape), torch.zeros(1), label=torch.zeros(1, dtype=torch.int64))


def test_a_missing_label_is_told():
    x, t, _ = inputs()
    with pytest.raises(ValueError, match="built for 3 classes but was called without labels"):
        tiny()(x, t)


@pytest.mark.parametrize("side", [None, 2, 8])
def test_missing_or_wrongly_sized_small_images_are_rejected(side):
    x, t, label = inputs()
    image = None if side is None else torch.zeros(3, 3, side, side)
    spec = SPEC.model_copy(update={"conditions": {"image": (3, 4, 4)}})
    with pytest.raises(ValueError, match="built for the conditions image of 3 x 4 x 4, but was called with"):
        tiny(spec)(x, t, label=label, image=image)


def test_unexpected_small_images_are_rejected():
    x, t, label = inputs()
    with pytest.raises(ValueError, match="built for the conditions none, but was called with image of 3 x 8 x 8"):
        tiny()(x, t, label=label, image=x)
