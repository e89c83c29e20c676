"""Configuration: a mistake is one clear line with a suggestion."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, create_model

from image_diffusion.core.config import Config, dump, load, parse, to_yaml


class Circle(Config):
    type: Literal["circle"] = "circle"
    radius: float = Field(1.0, gt=0)


class Square(Config):
    type: Literal["square"] = "square"
    side: int = 1


class Inner(Config):
    steps: int = Field(ge=1)
    mode: Literal["fast", "exact"] = "fast"


class Outer(Config):
    train: Inner
    shape: Annotated[Circle | Square, Field(discriminator="type")] = Circle()
    shapes: list[Annotated[Circle | Square, Field(discriminator="type")]] = Field(default_factory=list)


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
        ({**GOOD, "shape": {"radius": 1}}, "shape.type is required."),
        ({**GOOD, "shape": {"type": "square", "radius": 2}}, "shape.radius is not a known key. Known: side, type."),
        ({**GOOD, "shape": {"type": "circle", "radius": -1}}, "shape.radius is -1: input should be greater than 0."),
        (
            {**GOOD, "shapes": [{"type": "square", "sid": 2}]},
            "shapes.0.sid is not a known key. Did you mean shapes.0.side?",
        ),
        ({"train": {"steps": 1, "mode": "fsat"}}, "Unknown train.mode 'fsat'. Known: fast or exact."),
    ],
)
def test_a_mistake_is_told_in_one_line(data: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(Outer, data, "x.yaml")
    assert message in str(caught.value)


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        parse(Outer, {"trian": 1, "shape": {"type": "no"}}, "x.yaml")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and all(line.startswith("x.yaml: ") for line in lines)


def test_a_configuration_survives_the_way_to_yaml_and_back(tmp_path: Path) -> None:
    config = Outer(train=Inner(steps=2), shape=Square(side=4), shapes=[Circle(radius=0.5)])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(dump(config)))
    assert load(Outer, path) == config


@pytest.mark.parametrize(("text", "message"), [("a: [", "is not valid YAML"), (None, "does not exist")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load(Outer, path)
    assert str(path) in str(caught.value)


def test_the_sentence_under_a_key_describes_it_in_the_schema() -> None:
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
