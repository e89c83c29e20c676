"""Error messages on a configuration, one sentence each: the key, its value, and a valid value."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Location = Sequence[int | str]


def sentence(problem: Any, kind: Any, data: Any) -> str:
    """Return a sentence on an item of pydantic's `ValidationError.errors` from validating plain data as a kind."""
    location = _visible_location(problem["loc"], data)
    key = _dotted(location) or "the file"
    match problem["type"]:
        case "extra_forbidden":
            return f"{key} is not a known key. {_advice(kind, data, location)}"
        case "missing":
            return f"{key} is required."
        case "union_tag_invalid":
            tag, by = problem["ctx"]["tag"], _discriminator(problem)
            key = key if by == "type" else f"{key}.{by}"
            return f"Unknown {key} '{tag}'. Known: {problem['ctx']['expected_tags'].replace(chr(39), '')}."
        case "union_tag_not_found":
            by = _discriminator(problem)
            return f"{key}.{by} is required. Known: {', '.join(_tags(_models_at(kind, data, location), by))}."
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{key} is {_section_expected(problem['input'], _models_at(kind, data, location), location)}"
        case "tuple_type":
            return f"{key} is {problem['input']!r}: input should be a valid list."
        case "literal_error":
            return f"Unknown {key} '{problem['input']}'. Known: {problem['ctx']['expected'].replace(chr(39), '')}."
        case "value_error":
            return f"{key}: {problem['ctx']['error']}" if location else str(problem["ctx"]["error"])
        case _:
            return f"{key} is {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}."


def causes(problems: Sequence[Any]) -> list[Any]:
    """Return items of pydantic's `ValidationError.errors` without lists that are too short because items in them are
    invalid."""
    return [
        problem
        for problem in problems
        if problem["type"] != "too_short"
        or not any(other["loc"][: len(problem["loc"])] == problem["loc"] for other in problems if other is not problem)
    ]


def nearest(name: str, choices: Sequence[str]) -> str | None:
    """Return the known name that is most similar to a misspelt one."""
    return next(iter(difflib.get_close_matches(name, choices, n=1)), None)


def suggestion(name: str, known: Sequence[str], otherwise: str | None = None) -> str:
    """Return a sentence with the known name that is most similar to a misspelt one. otherwise: the sentence if none is
    similar; unset: the known names."""
    close = nearest(name, known)
    return f"Did you mean {close}?" if close else otherwise or f"Known: {', '.join(known)}."


def _advice(kind: Any, data: Any, location: Location) -> str:
    """Return a suggestion for an unknown key: a similar key, a key of its name in another section, or how to write a
    dotted key."""
    *parent, last = location
    name, keys = str(last), sorted({key for model in _models_at(kind, data, parent) for key in _keys(model)})
    section, dot, rest = name.partition(".")
    if dot and section in keys:
        return f"Write it in its section, as {section}: {{{rest.replace('.', ': {')}: …}}{'}' * rest.count('.')}."
    below = list(_paths_below(_models_at(kind, data, parent), _value_at(data, parent)))
    others = [model for model in _variants_at(kind, data, parent) if name in model.model_fields]
    if others:
        return f"It is a key of type {' and '.join(_tags(others))}."
    close, close_below = nearest(name, keys), nearest(name, [path[-1] for path in below])
    suggestions: list[Location] = (  # an equal name elsewhere takes precedence over a similar name here
        _shallowest([[*parent, *path] for path in below if path[-1] == name])
        or ([[*parent, close]] if close else [])
        or _shallowest([[*parent, *path] for path in below if path[-1] == close_below])
        or _shallowest([path for path in _paths_below(_models(kind), data) if path[-1] == name])
    )
    if suggestions:
        return f"Did you mean {' or '.join(_dotted(path) for path in suggestions[:3])}?"
    return f"Known: {', '.join(keys)}."


