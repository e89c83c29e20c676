"""Choice of a training step by a rule: valid rules, the chosen point, and the stated reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image, ImageChops

from image_diffusion.core.files.atomic import write_json
from image_diffusion.core.files.weights import read_model, read_weights, save_weights
from image_diffusion.core.journal.writer import Journal
from image_diffusion.experiments.experiment import Experiment
from image_diffusion.experiments.resolve import load_all, write_stages
from image_diffusion.metrics.choice import choose, parse_rule
from image_diffusion.metrics.curves import plot_sweep
from image_diffusion.stages import ema, sweep
from image_diffusion.tracking.plan import Request, final_weights, plan
from image_diffusion.tracking.run_summary import headline_of, sentence
from image_diffusion.training.checkpoint.checkpoint import Checkpoint, write_checkpoint
from image_diffusion.workflow.inputs import Files
from image_diffusion.workflow.plans import Plans, used_weights
from image_diffusion.workflow.trained_files import find_trained
from plans import a_plan, write_plans

Numbers = tuple[float | None, tuple[float, float] | None]


def point(step: int, distance: Numbers, copies: Numbers, note: str = "") -> dict[str, Any]:
    entries = {"inpipe_fd": distance, "inpipe_agreement": (step / 100, None), "copies": copies}
    metrics = {
        name: {"value": value, "debiased": None, "interval": interval, "note": note, "n": 500, "doubt": None}
        for name, (value, interval) in entries.items()
    }
    return {"value": str(step), "metrics": metrics}


POINTS = [
    point(10, (9.0, (8.0, 10.0)), (0.0, (0.0, 0.01))),
    point(20, (5.0, (4.0, 6.0)), (0.02, (0.01, 0.03))),
    point(30, (3.0, (2.0, 4.0)), (0.05, (0.04, 0.06))),
]


@pytest.mark.parametrize(
    ("rule", "step"),
    [
        ("distance", 30),
        ("distance where copies.upper < 0.06", 20),
        ("distance where copies.upper <= 0.06", 30),
        ("distance where copies.value < 0.02", 10),
        ("inpipe_fd where copies.lower <= 0.01 and inpipe_fd.upper < 7", 20),
        ("inpipe_agreement where distance.lower > 3", 20),
        ("inpipe_agreement where copies.value < 0.03", 20),  # higher is better
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_rule_chooses_the_best_point_that_meets_its_conditions(rule: str, step: int, order: int) -> None:
    choice = choose(parse_rule(rule), POINTS[::order], "inpipe_fd")
    assert (choice["step"], choice["fulfilled"], choice["rule"]) == (step, True, rule)
    assert [row["step"] for row in choice["points"]] == [10, 20, 30]
    assert ("It is the last one." in choice["reason"]) == (step == 30)


def test_ties_choose_the_earliest_step() -> None:
    same = [point(step, (5.0, None), (0.5, None)) for step in (30, 10, 20)]
    for rule in ("distance", "distance where copies.value < 0.1"):
        assert choose(parse_rule(rule), same, "inpipe_fd")["step"] == 10


def test_debiased_values_are_compared_if_all_points_have_them() -> None:
    points = [point(10, (3.0, None), (0.0, None)), point(20, (4.0, None), (0.0, None))]
    for row, debiased in zip(points, (2.0, 1.0), strict=True):
        row["metrics"]["inpipe_fd"]["debiased"] = debiased
    assert choose(parse_rule("distance"), points, "inpipe_fd")["step"] == 20
    points[0]["metrics"]["inpipe_fd"]["debiased"] = None
    assert choose(parse_rule("distance"), points, "inpipe_fd")["step"] == 10


def test_reason_explains_why_the_last_step_was_not_chosen() -> None:
    reason = choose(parse_rule("distance where copies.upper < 0.04"), POINTS, "inpipe_fd")["reason"]
    assert reason == (
        "Step 20 is used: of the 2 of 3 steps at which copies.upper < 0.04, it has the lowest inpipe_fd, 5 [4, 6]. "
        "The last, step 30, has 3 [2, 4], but copies.upper is 0.06."
    )


def test_closest_point_is_used_if_none_meets_the_rule() -> None:
    choice = choose(parse_rule("distance where copies.upper < 0.005"), POINTS, "inpipe_fd")
    assert (choice["step"], choice["fulfilled"]) == (10, False)
    assert choice["reason"].startswith(
        "No step fulfils copies.upper < 0.005. Step 10 comes closest (copies.upper is 0.01) and is used: its inpipe_fd "
        "is 9 [8, 10]. "
    )
    two = choose(parse_rule("distance where copies.upper < 0.005 and inpipe_fd.value < 6"), POINTS, "inpipe_fd")
    assert two["step"] == 20, "it misses one condition, by less than step 30 does"
    assert [len(row["missed"]) for row in two["points"]] == [2, 1, 1]


def test_unmeasured_values_fail_conditions_and_are_an_error_if_needed() -> None:
    rule = parse_rule("distance where copies.upper < 0.5")
    first = point(10, (1.0, None), (0.0, None), "no interval: too few samples")
    assert choose(rule, [first, *POINTS[1:]], "inpipe_fd")["step"] == 30
    with pytest.raises(ValueError, match=r"copies\.upper was not measured \(no interval: too few samples\)\. Measure"):
        choose(rule, [first], "inpipe_fd")
    with pytest.raises(ValueError, match="compares inpipe_fd, which was not measured at step 20"):
        choose(rule, [POINTS[0], point(20, (None, None), (0.0, (0.0, 0.1)))], "inpipe_fd")
    with pytest.raises(ValueError, match=r"sweep\.choose compares inception_score, which was not measured at step 10"):
        choose(parse_rule("inception_score"), POINTS, "inpipe_fd")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("distances", "'distances' is not a metric. Did you mean distance?"),
        ("distance where copise.upper < 1", "'copise' is not a metric. Did you mean copies?"),
        ("distance where copies.top < 1", "Unknown field 'top' of copies. Known: value, lower, upper."),
        ("distance where copies.upper < few", "'few' in 'copies.upper < few' is not a number"),
        ("distance where copies < 0.01", "needs .value, .lower or .upper after the name: copies.value < 0.01."),
        ("distance where inpipe_recall>0.3", "after the name: inpipe_recall.value > 0.3."),
        ("distance where copise > 0.3", "'copise' is not a metric. "),
        ("distance where ", "'distance where ' has no condition after where"),
        ("other_prompt_similarity", "other_prompt_similarity has no better direction"),
        ("__import__('os')", "is not a metric"),
        ("fid", "sweep.choose compares fid, which no point of sweep.checkpoint has. Name a metric of the samples"),
        ("distance where inception_precision.lower > 0.5", "sweep.choose compares inception_precision, which no point"),
        ("distance where bits_per_dim.value < 3", "sweep.choose compares bits_per_dim, which no point"),
    ],
)
def test_invalid_rules_are_rejected(tmp_path: Path, rule: str, message: str) -> None:
    with pytest.raises(ValueError) as told:
        experiment(tmp_path, {"checkpoint": [4, 8], "choose": rule})
    assert message in str(told.value) and len(str(told.value).splitlines()) == 1


TEXT: dict[str, Any] = {
    "data": {"name": "digits", "source": {"type": "digits"}, "resolution": 16},
    "system": {"type": "dit", "network": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4}},
    "train": {"steps": 10, "checkpoint": {"every_steps": 2, "keep_every": 4}},
    "sample": {"num_samples": 20, "first_seed": 5, "sampler": {"type": "ddim", "num_steps": 5}},
}
RULE = "distance where copies.upper < 0.04"


def experiment(folder: Path, sweep: dict[str, Any], **changes: Any) -> Experiment:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(TEXT | {"sweep": sweep} | changes))
    return load_all([path])["mine"][1]


def test_choice_requires_several_steps_and_no_early_stopping(tmp_path: Path) -> None:
    for steps in ([], [4]):
        with pytest.raises(ValueError, match=r"sweep\.choose chooses one of the steps of sweep\.checkpoint"):
            experiment(tmp_path, {"checkpoint": steps, "choose": RULE})
    with pytest.raises(ValueError, match=r"with train\.patience the training may end before them"):
        experiment(tmp_path, {"checkpoint": [4, 8]}, train=TEXT["train"] | {"patience": 0.5})


def test_points_of_a_choice_use_separate_seeds_and_measure_compared_metrics(tmp_path: Path) -> None:
    points = {"checkpoint": [4, 8], "num_steps": [2]}
    plain, chosen = (experiment(tmp_path, points | more) for more in ({}, {"choose": RULE}))
    seeds = [made.sweep.samples("checkpoint", "4", made.sample).first_seed for made in (plain, chosen)]
    assert seeds == [5, 25]
    assert chosen.sweep.samples("num_steps", "2", chosen.sample).first_seed == 5
    for made, copies in ((plain, False), (chosen, True)):
        write_stages("mine", made, tmp_path)
        judged = yaml.safe_load((tmp_path / "mine/config/sweep/evaluate.yaml").read_text())["evaluate"]
        assert (judged["copies"], judged["two_sample"]) == (copies, False)
        plan = json.loads((tmp_path / "mine/config/plan.json").read_text())
        assert plan["choose"] == (RULE if copies else "")
        assert used_weights(tmp_path / "mine") == tmp_path / "mine" / (
            "sweep/checkpoint/chosen/weights" if copies else "train"
        )


def test_points_measure_compared_metrics_for_every_detector(tmp_path: Path) -> None:
    """The names of some detectors' metrics end in the detector."""
    evaluate = {"detectors": ["inception", {"type": "dinov2", "weights": "dinov2.pth"}], "infinity": True}
    rule = "fd_infinity_dinov2 where copies_dinov2.upper < 0.04 and c2st_dinov2.value < 0.9"
    made = experiment(tmp_path, {"checkpoint": [4, 8], "choose": rule}, evaluate=evaluate)
    write_stages("mine", made, tmp_path)
    judged = yaml.safe_load((tmp_path / "mine/config/sweep/evaluate.yaml").read_text())["evaluate"]
    assert (judged["copies"], judged["two_sample"], judged["infinity"]) == (True, True, True)


