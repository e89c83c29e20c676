"""The options page lists every key of an experiment and every option of a command, each with its default."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from image_diffusion.core.process.commands import COMMANDS
from image_diffusion.experiments.experiment import schema

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import options


@pytest.fixture(scope="module")
def definitions() -> dict[str, Any]:
    sections: dict[str, Any] = schema()["$defs"]
    return sections


@pytest.fixture(scope="module")
def tables(definitions: dict[str, Any]) -> list[str]:
    with mock.patch.object(options, "schema", lambda: {"$defs": definitions}):
        return options.sections()


@pytest.fixture(scope="module")
def sections(tables: list[str]) -> dict[str, str]:
    split = (table.partition("\n\n") for table in tables)
    return {heading.removeprefix("## "): table for heading, _, table in split}


def test_every_schema_section_has_a_table_of_its_keys(definitions: dict[str, Any], sections: dict[str, str]) -> None:
    assert len(sections) >= len([name for name in definitions if "_of_" not in name]) > 100
    keys = definitions["FlowMatching"]["properties"].keys() - {"type"}
    table = sections["FlowMatching: `type: flow_matching`"]
    assert keys and not [key for key in keys if f"\n| `{key}` | " not in table]


def test_a_row_shows_the_default_the_values_the_meaning_and_an_example() -> None:
    shape = {"default": 3, "type": "integer", "minimum": 1, "description": "How many\nthere are."}
    row = options._table("Ring", {"type": {"const": "ring"}, "size": shape}, {"size": "`7` (`demo`)"}).splitlines()[-1]
    assert row == "| `size` | `3` | integer ≥ 1 | How many there are. Example: `7` (`demo`). |"
    assert options._table("Ring", {"type": {"const": "ring"}}, {}).endswith("No keys beside its type.")


def test_section_with_other_defaults_shows_only_the_differences(sections: dict[str, str]) -> None:
    differing = [title for title in sections if title.endswith(", where it differs")]
    assert differing
    for title in differing:
        first = next(
            whole for whole in sections if whole.startswith(title.partition(",")[0]) and whole not in differing
        )
        assert sections[title].count("\n") < sections[first].count("\n")


def test_examples_come_from_shipped_experiments() -> None:
    known = {path.stem for path in (options.ROOT / "config/experiments").glob("*.yaml")}
    shown = [example for keys in options.examples().values() for example in keys.values()]
    assert len(shown) > 50
    assert {example.rpartition("(`")[2].removesuffix("`)") for example in shown} <= known


def test_every_command_has_a_table_of_its_options() -> None:
    tables = dict(zip(sorted(COMMANDS), options.commands(), strict=True))
    for verb, table in tables.items():
        assert table.startswith(f"## `python -m image_diffusion {verb}`")
    assert "| `--schema` | unset | write the JSON schemas" in tables["configure"]
    assert "| `--config` | required | " in tables["train"]


def test_page_contains_every_table(tables: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "sections", lambda: tables)
    page = options.page()
    assert page.count("\n## ") + 1 == len(tables) + len(COMMANDS) and "\n# Commands\n" in page
    assert [table for table in [*tables, *options.commands()] if table.strip() not in page] == []


def test_every_key_of_every_section_has_a_row(definitions: dict[str, Any], tables: list[str]) -> None:
    rows = "\n".join(tables)
    keys = {
        key
        for section in definitions.values()
        for key, value in section["properties"].items()
        if key != "type" or "const" not in value
    }
    assert len(keys) > 300 and [key for key in sorted(keys) if f"\n| `{key}` | " not in rows] == []
