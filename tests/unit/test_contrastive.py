"""Small CLIP of a data set: it learns captions, is reproducible, and is saved with its prior."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from image_diffusion.core.config.base import parse, to_yaml
from image_diffusion.core.files.checksums import damaged
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded.pairs import write_pairs
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.sources.scikit_digits import PaintedDigits
from image_diffusion.stages import ema
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.pairs.config import PairInputs, PairsConfig
from image_diffusion.systems.pairs.contrastive import contrastive_loss
from image_diffusion.systems.prior.generation import PriorSampleConfig, text_encoder
from image_diffusion.systems.sampling import SamplingInputs
from image_diffusion.text_encoders.learned import FILE, read_text, word_numbers
from image_diffusion.tracking.plan import _carried
from image_diffusion.training.load_model import load_codec, load_model
from image_diffusion.training.session import run
from image_diffusion.workflow.damage import Damage

CPU = torch.device("cpu")
SOURCE = PaintedDigits(num_images=300)
SETTINGS: dict[str, Any] = {
    "type": "contrastive",
    "captions": {"type": "beside"},
    "splits": {"train": 0.8, "validation": 0.1, "test": 0.1},
    "num_tokens": 8,
    "training": {"epochs": 6, "batch_size": 64},
}


@pytest.fixture(scope="module")
def crops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("painted")
    data = {"name": "x", "source": SOURCE, "resolution": 32, "num_shards": 2, "validation_fraction": 0.1}
    crop_dataset(DataConfig.model_validate(data), folder)
    return folder


def written(crops: Path, output: Path, source: Any = SOURCE, **settings: Any) -> tuple[dict[str, Any], int]:
    pairs = parse(PairsConfig, SETTINGS | settings, "pairs")
    made = pairs.build(PairInputs(crops, source, 2, None, CPU, output))
    return write_pairs(made, "x", pairs.splits, pairs.dtype, output)


@pytest.fixture(scope="module")
def pairs(crops: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    written(crops, folder)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def test_images_match_their_captions_in_the_shared_space(pairs: Path):
    towers = json.loads((pairs / "towers.json").read_text())
    assert towers["retrieval_at_1"] > 8 * towers["chance"], towers
    assert 0 < towers["chance"] <= 1 / towers["num_captions"] + 1e-6
    manifest = json.loads((pairs / "manifest.json").read_text())
    assert manifest["pairs"]["shared_space"] is True
    data = open_shards(pairs, "all")
    assert towers["num_held_out"] + towers["num_pairs"] == data.num_samples == 300
    assert open_shards(pairs, "train").num_samples == towers["num_pairs"], "the prior is judged by nothing learnt from"
    rows = data.gather(np.arange(300)).float()
    assert rows.shape == (300, 10, 128)
    torch.testing.assert_close(rows[:, :2].norm(dim=2), torch.ones(300, 2), rtol=1e-3, atol=1e-3)
    own, other = (F.cosine_similarity(rows[:, 0], rows[:, 1].roll(shift, 0)).mean() for shift in (0, 7))
    assert own > other + 0.2


def test_word_order_matters_and_unknown_words_are_ignored(pairs: Path):
    text = read_text(pairs, 8, CPU)
    said = [
        "a large upright one in red on white",
        "a large upright one in white on red",
        "a large yellow submarine",
        "?",
    ]
    texts, tokens = text(said)
    assert texts.shape == (4, 128) and tokens.shape == (4, 8, 128)
    assert not torch.allclose(texts[0], texts[1], atol=1e-3)
    assert torch.equal(tokens.any(2).sum(1), torch.tensor([8, 8, 3, 0])) and not texts[3].any()
    torch.testing.assert_close(text(said[:1])[0], texts[:1], rtol=1e-5, atol=1e-6)
    assert word_numbers(["b a x b a"], ["a", "b"], 3).tolist() == [[2, 1, 2]]


def test_loss_equals_the_paper_and_equal_captions_are_not_negatives():
    images, texts = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    captions, scale = torch.arange(5)[:, None], torch.tensor(1.0)
    cosines = F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T * scale.exp()
    by_hand = -(cosines.log_softmax(1).diag().mean() + cosines.log_softmax(0).diag().mean()) / 2
    torch.testing.assert_close(contrastive_loss(images, texts, captions, scale), by_hand)
    captions[3], texts[3] = captions[1], texts[1]
    logits = F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T * scale.exp()
    logits[1, 3] = logits[3, 1] = -torch.inf
    by_hand = -(logits.log_softmax(1).diag().mean() + logits.log_softmax(0).diag().mean()) / 2
    torch.testing.assert_close(contrastive_loss(images, texts, captions, scale), by_hand)
    assert contrastive_loss(images, texts, captions, torch.tensor(9.0)) == contrastive_loss(
        images, texts, captions, torch.tensor(5.0)
    ), "the scale ends at 100"


SHORT = {"epochs": 0.1, "batch_size": 16}


def test_training_is_reproducible_and_skipped_if_up_to_date(crops: Path, tmp_path: Path, capsys):
    for name in ("once", "again"):
        assert written(crops, tmp_path / name, training=SHORT)[1] == 2
        assert "held-out images find their caption" in capsys.readouterr().out
    assert content(tmp_path / "again") == content(tmp_path / "once")
    assert written(crops, tmp_path / "again", training=SHORT)[1] == 0
    assert "find their caption" not in capsys.readouterr().out


def test_changed_training_rewrites_all_pairs_and_damaged_tower_is_restored(crops: Path, tmp_path: Path):
    before, _ = written(crops, tmp_path / "out", training=SHORT)
    other = SHORT | {"seed": 1}
    after, count = written(crops, tmp_path / "out", training=other)
    assert count == 2 and before["pairs"] != after["pairs"]
    whole = content(tmp_path / "out")
    (tmp_path / "out" / FILE).write_bytes(b"damaged")
    assert Damage("").fault_of(tmp_path / "out/manifest.json") is not None
    assert written(crops, tmp_path / "out", training=other)[1] == 0
    assert content(tmp_path / "out") == whole


class Told(PaintedDigits):
    """Painted digits with other captions."""

    said: str | None = None

    def read_captions(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        return {name: [self.said] if self.said else [] for name in super().read_captions(columns)}


@pytest.mark.parametrize(
    ("said", "settings", "words"),
    [
        (None, {}, "no image has a caption"),
        ("a digit", {}, "all 300 images have the same caption, 'a digit'"),
        ("", {"splits": {"train": 1, "validation": 0, "test": 0}}, "none of 300 pairs are held out"),
    ],
)
def test_uninformative_captions_are_rejected_before_training(tmp_path, said, settings, words):
    data = {"name": "x", "source": SOURCE, "resolution": 32, "num_shards": 1, "validation_fraction": 0}
    crop_dataset(DataConfig.model_validate(data), tmp_path / "crops")
    source = SOURCE if said == "" else Told(num_images=300, said=said)
    with pytest.raises(ValueError, match=words) as caught:
        written(tmp_path / "crops", tmp_path / "out", source, **settings)
    assert len(str(caught.value).splitlines()) == 1 and not (tmp_path / "out").exists()


class Speechless(PaintedDigits):
    """Painted digits: every third has only a caption without words; of the others every fifth also has one, first."""

    def read_captions(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        spoken = super().read_captions(columns).items()
        return {
            name: ["!"] if i % 3 == 0 else ["?!", *own] if i % 5 == 0 else own for i, (name, own) in enumerate(spoken)
        }


def test_captions_without_words_are_left_out(crops: Path, tmp_path: Path):
    source, pairs = Speechless(num_images=300), parse(PairsConfig, SETTINGS | {"training": SHORT}, "pairs")
    made = pairs.build(PairInputs(crops, source, 2, None, CPU, tmp_path))
    manifest, _ = write_pairs(made, "x", pairs.splits, pairs.dtype, tmp_path, max_bad_fraction=0.5)
    towers = json.loads((tmp_path / "towers.json").read_text())
    assert manifest["quarantined"] == 140, "a third, and of the others a fifth by their first caption"
    assert open_shards(tmp_path, "train").num_samples < towers["num_pairs"] < 200
    assert np.isfinite(open_shards(tmp_path, "all").gather(np.arange(160))).all()


def test_text_tower_is_saved_with_prior_weights_and_other_towers_are_rejected(crops, pairs, tmp_path, monkeypatch):
    prior = {"type": "prior", "network": {"depth": 1, "num_heads": 2, "head_width": 8, "max_text_len": 8, "ff_mult": 1}}
    train = {"steps": 2, "global_batch": 8, "flip_probability": 0, "keep_raw": True, "grid_every_steps": None}
    (tmp_path / "train.yaml").write_text(
        to_yaml({"experiment": "x", "codec": {"type": "rgb"}, "system": prior, "train": train})
    )
    training = prepare_training(tmp_path / "train.yaml", pairs / "manifest.json", None)
    output = tmp_path / "train"
    run(training.build, training.stage.train, training.model, training.data, output)
    for folder in (output, output / "raw"):
        assert (folder / FILE).read_bytes() == (pairs / FILE).read_bytes()
    assert Damage("").fault_of(output / "model.json") is None
    assert _carried(output) == [FILE], "it goes into MLflow with the weights"
    weights, averaged = output / "weights.safetensors", tmp_path / "averaged" / "weights.safetensors"
    monkeypatch.setattr(
        sys, "argv", ["ema", f"--state={output / 'state'}", f"--weights={weights}", f"--output={averaged}"]
    )
    ema.main()
    assert (averaged.parent / FILE).is_file() and Damage("").fault_of(averaged.parent / "model.json") is None

    model = load_model(output)
    settings = PriorSampleConfig(prompts=("a large upright one in red on white",), num_samples=2)
    pairs = model.pairs["pairs"]
    assert text_encoder(pairs, None, output).identity == pairs["text"]
    made = model.system.sampling().maker(SamplingInputs(model, settings, load_codec(model, None, CPU), load_model))
    assert made(slice(0, 2)).shape == (2, 128)

    written(crops, tmp_path / "other", training=SHORT)
    (output / FILE).write_bytes((tmp_path / "other" / FILE).read_bytes())
    assert damaged(output, json.loads((output / "model.json").read_text())["carried"]) == [FILE]
    with pytest.raises(ValueError, match="but the text encoder is now .* Train again"):
        text_encoder(pairs, None, output)
    (output / FILE).unlink()
    with pytest.raises(ValueError, match=f"{FILE} does not exist"):
        text_encoder(pairs, None, output)
