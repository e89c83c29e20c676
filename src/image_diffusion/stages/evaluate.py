"""Evaluate a trained model: samples against real images, a codec's reconstructions against their originals.

    python -m image_diffusion evaluate --config evaluate.yaml --weights results/x/train/weights.safetensors \
        --samples samples.npz --data crops --detector detector --output metrics.json --report evaluation

The model's system determines the metrics. Without --weights, any samples are evaluated. With --weights and
evaluate.likelihood, but without --samples, only the bits per dimension are measured. Several processes, started by
torchrun, share the images, and the numbers stay the same. After an interruption, the same command resumes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from image_diffusion.core.config.base import dump
from image_diffusion.core.devices import best_device
from image_diffusion.core.files.atomic import make_folder, read_json, sha256_file, write_json
from image_diffusion.core.files.checksums import describe
from image_diffusion.core.files.partial_results import resumable
from image_diffusion.core.journal.writer import Journal, NullJournal, open_journal
from image_diffusion.core.levels import Levels
from image_diffusion.core.process import command
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.remote import place
from image_diffusion.experiments.experiment import load_sections
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.samples import Samples, read_generated, read_samples
from image_diffusion.systems.base import Model
from image_diffusion.systems.diffusion.evaluation import DiffusionEvaluation
from image_diffusion.systems.evaluation import Evaluation, EvaluationInputs
from image_diffusion.systems.interface import Section
from image_diffusion.systems.sampling import SamplingInputs
from image_diffusion.training.load_model import check_trained_by, load_codec, load_model
from image_diffusion.training.parallel.world import join


def main() -> None:
    """Read the command line, measure, write metrics.json."""
    parser = command.Parser(prog="image-diffusion evaluate", description="Evaluate a trained model, or any samples.")
    parser.add_config("section evaluate, YAML")
    parser.add_path("--weights", "weights.safetensors of train (default: evaluate only samples)")
    parser.add_path("--trained-by", "train.yaml of the training that the weights must come from")
    parser.add_path("--samples", "samples.npz, or a folder of images; a codec needs none")
    parser.add_path("--making", "sample.yaml, to generate the samples here; --samples has the first ones")
    parser.add_path("--codec-weights", "with --making: as for sample")
    parser.add_path("--small-images", "with --making: as for sample")
    parser.add_paths("--embeddings", "with --making: as for sample")
    parser.add_argument("--data", type=place, required=True, help="folder of crops, or of a prior's pairs: path or URL")
    parser.add_path("--encoded", "folder of --data as encoded by the codec, for a token model")
    parser.add_paths("--pairs", "folders of what is paired with the images of --data, such as masks")
    parser.add_path("--detector", "folder that detect wrote; needed for the inpipe detector")
    parser.add_paths("--references", "folders that reference wrote, one per detector")
    parser.add_path("--reference", ".npz of statistics or samples, instead of the data's split")
    parser.add_path("--previews", "folder of the previews that training kept")
    parser.add_path("--report", "folder for the pictures")
    parser.add_path("--journal", "folder for this stage's journal")
    parser.add_path("--output", "metrics.json to write", required=True)
    arguments = parser.parse_args()
    weights, codec = arguments.weights, arguments.codec_weights
    with join() as world:
        model = None
        if weights is not None:
            check_trained_by(weights.parent, arguments.trained_by)
            model = load_model(weights.parent)
        evaluation = model.system.evaluation() if model is not None else DiffusionEvaluation()
        reader: Callable[[Path, list[str], Levels | None], Samples] = read_samples
        if arguments.making:
            if model is None:
                raise ValueError("--making needs the network. Name it: --weights weights.safetensors.")
            others = arguments.small_images, arguments.embeddings
            reader = generated_samples_reader(load_model(weights.parent), arguments.making, codec, *others)
        settings = evaluation_settings(model, evaluation.section, arguments.config, arguments.changes)
        if model is not None and arguments.samples is not None:
            check_samples_of(model.sha256, arguments.samples)
        # other processes share the work, but write nothing
        report, journal = (arguments.report, arguments.journal) if world.is_main else (None, None)
        inputs = EvaluationInputs(
            model=model,
            settings=settings,
            data=arguments.data,
            splits={split: open_shards(arguments.data, split, renders=True) for split in evaluation.splits},
            samples=arguments.samples,
            detector=arguments.detector,
            reference=arguments.reference,
            references=arguments.references,
            previews=arguments.previews,
            report=report,
            encoded=arguments.encoded,
            pairs=arguments.pairs,
            raw=partial(raw_network, weights),
            read=reader,
        )
        if report is not None:
            make_folder(report)
        tags, params = {"manifest_digest": inputs.splits["train"].digest}, {evaluation.section: dump(settings)}
        identity = [tags, params, *([model.sha256, dump(model.system), model.codec] if model is not None else [])]
        identity.append({"splits": [inputs.splits["train"].selection, inputs.splits["validation"].selection]})
        measured = (arguments.samples, arguments.detector, arguments.reference)
        run = None if journal is None else [*identity, *_file_digests(*measured)]
        with (
            resumable(arguments.output, identity, _files_read(arguments), world.is_main),
            open_journal(journal, "evaluate", tags, run) as record,
        ):
            record.params(params)
            evaluate(evaluation, inputs, model, record, arguments.output, world.is_main)


def evaluate(
    evaluation: Evaluation,
    inputs: EvaluationInputs,
    model: Model | None,
    journal: Journal | NullJournal,
    output: Path,
    writes: bool,
) -> None:
    """Measure; write metrics.json and print the numbers if this process `writes`."""
    result = measure(evaluation, inputs, model)
    step = model.step if model is not None else int(result["protocol"].get("samples", {}).get("step", 0))
    journal.metrics(dict(_tracked_metrics(result)), step)
    if result.get("doubt"):
        journal.params({"doubt": result["doubt"]})
    if model is not None:
        journal.metrics({"examples_seen": model.examples_seen}, step)
    for point in result["curve"]:
        values = {f"preview/{k}": v for k, v in point.items() if k not in ("step", "num_samples")}
        journal.metrics(values, point["step"])
    pictures = sorted(inputs.report.glob("*.png")) if inputs.report else []
    for picture in pictures:
        journal.image(picture.stem, picture, step)
    if writes:
        write_json(output, result | {"files": describe(output.parent, pictures)})
        print_metrics(result["metrics"], result.get("doubt"))


def _files_read(arguments: Namespace) -> list[Path | None]:
    """Return the files and folders that the numbers depend on, apart from --data; only a command with the same ones
    resumes after an interruption."""
    weights, codec, samples = arguments.weights, arguments.codec_weights, arguments.samples
    files = [weights and weights.parent / "raw", arguments.making, arguments.small_images, *arguments.embeddings]
    files += [codec, codec and codec.parent / "model.json", samples, samples and samples.with_suffix(".json")]
    return [*files, arguments.encoded, arguments.detector, arguments.reference, arguments.previews, *arguments.pairs]


def _file_digests(samples: Path | None, detector: Path | None, reference: Path | None) -> list[str]:
    """Return the sha256 of the files that describe the samples, or of the samples if none does, of the detector and of
    the reference."""
    described = samples and samples.with_suffix(".json")
    paths = [
        described if described and described.is_file() else samples,
        detector and detector / "detector.json",
        reference,
    ]
    return [sha256_file(path) for path in paths if path is not None and path.is_file()]


def check_samples_of(sha256: str, samples: Path) -> None:
    """Raise ValueError if the metadata of samples name other weights than those with this sha256."""
    described = samples.with_suffix(".json")
    made_with = read_json(described).get("weights_sha256", sha256) if described.is_file() else sha256
    if made_with != sha256:
        raise ValueError(
            f"{described} is of samples from other weights than --weights. Run sample with these weights, or name "
            f"those that it was run with."
        )


def raw_network(weights: Path) -> nn.Module | None:
    """Return the network with its raw weights, before averaging; None unless they were kept next to `weights`."""
    folder = weights.parent / "raw"
    return load_model(folder).network.to(best_device()) if (folder / "model.json").is_file() else None


def evaluation_settings(model: Model | None, section: str, config: Path, changes: list[str]) -> Any:
    """Return the section of a file with the settings of a model's evaluation, with some values changed."""
    sections = model.system.sections if model is not None else {section: Section(EvaluateConfig, EvaluateConfig())}
    return load_sections(config, [section], sections, changes)[section]


