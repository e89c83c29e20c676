"""A file that builds on another one: `base: cifar10` at its top stands for cifar10.yaml beside it.

What the file itself writes is merged over that, key by key, as long as `type` is the same or left out. An empty section
is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from image_diffusion.core.config import merged, read_yaml

BASE = "base"


def read_inherited(path: Path) -> tuple[Any, list[Path]]:
    """The plain data of a file over those of its bases, and every file that was read: itself, its base, and so on.

    Raises ValueError for a base that is missing, is no name, or leads back to the file.
    """
    files, levels = [path], [read_yaml(path)]
    while isinstance(levels[-1], dict) and BASE in levels[-1]:
        here = files[-1]
        name = levels[-1].pop(BASE)
        if not isinstance(name, str):
            raise ValueError(f"{here}: base is {name!r}, but the name of a file beside it is meant, without .yaml.")
        base = here.with_name(f"{name}.yaml")
        if base in files:
            way = " -> ".join(each.stem for each in (*files, base))
            raise ValueError(f"{here}: base goes in a circle, {way}. Leave it out of one of them.")
        try:
            found = read_yaml(base)
        except ValueError as error:
            raise ValueError(f"{here}: base is {name}, but {error}") from None
        files.append(base)
        levels.append(found)
    data = levels.pop()
    for written in reversed(levels):
        data = {key: value for key, value in merged(data, written).items() if value is not None or key not in written}
    return data, files
