"""Run the cells of a notebook in order and store their outputs.

    python tests/workflow/notebooks.py docs/notebooks/sample.ipynb FOLDER

runs a notebook in a folder with results, and rewrites the file. Jupyter is not needed.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import os
import sys
from collections.abc import Mapping
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any


def executed(path: Path, folder: Path, changes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the notebook at `path` after a run in `folder`. Errors are raised. changes: replacements in its code."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    with chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                cell["execution_count"] = count
                source = "".join(cell["source"])
                for before, now in (changes or {}).items():
                    source = source.replace(before, now)
                cell["outputs"] = _run(source, names, count)
    return notebook


def _run(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell. Return its printed text and the value of its last expression as outputs."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(ast.Module(body, []), f"<cell {count}>", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), f"<cell {count}>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        shown: dict[str, Any] = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_png_"):
            shown = {"image/png": base64.b64encode(_small(value)).decode(), "text/plain": ["a picture"]}
        outputs.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": shown})
    return outputs


def _small(picture: Any) -> bytes:
    """Return a picture as a PNG of 96 colours."""
    buffer = io.BytesIO()
    picture.convert("RGB").quantize(96, dither=0).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    file, where = (Path(argument).resolve() for argument in sys.argv[1:])
    written = json.dumps(executed(file, where), indent=1, ensure_ascii=False) + "\n"
    file.write_text(written.replace(os.fspath(where), "…"), encoding="utf-8")
