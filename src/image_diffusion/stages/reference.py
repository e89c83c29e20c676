"""Extract the features of a data set's real images, once for all comparisons.

    python -m image_diffusion reference --config reference.yaml --data crops --detector detector \\
        --output references/inpipe

Writes a folder: the features of every image and of some degraded ones, the statistics of both splits in the layout of
ADM and EDM, and reference.json, which names the images and the detector. Several processes, started by torchrun, share
the images.

With --part 2/8, only the images of that part are processed, and --output is an .npz of their features. Parts can run at
the same time. A last call with --made joins them, with the same bytes as without parts, and removes them.

Features are kept until the output is complete: after an interruption, the same command resumes.
"""

from __future__ import annotations

import shutil

from image_diffusion.core.config.base import load
from image_diffusion.core.devices import best_device
from image_diffusion.core.files.partial_results import resumable
from image_diffusion.core.process import command
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.remote import place
from image_diffusion.experiments.experiment import ReferenceStage
from image_diffusion.metrics.evaluate_samples import RealImages
from image_diffusion.metrics.features.reference_features import write_features, write_part
from image_diffusion.training.parallel.world import join


def main() -> None:
    """Read the command line, compute the features, and write the folder."""
    parser = command.Parser(prog="image-diffusion reference", description=__doc__)
    parser.add_config("section detector, YAML")
    parser.add_argument("--data", type=place, required=True, help="folder of crops: path or URL")
    parser.add_path("--detector", "folder of detect, for the detector inpipe")
    parser.add_argument("--part", type=command.part_of, help="part of the images, 2/8 is part 2 of 0 to 7")
    parser.add_paths("--made", "outputs of all parts, in order, to join")
    parser.add_path("--output", "folder to write, or .npz of a part", required=True)
    arguments = parser.parse_args()
    with join() as world:
        stage = load(ReferenceStage, arguments.config, arguments.changes)
        detector = stage.detector.build(arguments.detector, str(best_device()))
        train, validation = (open_shards(arguments.data, split, renders=True) for split in ("train", "validation"))
        data = RealImages(train, validation)
        splits = data.image_sets
        identity = [detector.identity, {name: [images.digest, images.selection] for name, images in splits.items()}]
        if arguments.part is not None:
            with resumable(arguments.output, identity, writes=world.is_main):
                write_part(detector, splits, arguments.output, arguments.part, world.is_main)
            return
        with resumable(arguments.output / "reference.json", identity, writes=world.is_main):
            write_features(detector, splits, arguments.output, world.is_main, arguments.made)
        if world.is_main:
            shutil.rmtree(arguments.output / "parts", ignore_errors=True)
            counts = " and ".join(f"{images.num_samples:,} of {name}" for name, images in splits.items())
            print(f"reference: {counts} seen by {detector.identity['name']}, {arguments.output / 'reference.json'}")
