"""The model card: front matter for the Hugging Face Hub, contents, and measured metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from image_diffusion.export.descriptions import CardUse, model_card
from image_diffusion.training.load_model import load_model
from tiny_models import write_model

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

USE = CardUse("unconditional-image-generation", "DiTPipeline", 'pipeline = DiTPipeline.from_pretrained(".")')
MEASURED = {
    "metrics": {
        "inpipe_fd": {"value": 1.5, "interval": [1.0, 2.0], "n": 300, "note": "few | samples"},
        "accuracy": {"value": None, "interval": None, "n": 0, "note": "no classes"},
    },
    "protocol": {"detectors": [{"name": "inpipe"}]},
}


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    write_model(tmp_path, step=10)
    text = model_card("mine", "flowers-64", load_model(tmp_path / "train"), USE, MEASURED, {"grid.png": "Samples"})
    (tmp_path / "README.md").write_text(text)
    from huggingface_hub import ModelCard  # slow to import

    return ModelCard.load(tmp_path / "README.md")


def test_hugging_face_hub_parses_the_card(card: ModelCard) -> None:
    assert card.data.library_name == "diffusers"
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("flowers-64", "inpipe_fd", 1.5)
    assert card.data.model_name == "mine"


def test_library_name_follows_the_export_format(tmp_path: Path) -> None:
    write_model(tmp_path, step=10)
    use = CardUse("image-to-image", "load", 'model = load(".")', library="other")
    text = model_card("mine", "flowers-64", load_model(tmp_path / "train"), use, None, {})
    assert "library_name: other" in text and "from other import load" in text and "diffusers" not in text


def test_card_lists_samples_training_size_classes_and_usage(card: ModelCard) -> None:
    for part in ("# mine", "![Samples](grid.png)", "10 steps, 640 examples", "dark, light", "1 to 2", "DiTPipeline"):
        assert part in card.text, part
    assert r"few \| samples" in card.text


def test_doubt_shared_by_all_metrics_is_one_sentence(tmp_path: Path) -> None:
    write_model(tmp_path, step=10)
    doubt = "the classifier guesses"
    metrics = {key: MEASURED["metrics"]["inpipe_fd"] | {"doubt": doubt} for key in ("inpipe_fd", "inpipe_kd")}
    metrics["other"] = MEASURED["metrics"]["inpipe_fd"] | {"doubt": "another"}
    metrics["copies"] = MEASURED["metrics"]["inpipe_fd"]
    measured = MEASURED | {"doubt": doubt, "metrics": metrics}
    text = model_card("mine", "flowers-64", load_model(tmp_path / "train"), USE, measured, {})
    assert (
        text.count(doubt) == 1
        and f"Do not rely on `inpipe_fd`, `inpipe_kd`: {doubt}." in text
        and "| another |" in text
    )


def test_card_without_metrics_has_no_results(tmp_path: Path) -> None:
    write_model(tmp_path, step=10)
    text = model_card("mine", "flowers-64", load_model(tmp_path / "train"), USE, None, {})
    assert "model-index" not in text and "## Results" not in text


def test_class_names_are_escaped_in_markdown(tmp_path: Path) -> None:
    write_model(tmp_path, step=10)
    model = replace(
        load_model(tmp_path / "train"), classes=["<img src=x>", "[a](http://b)", "a & b", "two\nlines", r"\[c]"]
    )
    text = model_card("mine", "flowers-64", model, USE, None, {})
    assert r"| Classes | &lt;img src=x&gt;, \[a](http://b), a &amp; b, two lines, \\\[c] |" in text
