"""Variables are named by a noun, not by a pronoun or a participle. `make lint` runs this."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "image_diffusion"
WORDS = frozenset({"each", "found", "given", "told"})
MOST = {"systems": 1}
"""Variables of these names by folder; other folders have none. That of systems is the key `sample.given`."""


def variables(code: str) -> Iterator[str]:
    """Yield the names of assigned variables, parameters and fields, without leading or trailing underscores."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id.strip("_")
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr.strip("_")
        elif isinstance(node, ast.arg):
            yield node.arg.strip("_")


def counts(source: Path) -> Counter[str]:
    """Return the number of such variables by top-level folder; "." for modules outside of folders."""
    count: Counter[str] = Counter()
    for path in source.rglob("*.py"):
        folder = path.relative_to(source).parts[0] if path.parent != source else "."
        count[folder] += sum(name in WORDS for name in variables(path.read_text(encoding="utf-8")))
    return count


def test_variables_are_nouns() -> None:
    too_many = {folder: (n, MOST.get(folder, 0)) for folder, n in counts(SOURCE).items() if n > MOST.get(folder, 0)}
    assert not too_many, (
        f"Variables named {', '.join(sorted(WORDS))}, by folder (present, allowed): {too_many}. Name them by a noun, "
        "such as path, sample or row."
    )


def test_every_kind_of_variable_is_counted(tmp_path: Path) -> None:
    (tmp_path / "nn").mkdir()
    (tmp_path / "nn" / "a.py").write_text(
        "def f(given, *, _told=1):\n    for each in given:\n        found = [each for each in given]\n"
        "class A:\n    told: str\n    def __init__(self):\n        self._found, self.told.x = 1, 2\n"
    )
    (tmp_path / "b.py").write_text("with open('x') as found:\n    (each := found)\n")
    assert counts(tmp_path) == {"nn": 7, ".": 2}
