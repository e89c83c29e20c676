"""Every option with its default stands in docs/options.md: changing one is a line of that page.

The page is made from the code: IMAGE_DIFFUSION_WRITE=1 pytest tests/unit/test_options.py writes it anew.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

import image_diffusion
from image_diffusion.__main__ import COMMANDS
from image_diffusion.experiment import schema

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
HEAD = """# Options

Made by `tests/unit/test_options.py` from the code. A section of an experiment is a heading below: its keys, their
defaults, and what they mean. Where a section comes in several types, the heading names the type. What a system takes
in place of these defaults stands beside its original's in [systems.md](systems.md).
"""
VERBS = sorted(
    path.stem
    for path in Path(image_diffusion.__file__).parent.glob("*.py")
    if "def main(" in path.read_text(encoding="utf-8") and path.stem != "__main__"
)


def sections() -> list[str]:
    """A table for each class of configuration that an experiment can hold."""
    definitions: dict[str, Any] = schema()["$defs"]
    systems = {name: each for name, each in definitions.items() if "_of_" in name}
    found = []
    for name in sorted(definitions.keys() - systems.keys(), key=lambda name: (name.split("__")[-1].lower(), name)):
        properties = definitions[name]["properties"]
        kind = properties.get("type", {}).get("const")
        found.append(_table(f"{name.split('__')[-1]}{f': `type: {kind}`' if kind else ''}", properties))
    for stem in sorted({name.partition("_of_")[0] for name in systems}):
        of = {name.partition("_of_")[2]: each["properties"] for name, each in systems.items() if name.startswith(stem)}
        first, *others = sorted(of)
        found.append(_table(f"{stem}, of {first}", of[first]))
        for other in others:
            differing = {key: each for key, each in of[other].items() if _default(each) != _default(of[first].get(key))}
            if differing:
                found.append(_table(f"{stem}, of {other}, where it differs", differing))
    return found


def commands() -> list[str]:
    """A table for each command: its options as argparse knows them."""
    found = []
    for verb in VERBS:
        rows = [
            f"| `{action.option_strings[-1]}` | {'required' if action.required else _text(action.default)} "
            f"| {_line(action.help)} |"
            for action in parser_of(verb)._actions
            if action.option_strings and action.dest != "help"
        ]
        found.append("\n".join([f"## `python -m image_diffusion.{verb}`", "", *_HEADER, *rows]))
    return found


class Captured(Exception):  # noqa: N818 - not an error: the way out of a command
    """A command's parser, before it parsed anything."""


def parser_of(verb: str) -> argparse.ArgumentParser:
    def capture(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise Captured(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", capture)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", capture)
        try:
            importlib.import_module(f"image_diffusion.{verb}").main()
        except Captured as captured:
            parser: argparse.ArgumentParser = captured.args[0]
            return parser
    raise AssertionError(f"{verb} parsed no arguments")


_HEADER = ["| Key | Default | What |", "| --- | --- | --- |"]


def _table(title: str, properties: dict[str, Any]) -> str:
    rows = [
        f"| `{key}` | {_default(each)} | {_line(each.get('description'))} |"
        for key, each in properties.items()
        if key != "type" or "const" not in each
    ]
    return "\n".join([f"## {title}", "", *(_HEADER + rows if rows else ["No keys beside its type."])])


def _default(each: dict[str, Any] | None) -> str:
    return "absent" if each is None else _text(each["default"]) if "default" in each else "required"


def _text(value: Any) -> str:
    if value is None or value == argparse.SUPPRESS:
        return "unset"
    return f"`{value}`" if isinstance(value, str | Path) else f"`{json.dumps(value, default=str)}`"


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def test_every_command_goes_by_the_one_name() -> None:
    assert sorted(COMMANDS) == VERBS


def test_the_page_shows_every_option_and_its_default() -> None:
    text = "\n\n".join([HEAD.strip(), *sections(), "# Commands", *commands()]) + "\n"
    if os.environ.get("IMAGE_DIFFUSION_WRITE"):
        PAGE.write_text(text, encoding="utf-8")
    written = PAGE.read_text(encoding="utf-8")
    changed = sorted(set(written.splitlines()) ^ set(text.splitlines()))
    assert written == text, "\n".join([*changed, "run: IMAGE_DIFFUSION_WRITE=1 pytest tests/unit/test_options.py"])
