"""Whether the sections of a diffusion experiment go together, before any work is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.types import DataSpec, SamplesOf
from image_diffusion.systems.diffusion.enlarging import check_wanted
from image_diffusion.systems.diffusion.likelihood import check_likelihood
from image_diffusion.systems.diffusion.prompts import check_judged
from image_diffusion.systems.diffusion.sampling import SampleConfig, chosen_classes
from image_diffusion.systems.diffusion.sweep import check_sweep
from image_diffusion.systems.given import Others, Sections
from image_diffusion.systems.system import makes

if TYPE_CHECKING:
    from image_diffusion.systems.diffusion.family import DiffusionSystem


def check_diffusion(system: DiffusionSystem, experiment: Sections, others: Others) -> None:
    """Raise ValueError for what cannot work: sizes that do not fit one another, settings that would do nothing."""
    system.objective.build(system.process.build(), DataSpec(channels=1, resolution=1, num_classes=1))
    sample: SampleConfig = experiment.section("sample")
    check_settings("sample", sample, system, experiment)
    if experiment.train.grid_every_steps is not None:
        check_settings("preview", experiment.section("preview"), system, experiment)
    if system.objective.learns_intervals and not system.takes_intervals:
        raise ValueError(
            f"system.objective.type is {system.objective.type}, but the network of the system {system.type} takes no "
            "intervals. Use the system dit, or another objective."
        )
    if getattr(system.objective, "direction", None) == "teacher" and experiment.train.init_from is None:
        raise ValueError(
            "system.objective.direction is teacher, but the network begins with random weights. Set train.init_from."
        )
    check_sweep(experiment.section("sweep"), sample, system, experiment.train)
    if isinstance(experiment.codec, Rgb) and experiment.section("encode").model_fields_set:
        raise ValueError("encode is set, but pixels are not encoded. Leave it out, or name a codec.")
    if system.low_resolution is not None and not isinstance(experiment.codec, Rgb):
        raise ValueError("A network that enlarges images works on pixels. Leave out codec, or network.low_resolution.")
    check_judged(experiment)
    likelihood = experiment.section("evaluate").likelihood
    if likelihood is not None:
        check_likelihood(system, experiment.codec, likelihood)
    _check_against(experiment, others)
    check_kept(experiment, others)


def check_kept(experiment: Sections, others: Others) -> None:
    """Raise ValueError where images that are not stored are needed after they were judged, or looked at twice."""
    for key, other in (("evaluate.against", others.against), ("sample.small_images", others.small_images)):
        theirs = other.section("sample") if other is not None else None
        if theirs is not None and theirs.num_stored < theirs.num_samples:
            raise ValueError(
                f"{key}.experiment stores {theirs.num_stored:,} of its {theirs.num_samples:,} images, since its "
                f"sample.keep is false. Leave that out."
            )
    sample, evaluate = experiment.section("sample"), experiment.section("evaluate")
    needs = {
        "sample.pictures": sample.pictures,
        "sample.small_images: validation": sample.small_images == "validation",
        "evaluate.attributes": evaluate.attributes is not None,
        "evaluate.prompts": evaluate.prompts is not None,
    }
    if not sample.keep and (asked := [key for key, is_set in needs.items() if is_set]):
        raise ValueError(
            f"sample.keep is false, so that images are looked at once, but {asked[0]} needs them again. Leave one of "
            f"the two out."
        )


def check_settings(section: str, settings: SampleConfig, system: DiffusionSystem, experiment: Sections) -> None:
    """Raise ValueError where the sampler, the guidance or the labels of a section do not fit system and data."""
    try:
        settings.sampler.grid(system.process)
    except ValueError as error:
        raise ValueError(f"{section}.sampler: {error}") from None
    scale = settings.guidance.guidance_scale
    if settings.sampler.asks_intervals and not system.objective.learns_intervals:
        raise ValueError(
            f"{section}.sampler.type is {settings.sampler.type}, but the network learns no average velocities. Set "
            "system.objective.type to mean_flow, or take another sampler."
        )
    if settings.sampler.asks_intervals and scale != 1:
        raise ValueError(
            f"{section}.guidance.guidance_scale is {scale:g}, but average velocities cannot be guided afterwards. Use "
            "1, and set system.objective.guidance_scale."
        )
    if scale != 1 and not system.drops_labels and settings.weaker_weights is None:
        raise ValueError(
            f"{section}.guidance.guidance_scale is {scale:g}, but the network never learns to do without a label. Use "
            f"1, or train with system.objective.label_drop_probability above 0."
        )
    if settings.decoder is not None:
        experiment.codec.check_decoder(f"{section}.decoder", settings.decoder)
    system.check_asked(section, settings)
    classes = experiment.data.source.known_classes() if not system.told_words else None
    if scale != 1 and classes == [] and settings.weaker_weights is None:
        raise ValueError(
            f"{section}.guidance.guidance_scale is {scale:g}, but the data have no classes that guidance could leave "
            f"out. Use 1, or set {section}.weaker_weights."
        )
    if classes is not None and not isinstance(settings.labels, str):
        if not classes:
            raise ValueError(f"{section}.labels names classes, but the data have none. Leave it out.")
        chosen_classes(f"{section}.labels", settings.labels, classes)


def _check_against(experiment: Sections, others: Others) -> None:
    """Whether the samples of two experiments can be compared."""
    if others.against is None:
        return
    if not makes(others.against, "images"):
        raise ValueError("evaluate.against.experiment makes no samples. Name one with a diffusion system.")
    ours, theirs = ((each.data.channels, each.data.resolution) for each in (experiment, others.against))
    if ours != theirs:
        raise ValueError(
            f"evaluate.against.experiment makes images of {theirs[0]} x {theirs[1]} x {theirs[1]}, this one of "
            f"{ours[0]} x {ours[1]} x {ours[1]}. Compare images of one size."
        )


def check_embeddings(wanted: SamplesOf | str | None, experiment: Sections, prior: Sections | None) -> None:
    """Raise ValueError where there are no embeddings of which images could be made, or a prior makes those of other
    pairs. wanted: `Inputs.embeddings`."""
    if wanted == "validation" and experiment.data.validation_fraction == 0:
        raise ValueError(
            "sample.embeddings is unset, so that images are made of the embeddings of held-out ones, but "
            "data.validation_fraction is 0. Hold some images out, or name a prior: {experiment: NAME}."
        )
    if prior is None:
        return
    if not makes(prior, "embeddings"):
        raise ValueError(
            "sample.embeddings.experiment makes no embeddings. Name one with a prior and a section sample, such as "
            "sample: {prompts: [a photo of a dog]}."
        )
    ours, theirs = (
        (pairs.type, getattr(pairs, "clip", None)) for pairs in (each.section("pairs") for each in (experiment, prior))
    )
    if ours != theirs and theirs[0] != "files":  # of which nothing says by what they were embedded
        raise ValueError(
            f"sample.embeddings.experiment makes embeddings such as pairs of type {theirs[0]} hold, but the network "
            f"learns from pairs of type {ours[0]}. Give both the same type, and the same clip."
        )


def check_small_images(system: DiffusionSystem, experiment: Sections, others: Others) -> None:
    """Of a cascade: raise ValueError unless what one experiment makes is what the next one enlarges."""
    sample: SampleConfig = experiment.section("sample")
    data, wanted, side, base = experiment.data, sample.small_images, system.low_resolution, others.small_images
    check_wanted(wanted, side)
    if wanted == "validation" and data.validation_fraction == 0:
        raise ValueError("sample.small_images is validation, but data.validation_fraction is 0. Hold some images out.")
    if isinstance(wanted, SamplesOf) and base is not None:
        if not makes(base, "images"):
            raise ValueError("sample.small_images.experiment makes no samples. Name one with a diffusion system.")
        if (base.data.resolution, base.data.channels) != (side, data.channels):
            raise ValueError(
                f"sample.small_images.experiment makes images of {base.data.resolution} x {base.data.resolution} with "
                f"{base.data.channels} channels, but the network enlarges {side} x {side} with {data.channels}. Name "
                f"one that fits, or change system.network.low_resolution."
            )
