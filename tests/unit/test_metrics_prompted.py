"""Retrieval against known values, and agreement of images and prompts by a model from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from image_diffusion.core.config.base import to_yaml
from image_diffusion.experiments.resolve import load_all
from image_diffusion.metrics.images.embedding_similarity import (
    PromptEncoder,
    PromptJudge,
    check_prompted,
    evaluate_prompted,
    retrieval,
    same_rows,
)
from image_diffusion.metrics.samples import Samples

WORDS = ["a", "zero", "one", "two", "three", "four", "five", "six"]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def values(*arguments: Any) -> list[float]:
    return [each.value for each in retrieval(*arguments, "items").values()]


def test_retrieval_rank_counts_items_before_the_first_match() -> None:
    gallery, groups = torch.eye(8), torch.arange(8)
    rank_three = torch.tensor([[0.0, 0.5, 0.4, 0.3, 0, 0, 0, 0]])  # its match is the third
    assert values(rank_three, torch.tensor([3]), gallery, groups) == [0, 1]
    assert values(torch.cat([rank_three, gallery[3:4]]), torch.tensor([3, 3]), gallery, groups) == [0.5, 1]
    two_of_a_group = torch.tensor([7, 1, 2, 3, 4, 5, 6, 7])
    assert values(gallery[:1], torch.tensor([7]), gallery, two_of_a_group) == [1, 1], "either of them counts"
    assert values(torch.ones(1, 8), torch.tensor([0]), gallery, groups) == [0, 0], "a tie counts against it"
    assert values(gallery[:1], torch.tensor([9]), gallery, groups) == [0, 0], "there is none of its own"
    assert same_rows(torch.tensor([[2.0, 0], [1, 1], [2, 0]])).tolist() == [1, 0, 1]


def test_retrieval_of_unrelated_sets_is_at_chance_within_its_interval() -> None:
    draw = torch.Generator().manual_seed(0)
    query, gallery = (torch.randn(2000, 16, generator=draw) for _ in range(2))
    group = torch.arange(2000)
    found = retrieval(query, group, gallery[:50], group[:50] + 1950, "items")
    assert found["retrieval_at_1"].value <= found["retrieval_at_5"].value < 0.02
    asked = group % 50
    found = retrieval(query, asked, gallery[:50], group[:50], "items")
    for k, each in zip((1, 5), found.values(), strict=True):
        assert each.interval is not None and each.interval[0] < k / 50 < each.interval[1]
        assert each.note == "among 50 items" and each.n == 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models of both kinds, with a tokenizer of a few words."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    found = {}
    for kind in ("CLIP", "Siglip"):
        path = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        special = {"<pad>": 0, "<unk>": 1, "<bos>": 2, "<eos>": 3}
        vocabulary = special | {word: 4 + i for i, word in enumerate(WORDS)}
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
        model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A <eos>", special_tokens=[("<eos>", 3)]
        )
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=model, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>", bos_token="<bos>"
        ).save_pretrained(path)
        text = SIZES | {"vocab_size": 12, "max_position_embeddings": 8, "eos_token_id": 3, "pad_token_id": 0}
        sizes = {"text_config": text, "vision_config": SIZES | {"image_size": 16, "patch_size": 8}}
        config = getattr(transformers, f"{kind}Config")(**sizes)
        getattr(transformers, f"{kind}Model")(config).save_pretrained(path)
        size = {"crop_size" if kind == "CLIP" else "size": {"height": 16, "width": 16}}
        processor = getattr(transformers, f"{kind}ImageProcessor")(image_mean=[0.5] * 3, image_std=[0.5] * 3, **size)
        processor.save_pretrained(path)
        found[kind.lower()] = path
    return found


def samples(prompts: list[str]) -> Samples:
    pixels = np.random.default_rng(0).integers(0, 256, (len(prompts), 16, 16, 3), dtype=np.uint8)
    return Samples(pixels, None, [], protocol={"prompts": prompts})


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_prompt_cosine_matches_the_transformers_model(kind: str, folder: dict[str, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    prompts = [f"a {WORDS[1 + i % 7]}" for i in range(120)]
    given = samples(prompts)
    judge = PromptJudge(weights=str(folder[kind]), name=f"tiny_{kind}")
    entries = evaluate_prompted(given, judge.build_both())
    model = transformers.AutoModel.from_pretrained(folder[kind]).eval()
    read = transformers.AutoTokenizer.from_pretrained(folder[kind])(
        prompts, padding="max_length", max_length=8, return_tensors="pt"
    )
    x = (given.gather(np.arange(120)).float() / 255 - 0.5) / 0.5
    with torch.inference_mode():
        texts, images = model.get_text_features(**read), model.get_image_features(pixel_values=x)
    texts, images = (getattr(each, "pooler_output", each) for each in (texts, images))
    cosines = torch.cosine_similarity(texts, images)
    found = entries[f"prompt_similarity_tiny_{kind}"]
    assert found["value"] == pytest.approx(float(cosines.mean()), abs=1e-5) and found["interval"] is not None
    assert set(entries) == {f"{name}_tiny_{kind}" for name in (
        "prompt_similarity", "other_prompt_similarity", "prompt_retrieval_at_1", "prompt_retrieval_at_5"
    )}  # fmt: skip
    assert entries[f"prompt_retrieval_at_5_tiny_{kind}"]["note"] == "among 7 prompts"


def test_single_prompt_has_no_comparison() -> None:
    class Same:
        identity: dict[str, Any] = {}  # noqa: RUF012
        classes: list[str] = []  # noqa: RUF012
        doubt = None

        def __call__(self, images: torch.Tensor) -> Any:
            from image_diffusion.metrics.features.base import Detected

            return Detected(torch.ones(len(images), 2))

        def metric_name(self, metric: str) -> str:
            return metric

    encoder = PromptEncoder(Same(), None, None)
    encoder.texts = lambda prompts: torch.ones(len(prompts), 2)  # type: ignore[method-assign]
    entries = evaluate_prompted(samples(["a"] * 4), encoder)
    assert "other_prompt_similarity" not in entries and entries["prompt_retrieval_at_1"]["value"] == 1


def test_invalid_prompt_evaluations_are_rejected_before_any_work(folder: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the samples have no prompts. Evaluate a model that takes prompts"):
        check_prompted(Samples(np.zeros((2, 8, 8, 3), np.uint8), None, []))
    vision = pytest.importorskip("transformers").Dinov2Config(**SIZES, image_size=16, patch_size=8)
    pytest.importorskip("transformers").Dinov2Model(vision).save_pretrained(tmp_path)
    pytest.importorskip("transformers").CLIPImageProcessor().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="embeds no words. Name a CLIP or a SigLIP"):
        PromptJudge(weights=str(tmp_path), name="blind").build_both()


def test_prompt_evaluation_without_prompts_is_rejected(tmp_path: Path) -> None:
    described = tmp_path / "labels.yaml"
    sections = {
        "data": {"name": "digits", "source": {"type": "digits"}, "resolution": 16},
        "system": {"type": "dit", "network": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4}},
        "train": {"steps": 1},
        "evaluate": {"prompts": {"weights": "somewhere", "name": "tiny"}},
    }
    described.write_text(to_yaml(sections))
    with pytest.raises(ValueError, match="evaluate.prompts is set, but the samples have no prompts"):
        load_all([described])
