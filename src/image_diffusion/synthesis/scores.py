"""Scores of a set of synthetic images: their names, groups and meanings, and requirements on them."""

from __future__ import annotations

from dataclasses import dataclass

from image_diffusion.core.config.errors import suggestion
from image_diffusion.metrics.choice import Condition, parse_conditions

_EXAMPLE = "copies.upper < 0.05 and utility.gain.lower > 0"


@dataclass(frozen=True)
class Score:
    """A score. group: of the scorecard. better: the direction; empty if there is none. meaning: in plain words. metric:
    its name in `evaluate`; empty if it is measured here."""

    group: str
    better: str
    meaning: str
    metric: str = ""


SCORES = {
    "fd": Score("Fidelity", "lower", "Fréchet distance to the training images", "inpipe_fd"),
    "class_fd": Score("Fidelity", "lower", "Fréchet distance within a class, mean over classes", "inpipe_class_fd"),
    "agreement": Score(
        "Fidelity", "higher", "share of images that the detector recognises as their class", "inpipe_agreement"
    ),
    "precision": Score("Fidelity", "higher", "share of images that look like training images", "inpipe_precision"),
    "recall": Score("Diversity", "higher", "share of training images that look like synthetic ones", "inpipe_recall"),
    "coverage": Score("Diversity", "higher", "share of training images near a synthetic one", "inpipe_coverage"),
    "effective_number": Score(
        "Diversity", "higher", "different images that the set amounts to (Vendi score of order two)"
    ),
    "utility.real": Score("Utility", "higher", "accuracy of a classifier trained on real images alone"),
    "utility.synthetic": Score("Utility", "higher", "accuracy of a classifier trained on synthetic images alone"),
    "utility.real_and_1x": Score("Utility", "higher", "accuracy with as many synthetic as real images"),
    "utility.real_and_2x": Score("Utility", "higher", "accuracy with twice as many synthetic as real images"),
    "utility.real_and_4x": Score("Utility", "higher", "accuracy with four times as many synthetic as real images"),
    "utility.real_and_all": Score("Utility", "higher", "accuracy with all synthetic images, fewer than real ones"),
    "utility.gain": Score("Utility", "higher", "accuracy with the most synthetic images, less utility.real"),
    "utility.gain_rarest": Score("Utility", "higher", "the same gain on the rarest quarter of the classes"),
    "copies": Score("Privacy", "lower", "share nearer to a training image than 99 % of real images", "copies"),
    "copies_in_features": Score("Privacy", "lower", "the same share in the detector's features", "inpipe_copies"),
    "nearest_ratio": Score("Privacy", "", "distance to the nearest over that to the second nearest training image"),
    "membership.auc": Score(
        "Privacy", "lower", "probability that a training image is nearer to the set than a held-out one"
    ),
    "membership.true_positives": Score("Privacy", "lower", "training images recognised at 1 % false positives, share"),
}
"""Scores by their names in requirements, in the order of the page."""


def parse_requirement(text: str) -> list[Condition]:
    """Return the conditions of a requirement such as `copies.upper < 0.05 and utility.gain.lower > 0`; none if it is
    empty. Raises ValueError for anything but comparisons of a known number with a bound."""
    return parse_conditions(text, "score", _check_score, _EXAMPLE)


def _check_score(name: str) -> None:
    if name not in SCORES:
        raise ValueError(f"Unknown score {name!r}. {suggestion(name, list(SCORES))}")
