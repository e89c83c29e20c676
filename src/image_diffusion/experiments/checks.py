"""Check an experiment as a whole, before any work, for conflicts between its sections."""

from __future__ import annotations

from image_diffusion.core.classes import class_number
from image_diffusion.core.devices import shapes_only
from image_diffusion.data.sources.latents import LatentSource
from image_diffusion.experiments.experiment import Experiment
from image_diffusion.export import check_export
from image_diffusion.metrics.choice import check_measured
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.synthesis.config import TAKEN, check_count, read_table
from image_diffusion.systems.base import (
    Others,
    check_arrays,
    check_augment,
    check_flips,
    columns_of,
    makes,
    spec_of,
)
from image_diffusion.systems.pairs.numbers import LABEL
from image_diffusion.training.finetune import check_tuning

_OF_LATENTS = {"name", "source", "resolution", "channels", "validation_fraction", "num_shards"}
"""Keys of the section data that apply to latents."""
_NO_CODECS = ("", ".", "..", "config", "crops", "datasheet", "detector", "journal", "references")
"""Names that a codec may not have, because the data set's folder has other folders of these names."""


def check_experiment(experiment: Experiment, others: Others) -> None:
    """Raise ValueError for conflicting settings, before any work is done. others: the experiments that it builds on."""
    if others.codec is not None and others.codec.data != experiment.data:
        raise ValueError("The experiment that trains the codec has another data section. Give both the same one.")
    if (name := experiment.codec.name) in _NO_CODECS:
        raise ValueError(
            f"The codec's latents would be stored in a folder named {name!r}, which the data set has for something "
            f"else. Rename the experiment that trains the codec, or the folder of its weights."
        )
    check_arrays(experiment)
    check_flips(experiment.system, experiment.train.flip_probability)
    check_augment(experiment)
    for pairs in experiment.pair_sets:
        pairs.check_channels(experiment.data.num_channels)
    if isinstance(experiment.data.source, LatentSource):
        check_imported(experiment, experiment.data.source)
    if experiment.train.balance_classes and experiment.data.source.known_classes() == []:
        raise ValueError("train.balance_classes is true, but the data have no classes. Leave it out.")
    experiment.system.check(experiment, others)
    if isinstance(experiment.evaluate, EvaluateConfig):
        check_evaluate(experiment)
    check_export(experiment, others)
    if experiment.synthesize is not None:
        check_synthesize(experiment)
    learns_images = bool(experiment.system.joined_kinds) or not experiment.pair_sets  # pairs have splits of their own
    if learns_images and not experiment.data.has_validation:
        check_unvalidated(experiment.train.weights, experiment.train.patience)
    if experiment.train.checks_network:
        spec = spec_of(experiment, others.codec)
        with shapes_only():
            network = experiment.system.build_network(spec)
        check_tuning(network, experiment.train)


def check_unvalidated(weights: str | float, patience: float | None) -> None:
    """Raise ValueError for settings that compare losses of held-out images."""
    for key, is_set in (("weights is best", weights == "best"), ("patience is set", patience is not None)):
        if is_set:
            raise ValueError(
                f"train.{key}, but no images are held out to measure the loss. Set data.validation_fraction: 0.1, or "
                f"data.held_out."
            )


def check_evaluate(experiment: Experiment) -> None:
    """Raise ValueError for detectors that do not take the images, for a choice by a metric that they do not measure,
    and for too few samples."""
    evaluate, channels = experiment.evaluate, experiment.data.num_channels
    encoders = [f"detectors has {detector.type}" for detector in evaluate.detectors if detector.type != "inpipe"]
    if evaluate.prompts is not None:
        encoders.append("prompts names an encoder")
    if encoders and channels not in (1, 3):
        raise ValueError(
            f"evaluate.{encoders[0]}, which takes images of 1 or 3 channels, but data.channels has {channels}. "
            "Leave it out."
        )
    if experiment.sweep is not None and (rule := experiment.sweep.rule) is not None:
        check_measured(rule, evaluate.detectors)
    if not makes(experiment, "images"):
        return
    least, key = evaluate.least_samples, "num_samples"
    for section in ("sample", "sweep"):
        count = getattr(getattr(experiment, section), key, None)
        if count is not None and count < least:
            raise ValueError(
                f"{section}.{key} is {count}, but evaluate needs at least {least} samples, two more than "
                f"evaluate.neighbours. Raise it, or lower evaluate.neighbours."
            )


