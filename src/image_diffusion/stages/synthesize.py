"""Make a data set of a trained model's images: drawn, scored beside held-out images, and released if it may be.

    python -m image_diffusion synthesize --config synthesize.yaml --sample sample.yaml --weights weights.safetensors \\
        --data crops/manifest.json --detector detector/detector.json --output results/x/synthetic

Writes a folder: the images with their classes and seeds in the layout of `synthesize.format`, README.md, the data card,
croissant.json, scorecard.json, index.html, the page of the scorecard, and provenance.json. Where `synthesize.require`
does not hold, the folder is called `quarantine` instead and the command fails. The same command resumes one that was
stopped. After a set that was kept back, another `require` or `format` draws no image again.
"""

from __future__ import annotations

import shutil
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from image_diffusion import __version__
from image_diffusion.core.classes import Position
from image_diffusion.core.config.base import dump
from image_diffusion.core.devices import best_device
from image_diffusion.core.files.atomic import atomic_folder, to_json, write_json, write_page
from image_diffusion.core.files.checksums import describe, write_checksums
from image_diffusion.core.files.npz import read_arrays, stream_samples
from image_diffusion.core.files.partial_results import partial_folder, resumable, rows_of_part
from image_diffusion.core.journal.writer import open_journal
from image_diffusion.core.process import command
from image_diffusion.core.process.progress import Progress
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.experiments.experiment import load_sections
from image_diffusion.metrics.evaluate_samples import RealImages
from image_diffusion.metrics.features.classifier import load_detector
from image_diffusion.metrics.samples import Samples
from image_diffusion.stages.sample import cached_batches, protocol, with_progress
from image_diffusion.synthesis.card import data_card, score_page
from image_diffusion.synthesis.config import SynthesizeConfig
from image_diffusion.synthesis.croissant import DataSetFacts, croissant
from image_diffusion.synthesis.layouts import UNLABELLED, WRITERS, synthetic_images
from image_diffusion.synthesis.scorecard import Scores, faults, measure_set, numbers_of
from image_diffusion.systems.base import Model
from image_diffusion.systems.interface import Section
from image_diffusion.systems.sampling import Maker, SamplingInputs
from image_diffusion.training.load_model import load_codec, load_model
from image_diffusion.training.trained_by import check_trained_by

_LICENCE = "Not stated. What these images may be used for follows from the licence of the model's training images."


def main() -> None:
    parser = command.Parser(prog="python -m image_diffusion synthesize", description=__doc__)
    parser.add_config("section synthesize, YAML")
    parser.add_argument("--sample", type=Path, required=True, help="sample.yaml, by which the images are drawn")
    parser.add_argument("--weights", type=Path, required=True, help="weights.safetensors that train wrote")
    parser.add_argument("--trained-by", type=Path, help="train.yaml: refuse weights of any other training")
    parser.add_argument("--codec-weights", type=Path, help="weights.safetensors of the trained codec")
    parser.add_argument("--data", type=Path, required=True, help="manifest.json of the crops of its training")
    parser.add_argument("--detector", type=Path, required=True, help="detector.json that detect wrote")
    parser.add_argument("--references", type=Path, nargs="+", default=[], help="folder that reference wrote")
    parser.add_argument("--journal", type=Path, help="folder of this stage's journal")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    sections = {"synthesize": Section(SynthesizeConfig, None, example="{per_class: 1000}")}
    config = load_sections(arguments.config, sections, sections, arguments.changes)["synthesize"]
    check_trained_by(arguments.weights.parent, arguments.trained_by)
    model = load_model(arguments.weights.parent)
    crops, detector_folder = arguments.data.parent, arguments.detector.parent
    train, held_out = open_shards(crops, "train"), open_shards(crops, "validation")
    sample = load_sections(arguments.sample, ["sample"], model.system.sections)["sample"]
    settings = sample.model_copy(update=requested_images(config, train))
    codec = load_codec(model, arguments.codec_weights and arguments.codec_weights.parent, best_device())
    generator = model.system.sampling().maker(SamplingInputs(model, settings, codec, load_model))
    described = protocol(settings, model) | generator.described
    described["training_data"] = {"name": train.manifest["name"], "digest": train.digest}

    output: Path = arguments.output
    drawn_by = dump(config.model_copy(update={"require": "", "format": "folders"}))
    identity = [described, drawn_by, dump(model.system), model.codec]
    journal = open_journal(arguments.journal, "synthesize")
    with resumable(output, identity, [detector_folder, *arguments.references]), journal:
        journal.params({"synthesize": dump(config), "data": train.digest})
        samples = draw(generator, settings, model, partial_folder(output) / "images.npz")
        real = RealImages(train, held_out)
        pictures = output.with_name(f"{output.name}_pictures")
        detector = load_detector(detector_folder, str(best_device()))
        scores = measure_set(samples, real, detector, config, arguments.references, pictures)
        wrong = faults(scores, config.require)
        folder = output.with_name("quarantine") if wrong else output
        experiment = output.absolute().parent.name
        write_set(folder, samples, settings.first_seed, config, scores, wrong, described, experiment, arguments.weights)
        journal.metrics(numbers_of(scores), model.step)
        for picture in sorted(pictures.glob("*.png")):
            journal.image(picture.stem, picture, model.step)
        for name in ("index.html", "scorecard.json"):
            journal.artifact(folder / name)
        if wrong:
            raise ValueError(
                f"synthesize.require does not hold: {'; '.join(wrong)}. The images are in {folder}, and "
                f"{folder / 'index.html'} has all scores. Train or sample otherwise, or change the requirement."
            )
    shutil.rmtree(output.with_name("quarantine"), ignore_errors=True)  # of an earlier run
    print(f"synthesize: {samples.num_samples:,} images in {output}, scored in {output / 'index.html'}")


