"""Prompts: what images are asked for with, as a list or in a file."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from image_diffusion.data.sources.table import read_columns
from image_diffusion.systems.given import Sections

COLUMN = "prompt"
"""Name of the column of a table of prompts."""


def read_prompts(prompts: tuple[str, ...] | str, key: str) -> list[str]:
    """The prompts of a list, of a `.txt` with one a line, or of the column "prompt" of a `.csv` or `.parquet`.

    key: where they are asked for, for the message. Raises ValueError for a file that cannot be read, and for none.
    """
    if isinstance(prompts, tuple):
        found, where = list(prompts), "it"
    else:
        path, where = Path(prompts), prompts
        if not path.is_file():
            raise ValueError(f"{key}: {path} does not exist. Give a .txt, a .csv or a .parquet, or a list of prompts.")
        if path.suffix.lower() in (".csv", ".parquet"):
            found = read_columns(path, COLUMN)[COLUMN]
        else:
            try:
                found = path.read_text(encoding="utf-8").splitlines()
            except UnicodeDecodeError as error:
                raise ValueError(f"{key}: {path} is not text: {error}. Write one prompt a line, in UTF-8.") from None
    found = [text for each in found if (text := each.strip())]
    if not found:
        raise ValueError(f"{key}: {where} holds no prompt. Write one at least.")
    return found


def check_judged(experiment: Sections) -> None:
    """Raise ValueError where images without prompts are to be compared with them."""
    sample = experiment.section("sample")
    if experiment.section("evaluate").prompts is not None and sample.prompts is None and sample.embeddings is None:
        raise ValueError(
            "evaluate.prompts is set, but images are asked for without words. Leave it out, or set sample.prompts, or "
            "sample.embeddings to a prior's."
        )


def classes_named(prompts: list[str], classes: list[str]) -> Tensor | None:
    """The class that each prompt names, int64 [N]; None unless each one names one class, as a word or words of it."""
    names = [re.compile(rf"(?<!\w){re.escape(name.replace('_', ' '))}(?!\w)", re.IGNORECASE) for name in classes]
    known: dict[str, list[int]] = {}
    for prompt in prompts:
        if prompt not in known:
            known[prompt] = [number for number, name in enumerate(names) if name.search(prompt)]
    if not prompts or any(len(found) != 1 for found in known.values()):
        return None
    return torch.tensor([known[prompt][0] for prompt in prompts], dtype=torch.int64)
