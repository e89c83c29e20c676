"""Judge a trained model: samples against real images, a codec's reconstructions against their originals.

    python -m image_diffusion.evaluate --config evaluate.yaml --weights results/x/train/weights.safetensors \
        --samples samples.npz --data crops --detector detector --output metrics.json --report evaluation

What is measured follows from the model's system. Without --weights, samples from anywhere are judged; with them and
evaluate.likelihood, but without --samples, the bits per dimension alone are measured. Where torchrun starts several
processes, they share the images and the numbers stay the same. Where it was stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from image_diffusion.core import command
from image_diffusion.core.config import dump
from image_diffusion.core.devices import best_device
from image_diffusion.core.files import write_json
from image_diffusion.core.halfway import going_on
from image_diffusion.core.journal import Journal, NullJournal
from image_diffusion.core.verify import describe
from image_diffusion.data.remote import place
from image_diffusion.data.shards import open_shards
from image_diffusion.experiment import load_sections
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.samples import Samples, read_made, read_samples
from image_diffusion.systems.diffusion.evaluation import judge_diffusion
from image_diffusion.systems.given import Section, ToJudge, ToSample
from image_diffusion.training.distributed import join
from image_diffusion.training.model import load_codec, load_model
from image_diffusion.training.trained_by import check_trained_by


def main() -> None:
    """Read the command line, measure, write metrics.json."""
    parser = command.Parser(prog="python -m image_diffusion.evaluate", description="Judge a trained model.")
    parser.add_config("resolved section evaluate")
    parser.add_argument("--weights", type=Path, help="weights.safetensors that train wrote; unset: samples alone")
    parser.add_argument("--trained-by", type=Path, help="train.yaml: refuse weights of any other training")
    parser.add_argument("--samples", type=Path, help="samples.npz, or a folder of pictures; a codec needs none")
    parser.add_argument("--making", type=Path, help="sample.yaml: make the samples now; --samples has the first ones")
    parser.add_argument("--codec-weights", type=Path, help="as sample takes it, with --making")
    parser.add_argument("--small-images", type=Path, help="as sample takes it, with --making")
    parser.add_argument("--embeddings", type=Path, nargs="+", default=[], help="as sample takes it, with --making")
    parser.add_argument("--data", type=place, required=True, help="folder of crops, or of a prior's pairs: path or URL")
    parser.add_argument("--encoded", type=Path, help="folder of what the codec made of --data; for a model of tokens")
    parser.add_argument("--detector", type=Path, help="folder that detect wrote; needed for the inpipe detector")
    parser.add_argument("--references", type=Path, nargs="+", help="folders that reference wrote, one a detector")
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
    given = to_judge(arguments)
    tags = {"manifest_digest": open_shards(arguments.data, "train").digest}
    journal = Journal.open(arguments.journal, "evaluate", tags=tags) if arguments.journal else NullJournal()
    with keeping(given, arguments, tags, writes), journal:
        journal.params({name: dump(section) for name, section in given.sections.items()})
        result = judge(given)
        samples = result["protocol"].get("samples", {})
        step = given.model.step if given.model is not None else int(samples.get("step", 0))
        journal.metrics(dict(_told(result)), step)
        if result.get("doubt"):
            journal.params({"doubt": result["doubt"]})
        if given.model is not None:
            journal.metrics({"examples_seen": given.model.examples_seen}, step)
        for point in result["curve"]:
            values = {f"preview/{k}": v for k, v in point.items() if k not in ("step", "num_samples")}
            journal.metrics(values, point["step"])
        drawn = sorted(arguments.report.glob("*.png")) if arguments.report else []
        for picture in drawn:
            journal.image(picture.stem, picture, step)
        if writes:
            write_json(arguments.output, result | {"files": describe(arguments.output.parent, drawn)})
            tell(result["metrics"], result.get("doubt"))


def keeping(
    given: ToJudge, arguments: argparse.Namespace, data: Any, writes: bool
) -> contextlib.AbstractContextManager[None]:
    """Where what the networks have seen and made is kept, so that the same command goes on after one that was stopped.
    data: what tells them from other data."""
    model, weights, samples, codec = given.model, arguments.weights, arguments.samples, arguments.codec_weights
    of: list[Any] = [data, {name: dump(section) for name, section in given.sections.items()}]
    if model is not None:
        of += [model.sha256, dump(model.system), model.codec]
    inputs = [samples, samples and samples.with_suffix(".json"), weights and weights.parent / "raw", arguments.making]
    inputs += [arguments.encoded, arguments.detector, arguments.reference, arguments.previews, arguments.small_images]
    inputs += [codec, codec and codec.parent / "model.json", *arguments.embeddings]
    return going_on(arguments.output, of, inputs, writes)


def to_judge(arguments: argparse.Namespace) -> ToJudge:
    """What the command line names."""
    if arguments.weights:
        check_trained_by(arguments.weights.parent, arguments.trained_by)
    model = load_model(arguments.weights.parent) if arguments.weights else None
    known = model.system.sections if model is not None else {"evaluate": Section(EvaluateConfig, EvaluateConfig())}
    names = model.system.judged_by if model is not None else ("evaluate",)

    def raw() -> nn.Module | None:
        folder = arguments.weights.parent / "raw"
        return load_model(folder).network.to(best_device()) if (folder / "model.json").is_file() else None

    return ToJudge(
        model,
        load_sections(arguments.config, names, known, arguments.changes),
        arguments.data,
        arguments.samples,
        arguments.detector,
        arguments.reference,
        arguments.references or [],
        arguments.previews,
        arguments.report,
        arguments.encoded,
        raw,
        making(arguments) if arguments.making else read_samples,
    )


def making(arguments: argparse.Namespace) -> Callable[[Path, list[str]], Samples]:
    """What reads samples that are made as they are looked at. Raises ValueError for what does not fit the model."""
    if arguments.weights is None:
        raise ValueError("--making needs the network. Name it: --weights weights.safetensors.")
    model = load_model(arguments.weights.parent)
    settings = load_sections(arguments.making, ["sample"], model.system.sections)["sample"]
    codec = load_codec(model, arguments.codec_weights.parent if arguments.codec_weights else None, best_device())
    given = ToSample(model, settings, codec, load_model, arguments.small_images, arguments.embeddings)
    made = model.system.maker(given)
    return partial(read_made, made, made.labels, settings.batch_size)


def judge(given: ToJudge) -> dict[str, Any]:
    """What metrics.json holds: {"metrics", "curve", "classes", "protocol"}. What is measured, the system says; samples
    from elsewhere are judged as a diffusion's are."""
    if given.report is not None:
        given.report.mkdir(parents=True, exist_ok=True)
    model = given.model
    if model is None:
        return judge_diffusion(given)
    result = model.system.judge(given)
    result["protocol"]["weights"] = {"sha256": model.sha256, "step": model.step, "system": model.system.type}
    return result


def _told(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers by the names under which they are tracked: those of a judge that must not be believed lie apart, so
    that nothing is chosen by them."""
    doubts = result.get("doubts", ())
    for name, entry in result["metrics"].items():
        if entry["value"] is not None:
            believed = entry.get("doubt") is None or entry["doubt"] not in doubts
            yield (name if believed else f"doubted/{name}"), entry["value"]


def tell(metrics: dict[str, dict[str, Any]], doubt: str | None = None) -> None:
    """Print a line for each metric, and each doubt once."""
    for name, entry in metrics.items():
        if entry["value"] is not None:
            interval = entry["interval"]
            between = f"  [{interval[0]:.4g}, {interval[1]:.4g}]" if interval else ""
            ratio = f"  {entry['ratio']:.2f} x floor" if entry.get("ratio") is not None else ""
            print(f"{name:24} {entry['value']:.5g}{between}{ratio}  {entry['note']}".rstrip())
    for each in dict.fromkeys([doubt, *(entry.get("doubt") for entry in metrics.values())]):
        if each is not None:
            print(f"Do not rely on these numbers: {each}.")


if __name__ == "__main__":
    command.run(main)
