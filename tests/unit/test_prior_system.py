"""The prior as a system: checks of its sections, samples, evaluation, and published weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import parse
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec
from image_diffusion.experiments.resolve import load_all
from image_diffusion.foreign.prior import network_of_shapes
from image_diffusion.metrics.images.embedding_similarity import (
    baselines,
    nearest_captions,
    other_captions,
    similarities,
)
from image_diffusion.networks.prior import PriorConfig
from image_diffusion.samplers.ancestral import LegacyDdim
from image_diffusion.stages.export import read_foreign
from image_diffusion.systems.prior.evaluation import EvaluatedPrior, PredictionConfig, evaluate_prior
from image_diffusion.systems.prior.generation import EmbeddingMaker, PriorSampleConfig
from image_diffusion.systems.prior.generator import EmbeddingGenerator, EmbeddingSampling, Scaling, pair_batch
from image_diffusion.systems.prior.prior import PriorSystem
from image_diffusion.training.load_model import load_model

ROOT = Path(__file__).parents[2]
DIM = 8
SMALL = {"depth": 1, "num_heads": 2, "head_width": 8, "max_text_len": 3, "ff_mult": 2}
SPEC = DataSpec(channels=DIM, resolution=1)


def system_of(**changes: Any) -> PriorSystem:
    return PriorSystem(network=SMALL, process={"schedule": {"type": "cosine"}, "num_timesteps": 50}, **changes)


def evaluated() -> EvaluatedPrior:
    system = system_of()
    return EvaluatedPrior(system.reading(SPEC), system.build_objective(SPEC), system.token_encodings)


class Perfect(nn.Module):
    """Predicts the exact image embedding of every caption: the caption embedding reversed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, t: Tensor, /, text_embed: Tensor, **cond: Tensor) -> Tensor:
        return text_embed.flip(1) * DIM**0.5


class Pairs:
    """Pairs in memory with the interface of shards."""

    def __init__(self, count: int, seed: int = 0, dim: int = DIM) -> None:
        draw = torch.Generator().manual_seed(seed)
        text = nn.functional.normalize(torch.randn(count, dim, generator=draw), dim=1)
        self.stored = torch.stack([text.flip(1), text], dim=1)
        self.num_samples, self.shape = count, (2, dim)
        self.digest, self.manifest = "x", {"kind": "pairs", "pairs": {}}

    def gather(self, rows: np.ndarray) -> Tensor:
        return self.stored[torch.from_numpy(rows)]


def judged(count: int = 120, network: nn.Module | None = None, **settings: Any) -> dict[str, Any]:
    splits = {"train": Pairs(30, 1), "validation": Pairs(0), "test": Pairs(count)}
    config = PredictionConfig(num_steps=(5,), num_candidates=1, **settings)
    return evaluate_prior({"": network or Perfect()}, evaluated(), SPEC, splits, config)  # type: ignore[arg-type]


def test_perfect_prior_scores_perfectly_only_for_its_own_captions():
    found = judged()
    metrics = found["metrics"]
    assert metrics["similarity_with_image_5"]["value"] == pytest.approx(1, abs=1e-5)
    assert abs(metrics["unrelated_similarity_with_image_5"]["value"]) < 0.2
    assert metrics["loss_test"]["value"] == pytest.approx(0, abs=1e-10)
    assert metrics["similarity_with_text_5"]["value"] == pytest.approx(
        metrics["baseline_similarity"]["value"], abs=1e-5
    )
    low, high = metrics["unrelated_similarity_with_image_5"]["interval"]
    assert low < 0.1 and high > -0.1 and metrics["similarity_with_image_5"]["n"] == 120
    assert set(metrics) >= {"loss_train", "similarity_with_unrelated_caption_5", "difference_from_baseline_5"}
    assert "loss_validation" not in metrics
    found = metrics["retrieval_at_1_5"]
    assert (found["value"], found["n"], found["note"]) == (1, 120, "among 120 images of 120 captions")
    assert metrics["nearest_caption_retrieval_at_1"]["value"] < metrics["nearest_caption_retrieval_at_5"]["value"] < 1


