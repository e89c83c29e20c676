"""An edit reruns its own stage and later ones, and nothing else."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import yaml
from projects import Project

from image_diffusion.core.files.atomic import read_json, write_json

pytestmark = pytest.mark.slow

AFTER_SAMPLE = {"sample", "evaluate", "track", "report", "summary"}


@pytest.mark.smoke
def test_a_second_run_has_nothing_to_do(finished: Project) -> None:
    assert "Nothing to be done" in finished.run()


def test_comment_reruns_nothing(finished: Project) -> None:
    path = finished / "config/experiments/micro.yaml"
    path.write_text("# Another word.\n" + path.read_text())
    assert finished.planned() == set()


def test_touching_source_reruns_nothing(finished: Project) -> None:
    for path in (finished / "images").rglob("*.png"):
        os.utime(path)
    assert finished.planned() == set()


@pytest.mark.smoke
def test_editing_sample_reruns_sample_and_later_stages(finished: Project) -> None:
    finished.edit(lambda experiment: experiment["sample"].update(num_samples=8))
    assert finished.planned() == AFTER_SAMPLE


def test_editing_evaluate_leaves_the_samples(finished: Project) -> None:
    finished.edit(lambda experiment: experiment.update(evaluate={"neighbours": 2}))
    assert finished.planned() == AFTER_SAMPLE - {"sample"}


def test_editing_train_leaves_the_data(finished: Project) -> None:
    finished.edit(lambda experiment: experiment["train"].update(seed=1))
    assert finished.planned() == {"train", *AFTER_SAMPLE}


def test_editing_resources_reruns_nothing(finished: Project) -> None:
    finished.edit(lambda experiment: experiment["resources"].update(memory_mb=1000, processes_per_node=2))
    assert finished.planned() == set()


def test_an_experiment_is_a_target_and_may_build_on_another(finished: Project) -> None:
    path = finished / "config/experiments/train.yaml"  # has the name of a rule, so its name as a target means the rule
    path.write_text("base: micro\n")
    path.with_name("mine.yaml").write_text("base: micro\nsample: {num_samples: 8}\n")
    assert finished.planned("mine") == {"train", *AFTER_SAMPLE, "mine"}
    assert finished.planned("--config", "experiments=mine") == {"train", *AFTER_SAMPLE}
    assert finished.planned("micro") == finished.planned() == set()
    trained = "results/mine/config/train.yaml"
    before = (finished / trained).read_bytes()
    finished.edit(lambda experiment: experiment["train"].update(steps=10))
    finished.planned("mine")
    assert (finished / trained).read_bytes() != before
    assert "results/train/" in finished.run("--dry-run", "--config", "experiments=train")


def test_one_more_image_reruns_everything(finished: Project) -> None:
    image = finished / "images/dark/000.png"
    (finished / "images/dark/new.png").write_bytes(image.read_bytes())
    assert {"crop", "train", *AFTER_SAMPLE} <= finished.planned()


def test_data_that_a_slow_clock_dates_before_their_results_still_rerun_everything(finished: Project) -> None:
    """A clock that was set back gives the new crops an earlier time than the old weights, detector and reference."""
    image = finished / "images/dark/000.png"
    (finished / "images/dark/new.png").write_bytes(image.read_bytes())
    dataset = finished / "results/datasets/dots-16"
    earlier = (dataset / "crops/manifest.json").stat().st_mtime - 3600
    finished.run("--until", "crop")
    for path in dataset.glob("crops/**/*"):
        os.utime(path, (earlier, earlier))
    assert {"detect", "reference", "train", *AFTER_SAMPLE} <= finished.planned()
    said = finished.run()
    assert "model.json is made again: it was made from other data than those in results/datasets/dots-16/crops" in said
    assert "detector.json is made again: it was made from other data than" in said
    assert "Nothing to be done" in finished.run()


def test_changed_number_of_shards_reruns_everything(finished: Project) -> None:
    finished.edit(lambda experiment: experiment["data"].update(num_shards=3))
    assert {"crop", "train", *AFTER_SAMPLE} <= finished.planned()


@pytest.mark.long
def test_several_jobs_make_large_reference_and_their_parts_are_removed(finished: Project) -> None:
    finished.edit(lambda experiment: experiment["data"].update(num_shards=32))
    reference = finished / "results/datasets/dots-16/references/inpipe"
    finished.run("--notemp", "--until", "reference_part")
    assert sorted(path.name for path in (reference / "parts").iterdir()) == ["part-0-of-2.npz", "part-1-of-2.npz"]
    finished.run()
    assert not (reference / "parts").exists() and (reference / "reference.json").is_file()
    assert "Nothing to be done" in finished.run()


def test_touch_keeps_finished_parts(finished: Project) -> None:
    samples = finished / "results/micro/samples"
    (samples / "samples.npz").unlink()
    (samples / "part-0-of-2.npz").touch()
    finished.run("--touch")
    assert (samples / "part-0-of-2.npz").exists()


def test_a_deleted_result_is_made_again(finished: Project) -> None:
    (finished / "results/micro/metrics.json").unlink()
    assert finished.planned() == AFTER_SAMPLE - {"sample"}


def test_a_deleted_manifest_is_made_again(finished: Project) -> None:
    """Although all files made from it exist."""
    (finished / "results/datasets/dots-16/crops/manifest.json").unlink()
    assert "crop" in finished.planned()


def test_changed_training_code_is_reported_but_reruns_nothing(finished: Project) -> None:
    write_json(finished / "results/micro/config/train.code", {"code": "of another day"})
    assert "The code of train has changed since. To make it again: rm -r results/micro/train" in finished.run("-n")
    assert finished.planned() == set()
    shutil.rmtree(finished / "results/micro/train")
    assert finished.planned() == {"train", *AFTER_SAMPLE}
    assert "has changed since" not in finished.run("-n")


def test_changed_weaker_network_reruns_samples(finished: Project) -> None:
    trained, weaker = finished / "results/micro/train", finished / "weaker"
    weaker.mkdir()
    for name in ("weights.safetensors", "model.json"):
        shutil.copy(trained / name, weaker)
    guided = {"weaker_weights": "weaker", "guidance": {"guidance_scale": 2}}
    finished.edit(lambda experiment: experiment["sample"].update(guided))
    finished.run("results/micro/samples/samples.npz")
    assert "sample" not in finished.planned()
    os.utime(weaker / "weights.safetensors")
    assert finished.planned() == AFTER_SAMPLE
    shutil.rmtree(weaker)
    assert finished.planned() == AFTER_SAMPLE


def test_changed_initial_weights_rerun_training(finished: Project) -> None:
    trained, start = finished / "results/micro/train", finished / "start"
    start.mkdir()
    for name in ("weights.safetensors", "model.json"):
        shutil.copy(trained / name, start)
    finished.edit(lambda experiment: experiment["train"].update(init_from="start"))
    finished.run("results/micro/train/weights.safetensors")
    assert "train" not in finished.planned()
    os.utime(start / "weights.safetensors")
    assert {"train", *AFTER_SAMPLE} <= finished.planned()


def test_weights_that_a_slow_clock_dates_before_what_started_from_them_rerun_training(finished: Project) -> None:
    experiments = finished / "config/experiments"
    tuned = yaml.safe_load((experiments / "micro.yaml").read_text())
    tuned["train"]["init_from"] = {"experiment": "micro"}
    (experiments / "tuned.yaml").write_text(yaml.safe_dump(tuned))
    weights, asked = "results/micro/train/weights.safetensors", ("--config", "experiments=[tuned]")
    finished.run("results/tuned/train/weights.safetensors", *asked)
    finished.edit(lambda experiment: experiment["train"].update(seed=1))
    earlier = (finished / weights).stat().st_mtime - 3600
    finished.run(weights)
    for path in (finished / "results/micro/train").glob("*"):
        os.utime(path, (earlier, earlier))
    said = finished.run("results/tuned/train/weights.safetensors", *asked)
    assert "model.json is made again: it started from other weights than those in results/micro/train" in said
    assert finished.planned("results/tuned/train/weights.safetensors", *asked) == set()


def test_metrics_are_the_same_if_images_are_not_stored(finished: Project) -> None:
    result = finished / "results/micro"
    before = read_json(result / "metrics.json")
    finished.edit(lambda experiment: experiment["sample"].update(keep=False, grid_images=4, images_per_job=4))
    finished.run()
    with np.load(result / "samples/samples.npz") as arrays:
        assert len(arrays["arr_0"]) == 4
    after = read_json(result / "metrics.json")
    changed = after["protocol"]["samples"]["settings"] | {"grid_images": 100, "images_per_job": 5000}
    assert after["protocol"]["samples"] | {"settings": changed} == before["protocol"]["samples"]
    assert after["protocol"]["samples_sha256"] == before["protocol"]["samples_sha256"]
    assert after["metrics"] == before["metrics"] and after["classes"] == before["classes"]
    assert "Nothing to be done" in finished.run()
    (finished / "config/experiments/mine.yaml").write_text("base: micro\nevaluate: {against: {experiment: micro}}\n")
    told = finished.snakemake("mine").stdout
    assert "evaluate.against.experiment stores 4 of its 16 images, since its sample.keep is false" in told
