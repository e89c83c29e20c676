"""Prompts of images, as a list or in a file."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from image_diffusion.core.texts import lines_in
from image_diffusion.data.sources.table import read_columns
from image_diffusion.systems.base import Sections

COLUMN = "prompt"
"""Name of the column of a table of prompts."""
EXAMPLE_PROMPTS = ("a white square on black", "a black square on white")
"""Prompts in the example of a request."""


def read_prompts(prompts: tuple[str, ...] | str, key: str) -> list[str]:
    """Read the prompts of a list, of a `.txt` with one per line, or of the column "prompt" of a `.csv` or `.parquet`.

    key: their key in the configuration, for the message. Raises ValueError for a file that cannot be read, and if there
    are no prompts.
    """
    if isinstance(prompts, tuple):
        texts, where = list(prompts), "it"
    else:
        path, where = Path(prompts), prompts
        if not path.is_file():
            raise ValueError(f"{key}: {path} does not exist. Give a .txt, a .csv or a .parquet, or a list of prompts.")
        if path.suffix.lower() in (".csv", ".parquet"):
            texts = read_columns(path, COLUMN)[COLUMN]
        else:
            try:
                texts = lines_in(path.read_bytes())
            except ValueError as error:
                raise ValueError(f"{key}: {path} is not text: {error}, one prompt a line.") from None
    texts = [text for line in texts if (text := line.strip())]
    if not texts:
        raise ValueError(f"{key}: {where} holds no prompt. Write one at least.")
    return texts


def check_judged(experiment: Sections) -> None:
    """Raise ValueError if the evaluation compares images with prompts, but the samples have none."""
    sample = experiment.section("sample")
    if experiment.section("evaluate").prompts is not None and sample.prompts is None and sample.embeddings is None:
        raise ValueError(
            "evaluate.prompts is set, but the samples have no prompts. Leave it out, set sample.prompts, or set "
            "sample.embeddings to a prior's."
        )


def classes_named(prompts: list[str], classes: list[str]) -> Tensor | None:
    """Return the class that each prompt names, int64 [N]; None unless each prompt contains the name of exactly one
    class, as whole words."""
    names = [re.compile(rf"(?<!\w){re.escape(name.replace('_', ' '))}(?!\w)", re.IGNORECASE) for name in classes]
    matches: dict[str, list[int]] = {}
    for prompt in prompts:
        if prompt not in matches:
            matches[prompt] = [number for number, name in enumerate(names) if name.search(prompt)]
    if not prompts or any(len(numbers) != 1 for numbers in matches.values()):
        return None
    return torch.tensor([matches[prompt][0] for prompt in prompts], dtype=torch.int64)