def test_predictions_are_compared_with_baselines_without_a_prior():
    metrics = judged()["metrics"]
    for name in ("mean_image", "nearest_caption", "other_caption"):
        low, high = metrics[f"{name}_similarity_with_image"]["interval"]
        assert -0.5 < low < high < 0.9, name
    text = F.normalize(torch.eye(4)[[0, 0, 1, 2]] + 0.1, dim=1)
    known = torch.eye(4)[[1, 0, 0, 2]]
    assert nearest_captions(text, known).tolist() == [1, 2, 0, 3], "equal ones take turns"
    images = torch.eye(4)
    found = baselines(torch.eye(4)[:3], images[:3], torch.eye(4)[[2, 1, 0]], images[[2, 1, 3]])
    assert found["nearest_caption_similarity_with_image"].tolist() == [0, 1, 1]
    torch.testing.assert_close(found["mean_image_similarity_with_image"], torch.tensor([0, 1, 1]).double() / 3**0.5)
    assert found["other_caption_similarity_with_image"].tolist() == [0, 0, 0]
    assert "other_caption_similarity_with_image" not in baselines(text[:2], images[:2], known, images)
    splits = {"train": Pairs(30, 1)}
    settings = PredictionConfig(num_steps=(5,), num_candidates=1)
    alone = evaluate_prior({"": Perfect()}, evaluated(), SPEC, splits, settings)["metrics"]  # type: ignore[arg-type]
    assert not any("nearest" in name for name in alone), "training pairs are no baseline of themselves"


def test_subset_of_pairs_is_spread_evenly_over_the_split():
    data, fewer = Pairs(120), Pairs(120)
    fewer.stored, fewer.num_samples = data.stored[[round(i * 119 / 29) for i in range(30)]], 30
    settings = {"num_steps": (5,), "num_candidates": 1}

    def measured(of: Pairs, **more: Any) -> dict[str, Any]:
        splits = {"train": of, "test": of}
        config = PredictionConfig.model_validate(settings | more)
        metrics: dict[str, Any] = evaluate_prior({"": Perfect()}, evaluated(), SPEC, splits, config)["metrics"]  # type: ignore[arg-type]
        return {name: metric["value"] for name, metric in metrics.items() if "loss" not in name}

    assert measured(data, num_pairs=30) == pytest.approx(measured(fewer), abs=1e-6)
    assert measured(data, num_pairs=120) == measured(data)


@pytest.mark.parametrize("kind", ["ddim", "ddpm", "legacy_ddim"])
def test_evaluation_count_matches_the_rows_given_to_the_network(kind: str):
    rows = 0

    class Counting(Perfect):
        def forward(self, x: Tensor, t: Tensor, /, text_embed: Tensor, **cond: Tensor) -> Tensor:
            nonlocal rows
            rows += len(x)
            return super().forward(x, t, text_embed, **cond)

    told = {"prompts": ["a"], "sampler": {"type": kind, "num_steps": 5}, "num_candidates": 3, "guidance_scale": 2}
    settings, system = PriorSampleConfig.model_validate(told), system_of()
    generator = EmbeddingGenerator(Counting(), system.reading(SPEC), SPEC, settings)
    generator({"text_embed": torch.randn(1, DIM)}, torch.tensor([0]))
    assert system.sampling().num_evaluations(settings) == rows


def test_metrics_do_not_depend_on_the_batch_size():
    torch.manual_seed(0)
    network = PriorConfig(**SMALL).build(SPEC).eval()
    one, other = (judged(20, network, batch_size=size, guidance_scale=1.5)["metrics"] for size in (3, 64))
    for name in one:
        assert one[name]["value"] == pytest.approx(other[name]["value"], rel=1e-4, abs=1e-6), name


