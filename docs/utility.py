"""Draw the curve of utility of synthetic images: python docs/utility.py scorecard.json=TITLE picture.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

POINTS = {0: "utility.real", 1: "utility.real_and_1x", 2: "utility.real_and_2x", 4: "utility.real_and_4x"}
"""Scores by the number of synthetic images for each real one."""


def draw(scorecards: dict[str, Path], picture: Path) -> None:
    """Draw a panel for each scorecard, by its title."""
    figure, panels = plt.subplots(1, len(scorecards), figsize=(4.5 * len(scorecards), 3.2), squeeze=False)
    for panel, (title, path) in zip(panels[0], scorecards.items(), strict=True):
        scores = json.loads(path.read_text(encoding="utf-8"))["scores"]
        measured = {times: scores[name] for times, name in POINTS.items() if scores[name]["value"] is not None}
        values = [score["value"] for score in measured.values()]
        below = [score["value"] - score["lower"] for score in measured.values()]
        above = [score["upper"] - score["value"] for score in measured.values()]
        panel.errorbar(list(measured), values, yerr=[below, above], marker="o", capsize=3, label="real and synthetic")
        panel.axhline(scores["utility.synthetic"]["value"], linestyle="--", color="grey", label="synthetic alone")
        panel.set(title=title, xlabel="synthetic images for each real one", ylabel="accuracy on held-out images")
        panel.set_xticks(list(POINTS))
        panel.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    *named, last = sys.argv[1:]
    draw({title: Path(path) for path, title in (text.split("=", 1) for text in named)}, Path(last))
