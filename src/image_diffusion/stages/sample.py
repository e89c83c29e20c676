"""Sample a trained model. Each sample has its own seed, and depends on nothing else.

    python -m image_diffusion sample --config sample.yaml --weights weights.safetensors --output samples.npz

Writes samples.npz (arr_0 uint8 [N, H, W, C] and, with classes, arr_1 int64 [N]: the layout of ADM's evaluator),
grid.png, steps.png (from noise to image) and samples.json (the settings). Only one batch at a time is in memory. With
`keep: false`, only the images of the grid are sampled here, and `evaluate` samples all images as it needs them.
A prior's samples are embeddings: img_emb/img_emb_0.npy and metadata/metadata_0.parquet, as clip-retrieval writes them,
and embeddings.json.

Name a trained experiment or a folder of weights; its other files are found:

    image-diffusion sample demo --label 3 --num 16 --seed 3 --guidance 2

For published weights, name the file and its description:

    image-diffusion sample --published config/published/dit_xl2_imagenet256.yaml \\
        --read DiT-XL-2-256x256.pt --output results/dit

Nothing is downloaded. --output is then a folder: `train` has the weights, from which a training can also start
(train.init_from), and `samples` the samples.

After an interruption, the same command resumes after the last finished batch.

With --part 2/8, only the samples of that part are drawn and written. Parts can run at the same time. A last call with
--made joins them, with the same bytes as without parts, and removes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from image_diffusion.core.config.base import dump, to_yaml
from image_diffusion.core.devices import best_device
from image_diffusion.core.files.atomic import write_text
from image_diffusion.core.files.partial_results import resumable, rows_of_part
from image_diffusion.core.journal.writer import open_journal
from image_diffusion.core.process import command
from image_diffusion.core.process.errors import log_line
from image_diffusion.core.process.progress import Progress
from image_diffusion.experiments.experiment import load_sections
from image_diffusion.systems.sample_batches import (
    cached_batches,
    first,
    joined,
    protocol,
    remove_stale_parts,
    with_progress,
    write_part,
)
from image_diffusion.systems.sampling import SamplesToWrite, SamplingInputs
from image_diffusion.training.load_model import check_trained_by, load_codec, load_model
from image_diffusion.workflow.trained_files import TrainedFiles, find_trained

SMALLER = ("sample.batch_size",)
"""Keys of an experiment that make the command need less memory when they are smaller."""

_SHORT = {
    "label": "labels",
    "num": "num_samples",
    "seed": "seed",
    "guidance": "guidance.guidance_scale",
}
"""Short options, and the keys of the section `sample` that they set; not every system has them all."""

_DEFAULT_NUM = 16
"""Default number of samples of a trained experiment that the command line names."""


def _parser() -> command.Parser:
    parser = command.Parser(prog="image-diffusion sample", description=__doc__)
    parser.add_argument("trained", nargs="?", help="trained experiment, its folder, or a folder of weights")
    parser.add_config("the stage's configuration, sample.yaml (that of the experiment, or the defaults)", False)
    about_label = "name, number or {position: N} of a class; repeat it to alternate between classes"
    parser.add_argument("--label", action="append", help=about_label)
    for name in ("num", "seed", "guidance"):
        parser.add_argument(f"--{name}", help=f"sample.{_SHORT[name]}")
    parser.add_path("--published", "config/published/….yaml, which describes the file in --read")
    parser.add_path("--read", "with --published: file of published weights")
    parser.add_argument("--codec", help="with --published: folder of the autoencoder, if the Hub is not available")
    parser.add_path("--results", "folder of all results", default=Path("results"))
    parser.add_path("--weights", "weights.safetensors that train wrote")
    parser.add_path("--trained-by", "train.yaml: refuse weights of any other training")
    parser.add_path("--codec-weights", "weights.safetensors of the experiment that trained the codec")
    parser.add_path(
        "--small-images",
        "images of the condition: samples.npz of an experiment, or the folder of crops to compute them from",
    )
    parser.add_path(
        "--embeddings",
        "embeddings to decode: their folder, or the folders of held-out pairs and of their crops",
        nargs="+",
    )
    parser.add_path("--crop", "crop.yaml of the data set, to crop the images of sample.given and sample.start")
    parser.add_argument(
        "--part", type=command.part_of, help="part of the samples, 2/8 is part 2 of 0 to 7 (default: all)"
    )
    parser.add_argument(
        "--shown", action="store_true", help="sample only the images that grid.png shows (sample.grid_images)"
    )
    parser.add_paths("--made", "outputs of all parts, in order, to join")
    parser.add_path(
        "--output", "samples.npz, embeddings.json, or a part's .npz, to write (drawn/NAME); a folder with --published"
    )
    parser.add_path("--journal", "folder of this stage's journal")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Run the command. words: its arguments; None: those of the process."""
    arguments = _parser().parse_args(words)
    values = {key: getattr(arguments, name) for name, key in _SHORT.items() if getattr(arguments, name) is not None}
    output: Path | None = arguments.output
    if arguments.published is not None:
        if arguments.read is None or output is None:
            raise ValueError("--published needs the weights and a folder to write. Name them: --read, --output.")
        files = read_published(arguments.published, arguments.read, arguments.codec, output)
        output = output / "samples" / "samples.npz"
    elif arguments.read is not None or arguments.codec is not None:
        raise ValueError("--read and --codec go with --published. Name the description of the weights there.")
    elif arguments.trained is not None:
        files = find_trained(arguments.trained, arguments.results)
        values.setdefault("num_samples", _DEFAULT_NUM)
    elif None in (arguments.weights, arguments.config, output):
        raise ValueError("Name a trained experiment, or give --config, --weights and --output.")
    else:
        files = TrainedFiles("", arguments.weights)
    names = ("weights", "config", "codec_weights", "small_images", "embeddings", "crop")
    files = replace(files, **{name: value for name in names if (value := getattr(arguments, name))})

    check_trained_by(files.weights.parent, arguments.trained_by)
    model = load_model(files.weights.parent)
    if "sample" not in model.system.sections:
        raise ValueError(
            f"A system of type {model.system.type} makes no samples. Sample an experiment whose system does."
        )
    sections = model.system.sections
    if "guidance_scale" in getattr(sections["sample"].kind, "model_fields", ()):  # a prior's section has no guidance
        values = {key.removeprefix("guidance."): value for key, value in values.items()}
    changes = [*short_changes(values, model.classes), *arguments.changes]
    settings = load_sections(files.config, ["sample"], sections, changes)["sample"]
    sampling = model.system.sampling()
    kind = sampling.files
    if arguments.trained is not None and arguments.num is None:
        listed = sampling.num_listed(settings)
        if (left_out := listed - settings.num_samples) > 0:
            log_line(
                f"warning: {left_out:,} of the {listed:,} rows or prompts that are listed are not drawn. Set --num "
                f"{listed} for all of them."
            )
    if arguments.shown:
        settings = settings.model_copy(update={"num_samples": min(settings.num_samples, kind.shown(settings))})
    codec = load_codec(model, files.codec_weights.parent if files.codec_weights else None, best_device())
    embeddings = files.embeddings or ()
    inputs = SamplingInputs(model, settings, codec, load_model, files.small_images, embeddings, files.crop)
    generator = sampling.maker(inputs)

    output = output or Path("drawn", files.name, kind.file)
    remove_stale_parts(output, arguments.part, arguments.made)
    described = protocol(settings, model) | generator.described
    described["settings"].pop("keep", None)  # keep does not change any image
    identity = [described, dump(model.system), model.codec]
    with resumable(output, identity, [files.small_images, *embeddings]):
        if arguments.part is not None:
            count = write_part("sample", kind.one, generator, settings, output, arguments.part)
            print(f"sample: part {arguments.part[0]} of {arguments.part[1]} is done, {count:,} {kind.kind}")
            return
        rows = rows_of_part(settings.num_samples, settings.batch_size, (0, 1))
        samples = joined(arguments.made, settings) if arguments.made else cached_batches(generator, rows)
        # A command that names a trained experiment stores all images; so do parts.
        count = settings.num_samples if arguments.trained or arguments.made else settings.num_stored
        journal = open_journal(arguments.journal, "sample", identity=identity)
        with journal, Progress("sample", count, kind.one) as progress:
            journal.params({"sample": dump(settings)})
            samples = with_progress(first(samples, count), progress)
            pictures = kind.write(SamplesToWrite(samples, generator, settings, model, described, output, count))
            journal.metrics({"examples_seen": model.examples_seen}, model.step)
            for title, picture in pictures.items():
                journal.image(title, picture, model.step)
    for part in arguments.made:  # here and not in Snakemake, which may be killed before it removes them
        part.unlink(missing_ok=True)
    shown = "".join(f", shown in {picture}" for picture in list(pictures.values())[:1])
    rest = f"; evaluate makes all {settings.num_samples:,}" if count < settings.num_samples else ""
    print(f"sample: {count:,} {kind.kind} in {output}{shown}{rest}")


