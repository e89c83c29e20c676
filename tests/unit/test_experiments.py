"""Shipped experiment files are valid for their commands and for the editor schema."""

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from image_diffusion.codecs.diffusers import Diffusers, StabilityVae
from image_diffusion.core.config.base import dump, load
from image_diffusion.core.files.atomic import to_json, write_text
from image_diffusion.experiments.experiment import TrainStage, load_sections, parse_experiment, schema
from image_diffusion.experiments.resolve import (
    detector_files,
    encode_stage,
    load_all,
    reference_stages,
    start_files,
    train_stage,
    write_stages,
)
from image_diffusion.experiments.study import schema as study_schema
from image_diffusion.tools import configure
from image_diffusion.workflow.resolve import read_and_written

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "config" / "experiments").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_experiments_resolve_to_readable_stage_configs(path: Path, tmp_path: Path) -> None:
    for name, (_, experiment) in load_all([path]).items():
        write_stages(name, experiment, tmp_path)
        plan = json.loads((tmp_path / name / "config" / "plan.json").read_text())
        train = load(TrainStage, Path(plan["configs"]["train"]))
        assert train.system == experiment.system and dump(train.train) == dump(experiment.train)
        sections = experiment.system.sections
        makes = "embeddings" if experiment.system.type == "prior" else "images"
        assert [plan["makes_samples"], plan["makes_embeddings"]] == [
            experiment.samples is not None and makes == kind for kind in ("images", "embeddings")
        ]
        assert not experiment.train.advice()
        for stage, names in {"sample": ["sample"], "evaluate": [experiment.system.evaluation().section]}.items():
            if stage in plan["configs"]:
                written = load_sections(Path(plan["configs"][stage]), names, sections)
                assert written == {name: experiment.section(name) for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_all_files_of_shipped_experiments_are_rebuilt_if_damaged(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for name, (_, experiment) in load_all([path]).items():
        write_stages(name, experiment, tmp_path)
    written = {each for each in tmp_path.rglob("*") if each.is_file()}
    assert written <= {*read_and_written(tmp_path, [path.stem], [])}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_experiments_begin_with_purpose_and_cost(path: Path) -> None:
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    text = " ".join(head)
    assert "Reproduces:" in text and "Cost:" in text


@pytest.fixture(scope="module")
def editor() -> jsonschema.Draft202012Validator:
    """Validator of the editor schema, which is itself checked."""
    of_experiments = schema()
    jsonschema.Draft202012Validator.check_schema(of_experiments)
    return jsonschema.Draft202012Validator(of_experiments)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_experiments_match_the_editor_schema(path: Path, editor: jsonschema.Draft202012Validator) -> None:
    editor.validate(yaml.safe_load(path.read_text()))


def test_editor_schema_accepts_detector_names(editor: jsonschema.Draft202012Validator) -> None:
    raw = yaml.safe_load((ROOT / "config/experiments/demo.yaml").read_text())
    for detectors in (["inpipe", "dinov2"], [{"type": "inpipe"}, "inception"]):
        editor.validate(raw | {"evaluate": {"detectors": detectors}})
    with pytest.raises(jsonschema.ValidationError):
        editor.validate(raw | {"evaluate": {"detectors": ["torchvision"]}})


def test_editor_schemas_are_generated_from_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "schemas" / "experiment.schema.json"
    monkeypatch.setattr("sys.argv", ["configure", "--schema", str(file)])
    configure.main()
    assert file.read_text() == to_json(schema())
    assert json.loads(file.with_name("study.schema.json").read_text()) == study_schema()


def demo() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((ROOT / "config" / "experiments" / "demo.yaml").read_text())
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"stpes": 3}}, "train.stpes is not a known key. Did you mean train.steps?"),
        ({"codec": {"type": "vqgan"}}, "Unknown codec 'vqgan'. Known: rgb, stability_vae, diffusers, trained, tokens."),
        ({"codec": {"experiment": "nowhere"}}, "nowhere.yaml does not exist. Write it"),
        ({"data": {"resolution": 30}}, "Choose a multiple of"),
        ({"system": {"network": {"patch": 3}}}, "patches of 3"),
        ({"system": {"process": {"schedule": {"type": "cosin"}}}}, "Known: "),
        ({"system": {"process": {"num_timesteps": 10, "schedule": {"type": "linear"}}}}, "num_steps >= 20"),
        (
            {
                "data": {"source": {"type": "folder", "path": "x", "classes": "none"}},
                "train": {"balance_classes": True},
            },
            "train.balance_classes is true, but the data have no classes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_clear_line_before_any_work(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    experiment = _merge(demo(), change)
    codec = yaml.safe_load((ROOT / "config" / "experiments" / "demo_codec.yaml").read_text())
    codec["data"] = experiment["data"]
    (tmp_path / "demo_codec.yaml").write_text(yaml.safe_dump(codec))
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(experiment))
    with pytest.raises(ValueError) as caught:
        load_all([path])
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["demo", "demo_codec", "tokens_demo"])
def test_detector_for_other_channels_is_rejected_before_any_work(name: str, tmp_path: Path) -> None:
    for path in FILES:
        change = {"data": {"channels": 4}} | ({"evaluate": {"detectors": ["inception"]}} if path.stem == name else {})
        (tmp_path / path.name).write_text(yaml.safe_dump(_merge(yaml.safe_load(path.read_text()), change)))
    with pytest.raises(ValueError, match=r"evaluate.detectors has inception, which takes images of 1 or 3 channels"):
        load_all([tmp_path / f"{name}.yaml"])


