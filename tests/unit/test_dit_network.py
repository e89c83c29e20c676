"""Properties of the DiT network; its agreement with the original is tested elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from image_diffusion.core.config.base import dump, parse
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit import SIZES, DiT, DiTConfig
from image_diffusion.nn.inputs import patchify, unpatchify
from image_diffusion.nn.positions import rotary_angles, rotate, sinusoid
from image_diffusion.nn.transformer import SelfAttention

TINY = {"depth": 2, "width": 32, "num_heads": 4, "patch": 2}
SPEC = DataSpec(channels=4, resolution=8, num_classes=3)
VARIANTS = [{}, {"qk_norm": True}, {"norm": "rms_norm"}, {"mlp": "swiglu"}]
VARIANTS += [{"rope": True}, {"patch_bottleneck": 6}, {"class_tokens": 3, "class_tokens_from": 1}]
VARIANTS.append({key: value for variant in VARIANTS for key, value in variant.items()})


def tiny(spec: DataSpec = SPEC, learned_variance: bool = False, **changes) -> DiT:
    """Return a small DiT with non-zero parameters, so that every part contributes to the output."""
    torch.manual_seed(0)
    network = DiTConfig(**{**TINY, **changes}).build(spec, learned_variance)
    for parameter in network.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
    return network


def inputs(batch: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 4, 8, 8, generator=generator), torch.tensor([0, 500, 999])[:batch], torch.arange(batch)


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: ",".join(changes) or "plain")
@pytest.mark.parametrize("learned_variance", [False, True])
def test_the_output_is_zero_at_the_start_and_learns_from_there(changes, learned_variance):
    network = DiTConfig(**TINY, **changes).build(SPEC, learned_variance)
    x, t, label = inputs()
    out = network(x, t, label=label)
    assert out.shape == (3, 8 if learned_variance else 4, 8, 8)
    assert not out.any()
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (network(x, t, label=label)[:, :4] - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    with_gradient = {name for name, p in network.named_parameters() if p.grad is not None and p.grad.any()}
    assert with_gradient == {name for name, _ in network.named_parameters()} - {"pos_embed"}


def test_every_input_counts_and_no_row_depends_on_another():
    network = tiny().eval()
    x, t, label = inputs()
    out = network(x, t, label=label)
    torch.testing.assert_close(network(x[1:2], t[1:2], label=label[1:2]), out[1:2], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(network(x + 0.1, t, label=label), out, atol=1e-3)
    assert not torch.allclose(network(x, t + 1, label=label), out, atol=1e-3)
    assert not torch.allclose(network(x, t, label=label + 1), out, atol=1e-3)


def test_training_mode_drops_no_labels():
    network = tiny()
    x, t, label = inputs()
    torch.testing.assert_close(network.train()(x, t, label=label), network.eval()(x, t, label=label), rtol=0, atol=0)


def test_unlabelled_data_need_no_label_table():
    network = tiny(SPEC.model_copy(update={"num_classes": 0}))
    x, t, label = inputs()
    assert not any("y_embedder" in name for name in network.state_dict())
    assert network(x, t).shape == x.shape
    with pytest.raises(ValueError, match="built for 0 classes but was called with labels"):
        network(x, t, label=label)


@pytest.mark.parametrize(("null_label", "rows"), [(True, 4), (False, 3)])
def test_the_label_table_has_a_row_for_no_label_where_it_is_wanted(null_label, rows):
    table = tiny(null_label=null_label).y_embedder.embedding_table.weight
    assert table.shape == (rows, 32)


def test_label_init_std_is_the_deviation_of_the_label_table():
    torch.manual_seed(0)
    spec = SPEC.model_copy(update={"num_classes": 500})
    table = DiTConfig(**TINY, label_init_std=0.5).build(spec).y_embedder.embedding_table.weight
    assert table.std().item() == pytest.approx(0.5, rel=0.02)


def test_gradient_checkpointing_does_not_change_gradients():
    plain = tiny()
    saving = tiny(gradient_checkpointing=True)
    x, t, label = inputs()
    gradients = []
    for network in (plain, saving):
        network(x, t, label=label).square().mean().backward()
        gradients.append([p.grad for p in network.parameters() if p.requires_grad])
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


@pytest.mark.parametrize(
    "changes",
    [{}, VARIANTS[-1], {"gradient_checkpointing": True}, {**VARIANTS[-1], "gradient_checkpointing": True}],
    ids=["plain", "all", "saving", "all saving"],
)
def test_one_graph_without_breaks(changes):
    network = tiny(**changes)
    x, t, label = inputs()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    out = compiled(x, t, label=label)
    torch.testing.assert_close(out, network(x, t, label=label), rtol=1e-5, atol=1e-5)
    out.square().mean().backward()
    assert all(p.grad is not None for p in network.parameters() if p.requires_grad)


def test_half_the_precision_gives_about_the_same():
    network = tiny().eval()
    x, t, label = inputs()
    with torch.no_grad():
        expected = network(x, t, label=label)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = network(x, t, label=label)
        pure = copy.deepcopy(network).bfloat16()(x.bfloat16(), t, label=label)
    assert pure.dtype == torch.bfloat16
    for out in (mixed.float(), pure.float()):
        assert (out - expected).norm() < 0.05 * expected.norm()


def test_swiglu_has_about_as_many_parameters_as_the_plain_mlp():
    counts = [sum(p.numel() for p in tiny(mlp=mlp, width=96).blocks[0].mlp.parameters()) for mlp in ("gelu", "swiglu")]
    assert counts[1] == pytest.approx(counts[0], rel=0.01)


def test_attention_is_softmax_of_scaled_products():
    torch.manual_seed(0)
    attention = SelfAttention(8, 2)
    x = torch.randn(1, 5, 8)
    q, k, v = attention.qkv(x).view(5, 3, 2, 4).permute(1, 2, 0, 3)  # each [heads, N, d]
    weights = (q @ k.transpose(1, 2) / 2).softmax(dim=-1)
    expected = attention.proj((weights @ v).transpose(0, 1).reshape(1, 5, 8))
    torch.testing.assert_close(attention(x), expected)


def test_a_rotary_product_depends_on_the_difference_of_positions_alone():
    """RoFormer, equation 16: (R_m q) . (R_n k) = q . (R_(n - m) k), here with rows and columns."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 16, generator=generator)
    turned_q, turned_k = (rotate(each.expand(36, 16), rotary_angles(16, 6, q.device)) for each in (q, k))
    products = (turned_q @ turned_k.T).view(6, 6, 6, 6)  # indexed by row, column and row, column
    for row, column in ((1, 2), (5, 0)):
        moved = products[: 6 - row, : 6 - column, row:, column:]
        same = moved.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1)
        torch.testing.assert_close(same, products[0, 0, row, column].expand_as(same), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(turned_q.norm(dim=1), q.norm().expand(36))
    assert torch.equal(turned_q[0], q)


def test_rotary_embedding_rotates_head_pairs_by_row_and_column():
    """RoFormer, equation 15, on each half: the slowest of d / 4 pairs turns 10000^-(1 - 4 / d) radians per position."""
    angles = rotary_angles(16, 3, torch.device("cpu")).view(3, 3, 2, 4)
    omega = torch.tensor([1.0, 0.1, 0.01, 0.001])
    torch.testing.assert_close(angles[2, 1], torch.stack([2 * omega, omega]))
    x = torch.tensor([1.0, 0.0])
    quarter_turn = rotate(x, torch.tensor([torch.pi / 2]))
    torch.testing.assert_close(quarter_turn, torch.tensor([0.0, 1.0]))


def test_class_tokens_are_added_at_their_block_and_removed_from_the_output():
    network = tiny(class_tokens=3, class_tokens_from=1)
    seen = []
    for block in network.blocks:
        block.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    x, t, label = inputs()
    assert network(x, t, label=label).shape == x.shape
    assert [each.shape[1] for each in seen] == [16, 19]
    expected = network.y_embedder(label)[:, None] + network.class_tokens
    torch.testing.assert_close(seen[1][:, :3], expected)


def test_a_bottleneck_has_the_parameters_of_two_thin_maps():
    embedder = tiny(patch=4, patch_bottleneck=6).x_embedder
    assert sum(p.numel() for p in embedder.parameters()) == 6 * 4 * 16 + 6 * 32 + 32
    x, _, _ = inputs()
    thin = F.conv2d(x, embedder.proj.weight, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(embedder(x), F.linear(thin, embedder.expand.weight, embedder.expand.bias))


def test_the_patch_embedding_is_a_convolution():
    network = tiny(patch=4)
    x, _, _ = inputs()
    proj = network.x_embedder.proj
    expected = F.conv2d(x, proj.weight, proj.bias, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(network.x_embedder(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("patch", [1, 2, 3])
def test_patches_return_to_the_image(patch):
    x = torch.randn(2, 5, 6, 12)
    tokens = patchify(x, patch)
    assert tokens.shape == (2, 72 // patch**2, 5 * patch**2)
    assert torch.equal(tokens[0, 0, :5], x[0, :, 0, 0])
    assert torch.equal(unpatchify(tokens, patch, 6, 12), x)


def test_sinusoid_frequencies():
    t = torch.tensor([1.0])
    assert torch.cos(torch.tensor(1.0)) == sinusoid(t, 8)[0, 0]
    assert sinusoid(t, 8)[0, 7].item() == pytest.approx(10_000**-0.75, rel=1e-5)
    assert sinusoid(t, 8, endpoint=True)[0, 7].item() == pytest.approx(10_000**-1, rel=1e-5)
    assert sinusoid(t, 7).shape == (1, 7)
    assert sinusoid(t, 7)[0, 6] == 0


def test_named_size_with_changes_equals_explicit_dimensions():
    assert DiTConfig(size="DiT-S/8", depth=2).shape == (2, 384, 6, 8)
    assert DiTConfig(depth=2, width=384, num_heads=6, patch=8).shape == DiTConfig(size="DiT-S/8", depth=2).shape
    assert [DiTConfig(size=size).shape for size in SIZES] == list(SIZES.values())


@pytest.mark.parametrize("config", [DiTConfig(size="DiT-L/4", qk_norm=True), DiTConfig(**TINY)])
def test_a_configuration_returns_from_plain_data(config):
    assert parse(DiTConfig, dump(config), "x.yaml") == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"size": "DiT-M/2"}, "Unknown size 'DiT-M/2'. Known: DiT-XL/2"),
        ({}, "needs depth, width, num_heads and patch; missing: depth, width, num_heads, patch"),
        ({"depth": 2, "width": 8, "patch": 1}, "missing: num_heads. Set them, or a size such as DiT-S/2"),
        ({**TINY, "width": 30}, "width 30 must be divisible by num_heads 4 and by 4. Use a width such as 32"),
        ({**TINY, "rope": True, "num_heads": 16}, "leaves 2 a head, which 4 does not divide"),
        ({**TINY, "class_tokens_from": 2}, "class_tokens_from is 2, but there are 2 blocks"),
        ({**TINY, "depth": 0}, "depth is 0: input should be greater than 0"),
        ({**TINY, "dept": 1}, "dept is not a known key. Did you mean depth?"),
    ],
)
def test_mistakes_in_the_configuration_are_told(data, message):
    with pytest.raises(ValueError, match=message):
        parse(DiTConfig, data, "network")


def test_patch_that_does_not_divide_the_resolution_is_reported():
    spec = SPEC.model_copy(update={"resolution": 9})
    with pytest.raises(ValueError, match=r"x of 9 x 9 pixels cannot be cut into patches of 2 x 2\. Set network\.patch"):
        DiTConfig(**TINY).build(spec)


def test_class_tokens_need_classes():
    with pytest.raises(ValueError, match=r"network\.class_tokens is 2, but the data have no classes\. Leave it out"):
        DiTConfig(**TINY, class_tokens=2).build(SPEC.model_copy(update={"num_classes": 0}))


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (1, 4, 16, 16), (1, 4, 8, 6)])
def test_x_of_another_shape_is_told(shape):
    with pytest.raises(ValueError, match=r"x has .* but the network was built for 4 x 8 x 8\. Use data of the codec"):
        tiny()(torch.zeros(shape), torch.zeros(1), label=torch.zeros(1, dtype=torch.int64))


def test_a_missing_label_is_told():
    x, t, _ = inputs()
    with pytest.raises(ValueError, match="built for 3 classes but was called without labels"):
        tiny()(x, t)