def requested_images(config: SynthesizeConfig, train: Shards) -> dict[str, Any]:
    """Return the values of the section `sample` that draw the images of a set: their number, and their classes."""
    if config.like == "train":
        labels = [Position(position=int(label)) for label in train.labels] if train.classes else "balanced"
        return {"num_samples": train.num_samples, "labels": labels, "keep": True}
    assert config.per_class is not None
    num_classes = len(train.classes) - len(train.untrained()) if train.classes else 1
    return {"num_samples": config.per_class * num_classes, "labels": "balanced", "keep": True}


def draw(generator: Maker, settings: Any, model: Model, path: Path) -> Samples:
    """Draw the images into an .npz, and return them as they lie there."""
    rows = rows_of_part(settings.num_samples, settings.batch_size, (0, 1))
    with Progress("synthesize", settings.num_samples, "image") as progress:
        batches = with_progress(cached_batches(generator, rows), progress)
        stream_samples(path, batches, settings.num_samples, generator.labels)
    labels = None if generator.labels is None else generator.labels.numpy()
    return Samples(read_arrays(path)["arr_0"], labels, model.classes)


def write_set(
    folder: Path,
    samples: Samples,
    first_seed: int,
    config: SynthesizeConfig,
    scores: Scores,
    wrong: list[str],
    described: dict[str, Any],
    experiment: str,
    weights: Path,
) -> None:
    """Write the folder of a set, complete or not at all. wrong: why it is not released, if it is not."""
    classes = samples.classes if samples.has_labels else [UNLABELLED]
    counts = Counter(classes[label] for label in samples.labels.tolist())
    with atomic_folder(folder) as unfinished:
        images = synthetic_images(samples, first_seed)
        WRITERS[config.format](unfinished, images, classes if samples.has_labels else [])
        written = sorted(path for path in unfinished.rglob("*") if path.is_file())
        facts = DataSetFacts(
            name=f"{experiment}-synthetic",
            description=f"{samples.num_samples:,} synthetic images of {len(counts):,} "
            f"{'class' if len(counts) == 1 else 'classes'}, drawn from a diffusion model that was trained on "
            f"{described['training_data']['name']}.",
            licence=_LICENCE,
            creator=f"image-diffusion {__version__}",
            version="1.0.0",
            published=datetime.fromtimestamp(weights.stat().st_mtime, UTC).date().isoformat(),
            files=describe(unfinished, written),
        )
        (unfinished / "croissant.json").write_text(to_json(croissant(facts, config.format)), encoding="utf-8")
        card = data_card(facts, config.format, counts, scores, experiment)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        write_page(unfinished / "index.html", score_page(facts, scores, config.require, wrong))
        write_json(unfinished / "scorecard.json", {"scores": scores, "require": config.require, "faults": wrong})
        write_json(unfinished / "provenance.json", described)
        write_checksums(unfinished)


if __name__ == "__main__":
    command.run(main, "sample.batch_size")
