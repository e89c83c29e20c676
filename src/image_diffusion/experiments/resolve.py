"""Load experiments with their dependencies, check them together, and write the configuration of each stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from image_diffusion.codecs.hub_files import files_of
from image_diffusion.codecs.tokens import tokens_of
from image_diffusion.codecs.trained import Trained
from image_diffusion.core.config.base import Config, beyond_defaults, dump, read_yaml, to_yaml
from image_diffusion.core.files.atomic import digest, read_json, to_json, write_if_changed
from image_diffusion.core.types import SamplesOf, WeightsOf
from image_diffusion.data.sources.embeddings import Embeddings
from image_diffusion.data.sources.latents import LatentSource
from image_diffusion.experiments.checks import check_experiment
from image_diffusion.experiments.experiment import (
    EmbedStage,
    EncodeStage,
    Experiment,
    ExportStage,
    ReferenceStage,
    TrainStage,
    load_experiment,
)
from image_diffusion.experiments.study import Expanded
from image_diffusion.systems.base import Others, makes
from image_diffusion.systems.pairs.config import PairsConfig
from image_diffusion.systems.pairs.inputs import pairs_entry
from image_diffusion.workflow.plans import PairPlan, Plan, plan_file

CODEC, SMALL_IMAGES = "codec.experiment", "sample.small_images.experiment"
AGAINST = "evaluate.against.experiment"
EMBEDDINGS = "sample.embeddings.experiment"
START = "train.init_from.experiment"
_MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
"""Files in a folder in transformers' layout that identify its weights."""


def built_on(experiment: Experiment) -> dict[str, str]:
    """Return the experiments that must be made before this one, by the key that names them."""
    trained_by, sources = experiment.codec.trained_by, experiment.system.sampling().sources(experiment.sample)
    evaluation = experiment.system.evaluation()
    read = {
        SMALL_IMAGES: sources.small_images,
        EMBEDDINGS: sources.embeddings,
        AGAINST: evaluation.against(experiment.section(evaluation.section)),
        START: experiment.train.init_from,
    }
    codec = {CODEC: trained_by} if trained_by is not None else {}
    return codec | {key: source.experiment for key, source in read.items() if isinstance(source, SamplesOf | WeightsOf)}


def load_all(paths: Iterable[Path], studies: Iterable[Expanded] = ()) -> dict[str, tuple[Path | str, Experiment]]:
    """Load experiments and those that they build on (see `built_on`), by name. Each comes with its location: a file, or
    a variant of a study.

    Raises ValueError for the first invalid experiment.
    """
    experiments: dict[str, tuple[Path | str, Experiment]] = {}
    waiting = list(paths)

    def add(name: str, location: Path | str, experiment: Experiment, base_file: Path) -> None:
        experiments[name] = (location, experiment)
        for key, base in built_on(experiment).items():
            other = base_file.with_name(f"{base}.yaml")
            if not other.is_file():
                raise ValueError(f"{location}: {key} is {base}, but {other} does not exist. Write it or name another.")
            waiting.append(other)

    for study in studies:
        for run in study.runs:
            add(run.name, run.where, run.experiment, study.base)
    while waiting:
        path = waiting.pop(0)
        if path.stem not in experiments:
            add(path.stem, path, load_experiment(path), path)
    for location, experiment in experiments.values():
        others = {key: experiments[name][1] for key, name in built_on(experiment).items()}
        codec, small_images, against, start, embeddings = map(
            others.get, (CODEC, SMALL_IMAGES, AGAINST, START, EMBEDDINGS)
        )
        start_codec = experiments[built_on(start)[CODEC]][1] if start is not None and CODEC in built_on(start) else None
        try:
            check_experiment(experiment, Others(codec, small_images, against, start, start_codec, embeddings))
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from None
    _check_shared_data(experiments)
    _check_circles(experiments)
    return experiments


def _check_circles(experiments: Mapping[str, tuple[Path | str, Experiment]]) -> None:
    """Raise ValueError for circular dependencies between experiments."""

    def follow(name: str, path: list[str], keys: tuple[str, ...]) -> None:
        location, experiment = experiments[name]
        for key, base in built_on(experiment).items():
            if key in keys and base in path:
                circle = " -> ".join([*path[path.index(base) :], base])
                raise ValueError(f"{location}: {key} makes a circle: {circle}. Name another experiment.")
            if key in keys:
                follow(base, [*path, base], keys)

    for name in experiments:
        for keys in ((CODEC, START), (SMALL_IMAGES, EMBEDDINGS)):
            follow(name, [name], keys)