def test_a_single_pair_is_not_compared_with_itself():
    names = judged(1)["metrics"]
    assert "similarity_with_image_5" in names and not any("unrelated" in name for name in names)


def test_unrelated_captions_differ_and_come_from_the_whole_set():
    captions = torch.eye(5)[torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 3, 4, 4, 4])]
    others = other_captions(captions)
    assert others is not None
    assert not (captions[torch.from_numpy(others)] == captions).all(dim=1).any()
    assert len(set(others.tolist())) > 3
    assert other_captions(captions[:3]) is None and other_captions(captions[:1]) is None
    assert other_captions(captions[2:4]).tolist() == [1, 0]


def test_zero_similarities_are_counted():
    text = torch.eye(3)
    found = similarities(text, text.roll(1, 0), text, text)
    assert found["baseline_similarity"].tolist() == [0, 0, 0]
    assert found["difference_from_baseline"].tolist() == [1, 1, 1]


def test_pairs_of_another_dimension_are_rejected():
    splits = {"test": Pairs(5, dim=6)}
    with pytest.raises(ValueError, match="test split has embeddings of 6 dimensions but the network was trained on 8"):
        evaluate_prior({"": Perfect()}, evaluated(), SPEC, splits, PredictionConfig(num_steps=(5,)))  # type: ignore[arg-type]
    network = PriorConfig(**SMALL).build(SPEC)
    with pytest.raises(ValueError, match="Text embeddings have 6 dimensions but the network was built for 8"):
        network(torch.zeros(2, 8), torch.zeros(2), text_embed=torch.zeros(2, 6))
    with pytest.raises(ValueError, match="pairs of embeddings"):
        pair_batch(torch.zeros(2, 3, 8, 8), None, Scaling(1.0), True)  # type: ignore[arg-type]


def test_candidates_draw_separate_noise_and_the_nearest_to_the_caption_is_kept():
    torch.manual_seed(0)
    network = PriorConfig(**SMALL).build(SPEC).eval()
    cond = {"text_embed": torch.randn(4, DIM)}
    settings = EmbeddingSampling(sampler={"type": "ddim", "num_steps": 5}, num_candidates=3)  # type: ignore[arg-type]
    generator = EmbeddingGenerator(network, system_of().reading(SPEC), SPEC, settings)
    kept = generator(cond, torch.arange(4))
    every = generator.candidates({"text_embed": cond["text_embed"].repeat_interleave(3, 0)}, torch.arange(12))
    every = every.view(4, 3, DIM)
    assert len(every.flatten(0, 1).unique(dim=0)) == 12
    nearness = torch.cosine_similarity(every, cond["text_embed"][:, None], dim=-1)
    torch.testing.assert_close(kept, every[torch.arange(4), nearness.argmax(1)])
    torch.testing.assert_close(generator({"text_embed": cond["text_embed"][2:]}, torch.tensor([2, 3])), kept[2:])


def test_self_conditioned_prior_receives_its_previous_estimate():
    system = PriorSystem(
        network=SMALL | {"self_cond": True}, process={"schedule": {"type": "cosine"}, "num_timesteps": 50}
    )
    seen: list[Tensor] = []

    class Counting(Perfect):
        def forward(self, x: Tensor, t: Tensor, /, self_cond: Tensor, **cond: Tensor) -> Tensor:
            seen.append(self_cond)
            return torch.full_like(x, float(len(seen)))

    settings = EmbeddingSampling(sampler={"type": "ddim", "num_steps": 3}, num_candidates=1)  # type: ignore[arg-type]
    generator = EmbeddingGenerator(Counting(), system.reading(SPEC), SPEC, settings)
    for _ in range(2):
        seen.clear()
        generator({"text_embed": torch.zeros(2, DIM)}, torch.arange(2))
        assert [each[0, 0].item() for each in seen] == [0, 1, 2]


