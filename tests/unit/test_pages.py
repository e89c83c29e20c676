"""Parts of the experiment pages: curves, marked configurations, metrics with their definitions."""

from __future__ import annotations

import importlib.util
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from image_diffusion.core.config.base import Config, beyond_defaults
from image_diffusion.core.files.atomic import write_json
from image_diffusion.core.journal.writer import Journal
from image_diffusion.experiments.experiment import parse_experiment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scripts() -> ModuleType:
    """Import workflow/scripts/report.py with the modules in its folder."""
    sys.path.insert(0, str(ROOT / "workflow/scripts"))
    try:
        found = importlib.util.find_spec("report")
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


class Part(Config):
    size: int = 3


class Whole(Config):
    name: str
    part: Part = Part()
    count: int = 1


def test_changed_settings_are_listed_by_key() -> None:
    assert beyond_defaults(Whole(name="a")) == {"name"}
    assert beyond_defaults(Whole(name="a", part=Part(size=4), count=2)) == {"name", "part.size", "count"}


def test_section_of_another_type_is_compared_with_its_own_defaults() -> None:
    raw = {"data": {"name": "d", "source": {"type": "digits"}, "resolution": 16}, "train": {"steps": 2}}
    own = parse_experiment(raw | {"system": {"type": "dit"}}, "x")
    other = parse_experiment(raw | {"system": {"type": "dit", "process": {"type": "flow", "time_scale": 10}}}, "x")
    assert {key for key in beyond_defaults(other) - beyond_defaults(own) if "process" in key} == {
        "system.process.type",
        "system.process.time_scale",
    }


@pytest.mark.parametrize("system", ["dit", "iddpm", "rin"])
def test_recipe_with_only_a_system_type_uses_all_system_defaults(system: str) -> None:
    raw = {"data": {"name": "d", "source": {"type": "digits"}, "resolution": 32}, "train": {"steps": 2}}
    changed = beyond_defaults(parse_experiment(raw | {"system": {"type": system}}, "x"))
    assert {key for key in changed if not key.startswith("data.")} == {"train.steps"}
    raw["train"]["grad_clip"] = 0.25
    more = beyond_defaults(parse_experiment(raw | {"system": {"type": system}}, "x"))
    assert more - changed == {"train.grad_clip"}


def test_lines_under_a_changed_key_are_marked(scripts: ModuleType) -> None:
    text = "a: 1\nb:\n  c: 2\n  d:\n  - 3\n  - 4\n"
    marked = dict(scripts.marked(text, {"x.a", "x.b.d"}, ("x",)))
    assert marked == {"a: 1": True, "b:": False, "  c: 2": False, "  d:": True, "  - 3": True, "  - 4": True}


def test_downsampled_curve_keeps_its_ends_and_extremes(scripts: ModuleType) -> None:
    values = [math.sin(step / 700) for step in range(20_000)]
    values[12_345] = 9.0
    drawn = scripts.curve(list(range(20_000)), values)
    assert len(drawn["x"]) < 1_100 and (drawn["x"][0], drawn["x"][-1]) == (0, 19_999)
    assert drawn["y"][drawn["x"].index(12_345)] == 9.0 and min(drawn["y"]) == pytest.approx(-1, abs=1e-4)


def test_nan_in_a_downsampled_curve_hides_no_extreme(scripts: ModuleType) -> None:
    values = [1.0] * 4000
    values[2000], values[2003] = math.nan, 9999.0  # 2000 is the first of a group of 8
    assert 9999.0 in scripts.curve(list(range(4000)), values)["y"]
    assert scripts.curve(list(range(4000)), [math.nan] * 4000)["y"][0] is None


def test_integers_are_shown_in_full(scripts: ModuleType) -> None:
    shown = sys.modules["pages"].number
    values = (12345.0, 1e6, 0.0, 12345.6, 1e20, math.nan)
    assert [shown(value) for value in values] == ["12,345", "1,000,000", "0", "1.235e+04", "1e+20", "nan"]


