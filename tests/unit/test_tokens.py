"""The token system: its network, objectives, samplers and likelihood bounds."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from image_diffusion.core.random.streams import Streams, at_step, image_streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.experiments.resolve import load_all
from image_diffusion.experiments.study import operations_of
from image_diffusion.networks.dit import TEXT
from image_diffusion.networks.token_transformer import TokenTransformer, TokenTransformerConfig
from image_diffusion.objectives.tokens import MaskedTokens, NextToken, hide
from image_diffusion.samplers.tokens import Autoregressive, Masked, Predictor, cut, drawn, hidden_counts
from image_diffusion.systems.tokens.generator import TokenGenerator, TokenSampleConfig
from image_diffusion.systems.tokens.tokens import TokensSystem, _bound

SMALL = TokenTransformerConfig(depth=2, width=16, num_heads=2, rope=True, dropout=0)
LABELLED = DataSpec(channels=8, resolution=3, num_classes=4)
TOLD = DataSpec(channels=8, resolution=3, conditions={TEXT: (1 + 3, 5)})
PLAIN = DataSpec(channels=8, resolution=3)
PLACES = 9


def trained(spec: DataSpec, causal: bool, config: TokenTransformerConfig = SMALL) -> TokenTransformer:
    """Build a network with random weights, also in its last layer, which starts at zero."""
    torch.manual_seed(0)
    network = config.build(spec, causal).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return network


def some(spec: DataSpec, count: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """Return tokens and their conditions; the first caption is one word shorter than the others."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(spec.channels, (count, PLACES), generator=draw)
    text = torch.randn(count, 4, 5, generator=draw)
    text[0, 3] = 0
    return tokens, {"text": text} if spec.conditions else {"label": torch.arange(count)} if spec.num_classes else {}


def batch_of(tokens: Tensor, cond: dict[str, Tensor]) -> Batch:
    number = torch.arange(len(tokens))
    return Batch(tokens, cond, Streams(0, torch.zeros_like(number), number))


@pytest.mark.parametrize("spec", [LABELLED, TOLD, PLAIN], ids=["label", "text", "nothing"])
def test_a_later_token_changes_no_earlier_logit(spec: DataSpec) -> None:
    tokens, cond = some(spec)
    for causal in (True, False):
        network = trained(spec, causal)
        before = network(tokens, **cond)
        for place in (0, 4, PLACES - 1):
            other = tokens.clone()
            other[:, place] = (other[:, place] + 1) % spec.channels
            changed = (network(other, **cond) - before).abs().amax(2) > 1e-6
            assert changed[:, place + 1 :].all(), "what comes after it sees it"
            assert changed[:, : place + 1].any().item() is not causal


def test_conditions_change_logits_but_padding_words_do_not() -> None:
    for spec in (LABELLED, TOLD):
        for causal in (True, False):
            network, (tokens, cond) = trained(spec, causal), some(spec)
            other = {name: each.flip(0) for name, each in cond.items()}
            assert not torch.allclose(network(tokens, **cond)[0], network(tokens, **other)[0])
    network, (tokens, cond) = trained(TOLD, True), some(TOLD)
    shorter = {"text": cond["text"][:1, :3]}
    torch.testing.assert_close(network(tokens[:1], **cond | {"text": cond["text"][:1]}), network(tokens[:1], **shorter))


def test_invalid_inputs_and_sizes_are_rejected() -> None:
    network, (tokens, cond) = trained(LABELLED, True), some(LABELLED)
    with pytest.raises(ValueError, match="needs a label"):
        network(tokens)
    with pytest.raises(ValueError, match="3 x 3 of them"):
        network(tokens[:, 1:], **cond)
    with pytest.raises(ValueError, match="divisible by num_heads"):
        TokenTransformerConfig(width=10, num_heads=4)


@pytest.mark.parametrize("objective", [NextToken(), MaskedTokens()], ids=["autoregressive", "masked"])
def test_untrained_network_needs_log2_codebook_bits(objective: Any) -> None:
    """The last layer is initialised to zero."""
    network, (tokens, cond) = SMALL.build(LABELLED, objective.causal), some(LABELLED)
    losses = objective.build(LABELLED)(network, batch_of(tokens, cond))
    torch.testing.assert_close(losses.loss, torch.full((3,), math.log2(8)))
    bound = _bound(network, tokens, cond, torch.arange(3)) if not objective.causal else losses.loss
    torch.testing.assert_close(bound, torch.full((3,), 3.0))