def _section_expected(value: Any, models: list[type[BaseModel]], location: Location) -> str:
    """Return the end of a sentence on a value where a section is expected."""
    key, tags = (location[-1] if location else "it"), _tags(models)
    if tags and isinstance(value, str):
        meant = value if value in tags else nearest(value, tags)
        choices = "" if meant else f" Known types: {', '.join(tags)}."
        return f"'{value}', but a section is expected. Write {key}: {{type: {meant or tags[0]}}}.{choices}"
    names = list(dict.fromkeys(key for model in models for key in _keys(model)))
    keys = f", with keys such as {', '.join(names[:4])}" if names else ""
    if value is None:
        return f"empty, but a section is expected{keys}." + (" Set one, or leave it out." if location else "")
    return f"{value!r}, but a section is expected{keys}."


def _visible_location(location: tuple[int | str, ...], data: Any) -> list[int | str]:
    """Return the keys as the user wrote them: pydantic also lists the tags of the unions it passed through. A tag in
    brackets is the form of a value, one section or a list of them."""
    visible: list[int | str] = []
    location = tuple(part for part in location if not str(part).startswith("("))
    for position, part in enumerate(location):
        if isinstance(data, dict) and part not in data and (position + 1 < len(location) or part == data.get("type")):
            continue
        if position > 0 and not isinstance(data, dict | list):
            break
        visible.append(part)
        data = _value_at(data, [part])
    return visible


def _value_at(data: Any, location: Location) -> Any:
    """Return the value at a path in the data; None if there is none."""
    for part in location:
        if isinstance(data, dict):
            data = data.get(part)
        else:
            data = data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else None
    return data


def _models_at(kind: Any, data: Any, location: Location) -> list[type[BaseModel]]:
    """Return the possible models of the value at a path: the model of its `type`, or all."""
    return _chosen(_variants_at(kind, data, location), _value_at(data, location))


def _variants_at(kind: Any, data: Any, location: Location) -> list[type[BaseModel]]:
    """Return the possible models at a path, regardless of its own `type`."""
    if not location:
        return _models(kind)
    first, *remaining = location
    inner = _value_at(data, [first])
    if isinstance(first, int):
        return _variants_at(kind, inner, remaining)
    models = _chosen(_models(kind), data)
    kinds = [model.model_fields[first].annotation for model in models if first in model.model_fields]
    return list(dict.fromkeys(model for annotation in kinds for model in _variants_at(annotation, inner, remaining)))


def _paths_below(models: list[type[BaseModel]], data: Any, above: tuple[Any, ...] = ()) -> Iterator[list[str]]:
    """Yield every possible key below a path, as relative paths, without keys in lists."""
    for model in _chosen(models, data):
        for key, field in _keys(model).items():
            yield [key]
            many = typing.get_origin(field.annotation) in (list, tuple, dict)
            # A section may contain its own kind, such as the codec of a codec: `above` prevents infinite recursion.
            inner = [] if many else [variant for variant in _models(field.annotation) if variant not in above]
            for path in _paths_below(inner, _value_at(data, [key]), (*above, *inner)):
                yield [key, *path]


def _chosen(models: list[type[BaseModel]], data: Any) -> list[type[BaseModel]]:
    """Return the models that have the `type` in the data."""
    tag = data.get("type") if isinstance(data, dict) else None
    return [model for model in models if tag in _tags([model])] or models


def _keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model by their configuration keys."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _tags(models: list[type[BaseModel]], key: str = "type") -> list[str]:
    """Return the values of a key, `type` or another discriminator, that distinguish the models."""
    fields = [keys[key] for model in models if key in (keys := _keys(model))]
    return sorted({str(tag) for field in fields for tag in typing.get_args(field.annotation)})


def _discriminator(problem: Any) -> str:
    """Return the configuration key that distinguishes the kinds of a section."""
    return str(problem["ctx"]["discriminator"]).split(" | ")[-1].strip("'")


def _models(kind: Any) -> list[type[BaseModel]]:
    """Return every pydantic model that a type annotation can stand for."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    if isinstance(kind, typing.TypeAliasType if hasattr(typing, "TypeAliasType") else ()):
        return _models(kind.__value__)
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType, typing.Annotated, list, tuple, dict):
        return [model for argument in arguments for model in _models(argument)]
    return []


def _shallowest(paths: Sequence[Location]) -> list[Location]:
    """Return the locations with the fewest keys, each once."""
    least = min(map(len, paths), default=0)
    return list(dict.fromkeys(tuple(path) for path in paths if len(path) == least))


def _dotted(location: Location) -> str:
    return ".".join(map(str, location))