def test_summary_shows_the_steps_of_the_chosen_weights(scripts: ModuleType, tmp_path: Path) -> None:
    for folder, step in (("train", 1000), ("sweep/checkpoint/chosen/weights", 500)):
        write_json(tmp_path / "mine" / folder / "model.json", {"step": step})
    plan = {"system": "dit", "dataset": "d", "headline": "fd", "choose": "distance"}
    write_json(tmp_path / "mine/config/plan.json", plan)
    write_json(tmp_path / "mine/metrics.json", {"metrics": {}})
    spec = importlib.util.spec_from_file_location("summary", ROOT / "workflow/scripts/summary.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(summary := importlib.util.module_from_spec(spec))
    assert summary.line("mine", tmp_path, tmp_path)["steps"] == 500


def test_short_curve_is_unchanged_and_nan_leaves_a_gap(scripts: ModuleType) -> None:
    assert scripts.curve([1, 2, 3], [0.5, math.nan, 2.0]) == {"x": [1, 2, 3], "y": [0.5, None, 2.0]}


def test_class_rows_have_the_names_of_the_sampled_classes(scripts: ModuleType, tmp_path: Path) -> None:
    write_json(tmp_path / "data" / "manifest.json", {"classes": ["cat", "dog", "owl"]})
    experiment = tmp_path / "mine"
    assert scripts.class_names(experiment, tmp_path / "data") == []
    (experiment / "samples").mkdir(parents=True)
    write_json(experiment / "samples" / "samples.json", {"num_samples": 4})
    np.savez(experiment / "samples" / "samples.npz", np.zeros((3, 2, 2, 3), np.uint8), np.array([2, 2, 0]))
    assert scripts.class_names(experiment, tmp_path / "data") == [], "others were drawn than those that are stored"
    write_json(experiment / "samples" / "samples.json", {"num_samples": 3})
    assert scripts.class_names(experiment, tmp_path / "data") == ["cat", "owl"]
    np.savez(experiment / "samples" / "samples.npz", np.zeros((3, 2, 2, 3), np.uint8))
    assert scripts.class_names(experiment, tmp_path / "data") == []


def test_report_counts_lost_records_of_the_training(scripts: ModuleType, tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal", "train", tags={"fingerprint": "a"}) as journal:
        journal.metrics({"loss": 1.0}, step=1)
    write_json(tmp_path / "train/model.json", {"fingerprint": "a"})
    model = tmp_path / "train/model.json"
    history = scripts.training(tmp_path / "journal/train", model)
    assert scripts.told(history, True) == {"attempts": 1, "status": "finished"}
    shutil.rmtree(tmp_path / "journal")
    said = scripts.told(scripts.training(tmp_path / "journal/train", model), True)
    assert (said["status"], said["incomplete"]) == ("finished", "3 of 3 records are lost")
    shutil.rmtree(tmp_path / ".journal")
    assert scripts.training(tmp_path / "journal/train", model) is None
    assert scripts.told(None, True) == {"incomplete": "the journal of the training is lost"}
    assert scripts.told(None, False) is None


def entry(value: float, floor: float, **changes: object) -> dict[str, object]:
    return {"value": value, "floor": floor, "n": 300, "note": "", "doubt": None} | changes


def test_report_summary_compares_with_real_images(scripts: ModuleType) -> None:
    metrics = {"inpipe_agreement": entry(0.997, 0.987), "copies": entry(0.01, 0.01), "inpipe_fd": entry(1.6, 0.5)}
    first, second = scripts.comparisons({"metrics": metrics})
    assert first.startswith("99.7% of the images") and first.endswith("real held-out images: 98.7%.")
    assert second.startswith("1.0% are nearer")
    metrics["inpipe_agreement"]["doubt"] = "the judge guesses"
    assert len(list(scripts.comparisons({"metrics": metrics}))) == 1
    assert list(scripts.comparisons(None)) == []


def test_values_are_shown_with_the_score_of_equally_many_real_images(scripts: ModuleType) -> None:
    pages = sys.modules["pages"]
    same = entry(1.69, 0.46, floor_n=300, at_floor_n=1.69)
    more = entry(0.41, 0.46, n=10_000, floor_n=374, at_floor_n=1.69)
    share = entry(0.02, 0.01, n=10_000, floor_n=374, at_floor_n=None)
    assert [pages.real(each) for each in (same, more, share)] == ["0.46", "0.46, as many samples (374): 1.69", "0.01"]
    assert pages.real({"value": 1.0, "n": 3}) == ""
    assert ['class="real"' in pages.bar(each) for each in (same, more, share)] == [True, False, True]
    judged = {"metrics": {"inpipe_fd": more, "fd_clip": same}}
    assert scripts.beside(judged)["rows"][0][1:] == [
        "inpipe_fd: 0.41 (real images 0.46, as many samples (374): 1.69)",
        "fd_clip: 1.69 (real images 0.46)",
    ]
    (sentence,) = scripts.comparisons({"metrics": {"inpipe_c2st": more | {"value": 0.9, "at_floor_n": 0.6}}})
    assert "an accuracy of 60%" in sentence


def test_report_summary_explains_a_missing_headline(scripts: ModuleType, tmp_path: Path) -> None:
    near = entry(0.4, 0.5, floor_n=300, at_floor_n=0.4, doubt="this many do not tell the samples from real images")
    protocol = {"weights": {"sha256": "a"}}
    write_json(tmp_path / "mine/metrics.json", {"metrics": {"inpipe_fd": near}, "protocol": protocol})
    write_json(tmp_path / "mine/train/model.json", {"sha256": "a", "step": 8, "system": {}})
    write_json(tmp_path / "mine/config/plan.json", {"headline": "inpipe_fd"})
    page = scripts.page(tmp_path / "mine", tmp_path / "data/crops", tmp_path / "benchmarks")
    assert "No headline</div><p>This many do not tell the samples from real images.</p>" in page


def test_report_summary_proposes_the_most_promising_change(scripts: ModuleType, tmp_path: Path) -> None:
    objective = {"label_drop_probability": 0.1}
    write_json(tmp_path / "train/model.json", {"step": 1000, "system": {"objective": objective}})
    judged = {
        "metrics": {"inpipe_agreement": entry(0.9, 1.0), "copies": entry(0.01, 0.01)},
        "curve": [],
        "can_guide": True,
    }
    curve = [{"step": 500, "inpipe_kd": 0.2}, {"step": 1000, "inpipe_kd": 0.1}]

    def proposed(judged: dict[str, object], findings: dict[str, int]) -> list[str | None]:
        return [lines for _, lines in scripts.proposals(tmp_path, judged, findings)]

    assert proposed(judged, {}) == ["sweep: {guidance_scale: [1, 1.5, 2, 4]}"]
    assert proposed(judged | {"curve": curve}, {})[0] == "train: {steps: 2000}"
    improving = next(scripts.proposals(tmp_path, judged | {"curve": curve}, {}))[0]
    for schedule, restarts in (("constant", False), ("cosine", True)):
        config = {"train": {"steps": 1000, "schedule": {"type": schedule}}}
        write_json(tmp_path / "config/train.yaml", config)  # JSON is YAML
        reason = next(scripts.proposals(tmp_path, judged | {"curve": curve}, {}))[0]
        assert reason == improving + restarts * " The training would start from scratch (docs/extend_training.md)."
    nearer = [{"step": 500, "inpipe_kd": -0.01}, {"step": 1000, "inpipe_kd": -0.0095}]
    assert proposed(judged | {"curve": nearer}, {}) == proposed(judged, {}), "as near as real images"
    reason, lines = next(scripts.proposals(tmp_path, judged, {"label conflict": 2}))
    assert (reason[:15], reason[-19:], lines) == ("2 pairs of imag", "Correct the labels.", None)
    metrics = {"copies": entry(0.3, 0.01, note="biased: 300 samples are few")}
    copying = judged | {"metrics": metrics, "can_guide": False, "curve": curve}
    assert proposed(copying, {}) == ["train: {steps: 500}"], "a codec draws no samples"
    write_json(tmp_path / "config/sample.yaml", {})
    assert proposed(copying, {}) == ["train: {steps: 500}", "sample: {num_samples: 3000}"]
    write_json(tmp_path / "train/model.json", {"step": 1000, "system": {"objective": {"label_drop_probability": 0.0}}})
    assert proposed(judged, {}) == []


def test_samples_without_classes_or_prompts_cannot_be_guided(scripts: ModuleType) -> None:
    settings = {"guidance": {"guidance_scale": 1.0}, "prompts": None}
    assert scripts.can_guide({"settings": settings, "classes": ["cat"]})
    assert scripts.can_guide({"settings": settings | {"prompts": ["a cat"]}, "classes": []})
    assert not scripts.can_guide({"settings": settings, "classes": []})
    assert not scripts.can_guide({"settings": {}, "classes": ["cat"]}) and not scripts.can_guide({})


def test_metrics_are_shown_by_name_and_key(scripts: ModuleType) -> None:
    named = sys.modules["pages"].metric("inpipe_fd")
    assert ">Fr\u00e9chet distance</abbr>" in named and '<small class="key">inpipe_fd</small>' in named


def test_energy_is_shown_only_for_a_training_without_a_pause(scripts: ModuleType, tmp_path: Path) -> None:
    for step in (1, 2):  # any time may pass between the two attempts
        with Journal.open(tmp_path, "train", step - 1 or None, {"fingerprint": "a"}) as journal:
            journal.metrics({"system/gpu_power_usage_watts": 400.0}, step=step)
        shown = scripts.facts(scripts.read_journal(tmp_path / "train"), "0:10:00")
        assert list(shown) == (["energy of one GPU", "training time"] if step == 1 else ["training time"])
