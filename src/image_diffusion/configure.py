"""Stage `configure`: experiment files -> one resolved configuration per stage, and a plan for Snakemake.

    python -m image_diffusion.configure --experiments config/experiments/demo.yaml --results results

Writes results/<experiment>/config/<stage>.yaml, what the stages of a data set share under
results/datasets/<dataset>/config, and results/<experiment>/config/plan.json. A file is written only when its content
changes, so that a comment in an experiment file re-runs nothing. An experiment that trains another one's codec, or
makes the small images or the embeddings that its images are made of, is found beside it and configured too. One with
train.seeds is followed by an experiment for each other seed, and results/ledgers/<experiment>-seeds/plan.json. A ledger
(--ledgers config/ledgers/digits.yaml) becomes an experiment for each row and seed, and
results/ledgers/<ledger>/plan.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from image_diffusion.codecs.pretrained import files_of
from image_diffusion.codecs.tokens import tokens_of
from image_diffusion.codecs.trained import Trained
from image_diffusion.core import command
from image_diffusion.core.config import Config, beyond_defaults, dump, to_yaml
from image_diffusion.core.files import digest, to_json, write_if_changed
from image_diffusion.core.types import SamplesOf, WeightsOf
from image_diffusion.data.captions import TableCaptions
from image_diffusion.data.sources.embeddings import Embeddings
from image_diffusion.data.sources.latents import LatentSource
from image_diffusion.experiment import (
    EmbedStage,
    EncodeStage,
    Experiment,
    ExportStage,
    ReferenceStage,
    TrainStage,
    check_experiment,
    load_experiment,
    schema,
)
from image_diffusion.ledgers import Expanded, expand, seeds_of
from image_diffusion.ledgers import schema as ledger_schema
from image_diffusion.systems.embedding.pairs import PairsConfig
from image_diffusion.systems.given import Others
from image_diffusion.systems.system import makes
from image_diffusion.workflow.ledgers import ledger_file, seeds_ledger

CODEC, SMALL_IMAGES = "codec.experiment", "sample.small_images.experiment"
AGAINST = "evaluate.against.experiment"
EMBEDDINGS = "sample.embeddings.experiment"
START = "train.init_from.experiment"


def built_on(experiment: Experiment) -> dict[str, str]:
    """The experiments that have to be made before this one, by the key that names them."""
    trained_by, inputs = experiment.codec.trained_by, experiment.system.inputs(experiment)
    start = experiment.train.init_from
    return {
        **({CODEC: trained_by} if trained_by is not None else {}),
        **({SMALL_IMAGES: inputs.small_images.experiment} if isinstance(inputs.small_images, SamplesOf) else {}),
        **({EMBEDDINGS: inputs.embeddings.experiment} if isinstance(inputs.embeddings, SamplesOf) else {}),
        **({AGAINST: inputs.against.experiment} if isinstance(inputs.against, SamplesOf) else {}),
        **({START: start.experiment} if isinstance(start, WeightsOf) else {}),
    }


def load_all(
    paths: Iterable[Path], ledgers: Iterable[Expanded] = (), load: Callable[[Path], Experiment] = load_experiment
) -> dict[str, tuple[Path | str, Experiment]]:
    """Experiments by name, and those that they build on: that train their codecs or what they start from, that
    make what they enlarge or draw. With each, where it stands: a file, or a row of a ledger.

    Raises ValueError for the first that cannot work.
    """
    found: dict[str, tuple[Path | str, Experiment]] = {}
    waiting = list(paths)

    def add(name: str, told: Path | str, experiment: Experiment, beside: Path) -> None:
        found[name] = (told, experiment)
        for key, base in built_on(experiment).items():
            other = beside.with_name(f"{base}.yaml")
            if not other.is_file():
                raise ValueError(f"{told}: {key} is {base}, but {other} is missing.")
            waiting.append(other)

    for ledger in ledgers:
        for run in ledger.runs:
            add(run.name, run.told, run.experiment, ledger.base)
    while waiting:
        path = waiting.pop(0)
        if path.stem not in found:
            add(path.stem, path, load(path), path)
    for told, experiment in found.values():
        others = {key: found[name][1] for key, name in built_on(experiment).items()}
        start = others.get(START)
        start_codec = found[built_on(start)[CODEC]][1] if start is not None and CODEC in built_on(start) else None
        try:
            check_experiment(
                experiment,
                Others(
                    others.get(CODEC),
                    others.get(SMALL_IMAGES),
                    others.get(AGAINST),
                    start,
                    start_codec,
                    others.get(EMBEDDINGS),
                ),
            )
        except ValueError as error:
            raise ValueError(f"{told}: {error}") from None
    _check_shared_data(found)
    return found


def _check_shared_data(found: dict[str, tuple[Path | str, Experiment]]) -> None:
    """Two experiments that name the same data set must describe it alike, since they share its files."""
    seen: dict[str, tuple[Path | str, Config]] = {}
    for name, (path, experiment) in found.items():
        sections: dict[str, Config] = {experiment.data.folder: experiment.data}
        if (tokens := own_tokens(name, experiment)) is not None:
            sections[f"{experiment.data.folder}/{tokens_of(name)}"] = tokens
        if experiment.codec.name is not None:
            sections[f"{experiment.data.folder}/{experiment.codec.name}"] = encode_stage(experiment)
        if experiment.pairs is not None:
            sections[f"{experiment.data.folder}/{experiment.pairs.name}"] = embed_stage(experiment)
        for folder, section in sections.items():
            other_path, other = seen.setdefault(folder, (path, section))
            if other != section:
                raise ValueError(
                    f"{path} and {other_path} describe the data set {folder} differently. Give the sections data, "
                    f"codec, encode and pairs the same values, or choose another data.name."
                )


def caption_table(pairs: PairsConfig | None) -> str | None:
    """The table that captions are read from, where there is one."""
    captions = getattr(pairs, "captions", None)
    return captions.path if isinstance(captions, TableCaptions) else None


def prompt_file(experiment: Experiment) -> str | None:
    """The file that prompts are read from, where there is one."""
    prompts = getattr(experiment.sample, "prompts", None)
    return prompts if isinstance(prompts, str) else None


def decoder_files(experiment: Experiment) -> list[str]:
    """The files of the decoder that samples are decoded by, where that is not the codec's own."""
    decoder = getattr(experiment.sample, "decoder", None)
    return [str(path) for path in files_of(decoder)] if decoder is not None else []


