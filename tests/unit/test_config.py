"""Configuration: a mistake is one clear line with a suggestion."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import Field, create_model

from image_diffusion.core.config.base import Config, dump, load, parse, read_yaml, to_yaml
from image_diffusion.core.config.yaml12 import from_text, in_line
from image_diffusion.data.config import DataConfig
from image_diffusion.training.config import TrainConfig


class Circle(Config):
    type: Literal["circle"] = "circle"
    radius: float = Field(1.0, gt=0)


class Square(Config):
    type: Literal["square"] = "square"
    side: int = 1


class Inner(Config):
    steps: int = Field(ge=1)
    mode: Literal["fast", "exact"] = "fast"


class Deeper(Config):
    rate: float = 0.5
    circle: Circle = Circle()
    words: str = ""
    often: int = 1


class Outer(Config):
    train: Inner
    slow: Deeper = Deeper()
    shape: Annotated[Circle | Square, Field(discriminator="type")] = Circle()
    shapes: list[Annotated[Circle | Square, Field(discriminator="type")]] = Field(default_factory=list)
    pair: tuple[int, ...] = ()


class Named(Config):
    name: str = ""
    """What it is called,
    in one word."""
    size: int = 1
    """How large it is."""


class Ring(Named):
    size: int = 2
    """How wide it is."""
    shape: Circle | None = None
    """What it looks like."""


GOOD = {"train": {"steps": 3}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": {"stpes": 3}}, "train.stpes is not a known key. Did you mean train.steps?"),
        ({"train": {}}, "train.steps is required."),
        ({"train": {"steps": 0}}, "train.steps is 0: input should be greater than or equal to 1."),
        ({**GOOD, "shape": {"type": "circel"}}, "Unknown shape 'circel'. Known: circle, square."),
        ({**GOOD, "shapes": [{"radius": 1}]}, "shapes.0.type is required. Known: circle, square."),
        (
            {**GOOD, "shape": {"type": "square", "radius": 2}},
            "shape.radius is not a known key. It is a key of type circle.",
        ),
        ({**GOOD, "shape": {"type": "circle", "radius": -1}}, "shape.radius is -1: input should be greater than 0."),
        (
            {**GOOD, "shapes": [{"type": "square", "sid": 2}]},
            "shapes.0.sid is not a known key. Did you mean shapes.0.side?",
        ),
        ({**GOOD, "train.steps": 1}, "train.steps is not a known key. Write it in its section, as train: {steps: …}."),
        ({**GOOD, "slow.circle.radius": 1}, "Write it in its section, as slow: {circle: {radius: …}}."),
        ({**GOOD, "rate": 1}, "rate is not a known key. Did you mean slow.rate?"),
        ({**GOOD, "side": 1}, "side is not a known key. Did you mean shape.side?"),
        ({**GOOD, "slow": {"radius": 1}}, "slow.radius is not a known key. Did you mean slow.circle.radius?"),
        ({**GOOD, "slow": {"raduis": 1}}, "slow.raduis is not a known key. Did you mean slow.circle.radius?"),
        ({**GOOD, "slow": {"mode": 1}}, "slow.mode is not a known key. Did you mean train.mode?"),
        ({**GOOD, "slow": {"zzz": 1}}, "slow.zzz is not a known key. Known: circle, often, rate, words."),
        ({**GOOD, "shape": {"type": "square", "zzz": 2}}, "shape.zzz is not a known key. Known: side, type."),
        ({**GOOD, "shape": "circle"}, "shape is 'circle', but a section is expected. Write shape: {type: circle}."),
        ({**GOOD, "shape": "sqare"}, "shape is 'sqare', but a section is expected. Write shape: {type: square}."),
        (
            {**GOOD, "shape": "zzz"},
            "shape is 'zzz', but a section is expected. Write shape: {type: circle}. Known types: circle, square.",
        ),
        ({"train": 3}, "train is 3, but a section is expected, with keys such as steps, mode."),
        (
            {**GOOD, "slow": None},
            "slow is empty, but a section is expected, with keys such as rate, circle, words, often. "
            "Set one, or leave it out.",
        ),
        (None, "the file is empty, but a section is expected, with keys such as train, slow, shape, shapes."),
        ({"train": {"steps": 1, "mode": "fsat"}}, "Unknown train.mode 'fsat'. Known: fast or exact."),
        ({"pair": 3, **GOOD}, "pair is 3: input should be a valid list."),
        ({"train": {"steps": True}}, "train.steps is 'true': input should be a valid integer"),
        (
            {**GOOD, "shape": {"type": "circle", "radius": False}},
            "shape.radius is 'false': input should be a valid number",
        ),
    ],
)
def test_each_mistake_is_reported_with_its_message(data: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(Outer, data, "x.yaml")
    assert message in str(caught.value)


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ValueError) as caught:
        parse(Outer, {"trian": 1, "shape": {"type": "no"}}, "x.yaml")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and all(line.startswith("x.yaml: ") for line in lines)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [([{"type": "no"}], "Unknown shapes.0 'no'. Known: circle, square."), ([], "shapes is []: tuple should have")],
)
def test_only_a_list_without_items_is_reported_as_too_short(shapes: object, message: str) -> None:
    shape = Annotated[Circle | Square, Field(discriminator="type")]
    model = create_model("Shapes", __base__=Config, shapes=(Annotated[tuple[shape, ...], Field(min_length=1)], ...))
    with pytest.raises(ValueError) as caught:
        parse(model, {"shapes": shapes}, "x.yaml")
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"x.yaml: {message}")


def test_configuration_survives_a_yaml_round_trip(tmp_path: Path) -> None:
    config = Outer(train=Inner(steps=2), shape=Square(side=4), shapes=[Circle(radius=0.5)])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(dump(config)))
    assert load(Outer, path) == config


def test_configuration_dumps_to_plain_data_in_declaration_order() -> None:
    kind = create_model("Drawn", __base__=Config, where=(Path, Path("a/b")), corner=(tuple[int, int], (1, 2)))
    assert dump(kind()) == {"where": "a/b", "corner": [1, 2]} and type(dump(kind())["corner"]) is list
    assert to_yaml(dump(kind())).startswith("where: a/b\ncorner:")


@pytest.mark.parametrize(("text", "message"), [("a: [", "is not valid YAML"), (None, "does not exist")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load(Outer, path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train:\n  steps: 1\n  steps: 2\n",
            "line 3, column 3: the key steps occurs here and in line 2; keep one of them.",
        ),
        (
            "train: {steps: 1, steps: 2}",
            "line 1, column 19: the key steps occurs here and in line 1; keep one of them.",
        ),
        ("train:\n\tsteps: 1\n", "line 2 begins with a tab; indent with spaces."),
        ("train:\n  steps: 1\n\tmode: fast\n", "line 3 begins with a tab; indent with spaces."),
        ("train: a: b", "line 1, column 9: mapping values are not allowed here."),
        ("train: \x00", "unacceptable character"),
        (b"train:\n  mode: f\xe4st\n", "line 2 is not UTF-8 text; save the file in UTF-8."),
    ],
)
def test_yaml_syntax_errors_are_reported_with_line_numbers(tmp_path: Path, text: str | bytes, message: str) -> None:
    (tmp_path / "config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        load(Outer, tmp_path / "config.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/config.yaml is not valid YAML: ")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("1e5", 1e5), ("1E+5", 1e5), ("1e-4", 1e-4), (".5", 0.5), ("1.", 1.0), ("-.inf", float("-inf")),
        ("1_000", 1000), ("010", 10), ("0x1F", 31), ("-3", -3), ("off", "off"), ("no", "no"),
        ("true", True), ("False", False),
        ("12:30:00", "12:30:00"), ("2024-01-01", "2024-01-01"), ("", None), ("~", None), ("null", None), ("e5", "e5"),
    ],
)  # fmt: skip
def test_words_are_read_as_in_yaml_1_2(tmp_path: Path, word: str, value: object) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"word: {word}\n")
    assert read_yaml(path) == {"word": value} and type(read_yaml(path)["word"]) is type(value)
    path.write_text(to_yaml({"word": word}))  # a word that looks like another type survives both readers
    assert read_yaml(path) == {"word": word} == yaml.safe_load(path.read_text())


def test_sections_can_be_shared_by_anchors(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n")
    assert read_yaml(tmp_path / "c.yaml")["b"] == {"x": 1, "y": 3}


def test_integers_can_be_written_in_scientific_notation(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: {steps: 1e5}")
    assert load(Outer, tmp_path / "config.yaml").train.steps == 100_000


def test_missing_config_file_error_lists_existing_ones(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "demo.yaml").touch()
    with pytest.raises(ValueError, match=r"mien.yaml does not exist. Did you mean mine\? .* holds: demo, mine\."):
        read_yaml(tmp_path / "mien.yaml")


@pytest.mark.parametrize(("name", "fitting"), [("my-flowers", "my_flowers"), ("two words", "two_words"), (".x", "x")])
def test_invalid_data_set_names_get_a_valid_suggestion(name: str, fitting: str) -> None:
    data = {"name": name, "source": {"type": "digits"}, "resolution": 32}
    with pytest.raises(ValueError, match=rf"x.yaml: name: '{name}' cannot name a data set. .*: {fitting}\.$"):
        parse(DataConfig, data, "x.yaml")


def test_misplaced_learning_rate_error_suggests_its_key() -> None:
    data = {"steps": 1, "lr": 1e-4}
    with pytest.raises(ValueError, match="x.yaml: lr is not a known key. Did you mean optimizer.lr?"):
        parse(TrainConfig, data, "x.yaml")


def test_attribute_docstrings_are_descriptions_in_the_schema() -> None:
    properties = Ring.model_json_schema()["properties"]
    assert {name: each["description"] for name, each in properties.items()} == {
        "name": "What it is called,\nin one word.",
        "size": "How wide it is.",
        "shape": "What it looks like.",
    }
    colour = (str, Field("", description="Its colour."))
    made = create_model("Made by a call", __base__=Ring, size=(int, 3), colour=colour)
    told = {name: each["description"] for name, each in made.model_json_schema()["properties"].items()}
    assert told == {name: each["description"] for name, each in properties.items()} | {"colour": "Its colour."}
    assert "description" not in Circle.model_json_schema()["properties"]["radius"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (2.0, "2.0"),
        ("flow", "flow"),
        ({"type": "muon", "adamw": {"betas": [0.9, 0.99]}}, "{type: muon, adamw: {betas: [0.9, 0.99]}}"),
        ([f"a word that is long, number {i}" for i in range(9)], None),
    ],
)
def test_one_line_values_survive_a_round_trip(value: Any, text: str | None) -> None:
    written = in_line(value)
    assert "\n" not in written and (text is None or written == text)
    assert from_text(f"key: {written}") == {"key": value}


@pytest.mark.parametrize("text", ["[" * 20_000, "{a: " * 20_000, "- " * 20_000, "a: " + "[" * 20_000 + "]" * 20_000])
def test_deeply_nested_yaml_is_reported_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"deep\.yaml is not valid YAML: ") as error:
        load(Ring, tmp_path / "deep.yaml")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    with pytest.raises(ValueError, match=r"--set radius=.* is not valid YAML") as error:
        load(Ring, _empty(tmp_path), [f"radius={text}"])


def _empty(folder: Path) -> Path:
    (folder / "empty.yaml").write_text("{}")
    return folder / "empty.yaml"
