"""An experiment: one section per stage. A YAML file under config/experiments is one of these."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from image_diffusion.codecs import CodecConfig
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config import Config, load
from image_diffusion.core.shapes import shapes_only
from image_diffusion.core.types import DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.encoding import EncodeConfig
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.embeddings import Embeddings
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.systems import CodecSystem, System
from image_diffusion.systems.autoencoder import AutoencoderSystem
from image_diffusion.systems.diffusion import DiffusionSystem
from image_diffusion.systems.dvae import DVAESystem
from image_diffusion.systems.enlarging import check_wanted
from image_diffusion.systems.generation import SampleConfig
from image_diffusion.systems.likelihood import check_likelihood
from image_diffusion.systems.pairs import FilePairs, PairsConfig
from image_diffusion.systems.prior import PriorSystem
from image_diffusion.systems.prior_evaluation import PredictionConfig
from image_diffusion.systems.rin import RinSystem
from image_diffusion.systems.sweep import SweepConfig, check_sweep
from image_diffusion.training.config import TrainConfig


class ExportConfig(Config):
    """What the trained model is written as, for other programs."""

    format: Literal["diffusers", "none"] = "none"
    """diffusers: a folder that diffusers loads (a DiTPipeline, or an AutoencoderKL). none: nothing."""


class ResourcesConfig(Config):
    """Where training runs. They do not change its result beyond the order of floating-point sums."""

    nodes: int = Field(1, ge=1)
    """Machines that train together."""
    processes_per_node: int = Field(1, ge=1)
    """Processes on each: one for each GPU, or any number on CPUs."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs that are requested on each machine from a cluster; 0 on CPUs."""
    cpus_per_process: int = Field(2, ge=1)
    """CPU cores that are requested for each process."""
    memory_mb: int = Field(8000, ge=1)
    """Memory that is requested on each machine, in MB."""
    runtime_min: int = Field(60, ge=1)
    """Time that is requested for one job, in minutes; longer training goes on in the next job."""


class Experiment(Config):
    """From images to a report."""

    data: DataConfig
    """Which images, and how they are cropped."""
    codec: CodecConfig = Rgb()
    """The space the network works in."""
    encode: EncodeConfig = EncodeConfig()
    """How images become latents."""
    pairs: PairsConfig | None = None
    """Where pairs of image and text embeddings come from; only for the system prior, which learns from them."""
    system: System
    """The network, the process and the objective."""
    train: TrainConfig
    """How it is trained."""
    preview: SampleConfig = SampleConfig()
    """Which images are drawn now and then while training (train.grid_every_steps)."""
    sample: SampleConfig = SampleConfig()
    """Which images are made from the trained weights."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """How those images are judged."""
    prediction: PredictionConfig = PredictionConfig()
    """How a prior predicts image embeddings, to be judged by them; only for the system prior."""
    sweep: SweepConfig = SweepConfig()
    """Curves of the metrics against one setting at a time."""
    export: ExportConfig = ExportConfig()
    """What the model is written as for other programs."""
    resources: ResourcesConfig = ResourcesConfig()
    """Where training runs."""


class EncodeStage(Config):
    """What `encode` runs with."""

    codec: CodecConfig
    encode: EncodeConfig


class EmbedStage(Config):
    """What `embed` runs with. source: where files are, for pairs or captions that are read from there."""

    name: str
    num_shards: int
    pairs: PairsConfig
    source: Source | None


class TrainStage(Config):
    """What `train` runs with."""

    experiment: str
    codec: CodecConfig
    system: System
    train: TrainConfig
    preview: SampleConfig


class SampleStage(Config):
    """What `sample` runs with."""

    sample: SampleConfig


class EvaluateStage(Config):
    """What `evaluate` runs with. prediction: for a prior."""

    evaluate: EvaluateConfig
    prediction: PredictionConfig | None = None


class ExportStage(Config):
    """What `export` runs with."""

    export: ExportConfig


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file. Raises ValueError with one line for each mistake in it."""
    return load(Experiment, path)