def generated_samples_reader(
    model: Model, config: Path, codec_weights: Path | None, small_images: Path | None, embeddings: Sequence[Path]
) -> Callable[[Path, list[str], Levels | None], Samples]:
    """Return a reader that generates samples when it needs them, by a sample.yaml. Raises ValueError for settings that
    do not fit the model."""
    settings = load_sections(config, ["sample"], model.system.sections)["sample"]
    codec = load_codec(model, codec_weights.parent if codec_weights else None, best_device())
    inputs = SamplingInputs(model, settings, codec, load_model, small_images, embeddings)
    generator = model.system.sampling().maker(inputs)
    return partial(read_generated, generator, generator.labels, settings.batch_size)


def measure(evaluation: Evaluation, inputs: EvaluationInputs, model: Model | None) -> dict[str, Any]:
    """Return the contents of metrics.json: {"metrics", "curve", "classes", "protocol"}."""
    result = evaluation.evaluate(inputs)
    if model is not None:
        result["protocol"]["weights"] = {"sha256": model.sha256, "step": model.step, "system": model.system.type}
    return result


def _tracked_metrics(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers by the names under which they are tracked: those of an unreliable detector have a prefix, so
    that nothing is selected by them."""
    doubts = result.get("doubts", ())
    for name, entry in result["metrics"].items():
        if entry["value"] is not None:
            believed = entry.get("doubt") is None or entry["doubt"] not in doubts
            yield (name if believed else f"doubted/{name}"), entry["value"]


def print_metrics(metrics: dict[str, dict[str, Any]], doubt: str | None = None) -> None:
    """Print a line for each metric, and each doubt once, with the metrics that it concerns. doubt: about the
    headline."""
    for name, entry in metrics.items():
        if entry["value"] is not None:
            interval = entry["interval"]
            between = f"  [{interval[0]:.4g}, {interval[1]:.4g}]" if interval else ""
            ratio = f"  {entry['ratio']:.2f} x floor" if entry.get("ratio") is not None else ""
            print(f"{name:24} {entry['value']:.5g}{between}{ratio}  {entry['note']}".rstrip())
    for reason in dict.fromkeys([doubt, *(entry.get("doubt") for entry in metrics.values())]):
        if reason is not None:
            doubted = [name for name, entry in metrics.items() if entry.get("doubt") == reason]
            print(f"Do not rely on these numbers: {reason}. These are {', '.join(doubted) or 'the headline'}.")