def test_conflicting_settings_of_one_data_set_are_rejected(tmp_path: Path) -> None:
    codec = yaml.safe_load((ROOT / "config" / "experiments" / "demo_codec.yaml").read_text())
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(codec))
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(_merge(codec, {"data": {"min_side": 2}})))
    with pytest.raises(ValueError, match="describe the data set digits-32 differently"):
        load_all([tmp_path / "one.yaml", tmp_path / "two.yaml"])


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        ({"type": "trained", "experiment": "crops"}, "'crops'"),
        ({"type": "trained", "experiment": ".."}, r"'\.\.'"),
        ({"type": "stability_vae", "weights": "/models/config"}, "'config'"),
        ({"type": "stability_vae", "weights": "models/.."}, r"'\.\.'"),
        ({"type": "diffusers", "weights": "/models/detector"}, "'detector'"),
        ({"type": "diffusers", "weights": "/"}, "''"),
    ],
)
def test_latent_folders_must_not_use_reserved_names(codec: dict[str, Any], name: str, tmp_path: Path) -> None:
    raw = demo() | {"codec": codec}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(_merge(raw, {"data": {"channels": 3}})))
    (tmp_path / f"{codec.get('experiment', 'none')}.yaml").write_text(
        yaml.safe_dump(
            yaml.safe_load((ROOT / "config/experiments/demo_codec.yaml").read_text()) | {"data": raw["data"]}
        )
    )
    with pytest.raises(ValueError, match=f"The codec's latents would be stored in a folder named {name}, which"):
        load_all([tmp_path / "mine.yaml"])


def test_latents_of_weights_in_the_current_folder_have_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sd").mkdir()
    monkeypatch.chdir(tmp_path / "sd")
    assert StabilityVae(weights=".").name == Diffusers(weights=".").name == "sd"


def test_experiments_with_different_scales_share_latents_of_a_codec(tmp_path: Path) -> None:
    (tmp_path / "demo_codec.yaml").write_text((ROOT / "config/experiments/demo_codec.yaml").read_text())
    (tmp_path / "usual.yaml").write_text(yaml.safe_dump(demo()))
    (tmp_path / "scaled.yaml").write_text(yaml.safe_dump(_merge(demo(), {"codec": {"scale": 0.5}})))
    experiments = load_all([tmp_path / "usual.yaml", tmp_path / "scaled.yaml"])
    usual, scaled = (experiments[name][1] for name in ("usual", "scaled"))
    assert dump(encode_stage(scaled)) == dump(encode_stage(usual))
    assert dump(encode_stage(usual).codec) == dump(usual.codec)
    assert train_stage("scaled", scaled).codec.scale == 0.5


