"""Break the code in small ways and find the changes that no test detects: `make mutants`.

The tests are collected once. A first run, in a separate process, records which functions each of them enters. Then each
mutant gets a process forked from the collected session, in which the code of one function is replaced: only the tests
that enter that function are run, nearest first, until one fails.

A surviving mutant is a hole in the tests, or is listed in tests/mutants.md with the reason why no test can detect it.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "image_diffusion"
PACKAGES = ("core", "data", "metrics", "objectives", "process", "samplers", "training")
NAMED = ROOT / "tests" / "mutants.md"
RECORD = ROOT / "mutants" / "entered.json"
BROKEN = 99  # exit status of a process in which this program failed, not a test

_PAIRS = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.FloorDiv, ast.Div),
    (ast.Mod, ast.Mult),
    (ast.Pow, ast.Mult),
    (ast.And, ast.Or),
    (ast.BitAnd, ast.BitOr),
    (ast.LShift, ast.RShift),
]
SWAPS = {b: a for a, b in reversed(_PAIRS)} | dict(_PAIRS)
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Return possible replacements of a node, each a mistake that a programmer could make."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in SWAPS:
            yield ast.Compare(left, [SWAPS[type(op)]()], right)
        case ast.BinOp(left, op, right) if type(op) in SWAPS and not _is_text(right):
            yield ast.BinOp(left, SWAPS[type(op)](), right)
        case ast.AugAssign(target, op, value) if type(op) in SWAPS:
            yield ast.AugAssign(target, SWAPS[type(op)](), value)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(SWAPS[type(op)](), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(ast.Name(name), args, keywords) if name in CALLS:
            yield ast.Call(ast.Name(CALLS[name], ast.Load()), args, keywords)
        case ast.Call(func, args, keywords):
            for each in keywords:
                yield ast.Call(func, args, [other for other in keywords if other is not each])
        case ast.If(test, body, otherwise):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, otherwise)
        case ast.IfExp(test, body, otherwise):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), body, otherwise)
        case ast.Expr(ast.Call()):
            yield ast.Pass()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Return the functions of a module and of its classes by qualified name; nested functions belong to outer ones."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def nodes(parent: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield each node below a node with its parent, without annotations, decorators and texts of messages."""
    for field, value in ast.iter_fields(parent):
        skipped = "annotation", "returns", "decorator_list", *(["args"] if isinstance(parent, ast.FunctionDef) else [])
        for child in value if isinstance(value, list) else [value]:
            if field not in skipped and isinstance(child, ast.AST) and not isinstance(child, _WORDING):
                yield parent, child
                yield from nodes(child)


_WORDING = ast.Raise | ast.Assert | ast.JoinedStr


@dataclass(frozen=True)
class Mutant:
    """A module in which one node of a function is replaced."""

    name: str
    path: Path
    function: str
    tree: ast.Module
    parent: ast.AST
    old: ast.AST
    new: ast.AST

    def code(self) -> CodeType:
        """Return the code of the changed function."""
        _put(self.parent, self.old, ast.copy_location(self.new, self.old))
        module = compile(ast.fix_missing_locations(self.tree), self.path, "exec", dont_inherit=True)
        return next(code for code in _codes(module) if code.co_qualname == self.function)


