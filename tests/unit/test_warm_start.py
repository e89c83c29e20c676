"""Warm starts from weights of another training: other classes, another resolution, and errors."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from crops import crops_of_twelve
from image_diffusion.core.config.base import to_yaml
from image_diffusion.core.files.weights import read_weights
from image_diffusion.core.types import DataSpec
from image_diffusion.experiments.resolve import load_all, write_stages
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.stages.export import read_foreign
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.warm_start import Trained, fitted, table
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.session import run
from image_diffusion.workflow.inputs import Files
from image_diffusion.workflow.plans import Plans, read_plan
from plans import a_plan

ROOT = Path(__file__).parents[2]
TABLE = "y_embedder.embedding_table.weight"


def of(
    classes: list[str] | None, count: int, patch: int = 4, resolution: int = 8, width: int = 16, num_heads: int = 2
) -> Trained:
    system = DiTSystem(network=DiTConfig(depth=1, width=width, num_heads=num_heads, patch=patch))
    return Trained(system, DataSpec(channels=3, resolution=resolution, num_classes=count), classes)


def start(ours: Trained, theirs: Trained) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """Return the tensors of the given weights, the initial tensors, and the table of changes."""
    torch.manual_seed(0)
    given, network = theirs.system.build_network(theirs.spec).state_dict(), ours.system.build_network(ours.spec)
    if TABLE in network.state_dict():
        network.get_parameter(TABLE).data.fill_(0.5)  # in place of random rows
    found, changes = fitted(network, ours, given, theirs)
    return given, found, table(changes)


def test_classes_are_matched_by_name_and_new_ones_start_near_the_mean_row() -> None:
    given, found, told = start(of(["fish", "cat"], 2), of(["cat", "dog", "owl"], 3))
    rows = given[TABLE]
    assert torch.equal(found[TABLE], torch.stack([rows[:3].mean(0) + 0.5, rows[0], rows[3]]))
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items() if name != TABLE)
    assert told.splitlines()[1].split("  ")[1:] == [
        "4 x 16",
        "3 x 16",
        "1 of 2 classes by name, the others near the mean row",
    ]


def test_equally_many_classes_of_other_names_are_new() -> None:
    given, found, told = start(of(["a", "b"], 2), of(["c", "d"], 2))
    assert (
        torch.equal(found[TABLE][:2], given[TABLE][:2].mean(0).expand(2, -1) + 0.5) and "0 of 2 classes by name" in told
    )
    given, found, told = start(of(["a", "b"], 2), of(["a", "b"], 2))
    assert torch.equal(found[TABLE], given[TABLE]) and told == ""


def test_class_numbers_of_imported_weights_are_not_names() -> None:
    given, found, told = start(of(["0", "1"], 2), of(None, 3))
    assert torch.equal(found[TABLE][0], given[TABLE][:3].mean(0) + 0.5) and "0 of 2" in told
    given, found, told = start(of(["a", "b", "c"], 3), of(None, 3))  # assumed to be the same data set
    assert torch.equal(found[TABLE], given[TABLE]) and told == ""


def test_class_table_is_new_or_dropped_where_one_side_has_no_classes() -> None:
    _, found, told = start(of(["a", "b"], 2), of([], 0))
    assert found[TABLE].shape == (3, 16) and "new: the weights know no classes" in told
    _, found, told = start(of([], 0), of(["a", "b"], 2))
    assert TABLE not in found and "left out: the data have no classes" in told


def test_another_resolution_interpolates_positions() -> None:
    given, found, told = start(of([], 0, resolution=16), of([], 0, resolution=8))
    assert found["pos_embed"].shape == (1, 16, 16) and "interpolated to the other resolution" in told
    grid = given["pos_embed"].view(1, 2, 2, 16).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(grid, (4, 4), mode="bicubic")
    assert torch.allclose(found["pos_embed"], expected.permute(0, 2, 3, 1).reshape(1, 16, 16))


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (
            of([], 0, patch=2),
            r"x_embedder.proj.weight \[16, 3, 4, 4\] here, .*system.network.patch \(4 here, 2 there\)",
        ),
        (of([], 0, width=32), r"and \d+ more.* system.network.width \(16 here, 32 there\)"),
        (of([], 0, num_heads=4), r"^system.network.num_heads \(2 here, 4 there\) .* other heads. Give it the value"),
    ],
)
def test_other_differences_are_rejected_with_the_fitting_setting(theirs: Trained, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        start(of([], 0), theirs)


@pytest.fixture
def crops(tmp_path: Path) -> Path:
    return crops_of_twelve(tmp_path)


def trained(
    tmp_path: Path, crops: Path, network: dict[str, Any], system: dict[str, Any] | None = None, **train: Any
) -> dict[str, torch.Tensor]:
    tmp_path.mkdir(exist_ok=True)
    config = tmp_path / "train.yaml"
    settings = {"steps": 1, "global_batch": 4, "validate_every_steps": None, "grid_every_steps": None, "weights": "raw"}
    described = {"type": "dit", "network": network, **(system or {})}
    stage = {"experiment": "x", "codec": {"type": "rgb"}, "system": described, "preview": {}}
    config.write_text(to_yaml({**stage, "train": settings | train}))
    training = prepare_training(config, crops / "manifest.json", None)
    run(training.build, training.stage.train, training.model, training.data, tmp_path / "train")
    return read_weights(tmp_path / "train")[0]


def test_published_weights_of_1000_classes_start_a_training_of_three(
    tmp_path: Path, crops: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"depth": 1, "width": 384, "num_heads": 6, "patch": 2}  # DiT-S/2, one block of it
    torch.manual_seed(0)
    published = DiTConfig(**shape, time_frequencies="dit").build(
        DataSpec(channels=3, resolution=8, num_classes=1000), True
    )
    torch.save(published.state_dict(), tmp_path / "DiT.pt")
    read_foreign(tmp_path / "DiT.pt", "nowhere", None, tmp_path / "published")
    network, still = {**shape, "time_frequencies": "dit"}, {"optimizer": {"type": "adam", "lr": 1e-12}}
    found = trained(tmp_path, crops, network, init_from=str(tmp_path / "published"), **still)
    told = capsys.readouterr().out
    assert f"Starting from {tmp_path}/published: " in told and "trained in the space of another codec" in told
    assert re.search(r"1001 x 384 +4 x 384 +0 of 3 classes by name, the others near the mean row", told)
    assert "1 x 16 x 384" in told and "interpolated to the other resolution" in told
    rows = published.state_dict()[TABLE]
    torch.testing.assert_close(found[TABLE][3], rows[1000], rtol=0, atol=1e-6)
    assert (found[TABLE][:3] - rows[:1000].mean(0)).std() == pytest.approx(0.02, rel=0.2)  # std of random rows
    name = "blocks.0.mlp.fc1.weight"
    torch.testing.assert_close(found[name], published.state_dict()[name], rtol=0, atol=1e-6)


def test_dit_xl_weights_fit_a_network_of_three_classes() -> None:
    """Shapes only: training 675 million parameters takes a minute and 14 GB."""
    from image_diffusion.core.devices import shapes_only

    system = DiTSystem(network=DiTConfig(size="DiT-XL/2", time_frequencies="dit"))
    ours = Trained(system, DataSpec(channels=4, resolution=32, num_classes=3), ["a", "b", "c"])
    theirs = Trained(system, DataSpec(channels=4, resolution=32, num_classes=1000), None)
    with shapes_only():
        network, there = (each.system.build_network(each.spec) for each in (ours, theirs))
        found, changes = fitted(network, ours, there.state_dict(), theirs)
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in network.state_dict().items()
    }
    assert [(each.name, each.there, each.here) for each in changes] == [(TABLE, (1001, 1152), (4, 1152))]
    assert sum(tensor.numel() for tensor in there.state_dict().values()) > 670e6


def test_frozen_parameters_do_not_change(tmp_path: Path, crops: Path) -> None:
    network = {"depth": 2, "width": 16, "num_heads": 2, "patch": 4}
    first = trained(tmp_path / "a", crops, network)
    settings = {"init_from": str(tmp_path / "a/train"), "freeze": ["blocks.*", "t_embedder.*"], "seed": 1}
    found = trained(tmp_path / "b", crops, network, **settings)
    same = {name for name, tensor in found.items() if torch.equal(tensor, first[name])}
    frozen = {name for name in found if name.startswith(("blocks.", "t_embedder."))}
    assert same == frozen | {"pos_embed"} | (same & {"y_embedder.embedding_table.weight"})
    with pytest.raises(
        ValueError, match=r"train.freeze has block.\*, which names no parameter. They begin with: pos_emb"
    ):
        trained(tmp_path / "c", crops, network, freeze=["block.*"])
    assert (
        "freeze" not in TrainConfig(steps=1).identity() and "freeze" in TrainConfig(steps=1, freeze=("a",)).identity()
    )


def test_settings_that_differ_from_the_weights_are_reported(
    tmp_path: Path, crops: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = {"depth": 1, "width": 16, "num_heads": 2, "patch": 4}
    flow: dict[str, Any] = {"process": {"type": "flow"}, "objective": {"type": "flow_matching"}}
    trained(tmp_path / "a", crops, network, flow)
    other = {
        "process": {"type": "flow", "time_scale": 1000},
        "objective": {"type": "flow_matching", "prediction": "x0"},
    }
    capsys.readouterr()
    trained(tmp_path / "b", crops, network, other, init_from=str(tmp_path / "a/train"))
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.endswith("tensors as they are.") and second == (
        "They were trained with other settings: system.process.time_scale (1000.0 here, 1.0 there), "
        "system.objective.prediction ('x0' here, 'velocity' there)."
    )
    discrete = {"objective": {"type": "denoising", "variance": "fixed_small", "loss": "simple"}}
    trained(tmp_path / "c", crops, network, discrete, init_from=str(tmp_path / "a/train"))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "other settings" in line)
    assert line.startswith("They were trained with other settings: system.process.type (") and "time_scale" not in line


def test_distillation_of_a_flow_resumes_bit_exactly(
    tmp_path: Path, crops: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After each resume the teacher is still the initial network of the training."""
    network = {"depth": 1, "width": 16, "num_heads": 2, "patch": 4}
    flow: dict[str, Any] = {"process": {"type": "flow"}, "objective": {"type": "flow_matching"}}
    objective = {"type": "mean_flow", "direction": "teacher", "interval_probability": 1.0}
    constant = {"schedule": {"type": "constant"}, "optimizer": {"type": "adam", "lr": 0.05}}
    teacher = trained(tmp_path / "flow", crops, network, flow, **constant)
    student: dict[str, Any] = {**constant, "init_from": str(tmp_path / "flow/train")}
    at_once = trained(tmp_path / "at_once", crops, network, {**flow, "objective": objective}, **student, steps=4)
    assert "interval_embedder.mlp.0.weight" in (told := capsys.readouterr().out)
    assert told.count("new: the weights lack the layer") == 4
    assert not torch.equal(at_once["x_embedder.proj.weight"], teacher["x_embedder.proj.weight"])
    for steps in (2, 4):
        in_two = trained(tmp_path / "two", crops, network, {**flow, "objective": objective}, **student, steps=steps)
    assert all(torch.equal(tensor, at_once[name]) for name, tensor in in_two.items())
    del student["init_from"]
    with pytest.raises(ValueError, match="direction is teacher, but the network begins with random weights"):
        trained(tmp_path / "none", crops, network, {**flow, "objective": objective}, **student)