def test_hidden_tokens_are_predicted_from_visible_ones_only() -> None:
    """The loss of an image depends neither on the hidden tokens in the input nor on the rest of the batch."""
    network, (tokens, cond) = trained(LABELLED, False), some(LABELLED)
    seen: list[Tensor] = []

    class Spy(torch.nn.Module):
        hidden = network.hidden

        def forward(self, given: Tensor, **cond: Tensor) -> Tensor:
            seen.append(given)
            return network(given, **cond)

    objective, streams = MaskedTokens(label_drop_probability=0).build(LABELLED), batch_of(tokens, cond).streams
    losses = objective(Spy(), batch_of(tokens, cond))
    share = torch.ceil(torch.cos(math.pi / 2 * streams.uniform("mask_ratio")) * PLACES)
    hidden = seen[0] == network.hidden
    assert hidden.sum(1).tolist() == share.tolist() and torch.equal(seen[0][~hidden], tokens[~hidden])
    p = network(seen[0], **cond).log_softmax(2).gather(2, tokens[..., None])[..., 0]
    by_hand = torch.stack([-p[i][hidden[i]].mean() / math.log(2) for i in range(3)])
    torch.testing.assert_close(losses.loss, by_hand)
    alone = Batch(tokens[1:2], {"label": cond["label"][1:2]}, Streams(0, torch.zeros(1).long(), torch.tensor([1])))
    torch.testing.assert_close(objective(network, alone).loss, losses.loss[1:2])


def test_tokens_are_hidden_uniformly() -> None:
    number = torch.arange(4000)
    hidden = hide(Streams(0, torch.zeros_like(number), number), torch.full_like(number, 3), PLACES)
    assert (hidden.sum(1) == 3).all() and (hidden.float().mean(0) - 1 / 3).abs().max() < 0.03


def test_top_k_and_top_p_keep_the_most_probable_tokens() -> None:
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64)
    cases: list[tuple[int | None, float | None, list[float]]] = [
        (None, None, [0.1, 0.4, 0.2, 0.3]),
        (2, None, [0, 4 / 7, 0, 3 / 7]),
        (1, None, [0, 1, 0, 0]),
        (None, 0.7, [0, 4 / 7, 0, 3 / 7]),
        (None, 0.71, [0, 4 / 9, 2 / 9, 3 / 9]),
        (None, 0.1, [0, 1, 0, 0]),
        (3, 0.5, [0, 4 / 7, 0, 3 / 7]),  # of 4/9, 3/9, 2/9
        (9, 1.0, [0.1, 0.4, 0.2, 0.3]),
    ]
    for top_k, top_p, expected in cases:
        torch.testing.assert_close(cut(p.log(), top_k, top_p), torch.tensor([expected], dtype=torch.float64))
    halved = Autoregressive(temperature=0.5).probabilities(p.log())
    torch.testing.assert_close(halved, p**2 / (p**2).sum())


def test_tokens_are_drawn_in_proportion_to_probability() -> None:
    p = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    uniform = (torch.arange(1000) + 0.5) / 1000
    counts = torch.bincount(drawn(p.expand(1000, 4), uniform), minlength=4)
    assert counts.tolist() == [500, 0, 300, 200]
    edges = drawn(p.expand(3, 4), torch.tensor([0.0, 0.5, 1 - 2**-24]))
    assert edges.tolist() == [0, 2, 3], "nothing that is impossible"


@pytest.mark.parametrize("spec", [LABELLED, TOLD, PLAIN], ids=["label", "text", "nothing"])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_key_value_cache_changes_no_token(spec: DataSpec, scale: float) -> None:
    network, (_, cond) = trained(spec, True), some(spec)
    scale = scale if cond else 1.0
    null = {name: torch.zeros_like(each[0]) if name == "text" else torch.tensor(4) for name, each in cond.items()}
    sampler, streams = Autoregressive(temperature=0.8, top_k=6), image_streams(torch.arange(3))
    *_, found = sampler.steps(Predictor(network, cond, null, scale, 3), streams, PLACES)
    tokens, whole = torch.zeros(3, PLACES, dtype=torch.int64), Predictor(network, cond, null, scale, 3)
    for place in range(PLACES):
        p = sampler.probabilities(whole.whole(tokens)[:, place])
        tokens[:, place] = drawn(p, at_step(streams, place).uniform("token"))
    assert torch.equal(found, tokens) and len(found.unique()) > 2


