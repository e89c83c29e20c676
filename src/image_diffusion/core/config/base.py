"""Configuration sections: typed, validated and frozen; an unknown key is an error with a suggestion.

`base: cifar10` at the top of a file stands for cifar10.yaml beside it. The content of the file is merged over it, key
by key, if `type` is the same or left out. An empty section removes the section of the base.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    Tag,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from image_diffusion.core.config import yaml12
from image_diffusion.core.config.errors import causes, nearest, sentence
from image_diffusion.core.process.secrets import check_no_secrets, without_credentials

T = TypeVar("T")


class Config(BaseModel):
    """Base of every configuration section. Instances are frozen; unknown keys are errors.

    A section with only some keys is completed by the default of the field that contains it (`merged`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _over_the_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        return {
            key: merged(fields[key].default, _word(value, fields[key].annotation)) if key in fields else value
            for key, value in data.items()
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        """Add the docstring of each field to the schema as its description. Docstrings are read only here: pydantic's
        use_attribute_docstrings reads the source of every class when it is defined, a third of a second at each
        start."""
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, about in _sentences(cls).items():
            properties[cls.model_fields[name].alias or name]["description"] = about
        return schema


def _word(value: Any, annotation: Any) -> Any:
    """Return true or false as a word if the field takes a number and no boolean: pydantic reads them as 1 and 0."""
    number = isinstance(value, bool) and _takes(annotation, int, float) and not _takes(annotation, bool, Any)
    return str(value).lower() if number else value


def _takes(annotation: Any, *kinds: Any) -> bool:
    """Return True if one of the kinds occurs in an annotation."""
    return annotation in kinds or any(_takes(part, *kinds) for part in typing.get_args(annotation))


class Sparse(Config):
    """Section that omits some keys from plain data if they are unset. Files and fingerprints of experiments without
    these keys then equal those of versions that did not have them.
    """

    if_set: ClassVar[frozenset[str]]
    """Keys that are omitted from plain data if they have their defaults."""

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dumped: SerializerFunctionWrapHandler) -> dict[str, Any]:
        plain: dict[str, Any] = dumped(self)
        fields = type(self).model_fields
        unset = [
            name for name in self.if_set if getattr(self, name) == fields[name].get_default(call_default_factory=True)
        ]
        return {name: value for name, value in plain.items() if name not in unset}


def merged(default: Any, written: Any) -> Any:
    """Merge the written keys of a section over its default, a Config or plain data.

    Sections are merged recursively, key by key, if `type` is the same or left out; another type uses its own defaults.
    """
    base = _explicit_values(default)
    if not isinstance(base, dict) or not isinstance(written, dict):
        return written
    if written.get("type", base.get("type")) != base.get("type"):
        return written
    return base | {key: merged(base[key], value) if key in base else value for key, value in written.items()}


def shortest(value: Any, default: Any = None) -> Any:
    """Return the shortest plain data that `merged` and the defaults of its class complete to a Config or plain data."""
    if not isinstance(value, Config):
        return value
    plain, fields = dump(value), type(value).model_fields
    bases = {
        name: getattr(default, name) if type(default) is type(value) else field.get_default(call_default_factory=True)
        for name, field in fields.items()
    }
    return {
        name: shortest(getattr(value, name), bases[name]) if isinstance(plain[name], dict) else plain[name]
        for name in fields
        if name == "type" or getattr(value, name) != bases[name]
    }


def _explicit_values(default: Any) -> Any:
    """Return, as plain data, the values of a default that differ from the defaults of its class, and its type."""
    if isinstance(default, BaseModel):
        names = [name for name in type(default).model_fields if name in default.model_fields_set or name == "type"]
        return {name: _explicit_values(getattr(default, name)) for name in names}
    return default


def read_yaml(path: Path) -> Any:
    """Return the plain data in a YAML file. Raises ValueError that names the file if it is missing or not YAML."""
    try:
        return yaml12.from_text(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.{_files_beside(path)}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path} is not valid YAML: line {line} is not UTF-8 text; save the file in UTF-8.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid YAML: {error}.") from None


def parse(kind: Any, data: Any, where: str) -> Any:
    """Validate plain data as `kind`: a Config class, or an annotated union of them.

    Raises ValueError with one sentence for each problem, which begins with `where` and the dotted key; also for URLs
    with passwords or signatures, which the sentences do not show.
    """
    try:
        check_no_secrets(data)
    except ValueError as error:
        raise ValueError(f"{without_credentials(where)}: {error}") from None
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        problems = [sentence(problem, kind, data) for problem in causes(error.errors())]
        raise ValueError(
            without_credentials("\n".join(f"{where}: {problem}" for problem in dict.fromkeys(problems)))
        ) from None


def load(kind: type[T], path: Path, changes: Sequence[str] = ()) -> T:
    """Read a YAML file as `kind`, with the changes of the command line. Raises ValueError (see `parse`)."""
    return typing.cast("T", parse(kind, changed(read_yaml(path), changes), origin(path, changes)))


def changed(data: Any, changes: Sequence[str]) -> Any:
    """Merge the settings of `--set`, such as "sample.sampler.num_steps=10" with a value in YAML, in order over plain
    data. Raises ValueError for an invalid setting."""
    for change in changes:
        key, separator, text = change.partition("=")
        names = key.split(".")
        if not separator or not all(names):
            raise ValueError(f"--set '{change}' is not a setting. Write KEY=VALUE, such as sample.num_samples=16.")
        try:
            value = yaml12.from_text(text)
        except ValueError as error:
            raise ValueError(f"--set {change}: the value is not valid YAML: {error}.") from None
        for name in reversed(names):
            value = {name: value}
        data = merged(data, value)
    return data


def origin(path: Path | None, changes: Sequence[str]) -> str:
    """Return the origin of a configuration, for error messages. path: None for defaults."""
    return " --set ".join([str(path or "the defaults"), *changes])


def dump(config: Config) -> dict[str, Any]:
    """Return plain data, including defaults, that `parse` converts to an equal configuration."""
    return config.model_dump(mode="json")


def differing_keys(ours: Any, theirs: Any, prefix: str = "") -> list[str]:
    """Return the dotted keys whose values differ, with both: "train.optimizer.lr (0.0002 here, 0.0001 there)"."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = [*ours, *(key for key in theirs if key not in ours)]
        return [d for key in keys for d in differing_keys(ours.get(key), theirs.get(key), f"{prefix}{key}.")]
    return [] if ours == theirs else [f"{prefix[:-1]} ({ours!r} here, {theirs!r} there)"]


def to_yaml(data: Any) -> str:
    """Return plain data as YAML, with keys in their given order. The same data always gives the same bytes."""
    return yaml12.to_text(data)


def _sentences(kind: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of the fields of a class and of those it inherits from, by field."""
    docstrings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Config) and base is not Config:
            docstrings |= _sentences_of(base)
    return {name: about for name, about in docstrings.items() if name in kind.model_fields}


