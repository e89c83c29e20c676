"""The folder of a set: its images, data card, Croissant file, scorecard, page, provenance and checksums."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from image_diffusion import __version__
from image_diffusion.core.files.atomic import atomic_folder, sha256_file, to_json, write_json, write_page
from image_diffusion.core.files.checksums import write_checksums
from image_diffusion.synthesis.card import data_card, score_page
from image_diffusion.synthesis.config import SynthesizeConfig
from image_diffusion.synthesis.croissant import DataSetFacts, croissant
from image_diffusion.synthesis.layouts import WRITERS, SyntheticSet
from image_diffusion.synthesis.scorecard import Scores

_LICENCE = "Not stated. What these images may be used for follows from the licence of the model's training images."


def write_set(
    folder: Path,
    images: SyntheticSet,
    config: SynthesizeConfig,
    scores: Scores,
    wrong: list[str],
    counts: Mapping[str, Mapping[str, int]],
    described: dict[str, Any],
    experiment: str,
    weights: Path,
) -> None:
    """Write the folder of a set atomically. wrong: a sentence for each condition of the requirement that is not met.
    counts: `Selection.counts`. described: how the images were made. weights: of the model; their modification time is
    the date of the set.
    """
    counts = {name: of_class for name, of_class in counts.items() if of_class["drawn"]}
    filled = sum(of_class["kept"] > 0 for of_class in counts.values())
    with atomic_folder(folder) as unfinished:
        WRITERS[config.format](unfinished, images)
        written = sorted(path for path in unfinished.rglob("*") if path.is_file())
        facts = DataSetFacts(
            name=f"{experiment}-synthetic",
            description=f"{images.samples.num_samples:,} synthetic images of {filled:,} "
            f"{'class' if filled == 1 else 'classes'}, drawn from a diffusion model that was trained on "
            f"{described['training_data']['name']}.",
            licence=_LICENCE,
            creator=f"image-diffusion {__version__}",
            version="1.0.0",
            published=datetime.fromtimestamp(weights.stat().st_mtime, UTC).date().isoformat(),
            files={str(path.relative_to(unfinished)): sha256_file(path) for path in written},
            numbers=tuple(images.numbers),
            has_classes=bool(images.classes),
        )
        (unfinished / "croissant.json").write_text(to_json(croissant(facts, config.format)), encoding="utf-8")
        card = data_card(facts, config.format, counts, scores, experiment)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        page = score_page(facts, scores, config.require, wrong, counts)
        write_page(unfinished / "index.html", page)
        scorecard = {"scores": scores, "images": counts, "require": config.require, "faults": wrong}
        write_json(unfinished / "scorecard.json", scorecard)
        write_json(unfinished / "provenance.json", described)
        write_checksums(unfinished)
