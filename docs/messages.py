"""Every message of the package, by module: `python docs/messages.py` prints the page that the site shows.

A message is the text of an exception that is raised for people, or of a line that is written to the terminal.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import image_diffusion

ROOT = Path(image_diffusion.__file__).parent
_WRITERS = {"print", "log_line", "log_line_once", "_warn", "warn", "error", "ArgumentTypeError", "exit"}


def page() -> str:
    """Return the messages as Markdown, a section for each module that has any."""
    sections = []
    for path in sorted(ROOT.rglob("*.py")):
        lines = [f"{number:>4}  {text}" for number, text in sorted(set(messages(path.read_text(encoding="utf-8"))))]
        if lines:
            name = path.relative_to(ROOT).as_posix()
            sections.append("\n".join([f"## {name}", "", "~~~text", *lines, "~~~", ""]))
    return "\n".join(sections)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each message in a module, its values in braces."""
    for node in ast.walk(ast.parse(source)):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func).rpartition(".")[2]
        if (isinstance(node, ast.Raise) and name != "NotImplementedError") or name in _WRITERS:
            for argument in call.args:
                text = " ".join(_text(argument).split())
                if " " in text:
                    yield call.lineno, text


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(values):
            return "".join(_text(value) for value in values)
        case ast.FormattedValue(value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left, ast.Add(), right):
            return _text(left) + _text(right)
        case ast.IfExp(_, body, other):
            return f"{_text(body)} | {_text(other)}".strip(" |")
        case _:
            return ""


if __name__ == "__main__":
    print(page())
