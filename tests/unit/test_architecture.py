"""Structure of the package: no import circles, small folders, meaningful names. `make lint` runs this."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grimp
import numpy as np

PACKAGE = "image_diffusion"
SOURCE = Path(__file__).parents[2] / "src" / PACKAGE
MAX_MODULES = 15
EMPTY_NAMES = frozenset(
    "ahead answer around asked attempt beside cited doubt each exhausted figures found given going_on halfway here "  # noqa: SIM905
    "inherited judged kept known lifeline looks made making mistakes of once ours panel seen spare telling there "
    "together told wanted".split()
)
"""Names that do not describe a module, a function or a class."""
MOST_GIVEN = {"TrainConfig": 12, "DataConfig": 29, "EvaluateConfig": 12}
"""Most functions that may take a whole section of an experiment; others take the values that they read."""
EMPTY_OPENINGS = ("What ", "Whether ", "Who ", "Of ", "Those ", "The same")
"""First words of docstrings that lack a noun or a verb."""


def circles() -> set[frozenset[str]]:
    """Return sets of modules that import each other in a circle, counting imports in functions and for types."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    names = sorted(graph.modules)
    number = {name: index for index, name in enumerate(names)}
    edges = [(number[name], number[to]) for name in names for to in graph.find_modules_directly_imported_by(name)]
    rows, columns = np.array(edges).T
    from scipy.sparse import coo_array  # slow to import
    from scipy.sparse.csgraph import connected_components

    matrix = coo_array((np.ones(len(edges)), (rows, columns)), shape=(len(names), len(names)))
    _, component = connected_components(matrix, connection="strong")
    sizes = Counter(component.tolist())
    return {
        frozenset(name.partition(".")[2] for name, where in zip(names, component, strict=True) if where == index)
        for index, size in sizes.items()
        if size > 1
    }


def defined_names() -> Iterator[str]:
    """Return names of all modules, functions and classes, without leading underscores."""
    for path in SOURCE.rglob("*.py"):
        yield path.stem.strip("_").lower()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name.strip("_").lower()


def test_no_import_circles() -> None:
    assert circles() == set()


def test_folders_are_small() -> None:
    count = Counter(path.parent for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    large = {str(folder.relative_to(SOURCE)): size for folder, size in count.items() if size > MAX_MODULES}
    assert large == {}


def test_names_are_meaningful() -> None:
    assert [name for name in defined_names() if name in EMPTY_NAMES] == []


def test_docstrings_open_with_a_noun_or_verb() -> None:
    root = SOURCE.parents[1]
    opening = [
        f"{path.relative_to(root)}:{node.value.lineno}"
        for path in (*SOURCE.rglob("*.py"), *(root / "workflow").rglob("*.py"), *(root / "docs").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if node.value.value.strip().startswith(EMPTY_OPENINGS)
    ]
    assert opening == []


def test_each_command_of_a_rule_is_a_stage() -> None:
    rules = "\n".join(path.read_text() for path in (SOURCE.parents[1] / "workflow" / "rules").glob("*.smk"))
    stages = {path.stem for path in (SOURCE / "stages").glob("*.py")} - {"__init__"}
    assert {stage for stage in stages if re.search(rf"\b{PACKAGE} {stage}\b", rules)} == stages


def test_few_functions_take_a_whole_config_section() -> None:
    count = Counter(
        ast.unparse(argument.annotation)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        for argument in (*node.args.args, *node.args.kwonlyargs)
        if argument.annotation is not None
    )
    assert {name: count[name] for name in MOST_GIVEN if count[name] > MOST_GIVEN[name]} == {}


def test_imports_of_benchmarks_exist() -> None:
    """Most benchmarks are run by no test."""
    missing = [
        f"{path.name}: {node.module}.{alias.name}"
        for path in (SOURCE.parents[1] / "tests" / "bench").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        for alias in node.names
        if not hasattr(importlib.import_module(str(node.module)), alias.name)
        and not (SOURCE.parent / str(node.module).replace(".", "/") / f"{alias.name}.py").is_file()
    ]
    assert missing == []