def test_later_stages_use_chosen_weights_and_the_curve_uses_checkpoints() -> None:
    plans = Plans({"one": a_plan("one", choose=RULE), "two": a_plan("two", start_experiment="one")})
    files = Files("r", plans)
    job = {"experiment": "one", "axis": "num_steps", "value": "2"}
    weights = "r/one/sweep/checkpoint/chosen/weights/weights.safetensors"
    assert files.of_model("sample", before="sample")["weights"](job) == weights  # type: ignore[operator]
    assert files.swept_weights(job) == weights
    assert files.inputs("start")["start"]({"experiment": "two"}) == [weights]
    assert files.of_model("sample", before="sample")["model"]({"experiment": "two"}) == "r/two/train/model.json"  # type: ignore[operator]
    chosen, named = ({"experiment": "one", "axis": "checkpoint", "value": value} for value in ("chosen", "4"))
    assert files.choosing_curve(chosen) == ["r/one/sweep/checkpoint/curve.json"] and files.choosing_curve(named) == []
    assert files.which_weights(chosen) == ["--chosen-in", "r/one/sweep/checkpoint/curve.json"]
    assert files.which_weights(named) == ["--step", "4"]
    assert files.choosing_option(named) == ["--choose", RULE]
    assert files.choosing_option(job) == files.choosing_option({**named, "experiment": "two"}) == []


