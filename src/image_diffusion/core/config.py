"""Configuration is a record: typed, bounded, frozen; a key that does not exist is an error with a suggestion."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from image_diffusion.core import plain_yaml
from image_diffusion.core.mistakes import nearest, sentence

T = TypeVar("T")


class Config(BaseModel):
    """Base of every configuration section. Frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


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


def load(kind: type[T], path: Path) -> T:
    """Read a YAML file as `kind`. Raises ValueError (see `parse`)."""
    return typing.cast("T", parse(kind, read_yaml(path), str(path)))


def dump(config: Config) -> dict[str, Any]:
    """Plain data that `parse` turns back into an equal configuration, defaults included."""
    return config.model_dump(mode="json")


def to_yaml(data: Any) -> str:
    """Plain data as YAML, keys in their given order: the same data always gives the same bytes."""
    return plain_yaml.to_text(data)


def _files_beside(path: Path) -> str:
    """What may have been meant by a file that is missing: one like it, and which there are."""
    there = sorted(each.stem for each in path.parent.glob(f"*{path.suffix}"))
    close = nearest(path.stem, there)
    advice = f" Did you mean {close}?" if close else ""
    return f"{advice} In {path.parent} there are: {', '.join(there)}." if there else advice