def _check_shared_data(experiments: dict[str, tuple[Path | str, Experiment]]) -> None:
    """Raise ValueError if two experiments describe the same data set differently, since they share its files."""
    described: dict[str, tuple[Path | str, Config]] = {}
    for name, (path, experiment) in experiments.items():
        sections: dict[str, Config] = {experiment.data.folder: experiment.data}
        if (tokens := own_tokens(name, experiment)) is not None:
            sections[f"{experiment.data.folder}/{tokens_of(name)}"] = tokens
        if experiment.codec.name is not None:
            sections[f"{experiment.data.folder}/{experiment.codec.name}"] = encode_stage(experiment)
        for pairs in experiment.pair_sets:
            sections[f"{experiment.data.folder}/{pairs.name}"] = embed_stage(experiment, pairs)
        for folder, section in sections.items():
            other_path, other = described.setdefault(folder, (path, section))
            if other != section:
                raise ValueError(
                    f"{path} and {other_path} describe the data set {folder} differently. Give the sections data, "
                    f"codec, encode and pairs the same values, or choose another data.name."
                )


def prompt_file(experiment: Experiment) -> str | None:
    """Return the file that prompts or rows of numbers are read from, if any."""
    files = (getattr(experiment.sample, name, None) for name in ("prompts", "conditions"))
    return next((file for file in files if isinstance(file, str)), None)


def start_files(experiment: Experiment) -> list[str]:
    """Return the files of the initial weights of training, if these are a folder and not an experiment."""
    start = experiment.train.init_from
    return _weights_in(start if isinstance(start, str) else None)


def _weights_in(folder: str | None) -> list[str]:
    return [str(Path(folder, name)) for name in ("weights.safetensors", "model.json")] if folder else []


def detector_files(experiment: Experiment) -> dict[str, list[str]]:
    """Return candidate paths of the local weights of each detector, by the folder of its results: a file, or the files
    of a folder in transformers' layout."""
    evaluation = experiment.system.evaluation()
    detectors = evaluation.detectors(experiment.section(evaluation.section))
    named = {_reference_name(detector): getattr(detector, "weights", None) for detector in detectors}
    paths = {name: Path(weights).expanduser() for name, weights in named.items() if weights is not None}
    return {name: [str(path), *(str(path / file) for file in _MODEL_FILES)] for name, path in paths.items()}


def encode_stage(experiment: Experiment) -> EncodeStage:
    """Return the configuration of `encode`, for an experiment that has a codec."""
    assert experiment.encode is not None
    tokens = {"tokens": True} if experiment.codec.stores == "tokens" else {}
    data = experiment.data if isinstance(experiment.data.source, LatentSource) else None
    codec, encode = experiment.codec.encoded_by(), experiment.encode.model_copy(update=tokens)
    return EncodeStage(codec=codec, encode=encode, data=data)


def own_tokens(name: str, experiment: Experiment) -> EncodeStage | None:
    """Return the configuration of `encode` for the tokens of an experiment that trains a discrete VAE; None if it
    stores none."""
    if experiment.encode is None or not experiment.encode.tokens:
        return None
    return EncodeStage(codec=Trained(experiment=name), encode=experiment.encode)


def train_stage(name: str, experiment: Experiment) -> TrainStage:
    """Return the configuration of `train` for a named experiment."""
    encoders = {pairs.kind: pairs.encoded_by for pairs in experiment.pair_sets if pairs.encoded_by is not None}
    return TrainStage(
        experiment=name,
        codec=experiment.codec,
        system=experiment.system,
        train=experiment.train,
        preview=experiment.preview,
        encoder=pairs_entry(encoders, [pairs.kind for pairs in experiment.pair_sets]),
    )


def reference_stages(experiment: Experiment) -> dict[str, ReferenceStage]:
    """Return the configurations of `reference`, by the folder of its results: one for each detector of the data set."""
    evaluation = experiment.system.evaluation()
    settings = experiment.section(evaluation.section)
    if not evaluation.reads_splits(settings):
        return {}
    detectors = evaluation.detectors(settings)
    return {_reference_name(detector): ReferenceStage(detector=detector) for detector in detectors}


def _reference_name(detector: Any) -> str:
    """Return the folder name of a detector's reference features."""
    usual = detector == type(detector)()
    return detector.type if usual else f"{detector.type}-{digest(dump(detector))[:8]}"


def embed_stage(experiment: Experiment, pairs: PairsConfig) -> EmbedStage:
    """Return the configuration of `embed` for one set of an experiment's section pairs."""
    data = experiment.data
    return EmbedStage(
        name=data.name,
        num_shards=data.num_shards,
        pairs=pairs,
        source=data.source if pairs.needs_source else None,
        max_bad_fraction=data.max_bad_fraction,
        data=data if pairs.needs_crop else None,
    )