def experiments(folder: Path, **network: Any) -> Path:
    """Write both experiments of the fine-tuning demo, the second with these changes, and return its path."""
    for name in ("finetune_base", "finetune_demo"):
        shutil.copy(ROOT / "config" / "experiments" / f"{name}.yaml", folder)
    path = folder / "finetune_demo.yaml"
    raw = yaml.safe_load(path.read_text())
    raw["system"]["network"] |= network
    path.write_text(yaml.safe_dump(raw))
    return path


def test_initial_experiment_is_a_dependency_of_the_workflow(tmp_path: Path) -> None:
    found = load_all([experiments(tmp_path)])
    assert set(found) == {"finetune_demo", "finetune_base"}
    for name, (_, experiment) in found.items():
        write_stages(name, experiment, tmp_path / "results")
    plan = read_plan(tmp_path / "results/finetune_demo/config/plan.json")
    assert plan.start_experiment == "finetune_base" and plan.builds_on == ["finetune_base"]
    files = Files("out", Plans({"one": a_plan("one", start_experiment="two"), "two": a_plan("two")}))
    assert files.inputs("start")["start"]({"experiment": "one"}) == ["out/two/train/weights.safetensors"]
    assert files.options("start")["start"]({"experiment": "one"})[0] == "--init-from"
    assert files.options("start")["start"]({"experiment": "two"}) == []
    assert files.plans.by_name["two"].configs["train"] in files.configs_before("train")({"experiment": "one"})