def encode_stage(experiment: Experiment) -> EncodeStage:
    """What `encode` runs with, for an experiment that has a codec."""
    assert experiment.encode is not None
    tokens = {"tokens": True} if experiment.codec.stores == "tokens" else {}
    data = experiment.data if isinstance(experiment.data.source, LatentSource) else None
    codec, encode = experiment.codec.encoded_by(), experiment.encode.model_copy(update=tokens)
    return EncodeStage(codec=codec, encode=encode, data=data)


def own_tokens(name: str, experiment: Experiment) -> EncodeStage | None:
    """What `encode` runs with for the tokens of an experiment that trains a discrete VAE; None: it keeps none."""
    if experiment.encode is None or not experiment.encode.tokens:
        return None
    return EncodeStage(codec=Trained(experiment=name), encode=experiment.encode)


def train_stage(name: str, experiment: Experiment) -> TrainStage:
    """What `train` runs with, for the experiment of that name."""
    return TrainStage(
        experiment=name,
        codec=experiment.codec,
        system=experiment.system,
        train=experiment.train,
        preview=experiment.preview,
        encoder=experiment.pairs.encoded_by if experiment.pairs is not None else None,
    )


def reference_stages(experiment: Experiment) -> dict[str, ReferenceStage]:
    """What `reference` runs with, by the folder of what it makes: for each detector that looks at the data set."""
    if not experiment.system.looks_at_splits(experiment):
        return {}
    found = {}
    for detector in experiment.system.detectors(experiment):
        usual = detector == type(detector)()
        name = detector.type if usual else f"{detector.type}-{digest(dump(detector))[:8]}"
        found[name] = ReferenceStage(detector=detector)
    return found


def embed_stage(experiment: Experiment) -> EmbedStage:
    """What `embed` runs with, for an experiment that has pairs."""
    assert experiment.pairs is not None
    data = experiment.data
    source = data.source if experiment.pairs.needs_source else None
    return EmbedStage(
        name=data.name,
        num_shards=data.num_shards,
        pairs=experiment.pairs,
        source=source,
        max_bad_fraction=data.max_bad_fraction,
    )


