"""Which code a stage runs: a digest that a comment does not change."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

from image_diffusion.core.files import digest

PACKAGE = "image_diffusion"


def code_digest(module: str, source: Path) -> str:
    """The sha256 of the code of a module and of all it imports from this package, directly or not.

    module: dotted name. source: the folder that holds the package. Taken over the syntax tree, without docstrings:
    comments, layout and wording do not count. Raises ValueError for a module that is not there.
    """
    if not _path(module, source):
        raise ValueError(f"There is no module {module} in {source}.")
    seen: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _path(name, source)
        if name in seen or path is None:
            continue
        seen[name], imported = _read(path)
        waiting += [*imported, *(name.rpartition(".")[:1] if "." in name else ())]
    return digest(seen)


def _path(module: str, source: Path) -> Path | None:
    """The file of a module; None for a name that is not a module but something inside one."""
    stem = source / Path(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


@cache
def _read(path: Path) -> tuple[str, list[str]]:
    """The digest of one file's code, and the names it may import from the package."""
    tree = ast.parse(path.read_bytes())
    imported = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            imported += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE]
    code = ast.dump(_WithoutText().visit(tree))
    return hashlib.sha256(code.encode()).hexdigest(), imported


class _WithoutText(ast.NodeTransformer):
    """Drops the strings that stand alone: docstrings, and the sentences under the fields of a configuration."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node