def pair_plans(experiment: Experiment) -> dict[str, PairPlan]:
    """Return the plans of the sets of an experiment's section pairs, by folder, in the order in which training reads
    them."""
    kinds = experiment.system.joined_kinds
    sets = sorted(experiment.pair_sets, key=lambda pairs: kinds.index(pairs.kind) if kinds else 0)
    of_images = not isinstance(experiment.data.source, Embeddings)
    return {
        pairs.name: {
            "of_images": of_images,
            "of_source": pairs.needs_source,
            "of_detector": pairs.needs_detector,
            "files": pairs.other_files,
            "weights": pairs.encoder_weights,
        }
        for pairs in sets
    }


def replaced(experiments: Mapping[str, Experiment], results: Path) -> list[str]:
    """Return a warning for each data set whose crops, made for other experiments with another section data, these
    experiments would replace. Call it before `write_stages`."""
    sentences = {}
    for name, experiment in experiments.items():
        dataset = results / "datasets" / experiment.data.folder
        data, before = dump(experiment.data), _cropped_by(dataset)
        keys = [key for key in data if key in before and data[key] != before[key]]
        others = [user for user in _users(dataset, before, results) if user not in experiments] if keys else []
        if others and dataset not in sentences:
            apart = f"with other {', '.join(f'data.{key}' for key in keys)}"
            sentences[dataset] = (
                f"{dataset} holds the images of {', '.join(others)}, "
                f"{'from another source' if 'source' in keys else apart}: {name} replaces them, and "
                f"{', '.join(others)} would have to run again. Choose another data.name to keep both."
            )
    return list(sentences.values())


def _cropped_by(dataset: Path) -> dict[str, Any]:
    """Return the section data of the crops in a folder; empty if there are none."""
    try:
        section = read_yaml(dataset / "config" / "crop.yaml")
    except ValueError:  # missing or damaged, so it is written again
        return {}
    return section if isinstance(section, dict) and (dataset / "crops" / "manifest.json").is_file() else {}


def _users(dataset: Path, data: Mapping[str, Any], results: Path) -> list[str]:
    """Return the experiments with this section data. A plan of an earlier version has only the source."""
    try:
        plans = [read_json(path) for path in sorted(results.glob("*/config/plan.json"))]
        return [
            plan["experiment"]
            for plan in plans
            if plan["dataset"] == dataset.name
            and plan["source"] == data["source"]
            and plan.get("data_digest") in (None, digest(data))
        ]
    except (ValueError, KeyError, TypeError):
        return []


