"""Every command under one name: `image-diffusion train …` is `python -m image_diffusion.train …`.

image-diffusion init my-project
"""

from __future__ import annotations

import ast
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from image_diffusion.core.mistakes import nearest

COMMANDS = (
    *(
        "init",
        "configure",
        "crop",
        "datasheet",
        "detect",
        "encode",
        "embed",
        "doctor",
        "train",
        "ema",
        "sample",
        "evaluate",
    ),
    *("sweep", "export", "published", "track", "follow", "crate"),
)


def main() -> None:
    """Run the command that is named; without one, tell which there are."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("usage: image-diffusion COMMAND …   (image-diffusion COMMAND --help tells of one)\n")
        for name in COMMANDS:
            print(f"  {name:10} {_first_line(name)}")
        return
    name = sys.argv.pop(1)
    if name not in COMMANDS:
        close = nearest(name, COMMANDS)
        hint = f" Did you mean {close}?" if close else f" There are {', '.join(COMMANDS)}."
        sys.exit(f"error: '{name}' is no command.{hint}")
    runpy.run_module(f"image_diffusion.{name}", run_name="__main__", alter_sys=True)


def _first_line(name: str) -> str:
    """What a command's docstring begins with, without importing it."""
    spec = find_spec(f"image_diffusion.{name}")
    assert spec is not None and spec.origin is not None
    told = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    return str(told).partition("\n")[0]


if __name__ == "__main__":
    main()
