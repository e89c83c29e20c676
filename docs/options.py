"""Every key of an experiment and every option of a command: `python docs/options.py` prints the page of the site.

A section of an experiment is a heading: its keys, their defaults, the values they take, and what they mean. Where a
section comes in several types, the heading names the type. An example is what a file of config/experiments writes.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

from pydantic import BaseModel

from image_diffusion.core.process.commands import COMMANDS, module_of
from image_diffusion.experiments.experiment import load_experiment, schema

ROOT = Path(__file__).resolve().parents[1]


def page() -> str:
    """Return the tables of all sections and commands as Markdown."""
    return "\n\n".join([*sections(), "# Commands", *commands()]) + "\n"


def sections() -> list[str]:
    """A table for each class of configuration that an experiment can hold."""
    definitions: dict[str, Any] = schema()["$defs"]
    shown = examples()
    systems = {name: each for name, each in definitions.items() if "_of_" in name}
    found = []
    for name in sorted(definitions.keys() - systems.keys(), key=lambda name: (name.split("__")[-1].lower(), name)):
        properties = definitions[name]["properties"]
        kind = properties.get("type", {}).get("const")
        title = f"{name.split('__')[-1]}{f': `type: {kind}`' if kind else ''}"
        found.append(_table(title, properties, shown.get(name, {})))
    for stem in sorted({name.partition("_of_")[0] for name in systems}):
        of = {name.partition("_of_")[2]: each["properties"] for name, each in systems.items() if name.startswith(stem)}
        first, *others = sorted(of)
        found.append(_table(f"{stem}, of {first}", of[first], shown.get(f"{stem}_of_{first}", {})))
        for other in others:
            differing = {key: each for key, each in of[other].items() if _default(each) != _default(of[first].get(key))}
            if differing:
                of_other = shown.get(f"{stem}_of_{other}", {})
                found.append(_table(f"{stem}, of {other}, where it differs", differing, of_other))
    return found


def examples() -> dict[str, dict[str, str]]:
    """Return the values in the shipped experiments: by the schema's name of a section, then by key, the
    first that is short."""
    found: dict[str, dict[str, str]] = {}

    def look(section: BaseModel, name: str) -> None:
        kind = type(section)
        whole = f"{kind.__module__}.{kind.__name__}".replace(".", "__")  # where two sections have one name
        for key, field in kind.model_fields.items():
            if field.exclude:  # of an experiment, and of none of its stages
                continue
            value = section.model_dump(mode="json", include={key}).get(key)  # what is unset may be left out
            if isinstance(value, dict) or len(_text(value)) > _SHORT or _text(value) == _text(field.get_default()):
                continue
            for each in (kind.__name__, whole):
                found.setdefault(each, {}).setdefault(key, f"{_text(value)} (`{name}`)")
        for key in kind.model_fields:
            if isinstance(value := getattr(section, key), BaseModel):
                look(value, name)

    for path in sorted((ROOT / "config" / "experiments").glob("*.yaml"), key=lambda path: path.stem):
        look(load_experiment(path), path.stem)
    return found


def commands() -> list[str]:
    """A table for each command: its options as argparse knows them."""
    found = []
    for verb in sorted(COMMANDS):
        rows = [
            f"| `{action.option_strings[-1]}` | {'required' if action.required else _text(action.default)} "
            f"| {_line(action.help)} |"
            for action in parser_of(verb)._actions
            if action.option_strings and action.dest != "help"
        ]
        about = re.sub(
            r"(?<=\S) {6,}",
            " \\\\\n        ",
            inspect.cleandoc(importlib.import_module(module_of(verb)).__doc__ or ""),
        )
        table = ["| Option | Default | What |", "| --- | --- | --- |", *rows]
        found.append("\n".join([f"## `python -m image_diffusion {verb}`", "", about.strip(), "", *table]))
    return found


class _Captured(Exception):  # noqa: N818 - not an error: the way out of a command
    """A command's parser, before it parsed anything."""


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""

    def capture(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Captured(self)

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", capture),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", capture),
    ):
        try:
            importlib.import_module(module_of(verb)).main()
        except _Captured as captured:
            parser: argparse.ArgumentParser = captured.args[0]
            return parser
    raise AssertionError(f"{verb} parsed no arguments")


_HEADER = ["| Key | Default | Values | What |", "| --- | --- | --- | --- |"]
_SHORT = 40


def _table(title: str, properties: dict[str, Any], shown: dict[str, str]) -> str:
    rows = [
        f"| `{key}` | {_default(each)} | {_values(each)} | {_line(each.get('description'))}"
        f"{f' Example: {shown[key]}.' if key in shown else ''} |"
        for key, each in properties.items()
        if key != "type" or "const" not in each
    ]
    return "\n".join([f"## {title}", "", *(_HEADER + rows if rows else ["No keys beside its type."])])


def _values(each: dict[str, Any]) -> str:
    """Return the values that a key takes, as the schema states them."""
    if "const" in each or "enum" in each:
        return ", ".join(f"`{value}`" for value in each.get("enum", [each.get("const")]))
    if "discriminator" in each:
        return "section of type " + ", ".join(f"`{kind}`" for kind in sorted(each["discriminator"]["mapping"]))
    if "$ref" in each:
        return f"section {each['$ref'].rpartition('/')[2].split('__')[-1]}"
    if choices := each.get("anyOf", each.get("oneOf")):
        return " or ".join(dict.fromkeys(map(_values, choices)))
    if "prefixItems" in each:
        return f"[{'; '.join(map(_values, each['prefixItems']))}]"
    kind = {"boolean": "`true`, `false`", "string": "text", "null": "`null`", "object": "keys and values"}
    if each.get("type") == "array":
        return f"list of {_values(each['items'])}"
    if "type" not in each:
        return "section, as the system has it"
    if each["type"] not in ("integer", "number"):
        return kind[each["type"]]
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {each[name]}" for name, sign in signs.items() if name in each]
    return " ".join(filter(None, [each["type"], ", ".join(bounds)]))


def _default(each: dict[str, Any] | None) -> str:
    return "absent" if each is None else _text(each["default"]) if "default" in each else "required"


def _text(value: Any) -> str:
    if value is None or value == argparse.SUPPRESS:
        return "unset"
    return f"`{value}`" if isinstance(value, str | Path) else f"`{json.dumps(value, default=str)}`"


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
