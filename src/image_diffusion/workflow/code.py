"""Which code a stage runs: a digest that a comment does not change; and which code what there is was made with.

Stages whose work takes long are made again only when asked: a change of their code is told. The rules of all others
carry the digest among their parameters.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import asdict
from functools import cache
from pathlib import Path

from image_diffusion.core.files import code_below, digest, read_json, write_json
from image_diffusion.workflow.plans import STAGES, Plans

PACKAGE = "image_diffusion"

LONG_STAGES = {
    "crop": ("datasets/{dataset}/crops/manifest.json", "datasets/{dataset}/config/crop.code"),
    "encode": ("datasets/{dataset}/{codec}/manifest.json", "datasets/{dataset}/config/encode-{codec}.code"),
    "embed": ("datasets/{dataset}/{pairs}/manifest.json", "datasets/{dataset}/config/embed-{pairs}.code"),
    "train": ("{experiment}/train/weights.safetensors", "{experiment}/config/train.code"),
}
"""By stage: what it makes, and where the code it was made with is noted."""


def note_code(plans: Plans, results: Path, code: dict[str, str]) -> list[str]:
    """Note which code each long stage is made with; once it has been made, tell when that code has changed.

    code: the digest of each stage's code now. Returns a sentence for each stage whose code was another one.
    """
    told = set()
    for plan in [*plans.by_name.values(), *plans.latents.values()]:
        for stage in LONG_STAGES.keys() & plan.configs.keys():
            made, note = (results / form.format(**asdict(plan)) for form in LONG_STAGES[stage])
            noted = _noted(note)
            if noted is None and note.is_file() and made.is_file():
                told.add(f"{note} was damaged: whether the code of {stage} has changed before now is not known.")
            if noted is None or (noted != code[stage] and not made.is_file()):
                write_json(note, {"code": code[stage]})
            elif noted != code[stage]:
                told.add(f"The code of {stage} has changed since. To make it again: rm -r {made.parent}")
    return sorted(told)


def _noted(note: Path) -> str | None:
    """The code that a note names; None where there is none or it is damaged."""
    try:
        return str(read_json(note)["code"])
    except (ValueError, KeyError, TypeError):
        return None


def stage_digests(source: Path) -> dict[str, str]:
    """The digest of the code of each stage. source: the folder that holds the package."""
    return {
        stage: code_digest(f"{PACKAGE}.{stage}", source)
        for stage in (*STAGES, "datasheet", "detect", "reference", "sweep", "ema")
    }


def package_digest(source: Path) -> str:
    """The digest of every file of the package."""
    return code_below(source / PACKAGE)


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
        seen[name], imported = _read(path.read_bytes())
        waiting += [*imported, *(name.rpartition(".")[:1] if "." in name else ())]
    return digest(seen)


def _path(module: str, source: Path) -> Path | None:
    """The file of a module; None for a name that is not a module but something inside one."""
    stem = source / Path(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


@cache
def _read(text: bytes) -> tuple[str, list[str]]:
    """The digest of one file's code, and the names it may import from the package. Read once for all stages."""
    tree = ast.parse(text)
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