def demo(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((ROOT / "config" / "experiments" / "prior_demo.yaml").read_text())
    for path, value in changes.items():
        section, *keys = path.split("__")
        if not keys:
            data.pop(section) if value is None else data.update({section: value})
            continue
        inner = data.setdefault(section, {})
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
    return data


FILES = {"data__source": {"type": "embeddings", "path": "x"}, "pairs": {"type": "files"}, "sample": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            FILES | {"system__image_scale": 2.0, "system__objective": {"clamp_norm": True}},
            "system.objective.clamp_norm is true and system.image_scale 2, but",
        ),
        (FILES | {"system__image_scale": 2.0, "prediction__clamp_x0": True}, "prediction.clamp_x0 is true and"),
        (
            {"pairs": {"type": "clip"}, "data__channels": 4},
            "pairs.type is clip, which embeds images of 1 or 3 channels",
        ),
        ({"sample__clip": {"weights": "other"}}, "sample.clip is set, but pairs.type is hashed"),
        (
            {"system__objective": {"self_conditioning_probability": 0.9}},
            "self_conditioning_probability is 0.9, but system.network.self_cond is false",
        ),
        ({"pairs": None}, "Add a section, such as pairs: {type: hashed}"),
        ({"train__flip_probability": 0.5}, "pairs have no mirror image"),
        ({"pairs__splits": {"train": 0.8, "validation": 0.3, "test": 0.1}}, "sum to 1.2"),
        ({"pairs": {"type": "files"}}, "pairs.type is files but data.source.type digits"),
        ({"prediction__num_steps": [64, 1001]}, "prediction.num_steps holds 1001; expected from 1 to"),
        ({"prediction__num_steps": [0]}, "prediction.num_steps holds 0"),
        ({"prediction__guidance_scale": 2, "system__objective": {"text_drop_probability": 0}}, "never learns to do"),
        ({"system__network__num_timesteps": 100}, "network.num_timesteps is 100 but process.num_timesteps 1000"),
        ({"system__objective": {"prediction": "eps", "clamp_norm": True}}, "clamp_norm is of a predicted x0"),
        ({"codec": {"type": "stability_vae"}}, "codec is set, but a system of type prior has no use for it"),
        (
            {"system": {"type": "dvae"}},
            "pairs and prediction and sample are set, but a system of type dvae has no use for them",
        ),
        ({"train__validate_every_steps": None}, "weights is best but validate_every_steps is unset"),
        ({"pairs__captions": {"type": "classes", "template": "a photo"}}, "must hold {} once"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_clear_line_before_any_work(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(demo(**changes)))
    with pytest.raises(ValueError) as caught:
        load_all([path])
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1, caught.value


@pytest.mark.parametrize("count", [1, 50, "ddim10"])
def test_legacy_sampler_reports_its_valid_step_counts(count):
    with pytest.raises(ValueError, match="takes from 2 to 49 steps of 50 timesteps"):
        LegacyDdim(num_steps=count).grid(system_of().process)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_timesteps": 50, "num_time_embeds": 2, "num_image_embeds": 2, "num_text_embeds": 3, "normformer": True},
        {"norm_in": True, "norm_out": False, "final_proj": False, "rotary": False, "num_time_embeds": 2},
    ],
)
def test_network_config_is_inferred_from_weight_shapes(changes):
    config = PriorConfig(**SMALL | changes)
    found = network_of_shapes(config.build(SPEC).state_dict())
    assert found.model_copy(update={"divide_by_maximum": False}) == config