def read_published(description: Path, path: Path, codec: str | None, folder: Path) -> TrainedFiles:
    """Write published weights to a folder, and the settings to sample them with; returns those files."""
    # By name: this keeps the import and export of weights, which change no sample, out of this stage's code digest.
    export = import_module("image_diffusion.stages.export")
    published = export.read_published(description, path, codec, folder / "train")
    print(f"sample: {published.what}. Licence: {published.licence}", flush=True)
    for result in published.cited:
        print(f"sample: {result.metric} {result.value:g} ({result.source}). {' '.join(result.differences)}".rstrip())
    config = folder / "config" / "sample.yaml"
    write_text(config, to_yaml({"sample": dump(published.sample)}))
    return TrainedFiles("", folder / "train" / "weights.safetensors", config)


def short_changes(values: Mapping[str, Any], classes: Sequence[str]) -> list[str]:
    """Return the changes that --label, --num, --seed and --guidance stand for, in the form of --set."""
    labels = f"[{', '.join(_label(text, classes) for text in values.get('labels', ()))}]"
    return [f"sample.{key}={labels if key == 'labels' else value}" for key, value in values.items()]


def _label(text: str, classes: Sequence[str]) -> str:
    """Return a class of the command line in the form of --set: a number, a position, or otherwise a name."""
    is_number = text.isdecimal() and text == str(int(text))
    is_position = text not in classes and re.fullmatch(r"\{position: *\d+\}", text)
    return text if is_number or is_position else json.dumps(text)
