"""Numbers as conditions: table columns, shards stored with the crops, networks, and rows for sampling."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor

from image_diffusion.core.config.base import dump, parse, to_yaml
from image_diffusion.core.files.atomic import write_json
from image_diffusion.core.number_columns import NumberColumns
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import NUMBERS, Batch, DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded.pairs import write_pairs
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.experiments.resolve import load_all
from image_diffusion.metrics.distances.jackknife import Estimate
from image_diffusion.nn.inputs import NumberEmbedder
from image_diffusion.objectives.label_dropout import LabelDropout
from image_diffusion.stages import sample
from image_diffusion.stages.train import prepare_training
from image_diffusion.synthesis.config import SCORES
from image_diffusion.synthesis.scorecard import score_of
from image_diffusion.synthesis.set_folder import DataSetFacts, data_card
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.pairs.inputs import PairInputs
from image_diffusion.systems.pairs.numbers import NumberPairs
from image_diffusion.systems.sampling import SamplingInputs
from image_diffusion.training.checkpoint.checkpoint import read_checkpoint
from image_diffusion.training.load_model import load_codec, load_model
from image_diffusion.training.session import run

CPU = torch.device("cpu")
SAMPLER = {"type": "euler", "num_steps": 2}
SYSTEMS: dict[str, dict[str, Any]] = {
    "dit": {
        "type": "dit",
        "network": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4},
        "process": {"type": "flow"},
        "objective": {"type": "flow_matching", "label_drop_probability": 0.2},
    },
    "iddpm": {
        "type": "iddpm",
        "network": {"channels": 32, "multipliers": [1], "num_res_blocks": 1, "attention_resolutions": []},
        "process": {"type": "flow"},
        "objective": {"type": "flow_matching", "label_drop_probability": 0.2},
    },
    "rin": {
        "type": "rin",
        "network": {
            "patch": 4, "width": 16, "num_latents": 4, "latent_width": 16, "depth": 1, "num_heads": 2, "head_width": 8,
            "latent_depth": 1,
        },
        "objective": {"label_drop_probability": 0.2},
    },
}  # fmt: skip


def write_data(folder: Path, table: str | None = None) -> DataConfig:
    """Write 24 images of two classes and a table of their numbers; crop the images into `crops`."""
    noise = np.random.default_rng(0).integers(0, 100, (24, 192), dtype=np.uint8)
    lines = ["path,age,dose"]
    for number in range(24):
        path = folder / "in" / ("dark", "light")[number % 2] / f"{number:02d}.ppm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"P6 8 8 255\n" + bytes(noise[number] + 100 * (number % 2)))
        dose = "" if number % 3 == 0 else f"{number / 100}"
        lines.append(f"{path.parent.name}/{path.name},{20 + number},{dose}")
    (folder / "numbers.csv").write_text(table or "\n".join(lines))
    source = {"type": "folder", "path": str(folder / "in")}
    data = {"name": "x", "source": source, "resolution": 8, "num_shards": 3, "validation_fraction": 0.25}
    config: DataConfig = parse(DataConfig, data, "data")
    crop_dataset(config, folder / "crops")
    return config


def stored(folder: Path, config: DataConfig, max_bad_fraction: float = 0.1, **pairs: Any) -> tuple[Any, int]:
    """Write the numbers into `numbers`."""
    settings = {"columns": ["age", "dose"], "table": str(folder / "numbers.csv")} | pairs
    numbers = parse(NumberPairs, settings, "pairs")
    made = numbers.build(PairInputs(folder / "crops", config.source, 3, None, CPU))
    return write_pairs(made, "x", numbers.splits, numbers.dtype, folder / "numbers", max_bad_fraction)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    stored(folder, write_data(folder))
    return folder


def trained(data: Path, system: dict[str, Any], output: Path, steps: int = 2, **train: Any) -> bytes:
    """Train on the crops and their numbers; return the weights."""
    settings = {"steps": steps, "global_batch": 8, "flip_probability": 0, "checkpoint": {"every_steps": 1}}
    settings |= {"ema": {"rates": [0.5], "warmup": None}, "optimizer": {"type": "adamw", "lr": 0.05}}
    settings |= {"validate_every_steps": 2} | train
    stage = {"experiment": "x", "codec": {"type": "rgb"}, "system": system, "train": settings}
    stage["preview"] = {
        "num_samples": 3,
        "sampler": SAMPLER if system["type"] != "rin" else {"type": "ddim", "num_steps": 2},
    }
    config = output.with_suffix(".yaml")
    config.write_text(to_yaml(stage))
    beside = [data / "numbers" / "manifest.json"] if "condition" in system else []
    training = prepare_training(config, data / "crops" / "manifest.json", None, beside)
    run(training.build, training.stage.train, training.model, training.data, output, None)
    return (output / "weights.safetensors").read_bytes()


def images(weights: Path, *folders: Path, **settings: Any) -> tuple[Tensor, Any]:
    """Return the images of `sample`, drawn in two batches, and their maker."""
    model = load_model(weights)
    sampler = {"type": "ddim", "num_steps": 2} if model.system.type == "rin" else SAMPLER
    config = parse(SampleConfig, {"num_samples": 4, "sampler": sampler} | settings, "sample")
    inputs = SamplingInputs(model, config, load_codec(model, None, CPU), load_model, embeddings=folders)
    maker = model.system.sampling().maker(inputs)
    return torch.cat([maker(slice(i, i + 2)) for i in (0, 2)]), maker


def test_numbers_are_stored_with_the_crops_scaled_by_the_training_images(data: Path) -> None:
    manifest = json.loads((data / "numbers/manifest.json").read_text())
    assert (manifest["kind"], manifest["shape"], manifest["dtype"]) == ("numbers", [2, 2], "float32")
    joined = open_shards(data / "crops", "train").join(open_shards(data / "numbers", "all"))
    (rows,) = joined.gather_joined(np.arange(joined.num_samples))
    columns = NumberColumns.described(manifest["pairs"])
    values = columns.values(rows)
    doses = [value["dose"] for value in values if "dose" in value]
    assert rows[..., 0].amin(0).tolist() == [-1, -1] and rows[..., 0].amax(0).tolist() == [1, 1]
    ages = [value["age"] for value in values]
    assert manifest["pairs"]["ranges"] == [[min(ages), max(ages)], [min(doses), max(doses)]]
    for age, value, row in zip(ages, values, rows, strict=True):
        number = int(age) - 20
        assert ("dose" in value) == (number % 3 != 0) == bool(row[1, 1])
        assert value.get("dose", number / 100) == pytest.approx(number / 100) and (row[1, 0] == 0) >= (not row[1, 1])
    assert torch.equal(columns.scaled(values), rows)
    held_out = open_shards(data / "crops", "validation").join(open_shards(data / "numbers", "all"))
    assert held_out.num_samples + joined.num_samples == 24


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (1.7e9, 1.7e9 + 63, [1.7e9, 1.7e9 + 33, 1.7e9 + 63]),
        (0, 6, [0, 1, 5]),
        (1, 15, [0]),
        (20200101, 20241231, [20240131]),
        (-0.4, 0.4, [0.15, 0.25]),
        (0, 1e-9, [3e-10]),
        (5, 1e300, [5, 1e300]),
    ],
)
def test_numbers_are_restored_to_7_digits_of_their_range(low: float, high: float, values: list[float]) -> None:
    columns = NumberColumns(("age",), ((low, high),))
    rows = [{"age": value} for value in values]
    read = [row["age"] for row in columns.values(columns.scaled(rows))]
    assert "-0.0" not in map(str, read)
    assert read == values if high < 1e300 else read == pytest.approx(values, abs=high * 1e-7)


def test_warnings_show_all_digits_of_a_number() -> None:
    columns = NumberColumns(("time",), ((1.7e9, 1.7e9 + 63),))
    assert columns.outside([{"time": 1.7e9 + 64}]) == ["time 1700000064 (trained on 1700000000 to 1700000063)"]


@pytest.mark.parametrize(("low", "high"), [(273.15, 273.18899999999996), (-0.5, 273.123456785), (1.7e9, 1.7e9 + 1e-3)])
def test_restored_numbers_stay_in_the_range_of_the_training_images(low: float, high: float) -> None:
    columns = NumberColumns(("temp",), ((low, high),))
    rows: list[dict[str, float | None]] = [{"temp": low}, {"temp": high}]
    assert columns.outside([dict[str, float | None](row) for row in columns.values(columns.scaled(rows))]) == []
    step = (high - low) / 1000
    assert all(columns.outside([{"temp": number}]) for number in (low - step, high + step))
    (beyond,) = columns.values(columns.scaled([{"temp": high + step}]))
    assert beyond["temp"] == pytest.approx(high + step, rel=1e-12, abs=step / 100), "held-out numbers keep their place"


def test_image_without_row_is_quarantined_and_edited_number_rewrites_its_shard(tmp_path: Path) -> None:
    config = write_data(tmp_path)
    table = tmp_path / "numbers.csv"
    whole = table.read_text()
    table.write_text("\n".join(line for line in whole.split("\n") if "/05" not in line))
    with pytest.raises(ValueError, match=r"1 of 24 pairs \(4.2%\) are of no use.*light/05.ppm: it has no row"):
        stored(tmp_path, config, 0.01)
    manifest, _ = stored(tmp_path, config)
    assert (manifest["num_samples"], manifest["quarantined"]) == (23, 1)
    assert "light/05.ppm,it has no row of numbers" in (tmp_path / "numbers/quarantine.csv").read_text()
    table.write_text(whole)
    before, _ = stored(tmp_path, config)
    assert stored(tmp_path, config) == (before, 0)
    age = next(row for row in range(24) if min(ages := _training_ages(tmp_path)) < 20 + row < max(ages))
    table.write_text(whole.replace(f",{20 + age},", f",{20 + age}.25,"))
    after, written = stored(tmp_path, config)
    assert written == 1 and after["pairs"] == before["pairs"]


def _training_ages(folder: Path) -> list[float]:
    joined = open_shards(folder / "crops", "train").join(open_shards(folder / "numbers", "all"))
    (rows,) = joined.gather_joined(np.arange(joined.num_samples))
    pairs = json.loads((folder / "numbers/manifest.json").read_text())["pairs"]
    return [row["age"] for row in NumberColumns.described(pairs).values(rows)]


def test_numbers_are_also_read_from_json_files_next_to_the_images(tmp_path: Path) -> None:
    config = write_data(tmp_path)
    for row in (tmp_path / "numbers.csv").read_text().split("\n")[1:]:
        path, age, dose = row.split(",")
        values = {"age": int(age), "dose": float(dose) if dose else None}
        (tmp_path / "in" / path).with_suffix(".json").write_text(json.dumps(values))
    of_table, _ = stored(tmp_path, config)
    beside, _ = stored(tmp_path, config, table=None)
    assert beside["pairs"] == of_table["pairs"]
    message = r"^pairs.columns: no image has a value of Age, mass beside it. Name columns or keys of the data set.$"
    with pytest.raises(ValueError, match=message):
        stored(tmp_path, config, table=None, columns=["Age", "mass"])
    assert [shard["sha256"] for shard in beside["shards"]] == [shard["sha256"] for shard in of_table["shards"]]


@pytest.mark.parametrize(
    ("table", "pairs", "message"),
    [
        ("path,age\ndark/00.ppm,old", {"columns": ["age"]}, "age of dark/00.ppm: 'old' is no number. Give a number"),
        ("path,age\ndark/00.ppm,inf", {"columns": ["age"]}, "'inf' is not finite"),
        ("path,age\ndark/00.ppm,3\ndark/00.ppm,4", {"columns": ["age"]}, "has two rows for dark/00.ppm. Give one row"),
        ("path,age\nother.ppm,3", {"columns": ["age"]}, "no training image has a row of numbers. Name the images"),
        ("path,years\ndark/00.ppm,3", {"columns": ["age"]}, "has no column 'age'. Known: path, years"),
        ("", {"columns": ["age"], "table": "nowhere.csv"}, "nowhere.csv does not exist. Give a .csv"),
    ],
)  # fmt: skip
def test_invalid_tables_of_numbers_are_reported_in_one_line(
    tmp_path: Path, table: str, pairs: dict[str, Any], message: str
) -> None:
    config = write_data(tmp_path, table or "path,age\n")
    with pytest.raises(ValueError, match=message) as caught:
        stored(tmp_path, config, 1.0, **pairs)
    assert len(str(caught.value).splitlines()) == 1


def test_constant_columns_and_reserved_column_names_are_rejected(tmp_path: Path) -> None:
    config = write_data(tmp_path)
    table = tmp_path / "numbers.csv"
    lines = table.read_text().split("\n")
    table.write_text("\n".join(["path,age", *(f"{line.split(',')[0]},7" for line in lines[1:])]))
    with pytest.raises(ValueError, match="age is 7 in every training image, so that nothing can be learnt from it"):
        stored(tmp_path, config, columns=["age"])
    with pytest.raises(ValueError, match="label is the name of an image's class. Rename the column"):
        parse(NumberPairs, {"columns": ["age", "label"]}, "pairs")
    for name in ("seed", "class", "prompt", "image"):
        with pytest.raises(ValueError, match=f"{name} is the name of another column of a request. Rename the column"):
            parse(NumberPairs, {"columns": ["age", name]}, "pairs")
    with pytest.raises(ValueError, match="age is named twice"):
        parse(NumberPairs, {"columns": ["age", "age"]}, "pairs")


def test_embedding_of_a_missing_number_ignores_its_value() -> None:
    torch.manual_seed(0)
    embed = NumberEmbedder(2, 8)
    zeros = embed(torch.zeros(1, 2, 2))
    assert torch.equal(embed(torch.tensor([[[0.7, 0.0], [-0.2, 0.0]]])), zeros)
    there = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
    assert not torch.allclose(embed(there), zeros), "a number of 0 is not a missing one"
    line = embed(torch.stack([torch.linspace(-1, 1, 9), torch.ones(9)], 1)[:, None].expand(9, 2, 2))
    assert (line.diff(dim=0).norm(dim=1) > 0.01).all(), "no two places of the range look the same"


@pytest.mark.parametrize("name", SYSTEMS)
def test_training_on_numbers_resumes_bit_exactly_and_samples_the_rows(
    data: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    system = SYSTEMS[name] | {"condition": [{"type": "label"}, {"type": "numbers"}]}
    whole = trained(data, system, tmp_path / "once", 4, grid_every_steps=2)
    assert trained(data, system, tmp_path / "twice", 2, grid_every_steps=2) != whole
    assert trained(data, system, tmp_path / "twice", 4, grid_every_steps=2) == whole
    model = load_model(tmp_path / "once")
    assert model.spec.num_classes == 2 and model.spec.conditions == {NUMBERS: (2, 2)}

    rows = [{"age": 25, "dose": 0.1, "label": "light"}, {"age": 40, "label": "dark"}]
    two, maker = images(tmp_path / "once", conditions=rows)
    assert maker.titles == ["light, age 25, dose 0.1", "dark, age 40"] * 2 and maker.labels.tolist() == [1, 0, 1, 0]
    assert maker.described["conditions"]["values"] == {"age": [25, 40, 25, 40], "dose": [0.1, None, 0.1, None]}
    one, _ = images(tmp_path / "once", conditions=rows[:1])
    assert torch.equal(two[::2], one[::2]) and not torch.equal(two[1::2], one[1::2])
    product, maker = images(tmp_path / "once", conditions={"label": ["light"], "age": [25, 30], "dose": [0.1]})
    assert torch.equal(product[::2], one[::2]) and maker.titles[1] == "light, age 30, dose 0.1"
    guided, _ = images(tmp_path / "once", conditions=rows[:1], guidance={"guidance_scale": 3})
    assert not torch.equal(guided, one)

    table = tmp_path / "rows.csv"
    table.write_text("label,age,dose\nlight,25,0.1\ndark,40,\n")
    of_table, _ = images(tmp_path / "once", conditions=str(table))
    assert torch.equal(of_table, two)
    with pytest.raises(ValueError, match="sample.labels is set, and sample.conditions names a label"):
        images(tmp_path / "once", conditions=str(table), labels=["dark"])
    capsys.readouterr()
    far = 90 + list(SYSTEMS).index(name)  # a warning is printed once
    images(tmp_path / "once", conditions=[{"age": far, "label": "dark"}])
    assert f"sample.conditions asks for age {far} (trained on 2" in capsys.readouterr().err


def test_warning_if_rows_omit_a_number_that_every_training_image_has(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((data / "numbers/manifest.json").read_text())
    assert manifest["missing_numbers"] == ["dose"] and "missing" not in str(manifest["pairs"])
    system = SYSTEMS["dit"] | {"condition": [{"type": "label"}, {"type": "numbers"}]}
    trained(data, system, tmp_path / "out")
    (checkpoint,) = (tmp_path / "out/state").glob("*/step-0000002")
    assert "missing_numbers" not in read_checkpoint(checkpoint)[1], "a training of before goes on"
    capsys.readouterr()
    images(tmp_path / "out", conditions=[{"age": 25}])
    assert "leaves out" not in capsys.readouterr().err
    images(tmp_path / "out", conditions=[{"dose": 0.1}, {"age": 25}])
    line = "sample.conditions leaves out age, which no training image lacks: the network has learnt no missing number."
    assert f"warning: {line}" in capsys.readouterr().err
    described = NumberColumns.described(load_model(tmp_path / "out").pairs["numbers"])
    assert replace(described, missing=None).never_missing([{}]) == [], "a model of before does not say"


def test_unset_conditions_default_to_held_out_images(data: Path, tmp_path: Path) -> None:
    system = SYSTEMS["dit"] | {"condition": [{"type": "label"}, {"type": "numbers"}]}
    trained(data, system, tmp_path / "out", grid_every_steps=2)
    folders = data / "numbers", data / "crops"
    _, maker = images(tmp_path / "out", *folders)
    held_out = open_shards(data / "crops", "validation").join(open_shards(data / "numbers", "all"))
    turns = np.arange(4) % held_out.num_samples
    assert maker.labels.tolist() == held_out.labels[turns].tolist()
    (rows,) = held_out.gather_joined(turns)
    pairs = json.loads((data / "numbers/manifest.json").read_text())["pairs"]
    values = NumberColumns.described(pairs).values(rows)
    assert maker.described["conditions"]["values"]["age"] == [row["age"] for row in values]
    assert maker.described["conditions"]["split"] == "validation"
    later, _ = images(tmp_path / "out", *folders, first_seed=2)
    first, _ = images(tmp_path / "out", *folders)
    assert torch.equal(later[:2], first[2:]), "a seed has its numbers"
    _, chosen = images(tmp_path / "out", *folders, labels=["light"])
    assert chosen.labels.tolist() == [1] * 4
    assert chosen.described["conditions"]["values"] == maker.described["conditions"]["values"]
    with pytest.raises(ValueError, match="sample.conditions is not set, so held-out images provide the conditions"):
        images(tmp_path / "out")
    assert len(list((tmp_path / "out/previews").rglob("step-???????.png"))) == 2


def test_network_on_numbers_alone_takes_no_class(data: Path, tmp_path: Path) -> None:
    trained(data, SYSTEMS["dit"] | {"condition": {"type": "numbers"}}, tmp_path / "out")
    model = load_model(tmp_path / "out")
    assert model.spec.num_classes == 0 and model.spec.conditions == {NUMBERS: (2, 2)}
    _, maker = images(tmp_path / "out", conditions=[{"age": 25}])
    assert maker.labels is None and maker.titles == ["age 25"] * 4
    with pytest.raises(
        ValueError, match="sample.conditions names years, which is no column of pairs.columns. Known: age"
    ):
        images(tmp_path / "out", conditions=[{"years": 25}])


def test_initial_weights_with_other_columns_are_rejected(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system = SYSTEMS["dit"] | {"condition": {"type": "numbers"}}
    trained(data, system, tmp_path / "out")
    described = json.loads((tmp_path / "out/model.json").read_text())

    def start(**pairs: Any) -> None:
        write_json(tmp_path / "out/model.json", {**described, "pairs": described["pairs"] | pairs})
        trained(data, system, tmp_path / "second", init_from=str(tmp_path / "out"))

    message = r"the weights were trained with the numbers dose, age, but pairs.columns is age, dose. Give it the same"
    with pytest.raises(ValueError, match=message):
        start(columns=["dose", "age"])
    capsys.readouterr()
    start(ranges=[[0.0, 90.0], described["pairs"]["ranges"][1]])
    assert "They were trained with other settings: pairs.numbers.ranges ([[2" in capsys.readouterr().out


def test_other_column_order_is_reported_before_any_work(tmp_path: Path) -> None:
    other = NUMBERS_SECTION | {"columns": ["dose", "age"]}
    assert mistake(tmp_path, BOTH, pairs=other) == ""
    (tmp_path / "mine.yaml").rename(tmp_path / "first.yaml")
    train = {"steps": 1, "init_from": {"experiment": "first"}}
    both = NUMBERS_SECTION | {"columns": ["age", "dose"]}
    data = {"name": "other", "source": {"type": "digits"}, "resolution": 8, "validation_fraction": 0.2}
    found = mistake(tmp_path, BOTH, pairs=both, train=train, data=data)
    assert "train.init_from.experiment: the weights were trained with the numbers dose, age, but" in found


def test_sample_command_warns_how_many_rows_are_not_drawn(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(data, SYSTEMS["dit"] | {"condition": {"type": "numbers"}}, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("\n".join(["age", *(str(20 + row / 4) for row in range(40))]))
    asked = ["out", "--set", "sample.conditions=rows.csv", "--set", "sample.sampler={type: euler, num_steps: 1}"]
    line = "warning: 24 of the 40 rows or prompts that are listed are not drawn. Set --num 40 for all of them."
    sample.main(asked)
    assert line in capsys.readouterr().err
    sample.main([*asked, "--num", "2"])
    assert "not drawn" not in capsys.readouterr().err


def test_command_in_a_data_card_reproduces_an_image(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(data, SYSTEMS["dit"] | {"condition": [{"type": "label"}, {"type": "numbers"}]}, tmp_path / "out")
    rows = [{"age": 20 + row, "dose": row / 100, "label": ("dark", "light")[row % 2]} for row in range(4)]
    drawn, _ = images(tmp_path / "out", conditions=rows)
    facts = DataSetFacts("x", "About x", "None", "Me", "1.0.0", "2026-01-01", {}, ("age", "dose"))
    scores = {name: score_of(Estimate(0.5, 10), None) for name in SCORES}
    card = data_card(facts, "folders", {"dark": {"drawn": 1, "kept": 1}}, scores, "out")
    command = card.partition("`image-diffusion sample ")[2].partition("`")[0].replace("CLASS", "light")
    command = command.replace("SEED", "3").replace("NUMBER", "23", 1).replace("NUMBER", "0.03")
    monkeypatch.chdir(tmp_path)
    sample.main([*shlex.split(command), "--set", "sample.sampler={type: euler, num_steps: 2}"])
    with np.load("drawn/out/samples.npz") as arrays:
        again = torch.from_numpy(arrays["arr_0"][0]).permute(2, 0, 1)
    torch.testing.assert_close(again, drawn[3], atol=1, rtol=0)
    assert (again.int() - drawn[1].int()).abs().max() > 1, "another seed of the class"


def test_served_older_model_accepts_a_number_named_class(data: Path, tmp_path: Path) -> None:
    trained(data, SYSTEMS["dit"] | {"condition": {"type": "numbers"}}, tmp_path / "out")
    model = load_model(tmp_path / "out")
    model.pairs["numbers"]["columns"] = ["class", "dose"]
    config = parse(SampleConfig, {"sampler": SAMPLER}, "sample")
    predict = model.system.sampling().predictor(model, config, lambda: load_codec(model, None, CPU), None)
    young, old = predict(pandas.DataFrame({"seed": [0, 0], "class": [22.0, 40.0]}))
    assert not np.array_equal(young, old)


@pytest.mark.parametrize("name", SYSTEMS)
def test_list_of_one_condition_equals_that_condition(data: Path, tmp_path: Path, name: str) -> None:
    plain = trained(data, SYSTEMS[name], tmp_path / "plain")
    usual = load_model(tmp_path / "plain").system
    listed = parse(type(usual), SYSTEMS[name] | {"condition": [{"type": "label"}]}, "system")
    assert dump(listed) == dump(usual) and listed.conditioning == usual.conditioning
    assert ("condition" in dump(usual)) == (name == "dit"), "files of before keep their bytes"
    written = {key: value for key, value in dump(listed).items() if key != "condition"}
    assert trained(data, written, tmp_path / "listed") == plain


def test_class_and_numbers_are_dropped_together_in_training() -> None:
    spec = DataSpec(channels=1, resolution=1, num_classes=10, conditions={NUMBERS: (2, 2)})
    count = 4000
    streams = Streams(0, torch.zeros(count, dtype=torch.int64), torch.arange(count))
    cond = {"label": torch.full((count,), 3), NUMBERS: torch.ones(count, 2, 2)}
    batch = Batch(torch.zeros(count, 1, 1, 1), cond, streams)
    dropped = LabelDropout(0.25, spec)(batch, torch.nn.Identity().train())
    gone = dropped["label"] == 10
    assert torch.equal(gone, ~dropped[NUMBERS].flatten(1).any(1)) and gone.float().mean().item() == pytest.approx(
        0.25, abs=0.03
    )


NUMBERS_SECTION = {"type": "numbers", "columns": ["age"], "table": "numbers.csv"}
BOTH = [{"type": "label"}, {"type": "numbers"}]


def mistake(folder: Path, condition: Any, name: str = "dit", **sections: Any) -> str:
    """Return the error message for an experiment; empty if it is valid."""
    data = {"name": "digits", "source": {"type": "digits"}, "resolution": 8, "validation_fraction": 0.2}
    sampler = {"sampler": {"type": "ddim", "num_steps": 2}}
    experiment = {"data": data, "train": {"steps": 1}, "pairs": NUMBERS_SECTION, "sample": {}, "preview": {}} | sections
    experiment |= {section: sampler | experiment[section] for section in ("sample", "preview")}
    experiment["system"] = SYSTEMS[name] | {"condition": condition}
    path = folder / "mine.yaml"
    path.write_text(to_yaml({key: value for key, value in experiment.items() if value is not None}))
    try:
        load_all([path])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", SYSTEMS)
def test_numbers_with_and_without_a_class_are_accepted(tmp_path: Path, name: str) -> None:
    assert mistake(tmp_path, BOTH, name) == ""
    assert mistake(tmp_path, {"type": "numbers"}, name, sample={"conditions": {"age": [1, 2]}}) == ""
    rows = [{"age": 1, "label": "7"}, {"age": None, "label": 3}]
    assert mistake(tmp_path, BOTH, name, sample={"conditions": rows}, preview={"conditions": rows}) == ""


@pytest.mark.parametrize(
    ("condition", "sections", "message"),
    [
        ([], {}, "system.condition: the list is empty. Name a part, such as {type: label}"),
        ([{"type": "label"}] * 2, {}, "system.condition: label is named twice. Name each part once."),
        (
            [{"type": "text"}, {"type": "numbers"}],
            {},
            "pairs.type is numbers. It needs captions: add {type: captions} to the list pairs.",
        ),
        (BOTH, {"pairs": {"type": "captions"}}, "system.condition.type is [label, numbers], but pairs.type is"),
        ({"type": "label"}, {}, "pairs has numbers, but system.condition.type is label: nothing reads them."),
        (BOTH, {"sample": {"conditions": [{"years": 3}]}}, "sample.conditions names years, which is no column of"),
        (BOTH, {"sample": {"conditions": [{"age": "old"}]}}, "age of row 0: 'old' is no number. Give a number"),
        (BOTH, {"sample": {"conditions": {"age": 3}}}, "sample.conditions: expected rows, such as [{age: 40"),
        (BOTH, {"sample": {"conditions": []}}, "sample.conditions: expected rows"),
        (BOTH, {"sample": {"conditions": [{"label": "x"}]}}, "sample.conditions names the class 'x', but the"),
        (
            BOTH,
            {"sample": {"conditions": [{"label": 1}, {"age": 3}]}},
            "sample.conditions: 1 of 2 rows name a label. Give one to each row, or to none.",
        ),
        (
            BOTH,
            {"sample": {"conditions": [{"label": 1}], "labels": [2]}},
            "sample.labels is set, and sample.conditions names a label. Leave one of them out.",
        ),
        (
            {"type": "numbers"},
            {"sample": {"conditions": [{"label": 1}]}},
            "sample.conditions names a label, but the network takes no classes.",
        ),
        ({"type": "numbers"}, {"sample": {"labels": [1]}}, "sample.labels is set, but the network takes numbers."),
        (
            {"type": "label"},
            {"sample": {"conditions": [{"age": 1}]}, "pairs": None},
            "sample.conditions is set, but the network takes no numbers. Leave it out, or add {type: numbers}",
        ),
        ({"type": "numbers"}, {"sample": {"prompts": ["a"]}}, "takes numbers, not words. Write sample.conditions"),
        (
            BOTH,
            {"pairs": {"type": "numbers", "columns": ["age"]}},
            "pairs.table is unset, but data.source.type: digits has no values beside the images. Name a table",
        ),
        (
            BOTH,
            {"sample": {"conditions": [{"age": 1}]}, "synthesize": {"per_class": 2}},
            "synthesize draws images of seeds and classes alone, but these are made of numbers. Set synthesize.table",
        ),
        (
            [*BOTH, {"type": "image", "from": "self", "shrink": 2}],
            {"synthesize": {"like": "train"}},
            "but these are made of images, on which system.condition conditions the network. Leave out synthesize.",
        ),
        (
            BOTH,
            {"synthesize": {"table": "absent.csv"}},
            "synthesize.table: absent.csv does not exist.",
        ),
        (
            {"type": "numbers"},
            {"data": {"name": "digits", "source": {"type": "digits"}, "resolution": 8}},
            "sample.conditions is unset, so held-out images provide the conditions, but data has no held-out images. "
            "Set data.validation_fraction, or write some.",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_in_one_line_before_any_work(
    tmp_path: Path, condition: Any, sections: dict[str, Any], message: str
) -> None:
    found = mistake(tmp_path, condition, **sections)
    assert message in found and len(found.splitlines()) == 1, found


def test_label_column_is_rejected_if_the_network_takes_no_class(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("age,label,count\n40,3,5\n")
    synthesize = {"table": str(tmp_path / "rows.csv")}
    assert mistake(tmp_path, BOTH, synthesize=synthesize) == ""
    assert "synthesize.table names a label, but the network takes no classes. Leave it out, or add {type: label}" in (
        mistake(tmp_path, {"type": "numbers"}, synthesize=synthesize)
    )
