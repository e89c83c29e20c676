"""Checks that the sections of a diffusion experiment fit each other, before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from image_diffusion.codecs import CodecConfig
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.process.errors import log_line_once
from image_diffusion.core.resolution import size_text
from image_diffusion.core.types import IMAGE, TEXT, DataSpec
from image_diffusion.data.sources.latents import LatentSource
from image_diffusion.nn.inputs import size_of
from image_diffusion.objectives import Objective
from image_diffusion.process import Process
from image_diffusion.process.base import Grid
from image_diffusion.process.discrete import Discrete
from image_diffusion.samplers.from_images import first_point
from image_diffusion.systems.base import Others, Sections, makes
from image_diffusion.systems.diffusion.conditioning import Conditions
from image_diffusion.systems.diffusion.conditions.base import labels_of, read_rows
from image_diffusion.systems.diffusion.conditions.image import ImagePart
from image_diffusion.systems.diffusion.evaluation import check_likelihood
from image_diffusion.systems.diffusion.generator import (
    Reading,
    SampleConfig,
    check_guidance,
    check_labels,
    check_scale,
    chosen_classes,
)
from image_diffusion.systems.interface import TrainSettings
from image_diffusion.systems.pairs.inputs import sets_of
from image_diffusion.systems.pictures import check_crop, listed


def check_pairs(condition: Conditions, kinds: Sequence[str], experiment: Sections) -> None:
    """Raise ValueError unless the section pairs provides exactly the sets of these kinds, which training reads."""
    sets = {of_kind.kind: of_kind for of_kind in sets_of(experiment.section("pairs"))}
    if missing := next((kind for kind in kinds if kind not in sets), None):
        reader = "system.alignment is set" if missing == "features" else f"system.condition.type is {condition.type}"
        types = ", ".join(of_kind.type for of_kind in sets.values())
        mistake = f"pairs.type is {types}" if sets else "pairs is missing"
        example = next((part.pairs_example for part in condition.parts if part.reads == missing), "{type: features}")
        advice = f"add a section, such as pairs: {example}" if not sets else f"add {example} to the list pairs"
        raise ValueError(f"{reader}, but {mistake}. It needs {missing}: {advice}.")
    if unread := next((kind for kind in sets if kind not in kinds), None):
        raise ValueError(
            "pairs is set, but system.alignment is not: nothing reads it. Leave it out, or add system.alignment, such "
            "as {block: 1}."
            if unread == "features"
            else f"pairs has {unread}, but system.condition.type is {condition.type}: nothing reads them. Leave them "
            f"out, or add {{type: {sets[unread].condition}}} to system.condition."
        )
    condition.check_pairs(list(sets.values()), experiment.data)


def check_condition(condition: Conditions, classes: Sequence[str] | None) -> None:
    """Raise ValueError if a condition of several parts includes classes, but the data have none. classes: of the data;
    None if unknown or unused."""
    if condition.reads and classes is not None and not classes:
        raise ValueError(
            f"system.condition is {condition.type}, but the data have no classes. Leave out {{type: label}}."
        )


def check_classes_of_rows(section: str, conditions: Any, classes: Sequence[str] | None) -> None:
    """Raise ValueError for a class in the rows of a section's `conditions` that the data do not have. classes: of the
    data; None if unknown or unused."""
    if conditions is not None and not isinstance(conditions, str) and classes is not None:
        key = f"{section}.conditions"
        chosen_classes(key, labels_of(read_rows(conditions, key), key), list(classes))


def check_objective(objective: Objective, process: Process, train: TrainSettings) -> None:
    """Raise ValueError for an objective that does not fit the process, or lacks the weights that it starts from."""
    if objective.build(process.build(), DataSpec(channels=1, resolution=1, num_classes=1)).pairs_samples:
        train.check_pairs()
    if getattr(objective, "direction", None) == "teacher" and train.init_from is None:
        raise ValueError(
            "system.objective.direction is teacher, but the network begins with random weights. Set train.init_from."
        )


def check_drops(objective: Objective, condition: Conditions) -> None:
    """Raise ValueError for drop probabilities of parts that the condition does not have, or of its only part."""
    types = [part.type for part in condition.parts]
    named = next((name for name in objective.drop_probabilities if name not in types or len(types) < 2), None)
    if named is not None:
        advice = "Leave it out" if named not in types else "Use system.objective.label_drop_probability"
        raise ValueError(
            f"system.objective.drop_probabilities names {named}, but system.condition.type is {condition.type}. "
            f"{advice}."
        )


def check_sections(process: Process, image: ImagePart | None, experiment: Sections, others: Others) -> None:
    """Raise ValueError for sections without effect or in conflict. image: the image part of the condition."""
    if isinstance(experiment.codec, Rgb) and experiment.section("encode").model_fields_set:
        raise ValueError("encode is set, but pixels are not encoded. Leave it out, or name a codec.")
    if image is not None:
        image.check_data(experiment.data, experiment.codec)
    check_judged(experiment)
    _check_pictures(experiment, image)
    likelihood = experiment.section("evaluate").likelihood
    _check_arrays(experiment, image)
    if likelihood is not None:
        check_likelihood(process, experiment.codec, likelihood)
    _check_against(experiment, others)
    check_kept(experiment, others)


def check_judged(experiment: Sections) -> None:
    """Raise ValueError if the evaluation compares images with prompts, but the samples have none."""
    sample = experiment.section("sample")
    if experiment.section("evaluate").prompts is not None and sample.prompts is None and sample.embeddings is None:
        raise ValueError(
            "evaluate.prompts is set, but the samples have no prompts. Leave it out, set sample.prompts, or set "
            "sample.embeddings to a prior's."
        )


def _check_arrays(experiment: Sections, image: ImagePart | None) -> None:
    """Raise ValueError if the images are arrays, for sections that support only pictures of 8 bits."""
    if experiment.data.dtype is None:
        return
    sample, evaluate = experiment.section("sample"), experiment.section("evaluate")
    of_pictures = {
        "an image in system.condition": image,
        "sample.given": sample.given,
        "sample.start": sample.start,
        "evaluate.likelihood": evaluate.likelihood,
        "evaluate.prompts": evaluate.prompts,
        "evaluate.attributes": evaluate.attributes,
    }
    named = [key for key, value in of_pictures.items() if value is not None]
    if named:
        raise ValueError(
            f"data.dtype is {experiment.data.dtype}, but {named[0]} is for pictures of 8 bits. Leave one of the two "
            f"out; without data.dtype, data.range: [low, high] makes such of grey images."
        )


def _check_pictures(experiment: Sections, image: ImagePart | None) -> None:
    """Raise ValueError if there are no pictures to sample from, or if the samples could not be evaluated."""
    sample: SampleConfig = experiment.section("sample")
    if sample.given is not None or sample.start is not None:
        if isinstance(experiment.data.source, LatentSource):
            raise ValueError(
                f"data.source.type is {experiment.data.source.type}, so that nothing says how the images of "
                "sample.given and sample.start would be cropped. Leave them out."
            )
        check_crop(experiment.data)
        listed(sample.given, sample.start)
    check_tiles(sample, image)
    if sample.tiles is not None and sample.tiles.number > 1:
        raise ValueError(
            "sample.tiles makes pictures larger than the real images that evaluate compares them with. Leave it out, "
            "and draw them from the trained model: image-diffusion sample NAME --set 'sample.tiles={rows: 2}'."
        )


def check_tiles(settings: SampleConfig, image: ImagePart | None) -> None:
    """Raise ValueError for tiles of a network that is conditioned on images, which would have to be cut into tiles,
    too."""
    if settings.tiles is not None and image is not None:
        raise ValueError("sample.tiles is set, but the network is conditioned on an image. Leave it out.")


def check_kept(experiment: Sections, others: Others) -> None:
    """Raise ValueError if images that are not stored are needed again after or during the evaluation."""
    for key, other in (("evaluate.against", others.against), ("sample.small_images", others.small_images)):
        settings = other.section("sample") if other is not None else None
        if settings is not None and settings.num_stored < settings.num_samples:
            raise ValueError(
                f"{key}.experiment stores {settings.num_stored:,} of its {settings.num_samples:,} images, since its "
                f"sample.keep is false. Leave that out."
            )
    sample, evaluate = experiment.section("sample"), experiment.section("evaluate")
    needs = {
        "sample.pictures": sample.pictures,
        "sample.given": sample.given is not None,
        "sample.start": sample.start is not None,
        "sample.small_images: validation": _made_of_held_out(experiment),
        "evaluate.attributes": evaluate.attributes is not None,
        "evaluate.prompts": evaluate.prompts is not None,
    }
    if not sample.keep and (needing := [key for key, is_set in needs.items() if is_set]):
        raise ValueError(
            f"sample.keep is false, so that images are looked at once, but {needing[0]} needs them again. Leave one of "
            f"the two out."
        )


def check_settings(
    section: str,
    settings: SampleConfig,
    reading: Reading,
    learns_intervals: bool,
    codec: CodecConfig,
    classes: Sequence[str] | None,
) -> None:
    """Raise ValueError if the sampler, the guidance, the decoder or the labels of a section do not fit.
    learns_intervals: whether the network learns average velocities. classes: of the data; None if unknown or unused.
    """
    try:
        grid: Grid = settings.sampler.grid(reading.process)
    except ValueError as error:
        raise ValueError(f"{section}.sampler: {error}") from None
    if isinstance(reading.process, Discrete):
        _warn_of_times(f"{section}.sampler", grid, reading.process)
    _check_first_point(section, settings, reading, grid, isinstance(codec, Rgb))
    if settings.sampler.needs_average_velocity and not learns_intervals:
        raise ValueError(
            f"{section}.sampler.type is {settings.sampler.type}, but the network learns no average velocities. Set "
            "system.objective.type to mean_flow, or take another sampler."
        )
    check_guidance(section, settings, reading)
    if settings.weaker_weights is None:
        alternative = ", or set sample.weaker_weights" if section == "sample" else ""
        check_scale(section, settings.guidance.guidance_scale, reading.drops_labels, classes != [], alternative)
    if settings.decoder is not None:
        codec.check_decoder(f"{section}.decoder", settings.decoder)
    check_labels(section, settings.labels, classes)


def _check_first_point(section: str, settings: SampleConfig, reading: Reading, grid: Grid, bounded: bool) -> None:
    """Raise ValueError if sampling starts at alpha 0 and the network predicts eps, which then does not determine x0.
    bounded: whether x are pixels."""
    first = 0 if settings.start is None else first_point(grid, settings.start.strength)
    is_clipped = settings.sampler.fitted(reading.variance, bounded).clip_denoised
    if reading.prediction == "eps" and grid.alpha[first] == 0 and not is_clipped:
        raise ValueError(
            f"{section}.sampler begins where alpha is 0, so that eps does not determine x0. Set "
            f"system.objective.prediction to v{f', or {section}.sampler.clip_denoised to true' if bounded else ''}."
        )


def _warn_of_times(key: str, grid: Grid, process: Discrete) -> None:
    """Log a warning if a sampler uses timesteps that respacing leaves out of training. key: of the sampler."""
    if process.respacing != "" and not torch.isin(grid.time, process.build().grid().time).all():
        log_line_once(
            f"warning: {key} asks the network at timesteps that system.process.respacing {process.respacing} leaves "
            f"out of training. Set num_steps: {process.respacing} for those that it was trained at."
        )


def check_guided_channels(section: str, settings: SampleConfig, channels: int) -> None:
    """Raise ValueError for guidance of more channels than x has."""
    if settings.guidance.channels == "first_three" and channels < 3:
        count = "1 channel" if channels == 1 else f"{channels} channels"
        raise ValueError(f"{section}.guidance.channels is first_three, but x has {count}. Use all.")


def check_negative_prompt(section: str, settings: SampleConfig) -> None:
    """Raise ValueError for a negative prompt that guidance does not use."""
    guidance = settings.guidance
    if not settings.negative_prompt:
        return
    if settings.weaker_weights is not None:
        raise ValueError(
            f"{section}.negative_prompt is set, but guidance leads away from {section}.weaker_weights. Leave one of "
            f"the two out."
        )
    if TEXT not in guidance.scales if guidance.scales is not None else guidance.guidance_scale == 1:
        is_scaled = guidance.scales is not None
        advice = f"Add {TEXT} to {section}.guidance.scales" if is_scaled else f"Set {section}.guidance.guidance_scale"
        raise ValueError(
            f"{section}.negative_prompt is set, but guidance leads away from no prompt. {advice}, or leave it out."
        )


def _check_against(experiment: Sections, others: Others) -> None:
    """Raise ValueError if the samples of two experiments cannot be compared."""
    if others.against is None:
        return
    if not makes(others.against, "images"):
        raise ValueError("evaluate.against.experiment makes no samples. Name one with a diffusion system.")
    own, other = ((section.data.num_channels, section.data.resolution) for section in (experiment, others.against))
    if own != other:
        raise ValueError(
            f"evaluate.against.experiment makes images of {other[0]} x {size_text(other[1])}, this one of {own[0]} x "
            f"{size_text(own[1])}. Compare images of one size."
        )


def check_embeddings(condition: Conditions, experiment: Sections, prior: Sections | None) -> None:
    """Raise ValueError if there are no embeddings, numbers or images to sample from, or if the prior was trained on
    other pairs."""
    if condition.draws(experiment.section("sample")) == "validation" and not experiment.data.has_validation:
        part, _ = condition.drawing(experiment.section("sample"))[0]
        raise ValueError(
            f"sample.{part.source_key} is unset, so held-out images provide the {part.source_key}, but data has no "
            f"held-out images. Set data.validation_fraction, or {part.source_advice}."
        )
    if prior is None:
        return
    if not makes(prior, "embeddings"):
        raise ValueError(
            "sample.embeddings.experiment makes no embeddings. Name one with a prior and a section sample, such as "
            "sample: {prompts: [a photo of a dog]}."
        )
    own, of_prior = (
        next(
            (pairs.type, getattr(pairs, "clip", None))
            for pairs in sets_of(sections.section("pairs"))
            if pairs.kind == "pairs"
        )
        for sections in (experiment, prior)
    )
    if own != of_prior and of_prior[0] != "files":  # whose encoder is unknown
        raise ValueError(
            f"sample.embeddings.experiment samples embeddings like those of pairs of type {of_prior[0]}, but the "
            f"network is trained on pairs of type {own[0]}. Use the same type and the same clip for both."
        )


def _made_of_held_out(experiment: Sections) -> bool:
    """True if the conditions of samples are derived from held-out images or stored with them, for comparison with
    these."""
    sources = experiment.system.sampling().sources(experiment.section("sample"))
    is_paired = experiment.system.evaluation().reads_pairs and sources.embeddings == "validation"
    return is_paired or sources.small_images == "validation"


def check_small_images(image: ImagePart | None, experiment: Sections, others: Others) -> None:
    """Raise ValueError unless there are images to condition samples on, and those of another experiment fit. image: the
    image part of the condition.
    """
    sample: SampleConfig = experiment.section("sample")
    data, base = experiment.data, others.small_images
    if image is None:
        return
    if image.draws_images(sample) == "validation" and not data.has_validation:
        raise ValueError(
            "sample.small_images is unset or validation, which makes them of held-out images, but data has no held-out "
            "images. Set data.validation_fraction, or name others: {experiment: NAME} or a samples.npz."
        )
    if base is not None:
        if not makes(base, "images"):
            raise ValueError("sample.small_images.experiment makes no samples. Name one with a diffusion system.")
        channels, *size = image.derived(DataSpec(channels=data.num_channels, resolution=data.resolution))[IMAGE]
        own = base.data.num_channels, *base.data.size
        if own != (channels, *size):
            raise ValueError(
                f"sample.small_images.experiment makes images of {size_of(own)} (channels x height x width), but the "
                f"network takes {size_of((channels, *size))}. Name one that fits, or change system.condition."
            )
