"""Every command under one name: `image-diffusion train …` is `python -m image_diffusion train …`.

image-diffusion init my-project
"""

from __future__ import annotations

import ast
import gc
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from image_diffusion.core.config.errors import nearest
from image_diffusion.core.process.command import run
from image_diffusion.core.process.commands import COMMANDS, module_of
from image_diffusion.core.process.errors import log_line

_RENAMED = {"follow": ("track", "--experiments", "--follow"), "crate": ("export", "--experiment", "--crate")}
"""Former commands: for each, the command that replaces it, that command's option for experiments, and the option to put
in its place."""


def main() -> None:
    """Run the named command; list the commands without one."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        usage = "usage: image-diffusion COMMAND ...   (image-diffusion COMMAND --help shows its options)\n"
        try:
            print("\n".join([usage, *(f"  {name:10} {_first_line(name)}" for name in COMMANDS)]), flush=True)
        except BrokenPipeError:  # the reader has closed the pipe; the last flush must not fail as well
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    name = sys.argv.pop(1)
    if name == "published":
        sys.exit("error: the command published is an option of sample: sample --published FILE --read FILE …")
    if name in _RENAMED:
        command, before, option = _RENAMED[name]
        log_line(f"warning: the command {name} is an option of {command}: {command} {option} EXPERIMENT …")
        name, sys.argv[1:] = command, [option if word == before else word for word in sys.argv[1:]]
    if name not in COMMANDS:
        close = nearest(name, COMMANDS)
        hint = f"Did you mean '{close}'?" if close else f"Known: {', '.join(COMMANDS)}."
        sys.exit(f"error: unknown command '{name}'. {hint}")
    gc.disable()  # importing PyTorch creates a million objects and no garbage; `command.run` enables collection again
    module = import_module(module_of(name))
    run(module.main, *getattr(module, "SMALLER", ()))


def _first_line(name: str) -> str:
    """Return the first line of a command's docstring, without importing it."""
    spec = find_spec(module_of(name))
    assert spec is not None and spec.origin is not None
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    return str(docstring).partition("\n")[0]


if __name__ == "__main__":
    main()
