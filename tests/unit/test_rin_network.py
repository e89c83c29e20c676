"""Properties of a RIN, apart from its agreement with the original."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from image_diffusion.core.config.base import dump, parse
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.rin import Rin, RinConfig

TINY = {"width": 16, "patch": 2, "depth": 2, "num_latents": 5, "latent_width": 12, "num_heads": 2, "head_width": 8}
SPEC = DataSpec(channels=4, resolution=8, num_classes=3)
VARIANTS = [
    {},
    {"time_as_latent": True},
    {"dual_patch_norm": False},
    {"patch_self_attention": False},
    {"qk_norm": True},
    {"latent_depth": 0},
    {"latent_width": None},
]
VARIANTS.append({"time_as_latent": True, "dual_patch_norm": False, "qk_norm": True, "num_frequencies": 3})


def tiny(spec: DataSpec = SPEC, **changes) -> Rin:
    """Return a small RIN with random values for all parameters, so that every part affects the output."""
    torch.manual_seed(0)
    network = RinConfig(**{**TINY, **changes}).build(spec)
    for name, parameter in network.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if name.endswith("gamma") else 0.0, std=0.2)
    return network


def inputs(network: Rin, batch: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, *network.latents.shape, generator=generator)
    images = torch.randn(2, batch, 4, 8, 8, generator=generator)
    label = torch.arange(batch)
    return {"x": images[0], "t": torch.rand(batch, generator=generator), "label": label} | {
        "self_cond": images[1],
        "latents": latents,
    }


def call(network: Rin, given: dict[str, torch.Tensor], **changes):
    given = given | changes
    return network(given.pop("x"), given.pop("t"), **given)


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: ",".join(changes) or "plain")
def test_every_option_gives_predictions_and_latents_that_learn(changes):
    network = tiny(**changes)
    given = inputs(network)
    output, latents, norm = call(network, given, return_latents=True)
    assert output.shape == (3, 4, 8, 8) and latents.shape == given["latents"].shape
    assert norm.shape == (3,) and (norm > 0).all()
    assert torch.equal(output, call(network, given))
    (output.square().mean() + latents.square().mean()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in network.parameters())


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: ",".join(changes) or "plain")
def test_every_input_changes_the_output(changes):
    network = tiny(**changes).eval()
    given = inputs(network)
    with torch.no_grad():
        plain = call(network, given)
        for name in given:
            uneven = torch.linspace(0.1, 0.9, given[name].numel()).view_as(given[name])
            changed = (given[name] + 1) % 4 if name == "label" else given[name] + uneven
            assert not torch.allclose(call(network, given, **{name: changed}), plain, atol=1e-4), name


def test_zero_rows_mean_no_estimate():
    network = tiny().eval()
    given = inputs(network)
    with torch.no_grad():
        with_all, without = call(network, given), call(network, given, self_cond=None, latents=None)
        row = torch.tensor([True, False, True])
        some = call(
            network,
            given,
            self_cond=given["self_cond"] * row[:, None, None, None],
            latents=given["latents"] * row[:, None, None],
        )
    torch.testing.assert_close(some, torch.where(row[:, None, None, None], with_all, without))
    assert not torch.allclose(with_all, without, atol=1e-3)


def test_latent_norm_shows_growth_hidden_by_normalisation():
    network, given = tiny(), inputs(tiny())
    with torch.no_grad():
        _, latents, norm = call(network, given, return_latents=True)
        network.blocks[-1].latents_cross_attn_ff.net[-1].weight *= 100
        _, later, grown = call(network, given, return_latents=True)
    assert (grown > 10 * norm).all()
    assert later.abs().max() < 3 * latents.abs().max()


def test_a_sample_does_not_depend_on_its_batch():
    network = tiny().eval()
    given = inputs(network)
    with torch.no_grad():
        whole = call(network, given)
        for i in range(3):
            alone = call(network, {name: tensor[i : i + 1] for name, tensor in given.items()})
            torch.testing.assert_close(alone[0], whole[i], rtol=1e-4, atol=1e-5)


def test_predictions_depend_on_patch_positions():
    """Identical patches give a different prediction at each position, by position embedding and edges."""
    network = tiny().eval()
    given = inputs(network)
    same = given["x"][:, :, :2, :2].repeat(1, 1, 4, 4)
    with torch.no_grad():
        out = call(network, given, x=same, self_cond=None)
    patches = out.unfold(2, 2, 2).unfold(3, 2, 2).reshape(3, 4, 16, 4).transpose(1, 2).flatten(2)
    assert torch.cdist(patches, patches)[:, *torch.triu_indices(16, 16, 1)].min() > 1e-4


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: ",".join(changes) or "plain")
def test_d36_flash_and_math_attention_agree(changes):
    """D-36: with flash attention the original crashes unless its patch attention is off."""
    network = tiny(**changes).eval()
    outputs = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with torch.no_grad(), sdpa_kernel(backend):
            outputs.append(call(network, inputs(network)))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}], ids=["plain", "qk_norm"])
def test_lower_precision_is_close_to_float32(changes, dtype):
    network = tiny(**changes).eval()
    with torch.no_grad():
        exact = call(network, inputs(network))
        with torch.autocast("cpu", dtype):
            near = call(network, inputs(network))
    assert near.isfinite().all()
    assert (near.float() - exact).abs().max() < 0.1 * exact.abs().max()


def test_a_network_of_unlabelled_data_has_no_label_table():
    network = tiny(DataSpec(channels=1, resolution=8))
    assert not hasattr(network, "label_embedding")
    assert network(torch.randn(2, 1, 8, 8), torch.rand(2)).shape == (2, 1, 8, 8)
    assert tiny().label_embedding.num_embeddings == SPEC.num_classes + 1


def test_the_weights_survive_a_round_trip():
    network, other = tiny(), RinConfig(**TINY).build(SPEC)
    other.load_state_dict(copy.deepcopy(network.state_dict()))
    given = inputs(network)
    assert torch.equal(call(network, given), call(other, given))


@pytest.mark.parametrize("patch", [3, 16])
def test_patch_that_does_not_divide_the_image_is_rejected(patch):
    with pytest.raises(ValueError, match=f"x of 8 x 8 pixels cannot be cut into patches of {patch} x {patch}. Set"):
        RinConfig(**{**TINY, "patch": patch}).build(SPEC)


def test_wrong_shapes_and_labels_are_rejected():
    network = tiny()
    given = inputs(network)
    with pytest.raises(ValueError, match="x has 4 x 16 x 16 .* but the network was built for 4 x 8 x 8"):
        call(network, given, x=torch.zeros(3, 4, 16, 16))
    with pytest.raises(ValueError, match="built for 3 classes but was called without labels"):
        call(network, given, label=None)
    with pytest.raises(ValueError, match="built for 0 classes but was called with labels"):
        call(tiny(SPEC.model_copy(update={"num_classes": 0})), given)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"width": 15}, "width"),
        ({"depth": 0}, "depth"),
        ({"num_latent": 3}, "num_latent is not a known key. Did you mean"),
        ({"type": "dit"}, "dit"),
    ],
)
def test_what_people_are_told_of_a_configuration(data, message):
    with pytest.raises(ValueError, match=message):
        parse(RinConfig, data, "x.yaml")


def test_rin_configuration_survives_a_round_trip():
    config = RinConfig(**TINY)
    assert parse(RinConfig, dump(config), "x.yaml") == config
