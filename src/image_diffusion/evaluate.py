"""Judge samples against real images.

    python -m image_diffusion.evaluate --config evaluate.yaml --samples samples.npz --data crops \
        --detector detector --output metrics.json --report report
"""

from __future__ import annotations

import argparse
from pathlib import Path

from image_diffusion.core import command
from image_diffusion.core.config import dump, load
from image_diffusion.core.devices import best_device
from image_diffusion.core.files import write_json
from image_diffusion.core.journal import Journal, NullJournal
from image_diffusion.data.remote import place
from image_diffusion.data.shards import open_shards
from image_diffusion.experiment import EvaluateStage
from image_diffusion.metrics.curve import read_previews
from image_diffusion.metrics.evaluation import RealImages, evaluate_samples
from image_diffusion.metrics.samples import read_samples


def main() -> None:
    """Read the command line, measure, write metrics.json."""
    parser = argparse.ArgumentParser(description="Judge samples against real images.")
    parser.add_argument("--config", type=Path, required=True, help="resolved section evaluate")
    parser.add_argument("--samples", type=Path, required=True, help="samples.npz, or a folder of pictures")
    parser.add_argument("--data", type=place, required=True, help="folder of crops it was trained on: path or URL")
    parser.add_argument("--detector", type=Path, help="folder that detect wrote; needed for the inpipe detector")
    parser.add_argument("--reference", type=Path, help=".npz of statistics or samples, in place of the data's split")
    parser.add_argument("--previews", type=Path, help="folder of the previews that training kept")
    parser.add_argument("--report", type=Path, help="folder for the pictures")
    parser.add_argument("--journal", type=Path, help="folder for this stage's journal")
    parser.add_argument("--output", type=Path, required=True, help="metrics.json to write")
    arguments = parser.parse_args()

    settings = load(EvaluateStage, arguments.config).evaluate
    data = RealImages(open_shards(arguments.data, "train"), open_shards(arguments.data, "validation"))
    samples = read_samples(arguments.samples, data.train.classes)
    detector = settings.detector.build(arguments.detector, str(best_device()))
    previews = read_previews(arguments.previews, data.train.classes) if arguments.previews else {}
    tags = {"manifest_digest": data.train.digest}
    journal = Journal.open(arguments.journal, "evaluate", tags=tags) if arguments.journal else NullJournal()
    with journal:
        journal.params({"evaluate": dump(settings)})
        result = evaluate_samples(samples, data, detector, settings, arguments.report, arguments.reference, previews)
        step = int(samples.protocol.get("step", 0))
        journal.metrics({k: e["value"] for k, e in result["metrics"].items() if e["value"] is not None}, step)
        for point in result["curve"]:
            values = {f"preview/{k}": v for k, v in point.items() if k not in ("step", "num_samples")}
            journal.metrics(values, point["step"])
        for picture in sorted(arguments.report.glob("*.png")) if arguments.report else []:
            journal.image(picture.stem, picture, step)
        write_json(arguments.output, result)
    for name, entry in result["metrics"].items():
        if entry["value"] is not None:
            interval = entry["interval"]
            between = f"  [{interval[0]:.4g}, {interval[1]:.4g}]" if interval else ""
            ratio = f"  {entry['ratio']:.2f} x floor" if entry["ratio"] is not None else ""
            print(f"{name:24} {entry['value']:.5g}{between}{ratio}  {entry['note']}".rstrip())


if __name__ == "__main__":
    command.run(main)
