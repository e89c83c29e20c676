"""Sampling a trained experiment by its name, with short options."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import image_diffusion
from image_diffusion.core.files.atomic import write_json
from image_diffusion.core.files.image_arrays import read_arrays
from image_diffusion.experiments.experiment import load_sections
from image_diffusion.stages import sample
from image_diffusion.systems.tokens.tokens import TokensSystem
from image_diffusion.workflow.plans import plan_file
from image_diffusion.workflow.trained_files import TrainedFiles, find_trained
from plans import a_plan
from tiny_models import write_model


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(Path("results/mine"), step=3)
    return Path("results")


def drawn(*given: str) -> tuple[np.ndarray, np.ndarray]:
    sample.main(list(given))
    arrays = read_arrays(Path("drawn", given[0].rpartition("/")[2], "samples.npz"))
    return arrays["arr_0"], arrays["arr_1"]


def test_experiment_is_sampled_by_its_name(results: Path) -> None:
    images, labels = drawn("mine")
    assert (len(images), sorted(set(labels.tolist()))) == (16, [0, 1])
    again, labels = drawn("mine", "--num", "2", "--label", "light", "--label", "1", "--seed", "3")
    assert (len(again), labels.tolist()) == (2, [1, 1])
    assert not np.array_equal(again[:2], images[:2])
    settings = json.loads(Path("drawn/mine/samples.json").read_text())["settings"]
    assert (settings["seed"], settings["sampler"]["num_steps"], settings["batch_size"]) == (3, 2, 2)


def test_set_option_changes_only_the_given_keys(results: Path) -> None:
    drawn("mine", "--num", "1", "--guidance", "2", "--set", "sample.sampler.num_steps=5", "-s", "sample.num_samples=3")
    settings = json.loads(Path("drawn/mine/samples.json").read_text())["settings"]
    assert settings["num_samples"] == 3, "--set goes before the short option"
    assert (settings["sampler"]["type"], settings["sampler"]["num_steps"]) == ("ddim", 5)
    assert settings["guidance"]["guidance_scale"] == 2


def test_weights_folder_is_sampled_with_the_defaults_of_its_system(results: Path) -> None:
    images, _ = drawn("results/mine/train", "--num", "1", "--set", "sample.sampler.num_steps=2")
    assert len(images) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["mine", "--set", "sample.prompts=[a cat]"], "sample.prompts is set, but the network takes no words"),
        (["mine", "--set", "sample.negative_prompt=a cat"], "sample.negative_prompt is set, but the network takes no"),
        (["mien"], "'mien' is no trained experiment of results and no folder that holds weights.safetensors. Did you"),
        (["other"], " Trained: mine. Train it, or name another one."),
        ([], "Name a trained experiment, or give --config, --weights and --output."),
        (["mine", "--set", "sample.stpes=1"], "results/mine/config/sample.yaml --set sample.num_samples=16 --set samp"),
        (
            ["mine", "--set", "sample.num_samples"],
            "--set 'sample.num_samples' is not a setting. Write KEY=VALUE",
        ),
        (["mine", "--set", "sample.labels=[1"], "--set sample.labels=[1: the value is not valid YAML: line 1"),
        (["mine", "--num", "none"], "num_samples is 'none': input should be a valid integer"),
    ],
)
def test_sample_command_errors_are_one_line(results: Path, given: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        sample.main(given)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("drawn").exists()


@pytest.mark.parametrize("change", ["tiles={rows: 2, columns: 2}", "decoder=else", "weaker_weights=results/mine/train"])
def test_settings_that_a_system_does_not_use_are_rejected(change: str) -> None:
    with pytest.raises(ValueError, match=rf"sample\.{change.partition('=')[0]} has no effect on a system of this type"):
        load_sections(None, ["sample"], TokensSystem.sections, [f"sample.{change}"])
    assert load_sections(None, ["sample"], TokensSystem.sections, ["sample.seed=3"])["sample"].seed == 3


def test_files_of_required_experiments_are_found(results: Path) -> None:
    plan = a_plan("mine", codec="vae", codec_experiment="vae", small_images_experiment="small")
    write_json(plan_file(results, "mine"), asdict(plan))
    assert find_trained("mine", results) == TrainedFiles(
        "mine",
        results / "mine/train/weights.safetensors",
        results / "mine/config/sample.yaml",
        results / "vae/train/weights.safetensors",
        results / "small/samples/samples.npz",
        crop=results / "datasets/dots-16/config/crop.yaml",
    )


def test_loaded_model_draws_the_same_images_as_the_command(results: Path) -> None:
    images, labels = drawn("mine", "--num", "3", "--seed", "0")
    make = image_diffusion.load("mine")
    assert np.array_equal(make({"seed": range(3), "label": labels}), images)
    assert np.array_equal(make({"seed": [1]}), images[1:2]), "without a class, that of `sample`"
    assert len(make({"seed": range(2), "class": "light"})) == 2
    other = image_diffusion.load(results / "mine", seed=1)
    assert not np.array_equal(other({"seed": range(3)}), images)


def test_loaded_model_errors_are_one_line(results: Path) -> None:
    with pytest.raises(ValueError, match="'mien' is no trained experiment"):
        image_diffusion.load("mien")
    with pytest.raises(ValueError, match="stpes is not a known key"):
        image_diffusion.load("mine", stpes=1)
    make = image_diffusion.load("mine")
    for request, message in (
        ({"seed": [0], "clas": ["light"]}, "Unknown column 'clas'. The model takes seed, label, class."),
        ({"class": ["light"]}, "The column 'seed' is missing. The model takes seed, label, class."),
        ({"seed": []}, "The table has no rows. Give a row for each image."),
    ):
        with pytest.raises(ValueError, match=message):
            make(request)