def check_experiment(
    experiment: Experiment,
    codec_experiment: Experiment | None,
    base: Experiment | None = None,
    against: Experiment | None = None,
) -> None:
    """Raise ValueError for what cannot work, before any work is done: sizes that do not fit one another.

    codec_experiment: the experiment that trains the codec, base: that whose samples are enlarged, against: that whose
    samples these are compared with, where there are. The network is built of shapes alone, so that its own checks
    speak.
    """
    if isinstance(experiment.system, PriorSystem) or experiment.pairs is not None:
        _check_prior(experiment)
        return
    images = DataSpec(channels=experiment.data.channels, resolution=experiment.data.resolution, num_classes=1)
    autoencoder = None
    if codec_experiment is not None and isinstance(codec_experiment.system, CodecSystem):
        autoencoder = codec_experiment.system.network
        if codec_experiment.data != experiment.data:
            raise ValueError("The experiment that trains the codec has another data section. Give both the same one.")
    if isinstance(experiment.system, CodecSystem) and not isinstance(experiment.codec, Rgb):
        raise ValueError("An autoencoder is trained on pixels. Leave out the codec section.")
    _check_against(experiment, against)
    check_sweep(experiment.sweep, experiment.sample, experiment.system, experiment.train.keeps)
    if experiment.encode.tokens and not isinstance(experiment.system, DVAESystem):
        raise ValueError(
            "encode.tokens is set, but only an experiment that trains a discrete VAE (system.type dvae) writes tokens. "
            "Set it there."
        )
    enlarges = isinstance(experiment.system, DiffusionSystem) and experiment.system.low_resolution is not None
    if enlarges and not isinstance(experiment.codec, Rgb):
        raise ValueError("A network that enlarges images works on pixels. Leave out codec, or network.low_resolution.")
    if isinstance(experiment.system, RinSystem) and not isinstance(experiment.codec, Rgb):
        experiment.system.self_conditioning.check_latents()
    if experiment.evaluate.likelihood is not None:
        check_likelihood(experiment.system, experiment.codec, experiment.evaluate.likelihood)
    spec = experiment.codec.spec(images, autoencoder)
    if isinstance(experiment.system, AutoencoderSystem):
        experiment.system.network.check(spec)
    else:
        with shapes_only():
            experiment.system.build_network(spec)
    _check_small_images(experiment, base)


def _check_against(experiment: Experiment, against: Experiment | None) -> None:
    """Whether the samples of two experiments can be compared."""
    if experiment.evaluate.against is not None and not isinstance(experiment.system, DiffusionSystem):
        raise ValueError("evaluate.against is set, but the system makes no samples to compare. Leave it out.")
    if against is not None:
        if not isinstance(against.system, DiffusionSystem):
            raise ValueError("evaluate.against.experiment makes no samples. Name one with a diffusion system.")
        ours, theirs = ((each.data.channels, each.data.resolution) for each in (experiment, against))
        if ours != theirs:
            raise ValueError(
                f"evaluate.against.experiment makes images of {theirs[0]} x {theirs[1]} x {theirs[1]}, this one of "
                f"{ours[0]} x {ours[1]} x {ours[1]}. Compare images of one size."
            )


def _check_small_images(experiment: Experiment, base: Experiment | None) -> None:
    """Of a cascade: whether what one experiment makes is what the next one enlarges."""
    system, data, wanted = experiment.system, experiment.data, experiment.sample.small_images
    side = system.low_resolution if isinstance(system, DiffusionSystem) else None
    check_wanted(wanted, side)
    if experiment.preview.small_images is not None:
        raise ValueError("preview.small_images: previews enlarge held-out images, made small. Leave it out.")
    if wanted == "validation" and data.validation_fraction == 0:
        raise ValueError("sample.small_images is validation, but data.validation_fraction is 0. Hold some images out.")
    if base is not None:
        if not isinstance(base.system, DiffusionSystem):
            raise ValueError("sample.small_images.experiment makes no samples. Name one with a diffusion system.")
        if (base.data.resolution, base.data.channels) != (side, data.channels):
            raise ValueError(
                f"sample.small_images.experiment makes images of {base.data.resolution} x {base.data.resolution} with "
                f"{base.data.channels} channels, but the network enlarges {side} x {side} with {data.channels}. Name "
                f"one that fits, or change system.network.low_resolution."
            )


def _check_prior(experiment: Experiment) -> None:
    """Of a prior: whether it has pairs, and whether they and its other sections go together."""
    system, pairs = experiment.system, experiment.pairs
    if not isinstance(system, PriorSystem):
        raise ValueError(f"The system {system.type} does not learn from pairs. Leave out the pairs section.")
    if pairs is None:
        raise ValueError("The system prior learns from pairs of embeddings. Add a section: pairs: {type: hashed}.")
    if not isinstance(experiment.codec, Rgb):
        raise ValueError("A prior has no codec: it learns from embeddings. Leave out the codec section.")
    if isinstance(pairs, FilePairs) != isinstance(experiment.data.source, Embeddings):
        raise ValueError(
            f"pairs.type is {pairs.type} but data.source.type {experiment.data.source.type}. Files of embeddings take "
            f"type files and source embeddings; all other pairs are made from images."
        )
    system.check_flips(experiment.train.flip_probability)
    experiment.prediction.check(system)
