"""Digests of the code of each stage, independent of comments, and of the code that made existing results.

A change of the code of a long-running stage is only reported; the rules of all other stages have the digest as a
parameter, so that Snakemake reruns them.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from image_diffusion.core.files.atomic import code_below, digest, is_code, read_json, sha256_file, write_json
from image_diffusion.core.process.commands import module_of
from image_diffusion.workflow.plans import STAGES, Plans

PACKAGE = "image_diffusion"

LONG_STAGES = {
    "crop": ("datasets/{dataset}/crops/manifest.json", "datasets/{dataset}/config/crop.code"),
    "encode": ("datasets/{dataset}/{codec}/manifest.json", "datasets/{dataset}/config/encode-{codec}.code"),
    "embed": ("datasets/{dataset}/{pairs}/manifest.json", "datasets/{dataset}/config/embed-{pairs}.code"),
    "train": ("{experiment}/train/weights.safetensors", "{experiment}/config/train.code"),
}
"""Result of each stage that takes long, and the file that records the digest of the code that made it."""


def note_code(plans: Plans, results: Path, code: dict[str, str]) -> list[str]:
    """Record the code of each long stage and report whether it has changed since its result was made. A result that is
    newer than its record was made with the code of the last start.

    code: the current digest of each stage's code. Returns a sentence for each stage whose code has changed.
    """
    messages = set()
    for plan in [*plans.by_name.values(), *plans.latents.values()]:
        for key in plan.configs:
            stage, _, pairs = key.partition("-")
            if stage not in LONG_STAGES:
                continue
            output, note = (results / form.format(**asdict(plan) | {"pairs": pairs}) for form in LONG_STAGES[stage])
            noted, is_made = _noted(note), output.is_file()
            if noted is None and note.is_file() and is_made:
                messages.add(f"{note} was damaged: whether the code of {stage} has changed before now is not known.")
            made_with = code[stage]
            if noted is not None and is_made:
                is_newer = output.stat().st_mtime_ns > note.stat().st_mtime_ns
                made_with = noted["last_start" if is_newer else "code"]
            now = {"code": made_with, "last_start": code[stage]}
            if now != noted:
                write_json(note, now)
            if made_with != code[stage]:
                messages.add(f"The code of {stage} has changed since. To make it again: rm -r {output.parent}")
    return sorted(messages)


def _noted(note: Path) -> dict[str, str] | None:
    """Return the contents of a record: the digests of the code that made a result, and of the code at the last start.
    None if the record is missing or damaged."""
    try:
        content = read_json(note)
        return {"code": content["code"], "last_start": content.get("last_start", content["code"])}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def stage_digests(source: Path) -> dict[str, str]:
    """Return the digest of the code of each stage. source: the folder that holds the package."""
    modules = Modules(source)
    stages = (*STAGES, "datasheet", "detect", "reference", "sweep", "synthesize", "ema", "track")
    return {stage: modules.digest([module_of(stage)]) for stage in stages}


def package_digest(source: Path) -> str:
    """Return the digest of every file of the package."""
    return code_below(source / PACKAGE)


def scripts_digest(folder: Path, source: Path) -> str:
    """Return the digest of the package's code that the scripts in a folder import. source: as in `stage_digests`."""
    scripts = [_read(path, path.read_bytes(), "") for path in sorted(folder.glob("*.py"))]
    return Modules(source).digest([name for script in scripts for name in script.imported])


class Modules:
    """The current modules of a package, each read once for all stages. source: the folder that holds the package."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._files: dict[str, Path | None] = {}
        self._digests: dict[Path, dict[str, str]] = {}

    def digest(self, names: Iterable[str]) -> str:
        """Return the sha256 of the code of modules, by dotted name, and of all modules that they import from the
        package, directly or indirectly; other modules are skipped.

        The digest covers the syntax tree without docstrings, so comments, layout and wording do not change it. Other
        files (tables and C) are included if a module names them or they have its name; C sources stand for their
        compiled files.
        """
        digests: dict[str, str] = {}
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            path = self._file_of(name)
            if name in digests or path is None:
                continue
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            code = _read(path, path.read_bytes(), package)
            digests[name] = code.digest
            digests |= {f"{name}: {file}": sha256 for file, sha256 in self._companions(path, code).items()}
            # Importing a.b.c also runs the __init__.py of a.b and a.
            waiting += [*code.imported, *(name.rpartition(".")[:1] if "." in name else ())]
        return digest(digests)

    def _file_of(self, module: str) -> Path | None:
        """Return the file of a module; None for a name that is not a module, such as a function."""
        if module not in self._files:
            stem = self._source / Path(*module.split("."))
            files = (stem.with_suffix(".py"), stem / "__init__.py")
            self._files[module] = next((path for path in files if path.is_file()), None)
        return self._files[module]

    def _companions(self, module: Path, code: _Code) -> dict[str, str]:
        """Return the sha256 of each non-Python file that belongs to a module: a file with its name or named in it."""
        if module not in self._digests:
            others = [path for path in sorted(module.parent.iterdir()) if path.suffix != ".py" and is_code(path)]
            named = [path for path in others if path.stem == module.stem or code.names(path.name)]
            self._digests[module] = {path.name: sha256_file(path) for path in named}
        return self._digests[module]


@dataclass(frozen=True)
class _Code:
    """One Python file. tree: its syntax without docstrings. imported: names that it may import from the package."""

    tree: str
    digest: str
    imported: list[str]

    def names(self, file: str) -> bool:
        """Return True if a string in the code is the name of a file or of the file compiled from it."""
        compiled = [str(Path(file).with_suffix(".compiled"))] if file.endswith(".c") else []
        return any(f"Constant(value={name!r})" in self.tree for name in (file, *compiled))


@cache
def _read(path: Path, text: bytes, package: str) -> _Code:
    """Return the code of one file. package: dotted name of the package that relative imports resolve against. Raises
    ValueError for text that is not Python."""
    try:
        module, imported = ast.parse(text), list[str]()
    except SyntaxError as error:
        raise ValueError(f"{path}: line {error.lineno}: {error.msg}. Correct it.") from None
    for statement in _without_text(module):
        if isinstance(statement, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - statement.level] if statement.level else []
            name = ".".join([*parents, *([statement.module] if statement.module else [])])
            if name.split(".")[0] == PACKAGE:
                imported += [name, *(f"{name}.{alias.name}" for alias in statement.names)]
        elif isinstance(statement, ast.Import):
            imported += [alias.name for alias in statement.names if alias.name.split(".")[0] == PACKAGE]
    tree = ast.dump(module)
    return _Code(tree, hashlib.sha256(tree.encode()).hexdigest(), imported)


def _without_text(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements inside a node, at any depth, and remove all docstrings, also those of fields."""
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        if isinstance(inside := getattr(node, block, None), list):
            inside[:] = [part for part in inside if not _is_text(part)]
            for part in inside:
                if isinstance(part, ast.stmt):
                    yield part
                yield from _without_text(part)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