def _put(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for field, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, field, new)
        elif isinstance(value, list):
            value[:] = [new if each is old else each for each in value]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Return every mutant of a module."""
    module, tree = ".".join(path.relative_to(SOURCE).with_suffix("").parts), ast.parse(path.read_text())
    seen: Counter[str] = Counter()
    for function, definition in functions(tree):
        for parent, old in nodes(definition):
            for new in changes(old):
                whole = isinstance(old, ast.Constant) and isinstance(parent, ast.expr | ast.keyword)
                before = _written(parent if whole else old)
                _put(parent, old, new)
                after = _written(parent if whole else new)
                _put(parent, new, old)
                name = f"{module}.{function}: {before} -> {after}"
                seen[name] += 1
                name += f" ({seen[name]})" if seen[name] > 1 else ""
                yield Mutant(name, path, function, tree, parent, old, new)


def _written(node: ast.AST) -> str:
    return f"if {ast.unparse(node.test)}" if isinstance(node, ast.If | ast.IfExp) else ast.unparse(node)


def modules(package: str) -> list[Path]:
    """Return the modules of a package."""
    return sorted((SOURCE / package).rglob("*.py"))


def chosen(number: int, seed: int) -> list[Mutant]:
    """Choose this many mutants: as many of each package, and in a package of each function in turn."""
    found = []
    for package in PACKAGES:
        by_function = defaultdict(list)
        for path in modules(package):
            for mutant in mutants_of(path):
                by_function[mutant.path, mutant.function].append(mutant)
        draw = random.Random(f"{seed}/{package}")
        groups = [draw.sample(group, len(group)) for group in by_function.values()]
        draw.shuffle(groups)
        rounds = [group[i] for i in range(max(map(len, groups))) for group in groups if i < len(group)]
        found += rounds[: -(-number // len(PACKAGES))]
    return found


class Campaign:
    """A pytest plugin that runs mutants instead of the collected tests."""

    def __init__(self, mutants: list[Mutant], budget_s: float) -> None:
        self.mutants, self.budget_s = mutants, budget_s
        self.counts: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for path in (path for package in PACKAGES for path in modules(package)):
            importlib.import_module(".".join(path.relative_to(ROOT / "src").with_suffix("").parts))
        record = _read_record()
        unknown = [item for item in session.items if record.get(item.nodeid, {}).get("of") != _digest(item.path)]
        for path, group in groupby(unknown, key=lambda item: item.path):
            tests = list(group)
            word = _in_process(partial(_keep, tests), 3600)
            print(f"{'recorded' if word == 'survived' else 'not recorded'} {path.relative_to(ROOT)}", flush=True)
        record = _read_record()
        named = NAMED.read_text() if NAMED.exists() else ""
        for mutant in self.mutants:
            items = self._nearest(session.items, record, mutant)
            word = _in_process(partial(_fails, items, mutant), 60 + 10 * self.budget_s) if items else "untested"
            if word in ("survived", "untested") and f"`{mutant.name}`" in named:
                word = "named"
            self.counts[word] += 1
            print(f"{word:9} {len(items):4} `{mutant.name}`", flush=True)
        print(", ".join(f"{count} {word}" for word, count in self.counts.items()), flush=True)
        return True

    def _nearest(self, items: list[pytest.Item], record: dict[str, Any], mutant: Mutant) -> list[pytest.Item]:
        """Return passing tests that enter a mutant's function, nearest first within the time budget, grouped by
        file."""
        key = f"{mutant.path.relative_to(SOURCE)}:{mutant.function}"
        touching = [item for item in items if item.nodeid in record and key in record[item.nodeid]["entered"]]
        touching.sort(key=lambda item: (len(record[item.nodeid]["entered"]), record[item.nodeid]["seconds"]))
        kept, spent = [], 0.0
        for item in touching:
            seconds = record[item.nodeid]["seconds"]
            if spent + seconds <= self.budget_s or not kept:
                kept.append(item)
                spent += seconds
        order = {path: number for number, path in reversed(list(enumerate(item.path for item in kept)))}
        return sorted(kept, key=lambda item: order[item.path])


def _fails(items: list[pytest.Item], mutant: Mutant) -> bool:
    """Put a mutant in place of its function, and run tests until one fails."""
    code = mutant.code()
    live = [each for each in gc.get_objects() if isinstance(each, FunctionType)]
    found = [each for each in live if _is(each.__code__, mutant.path, code)]
    assert found, mutant.name
    for each in found:
        each.__code__ = code
    try:
        return any(_failed(item, following) for item, following in zip(items, [*items[1:], None], strict=True))
    except BaseException:  # such as SystemExit: an exit of the tests counts as a failure
        return True


def _is(code: CodeType, path: Path, other: CodeType) -> bool:
    where = code.co_qualname, code.co_firstlineno
    return where == (other.co_qualname, other.co_firstlineno) and Path(code.co_filename) == path


def _failed(item: pytest.Item, following: pytest.Item | None) -> bool:
    reports = runtestprotocol(item, log=False, nextitem=following)
    return any(report.failed for report in reports)


def _recorded(items: list[pytest.Item]) -> dict[str, Any]:
    """Record which functions of the package each test enters, and its duration; nothing for a test that fails.

    The functions that a shared fixture enters count for each of its tests, though it runs for the first one only.
    """
    entered: dict[int, CodeType] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        entered[id(frame.f_code)] = frame.f_code

    spans = {path: [*functions(ast.parse(path.read_text()))] for path in SOURCE.rglob("*.py")}
    shared: defaultdict[str, set[str]] = defaultdict(set)
    record = {}
    for item, following in zip(items, [*items[1:], None], strict=True):
        entered.clear()
        start = time.perf_counter()
        threading.settrace(trace)
        sys.settrace(trace)
        failed = _failed(item, following)
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        names = set()
        for code in entered.values():
            path = Path(code.co_filename)
            for name, span in spans.get(path, []):
                first = min([span.lineno, *(each.lineno for each in span.decorator_list)])
                if first <= code.co_firstlineno <= (span.end_lineno or 0):
                    names.add(f"{path.relative_to(SOURCE)}:{name}")
        definitions = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
        wide = [f"{item.path}:{name}" for name, each in definitions.items() if each[-1].scope != "function"]
        for name in wide:
            shared[name] |= names if name not in shared else set()
        names |= {each for name in wide for each in shared[name]}
        seconds = time.perf_counter() - start
        entry = {"of": _digest(item.path), "seconds": seconds, "entered": [] if failed else sorted(names)}
        record[item.nodeid] = entry
    return record


def _read_record() -> dict[str, Any]:
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _keep(items: list[pytest.Item]) -> bool:
    found = _recorded(items)
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(_read_record() | found))
    return False


def _in_process(work: Callable[[], bool], limit_s: float) -> str:
    """Run work on a mutant in a forked process. Return its result: killed, survived, timed out, or broken."""
    folder = tempfile.mkdtemp()
    child = os.fork()
    if child == 0:
        status = BROKEN
        try:
            os.setpgid(0, 0)
            os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            status = int(work())
        finally:
            os._exit(status)
    until = time.monotonic() + limit_s
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.02)
    if ended[0] == 0:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)
    if ended[0] == 0:
        return "timed out"
    return {0: "survived", BROKEN: "broken"}.get(os.waitstatus_to_exitcode(ended[1]), "killed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=350, help="how many mutants to try, evenly over the packages")
    parser.add_argument("--package", choices=PACKAGES, help="only those of one package")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--only", help="in place of them every mutant whose name matches this expression")
    parser.add_argument("--budget", type=float, default=30, help="seconds of tests for each, by their recorded time")
    parser.add_argument("--marks", default="", help="only the tests that pytest selects by these marks")
    parser.add_argument("tests", nargs="*", default=["tests/unit", "tests/parity"])
    arguments = parser.parse_args()
    if arguments.only is None:
        mutants = chosen(arguments.number, arguments.seed)
        mutants = [each for each in mutants if (arguments.package or "") in each.path.relative_to(SOURCE).parts[0]]
    else:
        every = (each for package in PACKAGES for path in modules(package) for each in mutants_of(path))
        mutants = [each for each in every if re.search(arguments.only, each.name)]
    campaign = Campaign(mutants, arguments.budget)
    options = ["-s", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-m", arguments.marks]
    pytest.main([*options, *arguments.tests], plugins=[campaign])
    return int(any(campaign.counts[word] for word in ("survived", "untested", "broken")))


if __name__ == "__main__":
    sys.exit(main())
