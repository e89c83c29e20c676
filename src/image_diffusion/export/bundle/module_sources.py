"""Sources of the modules of this package that an exported model needs, under a separate package name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from image_diffusion.core.files.atomic import digest

_PACKAGE = "image_diffusion"
_ROOT = Path(__file__).parents[3]
_IMPORT = re.compile(rf"^(\s*(?:from|import) ){_PACKAGE}(?=[.\s])", re.MULTILINE)


def bundled(modules: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Return the name of a package, and the source of each of its modules by the name inside it.

    modules: dotted names, `image_diffusion.…`, with all that they import from this package, directly or not. The name
    contains a digest of the sources, so that two exported models never import each other's code or an installed
    `image_diffusion`. Imports for the type checker only are left out. Packages from which no name is imported are
    empty.
    """
    sources: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        path = _path(module)
        assert path is not None, module
        if module.partition(".")[2] in sources:
            continue
        text = path.read_text(encoding="utf-8")
        sources[module.partition(".")[2]] = text
        waiting += _imported(ast.parse(text))
    name = f"{_PACKAGE}_{digest(sources)[:12]}"
    return name, {module: _IMPORT.sub(rf"\1{name}", text) for module, text in sorted(sources.items())}


def _imported(node: ast.AST) -> list[str]:
    """Return the modules of this package that some code imports when it runs."""
    modules = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            modules += [name for branch in child.orelse for name in _imported(branch)]
        elif isinstance(child, ast.ImportFrom) and child.module and child.module.split(".")[0] == _PACKAGE:
            inside = [f"{child.module}.{alias.name}" for alias in child.names]
            modules += [name if _path(name) else child.module for name in inside]
        elif isinstance(child, ast.Import):
            modules += [alias.name for alias in child.names if alias.name.split(".")[0] == _PACKAGE]
        else:
            modules += _imported(child)
    return modules


def _path(module: str) -> Path | None:
    """Return the file of a module; None for a name inside a module."""
    stem = _ROOT / Path(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