def test_unsuitable_initial_weights_are_rejected_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train.init_from.experiment: .*system.network.patch \(2 here, 4 there\)"):
        load_all([experiments(tmp_path, patch=2)])
    (tmp_path / "finetune_base.yaml").unlink()
    with pytest.raises(ValueError, match=r"train.init_from.experiment is finetune_base, but .* does not exist"):
        load_all([tmp_path / "finetune_demo.yaml"])


def test_experiments_may_not_start_from_themselves(tmp_path: Path) -> None:
    path = experiments(tmp_path)
    text = path.read_text()
    path.write_text(
        yaml.safe_dump(yaml.safe_load(text) | {"train": {"steps": 1, "init_from": f"{tmp_path}/r/x/train"}})
    )
    (_, experiment) = load_all([path])["finetune_demo"]
    with pytest.raises(
        ValueError, match=r"^x: train.init_from is .*/r/x/train, this experiment's own folder, .*base: x"
    ):
        write_stages("x", experiment, tmp_path / "r")
    assert not (tmp_path / "r/x").exists()
    write_stages("xy", experiment, tmp_path / "r")
    path.write_text(text)
    base = tmp_path / "finetune_base.yaml"
    raw = yaml.safe_load(base.read_text())
    raw["train"]["init_from"] = {"experiment": "finetune_demo"}
    base.write_text(yaml.safe_dump(raw))
    message = (
        r"train.init_from.experiment makes a circle: finetune_demo -> finetune_base -> finetune_demo. Name another"
    )
    with pytest.raises(ValueError, match=message):
        load_all([path])


def test_interpolated_positions_are_not_exported() -> None:
    from image_diffusion.networks.weights.dit_diffusers import to_diffusers_transformer

    ours = of([], 0, resolution=16)
    network = ours.system.build_network(ours.spec)
    found, _ = fitted(network, ours, of([], 0).system.build_network(of([], 0).spec).state_dict(), of([], 0))
    network.load_state_dict(found)
    with pytest.raises(ValueError, match="positions were interpolated from another resolution"):
        to_diffusers_transformer(network)  # type: ignore[arg-type]