def write_stages(name: str, experiment: Experiment, results: Path) -> None:
    """Write the stage files and the plan of an experiment, where they have changed. Raises ValueError if the experiment
    starts from its own results."""
    start = experiment.train.init_from
    if isinstance(start, str) and Path(start).resolve().is_relative_to((results / name).resolve()):
        raise ValueError(
            f"{name}: train.init_from is {start}, this experiment's own folder, which training replaces. Write a new "
            f"experiment with base: {name} (docs/extend_training.md)."
        )
    dataset = results / "datasets" / experiment.data.folder
    codec = experiment.codec.name
    own = results / name / "config"
    system, evaluation = experiment.system, experiment.system.evaluation()
    evaluated = experiment.section(evaluation.section)
    stages: dict[str, tuple[Path, dict[str, Any]]] = {
        "train": (own / "train.yaml", dump(train_stage(name, experiment))),
        "evaluate": (own / "evaluate.yaml", {evaluation.section: dump(evaluated)}),
        "export": (own / "export.yaml", dump(ExportStage(export=experiment.export))),
    }
    has_images = not isinstance(experiment.data.source, LatentSource)
    if has_images:
        stages["crop"] = (dataset / "config" / "crop.yaml", dump(experiment.data))
    if experiment.samples is not None:
        stages["sample"] = (own / "sample.yaml", {"sample": dump(experiment.section("sample"))})
    if experiment.synthesize is not None:
        stages["synthesize"] = (own / "synthesize.yaml", {"synthesize": dump(experiment.synthesize)})
    if codec is not None:
        stages["encode"] = (dataset / "config" / f"encode-{codec}.yaml", dump(encode_stage(experiment)))
    tokens = None
    if (own_codec := own_tokens(name, experiment)) is not None:
        tokens = tokens_of(name)
        stages["tokens"] = (dataset / "config" / f"encode-{tokens}.yaml", dump(own_codec))
    for pairs in experiment.pair_sets:
        stage_name = f"embed-{pairs.name}"
        stages[stage_name] = (dataset / "config" / f"{stage_name}.yaml", dump(embed_stage(experiment, pairs)))
    references = {
        detector_name: (dataset / "config" / f"reference-{detector_name}.yaml", dump(stage))
        for detector_name, stage in reference_stages(experiment).items()
    }
    for path, stage in [*stages.values(), *references.values()]:
        write_if_changed(path, to_yaml(stage))
    swept = write_sweep(experiment, own / "sweep")
    samples, others = experiment.samples, built_on(experiment)
    decoder = getattr(samples, "decoder", None)
    sources, against = system.sampling().sources(experiment.sample), evaluation.against(evaluated)
    plan = Plan(
        experiment=name,
        system=system.type,
        dataset=experiment.data.folder,
        source=dump(experiment.data)["source"],
        data_digest=digest(dump(experiment.data)),
        has_images=has_images,
        num_shards=experiment.data.num_shards,
        codec=codec,
        codec_experiment=others.get(CODEC),
        codec_files=[str(path) for path in experiment.codec.files],
        decoder_files=[str(path) for path in files_of(decoder)] if decoder is not None else [],
        weaker_files=_weights_in(getattr(experiment.sample, "weaker_weights", None)),
        start_files=start_files(experiment),
        detector_files=detector_files(experiment),
        small_images=sources.small_images if isinstance(sources.small_images, str) else None,
        small_images_experiment=others.get(SMALL_IMAGES),
        embeddings=sources.embeddings if isinstance(sources.embeddings, str) else None,
        embeddings_experiment=others.get(EMBEDDINGS),
        against=against if isinstance(against, str) else None,
        against_experiment=others.get(AGAINST),
        start_experiment=others.get(START),
        tokens=tokens,
        judged_on_encoded=evaluation.reads_encoded,
        judged_on_pairs=evaluation.reads_pairs,
        pairs=pair_plans(experiment),
        pairs_beside=bool(system.joined_kinds),
        prompts=prompt_file(experiment),
        pictures=system.sampling().pictures(experiment.sample) if makes(experiment, "images") else [],
        makes_samples=makes(experiment, "images"),
        keeps_samples=samples is None or samples.num_stored == samples.num_samples,
        makes_embeddings=makes(experiment, "embeddings"),
        sample_jobs=samples.num_jobs if samples is not None else 0,
        sample_batches=-(-samples.num_samples // samples.batch_size) if samples is not None else 0,
        synthesize_jobs=experiment.synthesize.num_jobs if experiment.synthesize is not None else 0,
        synthesize_table=experiment.synthesize.table if experiment.synthesize is not None else None,
        global_batch=experiment.train.global_batch,
        detectors=[detector.type for detector in evaluation.detectors(evaluated)],
        references={detector_name: str(path) for detector_name, (path, _) in references.items()},
        headline=evaluation.headline(evaluated),
        sweep=swept,
        choose=experiment.sweep.choose if swept else "",
        export=experiment.export.format,
        resources=dump(experiment.resources),
        configs={stage: str(path) for stage, (path, _) in stages.items()},
        beyond_defaults=sorted(beyond_defaults(experiment)),
    )
    write_if_changed(plan_file(results, name), to_json(asdict(plan)))


def write_sweep(experiment: Experiment, folder: Path) -> dict[str, dict[str, str]]:
    """Write the sampling configuration of each point of the section `sweep`, and their common evaluation.

    Returns the paths, by the varied setting and by value. Copies, the two-sample test and the extrapolated distance are
    only measured if a point is chosen by them, and bits per dimension never.
    """
    written: dict[str, dict[str, str]] = {}
    if experiment.sweep is None:
        return written
    rule = experiment.sweep.rule
    compared = {definition.names for definition in rule.metrics.values()} if rule is not None else set()
    extra = {"copies": "copies", "two_sample": "c2st", "infinity": "fd_infinity"}
    light = {key: metric in compared for key, metric in extra.items()}
    judged = experiment.evaluate.model_copy(update=light | {"likelihood": None})
    for axis, values in experiment.sweep.values.items():
        write_if_changed(folder / "evaluate.yaml", to_yaml({"evaluate": dump(judged)}))
        for value in values:
            path = folder / f"{axis}-{value}.yaml"
            point = experiment.sweep.samples(axis, value, experiment.sample)
            write_if_changed(path, to_yaml({"sample": dump(point)}))
            written.setdefault(axis, {})[value] = str(path)
    return written
