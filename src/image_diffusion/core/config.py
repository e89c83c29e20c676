"""Configuration is a record: typed, bounded, frozen; a key that does not exist is an error with a suggestion."""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, TypeAdapter, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from image_diffusion.core import plain_yaml
from image_diffusion.core.mistakes import nearest, sentence

T = TypeVar("T")


class Config(BaseModel):
    """Base of every configuration section. Frozen, and strict about unknown keys.

    A section that is written in part keeps the rest of the default that stands where it is used (`merged`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _over_the_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        return {key: merged(fields[key].default, value) if key in fields else value for key, value in data.items()}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        """The sentence under each field describes it in the schema. Read here alone: pydantic's own
        use_attribute_docstrings reads the source of every class as it is made, a third of a second at each start."""
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, about in _sentences(cls).items():
            properties[name]["description"] = about
        return schema


def merged(default: Any, written: Any) -> Any:
    """What is written of a section, over the default that it takes the place of: a Config or plain data.

    Key by key, and so in the sections inside, as long as `type` is the same or left out; another type starts from the
    defaults of its own.
    """
    base = _set_by_hand(default)
    if not isinstance(base, dict) or not isinstance(written, dict):
        return written
    if written.get("type", base.get("type")) != base.get("type"):
        return written
    return base | {key: merged(base[key], value) if key in base else value for key, value in written.items()}


def _set_by_hand(default: Any) -> Any:
    """As plain data, what a default says beyond the defaults of its class, and its type."""
    if isinstance(default, BaseModel):
        names = [name for name in type(default).model_fields if name in default.model_fields_set or name == "type"]
        return {name: _set_by_hand(getattr(default, name)) for name in names}
    return default


def read_yaml(path: Path) -> Any:
    """The plain data in a YAML file. Raises ValueError naming the file when it is missing or is not YAML."""
    try:
        return plain_yaml.from_text(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.{_files_beside(path)}") from None
    except ValueError as error:  # bytes that are no text, too
        raise ValueError(f"{path} is not valid YAML: {error}.") from None


def parse(kind: Any, data: Any, where: str) -> Any:
    """Validate plain data as `kind`: a Config class, or an annotated union of them.

    Raises ValueError with one sentence a problem, each opening with `where` and the dotted key.
    """
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        problems = [sentence(problem, kind, data) for problem in error.errors()]
        raise ValueError("\n".join(f"{where}: {problem}" for problem in dict.fromkeys(problems))) from None


def load(kind: type[T], path: Path, changes: Sequence[str] = ()) -> T:
    """Read a YAML file as `kind`, with what the command line changes in it. Raises ValueError (see `parse`)."""
    return typing.cast("T", parse(kind, changed(read_yaml(path), changes), told(path, changes)))


def changed(data: Any, changes: Sequence[str]) -> Any:
    """Plain data with what `--set` says, in order, merged over it: each "sample.sampler.num_steps=10", the value as
    YAML has it. Raises ValueError for one that says nothing."""
    for change in changes:
        key, separator, text = change.partition("=")
        names = key.split(".")
        if not separator or not all(names):
            raise ValueError(f"--set '{change}' sets nothing. Write KEY=VALUE, such as sample.num_samples=16.")
        try:
            value = plain_yaml.from_text(text)
        except ValueError as error:
            raise ValueError(f"--set {change}: the value is not valid YAML: {error}.") from None
        for name in reversed(names):
            value = {name: value}
        data = merged(data, value)
    return data


def told(path: Path | None, changes: Sequence[str]) -> str:
    """Where what is read comes from, for the sentence on a mistake in it. path: None for defaults."""
    return " --set ".join([str(path or "the defaults"), *changes])


def dump(config: Config) -> dict[str, Any]:
    """Plain data that `parse` turns back into an equal configuration, defaults included."""
    return config.model_dump(mode="json")


def differing_keys(ours: Any, theirs: Any, prefix: str = "") -> list[str]:
    """Dotted keys whose values differ, each with both values: "train.optimizer.lr (0.0002 here, 0.0001 there)"."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = [*ours, *(key for key in theirs if key not in ours)]
        return [d for key in keys for d in differing_keys(ours.get(key), theirs.get(key), f"{prefix}{key}.")]
    return [] if ours == theirs else [f"{prefix[:-1]} ({ours!r} here, {theirs!r} there)"]


def to_yaml(data: Any) -> str:
    """Plain data as YAML, keys in their given order: the same data always gives the same bytes."""
    return plain_yaml.to_text(data)


def _sentences(kind: type[BaseModel]) -> dict[str, str]:
    """What stands under the fields of a class and of those it inherits from, by field."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if issubclass(each, Config) and each is not Config:
            found |= _sentences_of(each)
    return {name: about for name, about in found.items() if name in kind.model_fields}


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


def _files_beside(path: Path) -> str:
    """What may have been meant by a file that is missing: one like it, and which there are."""
    there = sorted(each.stem for each in path.parent.glob(f"*{path.suffix}"))
    close = nearest(path.stem, there)
    advice = f" Did you mean {close}?" if close else ""
    return f"{advice} In {path.parent} there are: {', '.join(there)}." if there else advice


def beyond_defaults(config: Config, defaults: Config | None = None) -> set[str]:
    """The dotted keys of what differs from the defaults, those of its classes where none are given. A part of another
    type counts with its key `type`, and is compared with the defaults of its own."""
    found: set[str] = set()
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        default = getattr(defaults, name) if defaults is not None else field.get_default(call_default_factory=True)
        if isinstance(value, Config):
            same = type(default) is type(value)
            found |= {f"{name}.{key}" for key in beyond_defaults(value, default if same else None)}
            if not same and isinstance(default, Config) and "type" in type(value).model_fields:
                found.add(f"{name}.type")
        elif value != default:
            found.add(name)
    return found