@pytest.mark.parametrize("wrapped", ["bare", "prior", "trainer"])
def test_published_weights_are_read_by_name_and_rebuilt(wrapped, tmp_path):
    network = PriorConfig(**SMALL, num_timesteps=50, divide_by_maximum=True).build(SPEC)
    tensors = network.state_dict()
    prior = {f"net.{name}": each for name, each in tensors.items()} | {"noise_scheduler.betas": torch.zeros(50)}
    other = {name: each + 1 for name, each in prior.items()}
    content = {"bare": tensors, "prior": prior, "trainer": {"ema_model": prior, "model": other, "step": 3}}[wrapped]
    path = tmp_path / "prior_aes_finetune.pth"
    torch.save(content, path)
    read_foreign(path, "", None, tmp_path / "out")
    model = load_model(tmp_path / "out")
    assert isinstance(model.system, PriorSystem) and model.system.network.attention_dropout == 0.05
    assert all(torch.equal(each, tensors[name]) for name, each in model.network.state_dict().items())


def test_unpublished_weights_require_an_experiment_and_pickles_are_rejected(tmp_path):
    network = PriorConfig(**SMALL).build(SPEC)
    path = tmp_path / "mine.pt"
    torch.save(network.state_dict(), path)
    with pytest.raises(ValueError, match="without a published name.*--experiment"):
        read_foreign(path, "", None, tmp_path / "out")
    with pytest.raises(ValueError, match="does not fit the prior described. missing: .*layers.1"):
        read_foreign(path, "", ROOT / "config" / "experiments" / "prior_demo.yaml", tmp_path / "out")
    torch.save({"ema_model": network.state_dict(), "version": Unsafe()}, path)
    with pytest.raises(ValueError, match="would run code from it.*'ema_model'"):
        read_foreign(path, "", None, tmp_path / "out")


class Unsafe:
    """A pickled object, as a trainer's file may hold besides tensors."""


def test_unknown_prior_key_is_reported():
    with pytest.raises(ValueError, match="network.heads is not a known key"):
        parse(PriorSystem, {"type": "prior", "network": {"heads": 8}}, "system")


def test_prior_in_bf16_agrees_with_float32_up_to_rounding():
    torch.manual_seed(0)
    network = PriorConfig(**SMALL | {"self_cond": True, "normformer": True, "norm_in": True}).build(SPEC)
    system = system_of()
    streams = Streams(0, torch.zeros(16).long(), torch.arange(16))
    batch = system.batch(Pairs(16).stored, None, streams, SPEC, None)  # type: ignore[arg-type]
    objective = system.build_objective(SPEC)
    exact = objective(network, batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        rounded = objective(network, batch).loss
    rounded.mean().backward()
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.05)
    assert all(each.grad.isfinite().all() for each in network.parameters() if each.grad is not None)


def test_self_conditioned_prior_receives_the_clamped_estimate():
    """With eps prediction an estimate at high noise lies far outside [-1, 1]."""
    seen: list[float] = []

    class Eps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x, t, /, self_cond=None, **cond):
            seen.append(float(self_cond.abs().max()))
            return torch.zeros_like(x)

    system = PriorSystem(
        network={**SMALL, "self_cond": True}, process={"num_timesteps": 50}, objective={"prediction": "eps"}
    )
    for kind in ("ddpm", "ddim", "legacy_ddim"):
        seen.clear()
        sampling = EmbeddingSampling(sampler={"type": kind, "num_steps": 5, "clip_denoised": True}, num_candidates=1)
        generator = EmbeddingGenerator(Eps(), system.reading(SPEC), SPEC, sampling)
        generator({"text_embed": torch.randn(4, DIM)}, torch.arange(4))
        assert seen[0] == 0 and 0.9 < max(seen) <= 1, kind


def test_batches_of_other_prompts_or_of_another_encoder_are_not_reused() -> None:
    """The description is part of the identity by which an interrupted stage finds its batches."""
    settings = PriorSampleConfig(prompts="prompts.txt", num_samples=2)
    made = [(["a"], {"dim": 8}), (["b"], {"dim": 8}), (["a"], {"dim": 16}), (["a"], {"dim": 8})]
    described = [EmbeddingMaker(None, {}, prompts, text, settings).described for prompts, text in made]  # type: ignore[arg-type]
    assert described[0] == described[3] and described[0] not in described[1:3]
