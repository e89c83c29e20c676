"""Stage `sample`: weights -> samples. Each sample has its own seed, and depends on nothing else.

    python -m image_diffusion.sample --config sample.yaml --weights weights.safetensors --output samples.npz

Writes samples.npz (arr_0 uint8 [N, H, W, C] and, with classes, arr_1 int64 [N]: the layout of ADM's evaluator),
grid.png, steps.png (from noise to image) and samples.json (how they were made). No more than a batch is in memory. With
`keep: false` only the images of the grid are made here, and `evaluate` makes them all as it looks at them.
A prior's samples are embeddings: img_emb/img_emb_0.npy and metadata/metadata_0.parquet, as clip-retrieval writes them,
and embeddings.json.

A person names what is trained, and the rest is found: an experiment, or a folder of weights.

    image-diffusion sample demo --label 3 --num 16 --seed 3 --guidance 2

A batch that has been made is not made again where the same command was stopped: it goes on after it.

With --part 2/8 only the samples of that part are made, and written alone; parts run side by side, and a last call with
--made joins what they wrote: the same bytes as of one call. The parts are then removed.
"""

from __future__ import annotations

import argparse
import glob
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from image_diffusion.core import command
from image_diffusion.core.arrays import read_arrays, stream_samples
from image_diffusion.core.config import dump
from image_diffusion.core.devices import best_device
from image_diffusion.core.files import remove_unfinished
from image_diffusion.core.halfway import Arrays, batches, going_on
from image_diffusion.core.journal import Journal, NullJournal
from image_diffusion.core.progress import Progress
from image_diffusion.core.together import rows_of_part
from image_diffusion.experiment import load_sections
from image_diffusion.systems.given import Maker, Model, SampleSettings, ToSample, ToWrite
from image_diffusion.training.model import load_codec, load_model
from image_diffusion.training.trained_by import check_trained_by
from image_diffusion.workflow.trained import find_trained

_SHORT = {
    "label": "labels",
    "num": "num_samples",
    "seed": "seed",
    "guidance": "guidance.guidance_scale",
}
"""Short options, and the keys of the section `sample` that they set; not every system has them all."""

_DRAWN = 16
"""Samples that a person gets who does not say how many."""

_PART = re.compile(r"\.?(?P<name>part-\d+-of-(?P<of>\d+)\.npz)(?P<half>\..+\.tmp|\.halfway)?")


def main(given: Sequence[str] | None = None) -> None:
    """given: the arguments of the command; None: those of the process."""
    parser = command.Parser(prog="python -m image_diffusion.sample", description=__doc__)
    parser.add_argument("trained", nargs="?", help="a trained experiment, its folder, or a folder of weights")
    parser.add_config("the stage's configuration, sample.yaml (that of the experiment, or the defaults)", False)
    for name, key in _SHORT.items():
        about = "name or number of a class; again for more, each in turn" if name == "label" else f"sample.{key}"
        parser.add_argument(f"--{name}", action="append" if name == "label" else "store", help=about)
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder of all results")
    parser.add_argument("--weights", type=Path, help="weights.safetensors that train wrote")
    parser.add_argument("--trained-by", type=Path, help="train.yaml: refuse weights of any other training")
    parser.add_argument(
        "--codec-weights", type=Path, help="weights.safetensors of the experiment that trained the codec"
    )
    parser.add_argument(
        "--small-images",
        type=Path,
        help="what is enlarged: the other experiment's samples.npz, or with small_images: validation the crops' folder",
    )
    parser.add_argument(
        "--embeddings",
        type=Path,
        nargs="+",
        help="what images are made of: a folder of embeddings, or the folders of held-out pairs and of their crops",
    )
    parser.add_argument(
        "--part", type=command.part_of, help="which samples to make: 2/8 is part 2 of 0 to 7; unset: all"
    )
    parser.add_argument("--shown", action="store_true", help="make only as many as grid.png shows, sample.grid_images")
    parser.add_argument("--made", type=Path, nargs="+", default=[], help="what all the parts wrote, in order, to join")
    parser.add_argument(
        "--output", type=Path, help="samples.npz, embeddings.json, or a part's .npz, to write (drawn/NAME)"
    )
    parser.add_argument("--journal", type=Path, help="the folder of this stage's journal")
    arguments = parser.parse_args(given)
    name = find(arguments)

    check_trained_by(arguments.weights.parent, arguments.trained_by)
    model = load_model(arguments.weights.parent)
    if "sample" not in model.system.sections:
        raise ValueError(
            f"A system of type {model.system.type} makes no samples. Sample an experiment whose system does."
        )
    changes = [*short_changes(arguments, model.classes), *arguments.changes]
    settings = load_sections(arguments.config, ["sample"], model.system.sections, changes)["sample"]
    samples = model.system.samples
    if arguments.shown:
        settings = settings.model_copy(update={"num_samples": min(settings.num_samples, samples.shown(settings))})
    codec = load_codec(model, arguments.codec_weights.parent if arguments.codec_weights else None, best_device())
    told_of = ToSample(model, settings, codec, load_model, arguments.small_images, arguments.embeddings or ())
    made = model.system.maker(told_of)

    output: Path = arguments.output or Path("drawn", name, samples.file)
    remove_left(output, arguments.part, arguments.made)
    described = protocol(settings, model) | made.described
    described["settings"].pop("keep", None)  # which changes no image
    goes_on = going_on(
        output, [described, dump(model.system), model.codec], [arguments.small_images, *told_of.embeddings]
    )
    if arguments.part is not None:
        rows_of_this = rows_of_part(settings.num_samples, settings.batch_size, arguments.part)
        count = sum(rows.stop - rows.start for rows in rows_of_this)
        with goes_on, Progress("sample", count, samples.one) as progress:
            stream_samples(output, told(made_once(made, rows_of_this), progress), count, None)
        print(f"sample: part {arguments.part[0]} of {arguments.part[1]} is done, {count:,} {samples.kind}")
        return

    journal = Journal.open(arguments.journal, "sample") if arguments.journal else NullJournal()
    # Who names a trained experiment wants to have the images, and parts have been stored.
    stored = settings.num_samples if arguments.trained or arguments.made else settings.num_stored
    with goes_on, journal, Progress("sample", stored, samples.one) as progress:
        journal.params({"sample": dump(settings)})
        rows_of_all = rows_of_part(settings.num_samples, settings.batch_size, (0, 1))
        batches_made = joined(arguments.made, settings) if arguments.made else made_once(made, rows_of_all)
        batches_made = first(batches_made, stored)
        given_to = ToWrite(told(batches_made, progress), made, settings, model, described, output, stored)
        pictures = samples.write(given_to)
        journal.metrics({"examples_seen": model.examples_seen}, model.step)
        for title, picture in pictures.items():
            journal.image(title, picture, model.step)
    for part in arguments.made:  # here and not by Snakemake, which may be killed between our end and their removal
        part.unlink(missing_ok=True)
    shown = "".join(f", shown in {picture}" for picture in list(pictures.values())[:1])
    rest = f"; evaluate makes all {settings.num_samples:,}" if stored < settings.num_samples else ""
    print(f"sample: {stored:,} {samples.kind} in {output}{shown}{rest}")