def test_experiment_without_chosen_step_cannot_be_sampled_by_name(tmp_path: Path) -> None:
    write_plans(tmp_path, a_plan("one", choose=RULE))
    save_weights(tmp_path / "one" / "train", {"weight": torch.zeros(1)}, {"step": 8})
    with pytest.raises(ValueError, match="no step is chosen yet. Run snakemake --cores all one first"):
        find_trained("one", tmp_path)
    folder = tmp_path / "one/sweep/checkpoint/chosen/weights"
    save_weights(folder, {"weight": torch.zeros(1)}, {"step": 4})
    assert find_trained("one", tmp_path).weights == folder / "weights.safetensors"


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments)])
    module.main()


def test_weights_of_the_step_that_the_curve_chooses_come_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    protocol = {"detectors": [], "reference": {}, "settings": {}, "num_samples": 500}
    for row in POINTS:
        write_json(tmp_path / f"{row['value']}.json", {"metrics": row["metrics"], "protocol": protocol})
    curve, plot = tmp_path / "curve.json", tmp_path / "curve.png"
    points = [f"{row['value']}={tmp_path / row['value']}.json" for row in POINTS]
    common = ["--axis", "checkpoint", "--points", *points, "--headline", "inpipe_fd", "--output", curve, "--plot", plot]
    run(sweep, monkeypatch, *common, "--choose", RULE)
    assert "sweep: Step 20 is used: " in capsys.readouterr().out
    found = json.loads(curve.read_text())
    assert (found["best"], found["choice"]["step"]) == ("30", 20)
    plot_sweep({name: value for name, value in found.items() if name != "choice"}, tmp_path / "best.png")
    marked = [Image.open(path).convert("RGB") for path in (plot, tmp_path / "best.png")]
    assert ImageChops.difference(*marked).getbbox() is not None, "the ring is at another point"

    for step in (10, 20, 30):
        groups = {"network": {"weight": torch.tensor([float(step)])}}
        write_checkpoint(tmp_path / "state" / "run", Checkpoint(step, 8 * step, False, groups), {}, {}, lambda: None)
    model = {"step": 30, "examples_seen": 240, "ema": None, "fingerprint": "run"}
    save_weights(tmp_path / "train", {"weight": torch.tensor([30.0])}, model)
    files = ["--state", tmp_path / "state", "--weights", tmp_path / "train" / "weights.safetensors"]
    run(ema, monkeypatch, *files, "--chosen-in", curve, "--output", tmp_path / "chosen" / "weights.safetensors")
    tensors, model = read_weights(tmp_path / "chosen")
    assert (tensors["weight"].item(), model["step"], model["examples_seen"]) == (20, 20, 160)

    run(sweep, monkeypatch, *common, "--choose", "distance where copies.upper < 0.001")
    printed = capsys.readouterr()
    assert printed.err.startswith("warning: No step fulfils copies.upper < 0.001. Step 10 comes closest (")
    assert len(printed.err.splitlines()) == 1
    with pytest.raises(ValueError, match="--step and --chosen-in both name a step"):
        run(
            ema,
            monkeypatch,
            *files,
            "--chosen-in",
            curve,
            "--step",
            10,
            "--output",
            tmp_path / "no" / "weights.safetensors",
        )
    run(sweep, monkeypatch, *common)
    assert "choice" not in json.loads(curve.read_text())
    with pytest.raises(ValueError, match="curve.json names no step, since it was made without a rule"):
        run(ema, monkeypatch, *files, "--chosen-in", curve, "--output", tmp_path / "no" / "weights.safetensors")


def test_headline_summary_and_registered_model_use_chosen_weights(tmp_path: Path) -> None:
    write_plans(tmp_path, a_plan("one", choose=RULE))
    folder = tmp_path / "one"
    for place, step in (("train", 30), ("sweep/checkpoint/chosen/weights", 20)):
        model = {"step": step, "examples_seen": 8 * step, "system": {"type": "dit"}}
        save_weights(folder / place, {"weight": torch.tensor([float(step)])}, model)
    chosen = read_model(folder / "sweep/checkpoint/chosen/weights")
    judged = {"metrics": POINTS[1]["metrics"], "protocol": {"weights": {"sha256": chosen["sha256"]}}}
    write_json(folder / "metrics.json", judged)
    headline = headline_of(folder, "inpipe_fd")
    assert headline is not None and headline.value == 5.0
    assert sentence(folder, None) == "`one`: a dit trained for 20 steps, 160 examples."
    with Journal.open(folder / "journal", "train") as book:
        book.params({"a": 1})
    (run_of_training,) = plan(folder, [])
    weights = final_weights(run_of_training, "id", Request(folder))
    assert weights is not None and weights.files["model.json"] == folder / "sweep/checkpoint/chosen/weights/model.json"