def test_paths_of_external_weights_are_known_before_they_exist(tmp_path: Path) -> None:
    detectors = [{"type": "dinov2", "weights": "d.pth"}, {"type": "transformers", "weights": "tower", "name": "tower"}]
    digits = yaml.safe_load((ROOT / "config" / "experiments" / "demo_codec.yaml").read_text())["data"]
    mine = {"data": digits, "system": {"type": "dit"}, "train": {"steps": 1, "global_batch": 2, "init_from": "start"}}
    experiment = parse_experiment(mine | {"evaluate": {"detectors": [{"type": "inpipe"}, *detectors]}}, "mine.yaml")
    assert start_files(experiment) == ["start/weights.safetensors", "start/model.json"]
    (dinov2, of_dinov2), (tower, of_tower) = detector_files(experiment).items()
    assert [dinov2.split("-")[0], tower.split("-")[0]] == ["dinov2", "transformers"]
    assert "d.pth" in of_dinov2 and "tower/model.safetensors" in of_tower
    assert {dinov2, tower} < reference_stages(experiment).keys()


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        merged[key] = _merge(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return merged


def test_replacing_the_source_of_a_shared_data_set_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
data: {{name: tab, resolution: 8, num_shards: 1, source: {{type: folder, path: {path}}}}}
system: {{type: dit, network: {{patch: 2, width: 8, depth: 1, num_heads: 1}}}}
train: {{steps: 1, global_batch: 2}}
"""
    for name, path in {"mine": "here", "shared": "here", "other": "there"}.items():
        (tmp_path / f"{name}.yaml").write_text(text.format(path=path))
    results = tmp_path / "results"

    def said(*names: str) -> str:
        files = [str(tmp_path / f"{name}.yaml") for name in names]
        monkeypatch.setattr(sys, "argv", ["configure", "--experiments", *files, "--results", str(results)])
        configure.main()
        return capsys.readouterr().err

    assert said("mine", "shared") == "" == said("mine", "shared")
    assert said("other") == "", "nothing has been made yet"
    assert said("mine", "shared") == ""
    write_text(results / "datasets/tab-8/crops/manifest.json", "{}")
    assert said("mine") == said("shared") == ""
    told = said("other")
    assert told.startswith(f"warning: {results}/datasets/tab-8 holds the images of mine, shared, from another source")
    assert told.count("\n") == 1 and "data.name" in told and said("other") == ""
    assert "the images of other, from another source: mine replaces them" in said("mine", "shared")
    for name in ("mine", "shared"):
        (tmp_path / f"{name}.yaml").write_text(text.format(path="elsewhere"))
    assert said("mine", "shared") == "", "their own data set"


def test_replacing_settings_of_a_shared_data_set_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"name": "tab", "resolution": 8, "num_shards": 1, "source": {"type": "folder", "path": "here"}}
    network = {"patch": 2, "width": 8, "depth": 1, "num_heads": 1}
    rest = {"system": {"type": "dit", "network": network}, "train": {"steps": 1, "global_batch": 2}}
    (tmp_path / "config").mkdir()
    (tmp_path / "config/mine.yaml").write_text(yaml.safe_dump({"data": data, **rest}))
    other = {"data": data | {"validation_fraction": 0.5, "num_shards": 2}, **rest}
    for name in ("other", "third"):
        (tmp_path / f"config/{name}.yaml").write_text(yaml.safe_dump(other))
    results = tmp_path / "results"

    def said(name: str) -> str:
        arguments = ["--experiments", str(tmp_path / f"config/{name}.yaml"), "--results", str(results)]
        monkeypatch.setattr(sys, "argv", ["configure", *arguments])
        configure.main()
        return capsys.readouterr().err

    said("mine")
    write_text(results / "datasets/tab-8/crops/manifest.json", "{}")
    assert "tab-8 holds the images of mine, with other data.validation_fraction, data.num_shards: other" in said(
        "other"
    )
    assert said("other") == said("third") == "", "the crops are their own"
    assert "holds the images of other, third, with other" in said("mine")