def write_stages(name: str, experiment: Experiment, results: Path) -> None:
    """Write the stage files and the plan of one experiment, those of them that changed."""
    dataset = results / "datasets" / experiment.data.folder
    codec = experiment.codec.name
    own = results / name / "config"
    system, codec = experiment.system, experiment.codec.name
    stages: dict[str, tuple[Path, dict[str, Any]]] = {
        "train": (own / "train.yaml", dump(train_stage(name, experiment))),
        "evaluate": (
            own / "evaluate.yaml",
            {section: dump(experiment.section(section)) for section in system.judged_by},
        ),
        "export": (own / "export.yaml", dump(ExportStage(export=experiment.export))),
    }
    has_images = not isinstance(experiment.data.source, LatentSource)
    if has_images:
        stages["crop"] = (dataset / "config" / "crop.yaml", dump(experiment.data))
    if experiment.samples is not None:
        stages["sample"] = (own / "sample.yaml", {"sample": dump(experiment.section("sample"))})
    if codec is not None:
        stages["encode"] = (dataset / "config" / f"encode-{codec}.yaml", dump(encode_stage(experiment)))
    own_codec = own_tokens(name, experiment)
    tokens = tokens_of(name) if own_codec is not None else None
    if own_codec is not None:
        stages["tokens"] = (dataset / "config" / f"encode-{tokens}.yaml", dump(own_codec))
    pairs = experiment.pairs
    if pairs is not None:
        stages["embed"] = (dataset / "config" / f"embed-{pairs.name}.yaml", dump(embed_stage(experiment)))
    references = {
        each: (dataset / "config" / f"reference-{each}.yaml", dump(stage))
        for each, stage in reference_stages(experiment).items()
    }
    for path, stage in [*stages.values(), *references.values()]:
        write_if_changed(path, to_yaml(stage))
    swept = write_sweep(experiment, own / "sweep")
    samples, inputs, others = experiment.samples, system.inputs(experiment), built_on(experiment)
    plan: dict[str, Any] = {
        "experiment": name,
        "system": system.type,
        "dataset": experiment.data.folder,
        "source": dump(experiment.data)["source"],
        "has_images": has_images,
        "num_shards": experiment.data.num_shards,
        "codec": codec,
        "codec_experiment": others.get(CODEC),
        "codec_files": [str(path) for path in experiment.codec.files],
        "decoder_files": decoder_files(experiment),
        "small_images": inputs.small_images if isinstance(inputs.small_images, str) else None,
        "small_images_experiment": others.get(SMALL_IMAGES),
        "embeddings": inputs.embeddings if isinstance(inputs.embeddings, str) else None,
        "embeddings_experiment": others.get(EMBEDDINGS),
        "against": inputs.against if isinstance(inputs.against, str) else None,
        "against_experiment": others.get(AGAINST),
        "start_experiment": others.get(START),
        "tokens": tokens,
        "judged_on_encoded": system.judged_on_encoded,
        "pairs": pairs.name if pairs is not None else None,
        "pairs_beside": system.reads_beside is not None,
        "pairs_of_images": pairs is not None and not isinstance(experiment.data.source, Embeddings),
        "pairs_of_source": pairs is not None and pairs.needs_source,
        "pairs_of_detector": pairs is not None and pairs.needs_detector,
        "captions": caption_table(pairs),
        "prompts": prompt_file(experiment),
        "makes_samples": makes(experiment, "images"),
        "keeps_samples": samples is None or samples.num_stored == samples.num_samples,
        "makes_embeddings": makes(experiment, "embeddings"),
        "sample_jobs": samples.num_jobs if samples is not None else 0,
        "sample_batches": -(-samples.num_samples // samples.batch_size) if samples is not None else 0,
        "global_batch": experiment.train.global_batch,
        "seeds": seeds_ledger(name) if experiment.train.seeds else None,
        "detectors": [detector.type for detector in system.detectors(experiment)],
        "references": {each: str(path) for each, (path, _) in references.items()},
        "headline": system.headline(experiment),
        "sweep": swept,
        "export": experiment.export.format,
        "resources": dump(experiment.resources),
        "configs": {stage: str(path) for stage, (path, _) in stages.items()},
        "beyond_defaults": sorted(beyond_defaults(experiment)),
    }
    write_if_changed(own / "plan.json", to_json(plan))


def write_sweep(experiment: Experiment, folder: Path) -> dict[str, dict[str, str]]:
    """Write what each point of the section `sweep` is sampled with, and what all of them are judged with.

    Returns where, by what is varied and by value. Copies, bits and the like, which say nothing of one setting, are
    left to `evaluate`.
    """
    written: dict[str, dict[str, str]] = {}
    if experiment.sweep is None:
        return written
    light = {"copies": False, "two_sample": False, "infinity": False, "likelihood": None}
    judged = experiment.evaluate.model_copy(update=light)
    for axis, values in experiment.sweep.values.items():
        write_if_changed(folder / "evaluate.yaml", to_yaml({"evaluate": dump(judged)}))
        for value in values:
            path = folder / f"{axis}-{value}.yaml"
            point = experiment.sweep.samples(axis, value, experiment.sample)
            write_if_changed(path, to_yaml({"sample": dump(point)}))
            written.setdefault(axis, {})[value] = str(path)
    return written


def main() -> None:
    parser = command.Parser(prog="python -m image_diffusion.configure", description=__doc__)
    parser.add_argument("--experiments", type=Path, nargs="*", default=[], help="experiment files")
    parser.add_argument("--ledgers", type=Path, nargs="*", default=[], help="ledger files")
    parser.add_argument("--bases", type=Path, default=Path("config/experiments"), help="folder of the bases of ledgers")
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder of all results")
    parser.add_argument("--schema", type=Path, help="write the JSON schemas of experiments and of ledgers")
    arguments = parser.parse_args()
    if arguments.schema is not None:
        write_if_changed(arguments.schema, to_json(schema()))
        write_if_changed(arguments.schema.with_name("ledger.schema.json"), to_json(ledger_schema()))
    ledgers = [expand(path, arguments.bases) for path in arguments.ledgers]
    load = cache(load_experiment)
    ledgers += [ledger for path in arguments.experiments if (ledger := seeds_of(path, load(path))) is not None]
    for name, (_, experiment) in load_all(arguments.experiments, ledgers, load).items():
        write_stages(name, experiment, arguments.results)
    for ledger in ledgers:
        write_if_changed(ledger_file(arguments.results, ledger.name), to_json(ledger.plan()))


if __name__ == "__main__":
    command.run(main)
