"""Sweeps: their points, errors before any work, the best point of a curve, and plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from PIL import Image

from image_diffusion.core.files.weights import save_weights
from image_diffusion.experiments.experiment import Experiment
from image_diffusion.experiments.resolve import load_all, write_stages
from image_diffusion.metrics.curves import plot_sweep, reading, sweep_curve
from image_diffusion.samplers import Sampler
from image_diffusion.systems.diffusion.sweep import SweepConfig
from image_diffusion.training.checkpoint.averaged_weights import weights_at
from image_diffusion.training.checkpoint.checkpoint import Checkpoint, folder_name, write_checkpoint

TEXT: dict[str, Any] = {
    "data": {"name": "digits", "source": {"type": "digits"}, "resolution": 16},
    "system": {
        "type": "dit",
        "network": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4},
        "objective": {"type": "denoising", "label_drop_probability": 0.1},
    },
    "train": {"steps": 10, "checkpoint": {"every_steps": 2, "keep_every": 4}},
    "sample": {"num_samples": 20, "sampler": {"type": "ddim", "num_steps": 5, "eta": 0.5, "clip_denoised": True}},
}

UNLABELLED = {"type": "folder", "path": ".", "classes": "none"}


def experiment(folder: Path, **changes: Any) -> Experiment:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(TEXT | changes))
    return load_all([path])["mine"][1]


def test_sweep_points_change_one_sampling_setting(tmp_path: Path) -> None:
    sweep = {"guidance_scale": [1, 1.5], "sampler": ["ddim", "heun"], "num_steps": [2], "checkpoint": [4, 8, 10]}
    found = experiment(tmp_path, sweep=sweep)
    assert found.sweep.values == {
        "guidance_scale": ["1", "1.5"],
        "sampler": ["ddim", "heun"],
        "num_steps": ["2"],
        "checkpoint": ["4", "8", "10"],
    }
    sample = found.sample
    assert found.sweep.samples("checkpoint", "4", sample) == found.sweep.samples("sampler", "ddim", sample) == sample
    guided = found.sweep.samples("guidance_scale", "1.5", sample)
    assert guided.guidance.guidance_scale == 1.5 and guided.model_copy(update={"guidance": sample.guidance}) == sample
    other = found.sweep.samples("sampler", "heun", sample).sampler
    assert (other.type, other.num_steps, other.clip_denoised) == ("heun", 5, True)
    assert found.sweep.samples("num_steps", "2", sample).sampler == sample.sampler.model_copy(update={"num_steps": 2})
    assert SweepConfig(num_samples=7).samples("checkpoint", "4", sample).num_samples == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sweep": {"checkpoint": [4, 6]}}, "sweep.checkpoint names step 6, whose weights are not kept"),
        ({"sweep": {"checkpoint": [12]}}, "sweep.checkpoint names step 12"),
        ({"sweep": {"num_samples": 50}}, "sweep.num_samples is set, but sweep names no values"),
        ({"sweep": {"num_steps": [5, 5]}}, "sweep.num_steps names a value twice"),
        ({"sweep": {"num_steps": [2000]}}, "sweep.num_steps 2000: "),
        ({"sweep": {"sampler": ["magic"]}}, "Unknown sweep.sampler.0 'magic'"),
        ({"sweep": {"guidance_scale": [-1]}}, "sweep.guidance_scale.0 is -1"),
        (
            {"sweep": {"ema": [0.5]}},
            r"sweep.ema names 0.5, but the averages of train.ema are: ema-0.9999\. Name the",
        ),
        ({"sweep": {"ema": [0.9999, 0.9999]}}, "sweep.ema names a value twice"),
        (
            {"sweep": {"guidance_scale": [1, 2]}, "system": {"type": "dit", "network": TEXT["system"]["network"]}},
            "sweep.guidance_scale 2: sample.guidance.guidance_scale is 2, but the network never learns to do without a",
        ),
        (
            {"sweep": {"guidance_scale": [1, 2]}, "data": TEXT["data"] | {"source": UNLABELLED}},
            "sweep.guidance_scale 2: sample.guidance.guidance_scale is 2, but the data have no classes",
        ),
        (
            {"sweep": {"num_steps": [2]}, "system": {"type": "dvae", "network": {"num_layers": 2}}},
            "sample and sweep are set, but a system of type dvae has no use for them",
        ),
    ],
)
def test_invalid_sweep_points_are_rejected_before_any_work(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    if "system" in changes and changes["system"]["type"] == "dit":
        changes["system"]["objective"] = {"type": "denoising", "label_drop_probability": 0}
    with pytest.raises(ValueError, match=message) as told:
        experiment(tmp_path, **changes)
    assert len(str(told.value).splitlines()) == 1


def test_sweep_values_keep_all_digits(tmp_path: Path) -> None:
    sweep = experiment(tmp_path, sweep={"guidance_scale": [1.23456789, 2, 0.5]}).sweep
    assert sweep is not None and sweep.values == {"guidance_scale": ["1.23456789", "2", "0.5"]}


def test_every_sampler_can_be_swept() -> None:
    names = [kind.model_fields["type"].default for kind in get_args(get_args(Sampler)[0])]
    assert "sde" in names and SweepConfig.model_validate({"sampler": names}).sampler == tuple(names)


def test_sweeping_time_differences_does_not_retrain_rin(tmp_path: Path) -> None:
    network = {"width": 32, "patch": 4, "depth": 1, "num_latents": 4}
    rin = {"system": {"type": "rin", "network": network}, "sample": {"sampler": {"num_steps": 5}}}
    found = experiment(tmp_path, sweep={"time_difference": [0, 0.05]}, **rin)
    points = [found.sweep.samples("time_difference", value, found.sample).sampler for value in ("0", "0.05")]
    assert [point.time_difference for point in points] == [0, 0.05]
    write_stages("mine", found, tmp_path)
    assert "time_difference" not in (tmp_path / "mine/config/train.yaml").read_text().split("preview:")[0]


def test_averages_are_swept_by_rate_or_width(tmp_path: Path) -> None:
    rates = {"type": "exponential", "rates": [0.9, 0.99999]}
    found = experiment(tmp_path, sweep={"ema": ["raw", 0.9, 0.99999]}, train=TEXT["train"] | {"ema": rates})
    assert found.sweep.values == {"ema": ["raw", "0.9", "0.99999"]}
    assert found.sweep.samples("ema", "0.9", found.sample) == found.sample
    write_stages("mine", found, tmp_path)
    assert list(json.loads((tmp_path / "mine/config/plan.json").read_text())["sweep"]["ema"]) == [
        "raw",
        "0.9",
        "0.99999",
    ]
    widths = {"type": "power", "widths": [0.05, 0.1]}
    assert experiment(tmp_path, sweep={"ema": [0.1]}, train=TEXT["train"] | {"ema": widths}).sweep.ema == (0.1,)
    with pytest.raises(ValueError, match="sweep.ema names raw, but train.weights is best"):
        experiment(tmp_path, sweep={"ema": ["raw"]}, train=TEXT["train"] | {"weights": "best"})


def test_evaluate_against_needs_an_experiment_with_images_of_the_same_size(tmp_path: Path) -> None:
    against = {"evaluate": {"against": {"experiment": "other"}}}
    with pytest.raises(ValueError, match="evaluate.against.experiment is other, but .*other.yaml does not exist"):
        experiment(tmp_path, **against)
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(TEXT))
    found = experiment(tmp_path, **against)
    write_stages("mine", found, tmp_path)
    plan = json.loads((tmp_path / "mine/config/plan.json").read_text())
    assert (plan["against_experiment"], plan["against"]) == ("other", None)
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(TEXT | {"data": TEXT["data"] | {"resolution": 32}}))
    with pytest.raises(ValueError, match="makes images of 3 x 32 x 32, this one of 3 x 16 x 16"):
        experiment(tmp_path, **against)
    (tmp_path / "other.yaml").write_text(
        yaml.safe_dump(
            {name: TEXT[name] for name in ("data", "train")}
            | {"system": {"type": "dvae", "network": {"num_layers": 2}}}
        )
    )
    with pytest.raises(ValueError, match="evaluate.against.experiment makes no samples"):
        experiment(tmp_path, **against)


def point(value: float, interval: tuple[float, float] | None, n: int = 500, detector: str = "a") -> dict[str, Any]:
    entry = {"value": value, "debiased": None if interval is None else sum(interval) / 2, "interval": interval, "n": n}
    protocol = {"detectors": [detector], "reference": {}, "settings": {}, "num_samples": n, "weights": {"step": value}}
    return {"metrics": {"inpipe_fd": entry, "inpipe_kd": entry}, "protocol": protocol}


def test_best_point_is_the_lowest_with_significance(tmp_path: Path) -> None:
    points = {"1": point(3.0, (2.0, 3.0)), "2": point(1.9, (1.0, 1.5)), "4": point(1.5, (1.6, 1.9))}
    curve = sweep_curve("guidance_scale", points, "inpipe_fd")
    assert (curve["best"], curve["apart"]) == ("2", True), "debiased numbers are compared"
    points["4"] = point(2.5, (1.4, 3.0))
    assert sweep_curve("guidance_scale", points, "inpipe_fd")["apart"] is False
    points["4"] = point(1.5, None)
    curve = sweep_curve("guidance_scale", points, "inpipe_fd")
    assert (curve["best"], curve["apart"]) == ("4", None)
    assert reading([row["metrics"]["inpipe_fd"] for row in curve["points"]]) == [3.0, 1.9, 1.5]
    for axis, name in (("guidance_scale", "a"), ("sampler", "b"), ("ema", "d"), ("guidance_scale", "c")):
        plot_sweep({**curve, "axis": axis}, tmp_path / f"{name}.png")
        assert Image.open(tmp_path / f"{name}.png").width > 300
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "c.png").read_bytes()
    alone = [{**row, "metrics": {"inpipe_fd": row["metrics"]["inpipe_fd"]}} for row in curve["points"]]
    plot_sweep({**curve, "points": alone}, tmp_path / "alone.png")
    assert Image.open(tmp_path / "alone.png").width < Image.open(tmp_path / "a.png").width


def test_points_measured_differently_are_rejected() -> None:
    for other in (point(1.0, None, n=400), point(1.0, None, detector="b")):
        with pytest.raises(ValueError, match="points 1 and 2 of sweep.num_steps were measured differently"):
            sweep_curve("num_steps", {"1": point(1.0, None), "2": other}, "inpipe_fd")
    with pytest.raises(ValueError, match="has no fid"):
        sweep_curve("num_steps", {"1": point(1.0, None)}, "fid")


def checkpoint(step: int, value: float) -> Checkpoint:
    network = {"weight": torch.full((2,), value), "buffer": torch.tensor([step])}
    return Checkpoint(step, 8 * step, False, {"network": network, "ema-0.9": {"weight": torch.full((2,), -value)}}, {})


def test_weights_of_earlier_steps_come_from_the_run_of_the_final_weights(tmp_path: Path) -> None:
    for name, offset in (("a", 100.0), ("b", 0.0)):
        for step in (4, 8):
            write_checkpoint(tmp_path / "state" / name, checkpoint(step, step + offset), {}, {}, lambda: None)
    model = {"step": 8, "examples_seen": 64, "ema": "ema-0.9", "system": {}, "fingerprint": "b"}
    save_weights(tmp_path / "train", {"weight": torch.full((2,), -8.0), "buffer": torch.tensor([8])}, model)
    tensors, found = weights_at(tmp_path / "state", tmp_path / "train", 4)
    assert tensors["weight"].tolist() == [-4, -4] and tensors["buffer"].tolist() == [4]
    assert (found["step"], found["examples_seen"]) == (4, 32)
    last, found = weights_at(tmp_path / "state", tmp_path / "train", 8)
    assert torch.equal(last["weight"], torch.full((2,), -8.0)) and found["step"] == 8
    with pytest.raises(ValueError, match=f"{folder_name(6)} is missing. Keep it with train.checkpoint.keep_every"):
        weights_at(tmp_path / "state", tmp_path / "train", 6)
    save_weights(tmp_path / "train", tensors, {**model, "fingerprint": "c"})
    with pytest.raises(ValueError, match="No run in .*state ended with the weights"):
        weights_at(tmp_path / "state", tmp_path / "train", 4)
