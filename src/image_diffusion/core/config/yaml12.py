"""Reading and writing YAML with the core schema of YAML 1.2; duplicate keys are errors.

PyYAML reads YAML 1.1, where 1e5 is a word, `off` is false, 010 is eight and the last of two equal keys wins silently.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_WORDS = {  # tag: pattern of plain words, and their first characters; underscores may separate digits
    "merge": (r"<<", "<"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}

_ENDLESS = 1 << 30  # characters of a line


def from_text(text: str) -> Any:
    """Return the plain data of one document. Raises ValueError with the problem and, if known, its line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise ValueError(_sentence(error, text)) from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("its lists or sections are nested too deeply; nest a few levels at most") from None


def to_text(data: Any) -> str:
    """Return plain data as YAML that both versions read equally, with keys in order. Equal data give equal bytes."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def in_line(value: Any) -> str:
    """Return a value as written after its key: true, {type: flow}."""
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=_ENDLESS
    )
    return str(text).removesuffix("\n").removesuffix("\n...")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in lines:
                problem = f"the key {key.value} occurs here and in line {lines[name]}; keep one of them"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[name] = line
        return super().construct_mapping(node, deep)

    def integer(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        return int(text, 16 if text.startswith("0x") else 10)


_Dumper: Any = type("_Dumper", (yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper,), {})
"""Dumper that quotes strings which either version reads as another type. With libyaml, which PyYAML's wheels contain,
it takes a fifth of the time; without it, some special characters are written differently, but read equally."""


_Loader.yaml_implicit_resolvers = {}
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.integer)
for _name, (_pattern, _first) in _WORDS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})$"), list(_first))


def _sentence(error: yaml.MarkedYAMLError, text: str) -> str:
    mark = error.problem_mark or error.context_mark
    problem = str(error.problem or error.context)
    if mark is None:
        return problem
    line = next(iter(text.splitlines()[mark.line :]), "")
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return f"line {mark.line + 1} begins with a tab; indent with spaces"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
