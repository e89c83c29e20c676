"""Judge a trained model: samples against real images, a codec's reconstructions against their originals.

    python -m image_diffusion.evaluate --config evaluate.yaml --weights results/x/train/weights.safetensors \
        --samples samples.npz --data crops --detector detector --output metrics.json --report evaluation

What is measured follows from the model's system. Without --weights, samples from anywhere are judged; with them and
evaluate.likelihood, but without --samples, the bits per dimension alone are measured. Where torchrun starts several
processes, they share the images and the numbers stay the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch import nn

from image_diffusion.codecs import CodecConfig
from image_diffusion.core import command
from image_diffusion.core.config import dump, load, parse
from image_diffusion.core.devices import best_device
from image_diffusion.core.files import write_json
from image_diffusion.core.journal import Journal, NullJournal
from image_diffusion.data.remote import place
from image_diffusion.data.shards import Shards, Split, open_shards
from image_diffusion.experiment import EvaluateStage
from image_diffusion.metrics.curve import read_previews
from image_diffusion.metrics.evaluation import RealImages, evaluate_samples
from image_diffusion.metrics.features import Detector
from image_diffusion.metrics.likelihood import LikelihoodConfig, measure_likelihood
from image_diffusion.metrics.samples import read_samples
from image_diffusion.systems import CodecSystem
from image_diffusion.systems.codec_evaluation import evaluate_codec
from image_diffusion.systems.enlarging_evaluation import evaluate_enlarging
from image_diffusion.systems.likelihood import ImageBound
from image_diffusion.systems.prior import PriorSystem
from image_diffusion.systems.prior_evaluation import PredictionConfig, evaluate_prior
from image_diffusion.training.distributed import join
from image_diffusion.training.model import Model, load_model
from image_diffusion.training.trained_by import check_trained_by


def main() -> None:
    """Read the command line, measure, write metrics.json."""
    parser = argparse.ArgumentParser(prog="python -m image_diffusion.evaluate", description="Judge a trained model.")
    parser.add_argument("--config", type=Path, required=True, help="resolved section evaluate")
    parser.add_argument("--weights", type=Path, help="weights.safetensors that train wrote; unset: samples alone")
    parser.add_argument("--trained-by", type=Path, help="train.yaml: refuse weights of any other training")
    parser.add_argument("--samples", type=Path, help="samples.npz, or a folder of pictures; a codec needs none")
    parser.add_argument("--data", type=place, required=True, help="folder of crops, or of a prior's pairs: path or URL")
    parser.add_argument("--detector", type=Path, help="folder that detect wrote; needed for the inpipe detector")
    parser.add_argument("--reference", type=Path, help=".npz of statistics or samples, in place of the data's split")
    parser.add_argument("--previews", type=Path, help="folder of the previews that training kept")
    parser.add_argument("--report", type=Path, help="folder for the pictures")
    parser.add_argument("--journal", type=Path, help="folder for this stage's journal")
    parser.add_argument("--output", type=Path, required=True, help="metrics.json to write")
    arguments = parser.parse_args()
    with join() as world:
        if not world.is_main:  # it shares the work, and writes nothing
            arguments.report = arguments.journal = None
        evaluate(arguments, world.is_main)


def evaluate(arguments: argparse.Namespace, writes: bool) -> None:
    """Measure; write metrics.json and print the numbers, where this process is the one that `writes`."""
    stage = load(EvaluateStage, arguments.config)
    data = RealImages(open_shards(arguments.data, "train"), open_shards(arguments.data, "validation"))
    if arguments.weights:
        check_trained_by(arguments.weights.parent, arguments.trained_by)
    model = load_model(arguments.weights.parent) if arguments.weights else None
    tags = {"manifest_digest": data.train.digest}
    journal = Journal.open(arguments.journal, "evaluate", tags=tags) if arguments.journal else NullJournal()
    with journal:
        journal.params(dump(stage))
        result = measure(model, data, stage, arguments)
        step = model.step if model is not None else int(result["protocol"].get("samples", {}).get("step", 0))
        journal.metrics({k: e["value"] for k, e in result["metrics"].items() if e["value"] is not None}, step)
        for point in result["curve"]:
            values = {f"preview/{k}": v for k, v in point.items() if k not in ("step", "num_samples")}
            journal.metrics(values, point["step"])
        for picture in sorted(arguments.report.glob("*.png")) if arguments.report else []:
            journal.image(picture.stem, picture, step)
        if writes:
            write_json(arguments.output, result)
            tell(result["metrics"])


def measure(
    model: Model | None,
    data: RealImages,
    stage: EvaluateStage,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """What metrics.json holds: {"metrics", "curve", "classes", "protocol"}. One paragraph for each kind of system."""
    report: Path | None = arguments.report
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
    settings = stage.evaluate

    def detector() -> Detector:
        return settings.detector.build(arguments.detector, str(best_device()))

    if model is not None and isinstance(model.system, PriorSystem):
        names: tuple[Split, ...] = ("train", "validation", "test")
        splits: dict[str, Shards] = {name: open_shards(arguments.data, name) for name in names}
        networks = {"": model.network.to(best_device())} | online(arguments.weights.parent)
        prediction = stage.prediction or PredictionConfig()
        result = evaluate_prior(networks, model.system, model.spec, splits, prediction, report)

    elif model is not None and isinstance(model.system, CodecSystem):
        network = model.network.to(best_device())
        result = evaluate_codec(network, data, detector(), settings, report)

    else:
        if arguments.samples is None and settings.likelihood is None:
            raise ValueError("A diffusion model is judged by its samples. Name them: --samples samples.npz.")
        result = {"metrics": {}, "curve": [], "classes": {}, "protocol": {}}
        if arguments.samples is not None:
            if settings.against is not None and arguments.reference is None:
                raise ValueError("evaluate.against is set. Name the .npz that samples are compared with: --reference.")
            samples = read_samples(arguments.samples, data.train.classes)
            previews = {}
            if arguments.previews and model is not None:
                run = arguments.previews / model.fingerprint
                previews = read_previews(run, data.train.classes, model.num_steps)
            result = evaluate_samples(samples, data, detector(), settings, report, arguments.reference, previews)
            result["metrics"] |= evaluate_enlarging(samples, data.validation, settings.batch_size, report)
        if settings.likelihood is not None:
            bits, result["likelihood"] = likelihood(model, data, settings.likelihood, report)
            result["metrics"] |= bits
            result["protocol"]["likelihood"] = {"settings": dump(settings.likelihood), "data": data.train.digest}

    if model is not None:
        result["protocol"]["weights"] = {"sha256": model.sha256, "step": model.step, "system": model.system.type}
    return result


def online(folder: Path) -> dict[str, nn.Module]:
    """The network with the weights that were not averaged, where training kept those (train.keep_raw)."""
    if not (folder / "raw" / "model.json").is_file():
        return {}
    return {"online": load_model(folder / "raw").network.to(best_device())}


def likelihood(
    model: Model | None, data: RealImages, settings: LikelihoodConfig, report: Path | None
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The bits per dimension of real images, and their terms by timestep."""
    if model is None:
        raise ValueError("evaluate.likelihood needs the network. Name it: --weights weights.safetensors.")
    spec, shape, num_classes = model.spec, data.train.shape, len(data.train.classes)
    if shape != (spec.channels, spec.resolution, spec.resolution) or spec.num_classes not in (0, num_classes):
        raise ValueError(
            f"The network was trained on images of {[spec.channels, spec.resolution, spec.resolution]} with "
            f"{spec.num_classes} classes, but --data holds {list(shape)} with {num_classes}. Name images like its own."
        )
    codec = parse(CodecConfig, model.codec["config"], "model.json: codec")
    bound = ImageBound(model.network.to(best_device()), model.system, model.spec, codec, settings)
    return measure_likelihood(bound, bound.timesteps, data.split(settings.split), settings, report)


def tell(metrics: dict[str, dict[str, Any]]) -> None:
    """Print a line for each metric."""
    for name, entry in metrics.items():
        if entry["value"] is not None:
            interval = entry["interval"]
            between = f"  [{interval[0]:.4g}, {interval[1]:.4g}]" if interval else ""
            ratio = f"  {entry['ratio']:.2f} x floor" if entry.get("ratio") is not None else ""
            print(f"{name:24} {entry['value']:.5g}{between}{ratio}  {entry['note']}".rstrip())


if __name__ == "__main__":
    command.run(main)