def check_imported(experiment: Experiment, source: LatentSource) -> None:
    """Raise ValueError for settings that are impossible, or without effect, for data that are latents."""
    codec, evaluate, where = experiment.codec, experiment.evaluate, f"data.source.type is {source.type}"
    if codec.stores != "latents" or codec.trained_by is not None:
        raise ValueError(
            f"{where}, but codec.type is {codec.type}. Name the autoencoder that made the latents, as codec: {{type: "
            f"diffusers, weights: FOLDER}}, say."
        )
    if codec.pixel_range != source.pixels:
        raise ValueError(
            f"{where}, whose autoencoder was given {source.pixels} pixels, but the codec's is given "
            f"{codec.pixel_range} ones. Use codec: {{type: diffusers, weights: FOLDER, pixels: {source.pixels}}}."
        )
    if experiment.train.flip_probability > 0 and not source.has_mirror_images:
        raise ValueError(
            f"train.flip_probability is {experiment.train.flip_probability:g}, but {where}: those have no mirror "
            f"images. Set it to 0."
        )
    keys = {"data": _OF_LATENTS, "encode": {"dtype"}}
    unused = [
        f"{name}.{key}"
        for name, usable in keys.items()
        for key in sorted(getattr(experiment, name).model_fields_set - usable)
    ]
    if unused:
        raise ValueError(f"{unused[0]} is set, but {where}: there are no images to crop or encode. Leave it out.")
    if experiment.pairs is not None:
        raise ValueError(f"pairs is set, but {where}: there are no images that they could be made of. Leave it out.")
    if evaluate is not None and (
        not isinstance(evaluate.against, str)
        or evaluate.copies
        or evaluate.likelihood is not None
        or any(detector.type == "inpipe" for detector in evaluate.detectors)
    ):
        raise ValueError(
            f"{where}: there are no real images that evaluate could look at. Compare with a file of statistics, as "
            f"evaluate: {{against: FILE.npz, detectors: [inception], copies: false}}, without likelihood."
        )


def check_synthesize(experiment: Experiment) -> None:
    """Raise ValueError if the images of an experiment cannot become a synthetic data set."""
    if not makes(experiment, "images"):
        raise ValueError(
            f"synthesize is set, but a system of type {experiment.system.type} draws no images. Leave it out, or set "
            f"it in the experiment that draws them."
        )
    config, sampling = experiment.synthesize, experiment.system.sampling()
    assert config is not None
    columns = columns_of(experiment)
    if taken := sorted(TAKEN.intersection(columns)):
        raise ValueError(
            f"pairs.columns names {taken[0]}, which is another column of the files of synthesize. Rename the column."
        )
    settings = experiment.sample
    if columns and config.per_class is None:  # replaces the rows of the section sample
        settings = settings.model_copy(update={"conditions": [dict.fromkeys(columns)]})
    sources = sampling.sources(settings)
    refused = {
        "images, on which system.condition conditions the network": sources.small_images is not None,
        "images of the section sample": bool(sampling.pictures(settings)),
        "sample.prompts": settings.prompts is not None,
        "numbers": settings is experiment.sample and (bool(columns) or settings.conditions is not None),
        "embeddings": sources.embeddings is not None,
    }
    if part := next((part for part, is_set in refused.items() if is_set), None):
        of_numbers = part == "numbers"
        cure = "Set synthesize.table or like: train in place of per_class" if of_numbers else "Leave out synthesize"
        raise ValueError(f"synthesize draws images of seeds and classes alone, but these are made of {part}. {cure}.")
    classes = experiment.data.source.known_classes()
    if config.per_class is not None and classes is not None:
        check_count(config, config.per_class * (len(classes) or 1))
    if config.table is not None:
        rows, counts = read_table(config.table, columns)
        check_count(config, sum(counts))
        if LABEL in rows[0] and not sampling.takes_classes:
            raise ValueError(
                "synthesize.table names a label, but the network takes no classes. Leave it out, or add {type: label} "
                "to system.condition."
            )
        if classes is not None and LABEL in rows[0]:
            for row in rows:
                class_number("synthesize.table", row[LABEL], classes)
    if config.reject is not None and config.reject.needs_classes and classes == []:
        raise ValueError(
            "synthesize.reject.confidence or other_class is set, but the data have no classes. Leave it out."
        )
    if isinstance(experiment.data.source, LatentSource) or not experiment.data.has_validation:
        raise ValueError(
            "synthesize compares with real images that are held out, but there are none. Set data.validation_fraction: "
            "0.1 or data.held_out, and name images as data.source."
        )
    if experiment.data.num_channels == 2 or experiment.data.dtype is not None:
        key = "data.channels is 2" if experiment.data.dtype is None else f"data.dtype is {experiment.data.dtype}"
        raise ValueError(f"synthesize writes PNGs of 8 bits with 1, 3 or 4 channels, but {key}. Leave it out.")
