"""Make a data set of synthetic images, score it against held-out images, and release it if it passes.

    python -m image_diffusion synthesize --config synthesize.yaml --sample sample.yaml --weights weights.safetensors \\
        --data crops/manifest.json --detector detector/detector.json --output results/x/synthetic

Writes a folder: the images with their classes and seeds in the layout of `synthesize.format`, README.md (the data
card), croissant.json, scorecard.json, index.html (the page of the scorecard) and provenance.json. If
`synthesize.require` is not met, the folder is named `quarantine` instead, and the command fails. After an interruption,
the same command resumes. If a set was quarantined, changing `require` or `format` does not draw its images again.

With --part 2/8, only the images of that part are drawn and written. A last call with --made joins the parts, with the
same bytes as without parts, and removes them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from image_diffusion.core.config.base import dump
from image_diffusion.core.devices import best_device
from image_diffusion.core.files.atomic import sha256_file
from image_diffusion.core.files.image_arrays import read_arrays, stream_samples
from image_diffusion.core.files.partial_results import partial_folder, resumable
from image_diffusion.core.journal.writer import open_journal
from image_diffusion.core.number_columns import NumberColumns
from image_diffusion.core.process import command
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.experiments.experiment import load_sections
from image_diffusion.metrics.evaluate_samples import RealImages
from image_diffusion.metrics.features.classifier import load_detector
from image_diffusion.metrics.samples import Samples
from image_diffusion.synthesis.config import LEAST, SynthesizeConfig, check_count, requested
from image_diffusion.synthesis.layouts import UNLABELLED, SyntheticSet
from image_diffusion.synthesis.scorecard import Numbers, faults, measure_set, numbers_of
from image_diffusion.synthesis.selection import chosen, reasons_to_reject, select
from image_diffusion.synthesis.set_folder import write_set
from image_diffusion.systems.interface import Section
from image_diffusion.systems.pairs.numbers import NumberPairs
from image_diffusion.systems.sample_batches import joined, protocol, remove_stale_parts, write_part
from image_diffusion.systems.sampling import SamplingInputs
from image_diffusion.training.load_model import check_trained_by, load_codec, load_model

SMALLER = ("sample.batch_size",)
"""Keys of an experiment that make the command need less memory when they are smaller."""


def main() -> None:
    parser = command.Parser(prog="image-diffusion synthesize", description=__doc__)
    parser.add_config("section synthesize, YAML")
    parser.add_path("--sample", "sample.yaml, the settings of sampling", required=True)
    parser.add_path("--weights", "weights.safetensors that train wrote", required=True)
    parser.add_path("--trained-by", "train.yaml: refuse weights of any other training")
    parser.add_path("--codec-weights", "weights.safetensors of the trained codec")
    parser.add_path("--data", "manifest.json of the crops that it was trained on", required=True)
    parser.add_paths("--pairs", "manifest.json of each set paired with the crops, such as numbers")
    parser.add_path("--detector", "detector.json that detect wrote", required=True)
    parser.add_paths("--references", "folder that reference wrote")
    parser.add_argument(
        "--part", type=command.part_of, help="part of the images, 2/8 is part 2 of 0 to 7 (default: all)"
    )
    parser.add_paths("--made", "outputs of all parts, in order, to join")
    parser.add_path("--journal", "folder of this stage's journal")
    parser.add_path("--output", "folder to write; with --part the .npz", required=True)
    arguments = parser.parse_args()
    sections = {"synthesize": Section(SynthesizeConfig, None, example="{per_class: 1000}")}
    config = load_sections(arguments.config, sections, sections, arguments.changes)["synthesize"]
    check_trained_by(arguments.weights.parent, arguments.trained_by)
    model = load_model(arguments.weights.parent)
    train, held_out = (open_shards(arguments.data.parent, name) for name in ("train", "validation"))
    with_numbers, columns = [train, held_out], None
    if NumberPairs.kind in model.pairs:
        columns = NumberColumns.described(model.pairs[NumberPairs.kind])
        with_numbers = [open_shards(arguments.data.parent, name) for name in ("train", "validation")]
        for split in with_numbers:  # without the images that have no numbers
            for manifest in arguments.pairs:
                split.join(open_shards(manifest.parent, "all"))
    request = requested(config, with_numbers[0], columns, model.system.sampling().takes_classes)
    check_count(config, len(request.groups))
    sample = load_sections(arguments.sample, ["sample"], model.system.sections)["sample"]
    settings = sample.model_copy(update=request.drawn(config.reject.drawn if config.reject else 1))
    codec = load_codec(model, arguments.codec_weights and arguments.codec_weights.parent, best_device())
    generator = model.system.sampling().maker(SamplingInputs(model, settings, codec, load_model))
    described = protocol(settings, model) | generator.described
    described["training_data"] = {"name": train.manifest["name"], "digest": train.digest}

    output: Path = arguments.output
    drawn_by = dump(config.model_copy(update={"require": "", "format": "folders", "num_jobs": 1}))
    identity = [described, drawn_by, dump(model.system), model.codec]
    if arguments.part is not None:
        remove_stale_parts(output, arguments.part, [])
        with resumable(output, identity):
            write_part("synthesize", "image", generator, settings, output, arguments.part)
        print(f"synthesize: part {arguments.part[0]} of {arguments.part[1]} is done")
        return
    detector_folder = arguments.detector.parent
    identity.append({"splits": [train.selection, held_out.selection]})
    of_run = [*identity, dump(config), sha256_file(arguments.detector)]
    journal = open_journal(arguments.journal, "synthesize", identity=of_run)
    with resumable(output, identity, [detector_folder, *arguments.references]), journal:
        journal.params({"synthesize": dump(config), "data": train.digest})
        path = partial_folder(output) / "images.npz"
        if arguments.made:
            stream_samples(path, joined(arguments.made, settings), settings.num_samples, generator.labels)
        else:
            write_part("synthesize", "image", generator, settings, path, labels=generator.labels)
        labels = None if generator.labels is None else generator.labels.numpy()
        drawn = Samples(read_arrays(path)["arr_0"], labels, model.classes)
        real, detector = RealImages(train, held_out), load_detector(detector_folder, str(best_device()))
        reasons = reasons_to_reject(drawn, real, detector, config.reject) if config.reject else {}
        selection = select(drawn, request, reasons)
        if len(selection.rows) < LEAST:
            raise ValueError(
                f"synthesize.reject leaves {len(selection.rows)} of {settings.num_samples:,} images, but the scores of "
                f"a set need at least {LEAST}. Raise synthesize.reject.drawn, or reject fewer."
            )
        requested_numbers: dict[str, list[float | None]] = generator.described.get("conditions", {}).get("values", {})
        numbers = {name: [of_all[row] for row in selection.rows.tolist()] for name, of_all in requested_numbers.items()}
        seeds = settings.first_seed + selection.rows
        images = SyntheticSet(chosen(drawn, selection), seeds, numbers)
        pictures = output.with_name(f"{output.name}_pictures")
        beside = compared_numbers(columns, numbers, *with_numbers)
        scores = measure_set(images.samples, real, detector, config, arguments.references, pictures, beside)
        wrong = faults(scores, config.require)
        folder = output.with_name("quarantine") if wrong else output
        experiment = output.absolute().parent.name
        counts = selection.counts(drawn, UNLABELLED)
        write_set(folder, images, config, scores, wrong, counts, described, experiment, arguments.weights)
        journal.metrics(numbers_of(scores), model.step)
        for picture in sorted(pictures.glob("*.png")):
            journal.image(picture.stem, picture, model.step)
        for name in ("index.html", "scorecard.json", "SHA256SUMS"):
            journal.artifact(folder / name)
        if wrong:
            raise ValueError(
                f"synthesize.require does not hold: {'; '.join(wrong)}. The images are in {folder}, and "
                f"{folder / 'index.html'} has all scores. Train or sample otherwise, or change the requirement."
            )
    shutil.rmtree(output.with_name("quarantine"), ignore_errors=True)  # folder of an earlier run
    for part in arguments.made:  # here and not in Snakemake, which may be killed before it removes them
        part.unlink(missing_ok=True)
    fewer = (
        "" if len(selection.rows) == selection.num_requested else f" of {selection.num_requested:,} that were asked for"
    )
    print(f"synthesize: {len(selection.rows):,} images{fewer} in {output}, scored in {output / 'index.html'}")


def compared_numbers(
    columns: NumberColumns | None, numbers: dict[str, list[float | None]], train: Shards, held_out: Shards
) -> Numbers | None:
    """Return the numbers for training regressors; None without numbers."""
    if columns is None:
        return None
    rows = [dict(zip(numbers, cells, strict=True)) for cells in zip(*numbers.values(), strict=True)]
    of_real = (
        images.gather_of(NumberPairs.kind, np.arange(images.num_samples)).float() for images in (train, held_out)
    )
    return Numbers(RealImages(train, held_out), columns.scaled(rows), *of_real)