def find(arguments: argparse.Namespace) -> str:
    """Fill in the files that a trained experiment gives, where one is named; what to call it. Raises ValueError for
    what is missing."""
    if arguments.trained is not None:
        found = find_trained(arguments.trained, arguments.results)
        for name in ("weights", "config", "codec_weights", "small_images", "embeddings"):
            setattr(arguments, name, getattr(arguments, name) or getattr(found, name))
        arguments.num = arguments.num or _DRAWN
        return found.name
    if None in (arguments.weights, arguments.config, arguments.output):
        raise ValueError("Name a trained experiment, or give --config, --weights and --output.")
    return ""


def short_changes(arguments: argparse.Namespace, classes: Sequence[str]) -> list[str]:
    """What --label, --num, --seed and --guidance stand for, as --set has it."""
    given = {key: getattr(arguments, name) for name, key in _SHORT.items() if getattr(arguments, name) is not None}
    if "labels" in given:
        # A word is a number only where no class is called so.
        labels = [int(each) if each.isdecimal() and each not in classes else each for each in given["labels"]]
        given["labels"] = json.dumps(labels)
    return [f"sample.{key}={value}" for key, value in given.items()]


def remove_left(output: Path, part: tuple[int, int] | None, made: Sequence[Path]) -> None:
    """Remove the parts that killed runs left beside an output, whole or half-written: those of another number of parts,
    and when they are joined all that are not `made`. What is being written stays."""
    wanted = {path.name for path in made}
    for path in sorted(output.parent.glob("*part-*-of-*.npz*")):
        found = _PART.fullmatch(path.name)
        if found is None or (part is not None and int(found["of"]) == part[1]):
            continue
        if found["half"] == ".halfway":
            shutil.rmtree(path, ignore_errors=True)
        elif found["half"]:
            remove_unfinished(output.parent, glob.escape(found["name"]))
        elif path.name not in wanted:
            path.unlink(missing_ok=True)


def made_once(made: Maker, rows_of_each: Iterable[slice]) -> Iterator[Tensor]:
    """The batches of these rows; one that an earlier start has made is not made again."""

    def make(rows: slice) -> Arrays:
        return {"made": made(rows).numpy()}

    once = batches("samples")
    for rows in rows_of_each:
        yield torch.from_numpy(once(f"{rows.start}-{rows.stop}", partial(make, rows))["made"])


def joined(parts: list[Path], settings: SampleSettings) -> Iterator[Tensor]:
    """The batches [B, C, H, W] or [B, dim] that the parts wrote, in order. A damaged part is removed, to be made again.

    Raises ValueError when one is damaged, or they are not all of them.
    """
    arrays = []
    for path in parts:
        try:
            arrays.append(read_arrays(path)["arr_0"])
        except ValueError as error:
            path.unlink(missing_ok=True)
            raise ValueError(f"{error} It is removed: run the same command again.") from None
    if sum(map(len, arrays)) != settings.num_samples:
        raise ValueError(
            f"--made holds {sum(map(len, arrays)):,} samples, but sample.num_samples is {settings.num_samples:,}. Name "
            f"what every part wrote, once and in order."
        )
    for rows in arrays:
        for start in range(0, len(rows), settings.batch_size):
            yield torch.from_numpy(rows[start : start + settings.batch_size].copy()).movedim(-1, 1)


def first(batches: Iterable[Tensor], count: int) -> Iterator[Tensor]:
    """So many samples at most, in the same batches; none is made for nothing but those beside the last one."""
    for batch in batches:
        yield batch[:count]
        count -= len(batch)
        if count <= 0:
            return


def told(batches: Iterable[Tensor], progress: Progress) -> Iterator[Tensor]:
    """The batches, each counted as it passes."""
    for batch in batches:
        yield batch
        progress.advance(len(batch))


def protocol(settings: Any, model: Model) -> dict[str, Any]:
    """How samples were made: what metrics.json repeats beside every number."""
    return {
        "kind": "samples",
        "num_samples": settings.num_samples,
        "settings": dump(settings),
        "classes": model.classes,
        "weights_sha256": model.sha256,
        "step": model.step,
        "examples_seen": model.examples_seen,
    }


if __name__ == "__main__":
    command.run(main, "sample.batch_size")