def _sentences_of(kind: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of the fields in the source of one class; empty for a class without source."""
    try:
        written = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except OSError:
        return {}
    docstrings = {}
    for field, below in pairwise(typing.cast("ast.ClassDef", written).body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                docstrings[name] = inspect.cleandoc(text)
    return docstrings


def _files_beside(path: Path) -> str:
    """Return a suggestion for a missing file: a similar name, and all existing files."""
    names = sorted(file.stem for file in path.parent.glob(f"*{path.suffix}"))
    close = nearest(path.stem, names)
    advice = f" Did you mean {close}?" if close else ""
    return f"{advice} {path.parent} holds: {', '.join(names)}." if names else advice


def beyond_defaults(config: Config, defaults: Config | None = None) -> set[str]:
    """Return the dotted keys of values that differ from the defaults; unset: those of the class. For a section of
    another type, the key `type` is included, and its values are compared with the defaults of that type."""
    keys: set[str] = set()
    for attribute, field in type(config).model_fields.items():
        name, value = field.alias or attribute, getattr(config, attribute)
        default = getattr(defaults, attribute) if defaults is not None else field.get_default(call_default_factory=True)
        if isinstance(value, Config):
            same = type(default) is type(value)
            keys |= {f"{name}.{key}" for key in beyond_defaults(value, default if same else None)}
            if not same and isinstance(default, Config) and "type" in type(value).model_fields:
                keys.add(f"{name}.type")
        elif value != default:
            keys.add(name)
    return keys


BASE = "base"


def merged_over(base: Any, written: Any) -> dict[str, Any]:
    """Return the data of a file or variant merged over its base, without sections that it leaves empty."""
    return {key: value for key, value in merged(base, written).items() if value is not None or key not in written}


def read_inherited(path: Path) -> tuple[Any, list[Path]]:
    """Return the plain data of a file merged over those of its bases, and all files that were read: the file, its base,
    and so on. Raises ValueError for a base that is missing, is not a name, or is circular.
    """
    files, levels = [path], [read_yaml(path)]
    while isinstance(levels[-1], dict) and BASE in levels[-1]:
        current = files[-1]
        name = levels[-1].pop(BASE)
        if not isinstance(name, str):
            raise ValueError(f"{current}: base is {name!r}. Expected the name of a file beside it, without .yaml.")
        base = current.with_name(f"{name}.yaml")
        if base in files:
            way = " -> ".join(file.stem for file in (*files, base))
            raise ValueError(f"{current}: base leads in a circle: {way}. Remove it from one of these files.")
        try:
            inherited = read_yaml(base)
        except ValueError as error:
            raise ValueError(f"{current}: base is {name}, but {error}") from None
        files.append(base)
        levels.append(inherited)
    data = levels.pop()
    for written in reversed(levels):
        data = merged_over(data, written)
    return data, files


def _form(value: Any) -> str:
    """Return the tag of a value: "(several)" of a list, "(one)" of anything else."""
    return "(several)" if isinstance(value, list | tuple) else "(one)"


OneOrSeveral = Annotated[Annotated[T, Tag("(one)")] | Annotated[tuple[T, ...], Tag("(several)")], Discriminator(_form)]
"""A value, or a list of values."""


def single_value(example: str) -> BeforeValidator:
    """Return a validator that replaces a list of one value by the value, and rejects an empty list. example: a value
    for the message."""

    def validated(value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) < 2:
            if not value:
                raise ValueError(f"the list is empty. Name {example}, or leave the key out.")
            return value[0]
        return value

    return BeforeValidator(validated)