def test_hidden_counts_follow_the_cosine_schedule() -> None:
    assert hidden_counts(64, 8) == [math.floor(64 * math.cos(math.pi * i / 16)) for i in range(1, 8)] + [0]
    assert hidden_counts(4, 4) == [3, 2, 1, 0]
    for places, steps in ((5, 4), (64, 60), (256, 12), (7, 1)):
        counts = hidden_counts(places, steps)
        assert len(counts) == steps and counts[-1] == 0
        assert all(later < earlier for earlier, later in zip([places, *counts], counts, strict=False))
    with pytest.raises(ValueError, match="5 steps, but only 4 tokens"):
        hidden_counts(4, 5)
    network = trained(LABELLED, False)
    predictor = Predictor(network, {"label": torch.arange(3)}, {}, 1.0, 3)
    steps = list(Masked(num_steps=4).steps(predictor, image_streams(torch.arange(3)), PLACES))
    assert [(each == network.hidden).sum(1).tolist() for each in steps] == [[n] * 3 for n in hidden_counts(PLACES, 4)]
    for before, after in pairwise(steps):
        known = before != network.hidden
        assert torch.equal(before[known], after[known]), "what is known stays"


class Blocks:
    """A codec of 8 grey levels; a token is a block of 2 x 2 pixels."""

    def decode(self, x: Tensor) -> Tensor:
        return (x[:, None] * 32).to(torch.uint8).repeat_interleave(2, 2).repeat_interleave(2, 3)


@pytest.mark.parametrize("type_", ["autoregressive", "masked"])
def test_images_depend_only_on_their_seed(type_: str) -> None:
    system = TokensSystem.model_validate({"network": SMALL.model_dump(), "objective": {"type": type_}})
    network: Any = trained(LABELLED, system.objective.causal)
    settings = TokenSampleConfig.model_validate(
        {
            "sampler": {"type": type_} | ({"num_steps": 5} if type_ == "masked" else {}),
            "guidance": {"guidance_scale": 2},
        }
    )
    make = TokenGenerator(network, system.reading, LABELLED, Blocks(), settings)  # type: ignore[arg-type]
    seeds, labels = torch.arange(6), torch.arange(6) % 4
    together = make(seeds, labels)
    apart = torch.cat([make(seeds[rows], labels[rows]) for rows in (slice(4, 6), slice(0, 1), slice(1, 4))])
    assert together.shape == (6, 1, 6, 6)
    assert torch.equal(together, apart[torch.tensor([2, 3, 4, 5, 0, 1])])
    assert len({each.numpy().tobytes() for each in together}) == 6
    steps = make.trajectory(seeds, labels)
    assert len(steps) == (9 if type_ == "autoregressive" else 5) and torch.equal(steps[-1], together)
    assert (steps[0] == 128).any(), "grey where nothing is known yet"
    other = TokenGenerator(network, system.reading, LABELLED, Blocks(), settings.model_copy(update={"seed": 1}))  # type: ignore[arg-type]
    assert not torch.equal(other(seeds, labels), together)


def test_bound_of_a_perfect_masked_network_is_exact() -> None:
    """Two binary tokens that are always equal: one bit per image, half a bit per token. The network predicts this for
    any hidden tokens, so that its bound is exact."""

    class Alike(torch.nn.Module):
        hidden = 2

        def forward(self, tokens: Tensor) -> Tensor:
            logits = torch.zeros(len(tokens), 2, 2)
            for place in (0, 1):
                known = tokens[:, 1 - place]
                logits[known < 2, place] = torch.nn.functional.one_hot(known[known < 2], 2) * 100.0
            return logits

    number = torch.arange(4000)
    found = _bound(Alike(), (number % 2)[:, None].expand(-1, 2), {}, number)
    assert abs(found.mean().item() - 0.5) < 0.02


