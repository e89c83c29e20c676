"""Train the embedded detector on a data set's own crops.

Writes detector.safetensors and detector.json, both complete or absent. After an interruption it starts again: it trains
on at most 200,000 examples (`most_examples`), ten minutes on two CPU cores.
"""

from __future__ import annotations

from image_diffusion.core.config.base import load
from image_diffusion.core.devices import best_device
from image_diffusion.core.process.command import Parser
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.remote import place
from image_diffusion.metrics.features.classifier_training import DetectorTraining, train_detector


def main() -> None:
    """Read the command line, train, and print the detector's accuracy."""
    parser = Parser(
        prog="image-diffusion detect",
        description="Train the classifier whose features the inpipe metrics use.",
    )
    parser.add_argument("--data", type=place, required=True, help="folder of crops: path or URL")
    parser.add_path("--config", "YAML file with training settings (default: those of DetectorTraining)")
    parser.add_path("--output", "folder to write", required=True)
    options = parser.parse_args()
    settings = load(DetectorTraining, options.config) if options.config else DetectorTraining()
    train, held_out = (open_shards(options.data, split, renders=True) for split in ("train", "validation"))
    description = train_detector(train, held_out, settings, options.output, str(best_device()))
    print(
        f"detector: {description['accuracy']:.1%} of {description['num_held_out']:,} held-out images right "
        f"({description['labels']}), {options.output / 'detector.json'}"
    )
