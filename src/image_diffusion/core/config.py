"""Configuration is a record: typed, bounded, frozen; a key that does not exist is an error with a suggestion."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
import types
import typing
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, TypeAdapter, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

T = TypeVar("T")


class Config(BaseModel):
    """Base of every configuration section. Frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        """The sentence under each field describes it in the schema. Read here alone: pydantic's own
        use_attribute_docstrings reads the source of every class as it is made, a third of a second at each start."""
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, sentence in _sentences(cls).items():
            properties[name]["description"] = sentence
        return schema


def read_yaml(path: Path) -> Any:
    """The plain data in a YAML file. Raises ValueError naming the file when it is missing or is not YAML."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def parse(kind: Any, data: Any, where: str) -> Any:
    """Validate plain data as `kind`: a Config class, or an annotated union of them.

    Raises ValueError with one sentence a problem, each opening with `where` and the dotted key.
    """
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        problems = [_sentence(problem, kind, data) for problem in error.errors()]
        raise ValueError("\n".join(f"{where}: {problem}" for problem in dict.fromkeys(problems))) from None


def load(kind: type[T], path: Path) -> T:
    """Read a YAML file as `kind`. Raises ValueError (see `parse`)."""
    return typing.cast("T", parse(kind, read_yaml(path), str(path)))


def dump(config: Config) -> dict[str, Any]:
    """Plain data that `parse` turns back into an equal configuration, defaults included."""
    return config.model_dump(mode="json")


def to_yaml(data: Any) -> str:
    """Plain data as YAML, keys in their given order: the same data always gives the same bytes."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def _sentences(kind: type[BaseModel]) -> dict[str, str]:
    """What stands under the fields of a class and of those it inherits from, by field."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if issubclass(each, Config) and each is not Config:
            found |= _sentences_of(each)
    return {name: sentence for name, sentence in found.items() if name in kind.model_fields}


def _sentences_of(kind: type[BaseModel]) -> dict[str, str]:
    """The same in the source of one class; none of one that was made by a call."""
    try:
        written = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except OSError:
        return {}
    found = {}
    for field, below in pairwise(typing.cast("ast.ClassDef", written).body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                found[name] = inspect.cleandoc(text)
    return found


def _sentence(problem: Any, kind: Any, data: Any) -> str:
    location = _visible_location(problem["loc"], data)
    key = ".".join(str(part) for part in location) or "the file"
    match problem["type"]:
        case "extra_forbidden":
            parent = _fields_at(kind, data, location[:-1])
            close = difflib.get_close_matches(str(location[-1]), parent, n=1)
            prefix = "".join(f"{part}." for part in location[:-1])
            advice = f"Did you mean {prefix}{close[0]}?" if close else f"Known: {', '.join(sorted(parent))}."
            return f"{key} is not a known key. {advice}"
        case "missing":
            return f"{key} is required."
        case "union_tag_invalid":
            tag = problem["ctx"]["tag"]
            return f"Unknown {key} '{tag}'. Known: {problem['ctx']['expected_tags'].replace(chr(39), '')}."
        case "union_tag_not_found":
            return f"{key}.type is required."
        case "literal_error":
            return f"Unknown {key} '{problem['input']}'. Known: {problem['ctx']['expected'].replace(chr(39), '')}."
        case "value_error":
            return f"{key}: {problem['ctx']['error']}" if location else str(problem["ctx"]["error"])
        case _:
            return f"{key} is {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}."


def _visible_location(location: tuple[int | str, ...], data: Any) -> list[int | str]:
    """The keys as the user wrote them: pydantic also lists the tags of the unions it passed through."""
    visible: list[int | str] = []
    for position, part in enumerate(location):
        if isinstance(data, dict) and part not in data and position + 1 < len(location):
            continue
        visible.append(part)
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
    return visible


def _fields_at(kind: Any, data: Any, location: list[int | str]) -> list[str]:
    """Names of the fields allowed at a place in the data."""
    models = _models(kind)
    tag = data.get("type") if isinstance(data, dict) else None
    tagged = [
        m for m in models if "type" in m.model_fields and tag in typing.get_args(m.model_fields["type"].annotation)
    ]
    models = tagged or models
    if not location:
        return sorted({name for model in models for name in model.model_fields})
    inner = data.get(location[0]) if isinstance(data, dict) else data[location[0]]
    if isinstance(location[0], int):
        return _fields_at(kind, inner, location[1:])
    kinds = [m.model_fields[location[0]].annotation for m in models if location[0] in m.model_fields]
    return sorted({name for each in kinds for name in _fields_at(each, inner, location[1:])})


def _models(kind: Any) -> list[type[BaseModel]]:
    """Every pydantic model a type annotation can stand for."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    if isinstance(kind, typing.TypeAliasType if hasattr(typing, "TypeAliasType") else ()):
        return _models(kind.__value__)
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType, typing.Annotated, list, tuple, dict):
        return [model for argument in arguments for model in _models(argument)]
    return []