DATA = {"name": "digits", "source": {"type": "digits"}, "resolution": 16}
DVAE = {"type": "dvae", "network": {"num_tokens": 8, "num_layers": 2, "codebook_dim": 4, "hidden_dim": 8}}
OF = {"codec": {"type": "tokens", "of": {"type": "trained", "experiment": "vae"}}}
MASKED = {"sampler": {"type": "masked", "num_steps": 4, "top_k": 5}}
TOKENS = {"type": "tokens", "network": {"depth": 1, "width": 16, "num_heads": 2}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"system": TOKENS} | OF, ""),
        ({"system": TOKENS}, "codec is missing, and a system of type tokens needs it"),
        ({"system": TOKENS} | OF | {"sample": {"sampler": {"type": "autoregressive"}}}, "sampler is autoregressive"),
        ({"system": TOKENS} | OF | {"sample": {"sampler": {"type": "masked", "num_steps": 17}}}, "only 16 tokens"),
        ({"system": TOKENS} | OF | {"sample": {"compile": True}}, "sample.compile is set, but"),
        ({"system": TOKENS} | OF | {"sweep": {"temperature": [0.5]}}, "sample.sampler, which is missing. Write it"),
        ({"system": TOKENS} | OF | {"sample": MASKED, "sweep": {"num_steps": [4, 17]}}, "steps 17.sampler: .*16 tok"),
        ({"system": TOKENS} | OF | {"sweep": {"guidance_scale": [1, 1]}}, "names a value twice"),
        ({"system": TOKENS} | OF | {"sweep": {"sampler": ["ddim"]}}, "sweep.sampler is set, but"),
        ({"system": TOKENS} | OF | {"sweep": {"checkpoint": [2]}}, "step 2, whose weights are not kept"),
        (
            {"system": TOKENS | {"objective": {"label_drop_probability": 0}}} | OF | {"sweep": {"guidance_scale": [2]}},
            "sweep.guidance_scale 2.guidance.guidance_scale is 2, but the network never",
        ),
        ({"system": TOKENS} | OF | {"sample": {"prompts": ["a seven"]}}, "takes classes, not words"),
        (
            {"system": TOKENS} | OF | {"pairs": {"type": "captions"}},
            "pairs has captions, but system.condition.type is label: nothing reads them",
        ),
        ({"system": TOKENS | {"condition": {"type": "text"}}} | OF, "needs captions"),
        (
            {"system": TOKENS | {"objective": {"label_drop_probability": 0}}}
            | OF
            | {"sample": {"guidance": {"guidance_scale": 2}}},
            "never learns to do without",
        ),
        ({"system": {"type": "dit", "network": {"size": "DiT-S/2"}}} | OF, "learns from crops or latents, not from"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_invalid_token_experiments_are_rejected_before_any_work(tmp_path: Path, sections: Any, message: str) -> None:
    (tmp_path / "vae.yaml").write_text(yaml.safe_dump({"data": DATA, "system": DVAE, "train": {"steps": 1}}))
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump({"data": DATA, "train": {"steps": 1}} | sections))
    if not message:
        found = {name: experiment for name, (_, experiment) in load_all([mine]).items()}
        assert operations_of(found["mine"], found["vae"]) > 16 * 6 * 3000, "6 a parameter of the block and token"
        return
    with pytest.raises(ValueError, match=message):
        load_all([mine])


def test_token_sweep_points_change_only_their_setting(tmp_path: Path) -> None:
    (tmp_path / "vae.yaml").write_text(yaml.safe_dump({"data": DATA, "system": DVAE, "train": {"steps": 1}}))
    mine, data = tmp_path / "mine.yaml", {"data": DATA, "train": {"steps": 1}, "sample": MASKED, "system": TOKENS}
    swept = {"temperature": [0.5, 2], "num_steps": [2], "guidance_scale": [3], "ema": ["raw"], "num_samples": 9}
    mine.write_text(yaml.safe_dump(data | OF | {"sweep": swept}))
    _, found = load_all([mine])["mine"]
    assert found.sweep.values == {
        "guidance_scale": ["3"], "num_steps": ["2"], "ema": ["raw"], "temperature": ["0.5", "2"]
    }  # fmt: skip
    hot, few, led = (
        found.sweep.samples(axis, value, found.sample)
        for axis, value in (("temperature", "2"), ("num_steps", "2"), ("guidance_scale", "3"))
    )
    plain = found.sample.model_copy(update={"num_samples": 9})
    assert hot == plain.model_copy(update={"sampler": plain.sampler.model_copy(update={"temperature": 2.0})})
    assert few == plain.model_copy(update={"sampler": plain.sampler.model_copy(update={"num_steps": 2})})
    assert led.guidance.guidance_scale == 3 and led.sampler == plain.sampler and type(led) is type(plain)


def test_tokens_of_an_experiment_without_discrete_vae_are_rejected(tmp_path: Path) -> None:
    vae = {"data": DATA, "system": {"type": "autoencoder", "network": {"block_channels": [8, 8], "norm_groups": 4}}}
    (tmp_path / "vae.yaml").write_text(yaml.safe_dump(vae | {"train": {"steps": 1}}))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"data": DATA, "train": {"steps": 1}, "system": TOKENS} | OF))
    with pytest.raises(ValueError, match="trains no discrete VAE"):
        load_all([tmp_path / "mine.yaml"])
