"""Images from a diffusion system: seeds and labels -> pixels, for the sample stage and for previews while training; and
the properties of the system that they depend on: its noise, and the meaning of its network's output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from image_diffusion.codecs.base import Codec
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.classes import ClassLabel, class_number
from image_diffusion.core.config.base import Config, Sparse
from image_diffusion.core.random.streams import Streams, image_streams, initial_noise
from image_diffusion.core.types import DataSpec, Network, SamplesOf
from image_diffusion.nn.blocks import compile_by_block
from image_diffusion.nn.precision import Precision, computing_in, tf32
from image_diffusion.process import Process
from image_diffusion.process.base import Denoiser, Grid
from image_diffusion.process.denoiser import NetworkDenoiser, Prediction, SelfConditionedDenoiser, Variance, clamp
from image_diffusion.process.tiles import Tiles
from image_diffusion.samplers import Sampler
from image_diffusion.samplers.ancestral import Ddim
from image_diffusion.samplers.base import SamplerConfig
from image_diffusion.samplers.from_images import FromImages, Inpainting, Start
from image_diffusion.samplers.guidance import Guidance

if TYPE_CHECKING:
    from image_diffusion.systems.pictures import Pictures

Cell = int | float | str | None
"""A number of an image, its class, or the path of an image file; None: a missing number."""


class Reading(Config):
    """Properties of a system that `Generator` needs. An exported model contains them instead of the system."""

    process: Process
    """Process by which noise was added."""
    prediction: Prediction
    """Prediction of the network."""
    variance: Variance
    """Parametrization of the variance."""
    drops_labels: bool
    """True if labels were dropped in training, so that guidance is possible."""
    drops_alone: tuple[str, ...] = ()
    """Parts of the condition that were dropped alone, so that guidance can have a scale for each."""
    estimates: Literal["none", "clamped", "free"] = "none"
    """Self-conditioning on the network's own earlier x0: none, clamped to [-1, 1], or unchanged."""

    def denoiser(
        self,
        network: Network,
        grid: Grid,
        cond: Mapping[str, Tensor],
        guide: Callable[[Network], Network] = lambda network: network,
    ) -> Denoiser:
        """Return the denoiser for a sampler on `grid`, for one batch of images. guide: maps a network to the guided
        one."""
        process = self.process.build()
        if self.estimates == "none":
            return NetworkDenoiser(guide(network), process, grid, self.prediction, self.variance, cond)
        restrict: Callable[[Tensor], Tensor] = clamp if self.estimates == "clamped" else lambda x0: x0
        return SelfConditionedDenoiser(network, process, grid, self.prediction, cond, restrict, guide)


class SampleConfig(Sparse):
    """Number, seeds and conditions of the images to make, and the sampler's settings."""

    if_set: ClassVar[frozenset[str]] = frozenset({"given", "start", "tiles", "conditions"})

    num_samples: int = Field(64, ge=1)
    """Number of images."""
    first_seed: int = Field(0, ge=0, lt=2**62)
    """Seed of the first image; image number i has seed first_seed + i."""
    seed: int = Field(0, ge=0)
    """Seed combined with the seed of each image: another value gives other images."""
    labels: Literal["balanced", "random"] | list[ClassLabel] = "balanced"
    """Classes of the images. balanced: all classes in turn; random: drawn from the seed of each image; or a list of
    names or numbers, used in turn. A number is a name if the classes' names are numbers, otherwise a position;
    {position: 2} is always a position."""
    prompts: tuple[str, ...] | str | None = None
    """Prompts of a network that is conditioned on words, each used in turn. A list, or a file: `.txt` with one prompt
    per line, or `.csv` or `.parquet` with a column "prompt"."""
    negative_prompt: str = ""
    """Prompt that guidance leads away from; unset: the empty caption. It requires guidance, without weaker_weights."""
    sampler: Sampler = Ddim()
    """Sampler and its number of steps."""
    guidance: Guidance = Guidance()
    """Classifier-free guidance; a scale of 1 is none."""
    weaker_weights: str | None = None
    """Weights folder of a weaker network for the same data (smaller, or trained for fewer steps). Guidance then leads
    away from its prediction (autoguidance) instead of the unconditional prediction."""
    small_images: Literal["validation"] | SamplesOf | str | None = None
    """Images that the network is conditioned on, such as small images to enlarge: {experiment: NAME} for the samples of
    another experiment, the path of a samples.npz, or validation for images derived from the held-out images, with which
    the samples can then be compared; unset: validation. Seed s takes image s modulo the number of images, and its label
    unless `labels` is set. `conditions` names individual image files."""
    embeddings: SamplesOf | str | None = None
    """Embeddings that the network is conditioned on: {experiment: NAME} for the samples of a prior, or a folder in the
    layout of clip-retrieval; unset: embeddings of held-out images. Seed s takes embedding s modulo the number of
    embeddings."""
    decoder: str | None = None
    """Autoencoder that decodes the latents in place of the codec (a folder or a name on the Hub), such as Stable
    Diffusion's mse autoencoder for latents of its ema autoencoder, or a small autoencoder for previews; unset: the
    codec. It requires no new encoding or training."""
    batch_size: int = Field(50, ge=1)
    """Number of images made at once. It does not change the images."""
    images_per_job: int = Field(5000, ge=1)
    """Images per job; more images are made by several jobs in parallel. It does not change the images."""
    precision: Precision = "tf32"
    """Precision of the network: float32; tf32: a GPU rounds the factors of products to 10 bits; or bf16. The sampler
    itself always computes in float32."""
    compile: bool = False
    """Compile the network's blocks with torch.compile. It takes about a minute; useful for many images on a GPU."""
    pictures: bool = False
    """Also keep each image as a PNG named after its seed, in the folder `pictures`."""
    grid_images: int = Field(100, ge=1)
    """Number of images in the picture grid.png."""
    keep: bool = True
    """Store all images. false: `samples.npz` contains only the images of grid.png, and `evaluate` generates all images
    during the evaluation, in one job; metrics.json is the same."""

    given: Inpainting | None = None
    """Images with a known part; sampling fills in the rest (inpainting). Unset: no inpainting."""
    start: Start | None = None
    """Images that sampling starts from instead of noise; unset: noise."""
    tiles: Tiles | None = None
    """Tiles of a picture that is larger than the images of the network; unset: one tile."""
    conditions: list[dict[str, Cell]] | dict[str, list[Cell]] | str | None = None
    """Rows of conditions, used in turn. A row holds the numbers that the network is conditioned on, by name; under
    "image" the path of an image file, if it is conditioned on images; under "label" the class. Given as a list of rows;
    a list of values for each name, for all combinations; or a table (`.csv`, `.tsv`, `.jsonl`, `.parquet`). Unset: the
    conditions of held-out images; seed s takes those of image s modulo the number of images."""

    @field_validator("conditions", mode="before")
    @classmethod
    def _rows_or_values(cls, value: Any) -> Any:
        def good(cells: Any) -> bool:
            return all(isinstance(cell, int | float | str | None) for cell in cells)

        rows = value if isinstance(value, list | tuple) else ()
        lists = value.values() if isinstance(value, dict) else ()
        fits = (
            isinstance(value, str | None)
            or (len(rows) > 0 and all(isinstance(row, dict) and row and good(row.values()) for row in rows))
            or (len(lists) > 0 and all(isinstance(cells, list | tuple) and cells and good(cells) for cells in lists))
        )
        if not fits:
            raise ValueError(
                "expected rows, such as [{age: 40, dose: 1.5}], values for all combinations, such as {age: [20, 40]}, "
                "or the path of a table."
            )
        return value

    @model_validator(mode="after")
    def _pictures_fit(self) -> Self:
        if self.tiles is not None and (self.given is not None or self.start is not None):
            raise ValueError(
                "tiles is set beside given or start, whose images have the size of one tile. Leave one of the two out."
            )
        repeats = self.given is not None and self.given.resamplings > 1
        in_the_middle = (repeats or self.start is not None) and isinstance(self.sampler, SamplerConfig)
        if in_the_middle and not self.sampler.can_start_anywhere:
            raise ValueError(
                f"sampler.type is {self.sampler.type} with noise added between its steps, which cannot start in the "
                "middle. Set sampler.s_churn: 0, or leave out start and set given.resamplings: 1."
            )
        return self

    @property
    def num_jobs(self) -> int:
        """Return the number of jobs that make the images: each makes whole batches."""
        jobs = min(-(-self.num_samples // self.images_per_job), -(-self.num_samples // self.batch_size))
        return jobs if self.keep else 1

    @property
    def num_stored(self) -> int:
        """Return the number of images that are stored, the first ones."""
        return self.num_samples if self.keep else min(self.num_samples, self.grid_images)


class Generator:
    """Generator of images from seeds, on the device of the network.

    weaker: the network of `settings.weaker_weights`, on the same device. null: the condition that guidance leads away
    from, by name, unless it is the null label or zeros. A compiled network (`compile`) always receives `batch_size`
    images; incomplete batches are padded. pictures: of `settings.given` and `settings.start`; None: sampling starts
    from noise alone.

    Raises ValueError when the sampler, the guidance or the pictures do not fit the model.
    """

    def __init__(
        self,
        network: nn.Module,
        reading: Reading,
        spec: DataSpec,
        codec: Codec,
        settings: SampleConfig,
        weaker: nn.Module | None = None,
        null: Mapping[str, Tensor] | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        check_guidance("sample", settings, reading)
        scale = settings.guidance.guidance_scale
        if scale != 1 and (spec.num_classes or spec.conditions) and weaker is None and not reading.drops_labels:
            raise ValueError(
                f"sample.guidance.guidance_scale is {scale}, but no labels were dropped in training. Use 1, or "
                f"train with system.objective.label_drop_probability above 0."
            )
        self._device = next(network.parameters()).device
        if settings.decoder is not None:
            codec = codec.with_decoder(settings.decoder, self._device)
        self._spec, self._reading, self._codec = spec, reading, codec
        self._sampler = settings.sampler.fitted(reading.variance, codec.bounded)
        self.settings = settings.model_copy(update={"sampler": self._sampler})
        self._seed = settings.seed
        # compiled code is specialised to a batch size, so smaller batches are padded to it (`_rows`)
        self._precision, self._whole_batch = settings.precision, settings.batch_size if settings.compile else 0
        self._grid = self._sampler.grid(reading.process)
        nothing = null_conditions(spec, null, self._device) if weaker is None else {}
        for module in (network, weaker):
            if module is not None and settings.compile:
                compile_by_block(module)
        negative = computing_in(cast("Network", weaker), settings.precision) if weaker is not None else None
        self._network = computing_in(cast("Network", network), settings.precision)
        self._guide: Callable[[Network], Network] = lambda plain: settings.guidance.build(
            plain, nothing, self._grid, negative
        )
        self._guide(self._network)  # raises now if settings do not fit
        self._tiles, self._pictures = settings.tiles or Tiles(), pictures

    @torch.no_grad()
    def __call__(self, seeds: Tensor, labels: Tensor | None, conditions: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return images [N, C, H, W], of the data's type, of these seeds, int64 [N], and labels, int64 [N].

        conditions: the other conditions of each image, by name.
        """
        row = self._rows(len(seeds))
        labels = None if labels is None else labels[row]
        more = {name: tensor[row] for name, tensor in (conditions or {}).items()}
        denoiser, noise, streams = self._start(seeds[row], labels, more)
        x = self._from_images(seeds[row]).sample(self._sampler, denoiser, self._grid, noise, streams)
        images = self._decode(x[: len(seeds)])
        return images if self._pictures is None else self._pictures.pasted(images, seeds.cpu())

    @torch.no_grad()
    def trajectory(
        self, seeds: Tensor, labels: Tensor | None, conditions: Mapping[str, Tensor] | None = None
    ) -> list[Tensor]:
        """Return the noise as images [N, C, H, W], then the prediction of each step, from the first to the last. Never
        compiled."""
        denoiser, noise, streams = self._start(seeds, labels, conditions or {})
        with torch.compiler.set_stance("force_eager"):
            steps = self._from_images(seeds).trajectory(self._sampler, denoiser, self._grid, noise, streams)
            return [self._decode(x) for x in (noise, *(step.x0 for step in steps))]

    def _rows(self, count: int) -> Tensor:
        """Return the rows of a batch, int64; a batch that has to be full repeats the last row."""
        return torch.arange(max(count, self._whole_batch)).clamp(max=count - 1)

    def _decode(self, x: Tensor) -> Tensor:
        with tf32(self._precision != "float32"):
            return self._codec.decode(x).cpu()

    def _from_images(self, seeds: Tensor) -> FromImages:
        return FromImages() if self._pictures is None else self._pictures.of_seeds(seeds.cpu(), self._encode)

    def _encode(self, images: Tensor) -> Tensor:
        """Return images [N, C, H, W] as x0: pixels in [-1, 1], or the means of their latents."""
        if isinstance(self._codec, Rgb):
            return self._codec.pixels(images.to(self._device))
        with tf32(self._precision != "float32"):
            return self._codec.normalise(self._codec.encode(images)[:, 0]).to(self._device)

    def _start(
        self, seeds: Tensor, labels: Tensor | None, conditions: Mapping[str, Tensor]
    ) -> tuple[Denoiser, Tensor, Streams]:
        streams = image_streams(seeds.to(self._device), self._seed)
        size = self._spec.size
        noise = initial_noise(streams, (self._spec.channels, *self._tiles.shape(size)))
        inputs = {"label": labels, **conditions}
        cond = {name: value.to(self._device) for name, value in inputs.items() if value is not None}
        denoisers = [
            self._reading.denoiser(self._network, self._grid, cond, self._guide) for _ in range(self._tiles.number)
        ]
        return self._tiles.joined(denoisers, size), noise, streams


def null_conditions(spec: DataSpec, null: Mapping[str, Tensor] | None, device: torch.device) -> dict[str, Tensor]:
    """Return the condition that guidance leads away from, by name: that of `null`, or the null label and zeros."""
    nothing = {"label": torch.tensor(spec.num_classes)} if spec.num_classes else {}
    nothing |= {name: torch.zeros(shape) for name, shape in spec.conditions.items()} | dict(null or {})
    return {name: tensor.to(device) for name, tensor in nothing.items()}


def check_guidance(section: str, settings: SampleConfig, reading: Reading) -> None:
    """Raise ValueError for guidance of average velocities; a power, if time does not run from 1 to 0; and scales of
    parts that were not dropped alone, or that the sampler or weaker_weights do not allow. section: the name of the
    settings."""
    scale = settings.guidance.guidance_scale
    if settings.sampler.needs_average_velocity and scale != 1:
        raise ValueError(
            f"{section}.guidance.guidance_scale is {scale:g}, but average velocities cannot be guided afterwards. Use "
            "1, and set system.objective.guidance_scale."
        )
    if settings.guidance.power is not None and reading.process.type == "edm":
        raise ValueError(
            f"{section}.guidance.power is set, but time of the process edm is a logarithm of sigma, not from 1 to 0. "
            f"Use guidance.interval, or leave it out."
        )
    scales, key = settings.guidance.scales, f"{section}.guidance.scales"
    if scales is None:
        return
    if unknown := next((name for name in scales if name not in reading.drops_alone), None):
        known = ", ".join(reading.drops_alone) or "none"
        raise ValueError(
            f"{key} names {unknown}, but the network never learns to do without that alone. Known: {known}. Leave it "
            f"out, or train with system.objective.drop_probabilities: {{{unknown}: 0.1}}."
        )
    if settings.weaker_weights is not None or settings.sampler.needs_average_velocity:
        other = "weaker_weights" if settings.weaker_weights is not None else f"sampler.type {settings.sampler.type}"
        raise ValueError(f"{key} is set, but {section}.{other} does not go with it. Leave one of the two out.")


def requested_labels(
    labels: str | Sequence[ClassLabel],
    classes: list[str],
    seeds: Tensor,
    seed: int = 0,
    untrained: Sequence[str] = (),
    first_seed: int | None = None,
) -> Tensor | None:
    """Return the label of each sample, int64 [N]; None without classes.

    labels: "balanced" takes the classes in turn, "random" draws each from the sample's own seed and the `seed` that all
    share, a list of class names or numbers is repeated in turn. untrained: names of classes without training images,
    used only if a list names them. first_seed: seed of the first class in turn, for seeds that are not consecutive;
    None: the classes follow the order of the rows. Raises ValueError for a class that does not exist.
    """
    if not classes:
        return None
    trained = [number for number, name in enumerate(classes) if name not in untrained]
    if labels == "random":
        return torch.tensor(trained)[image_streams(seeds, seed).integers("label", len(trained))]
    chosen = trained if isinstance(labels, str) else chosen_classes("sample.labels", labels, classes)
    turns = torch.arange(len(seeds)) if first_seed is None else seeds - first_seed
    return torch.tensor(chosen)[turns % len(chosen)]


def check_scale(section: str, scale: float, drops_labels: bool, has_classes: bool, alternative: str = "") -> None:
    """Raise ValueError for guidance of a network that was never trained without a class, or of data without classes.
    alternative: to a scale of 1, for the message."""
    if scale != 1 and not drops_labels:
        raise ValueError(
            f"{section}.guidance.guidance_scale is {scale:g}, but the network never learns to do without a label. Use "
            f"1, or train with system.objective.label_drop_probability above 0."
        )
    if scale != 1 and not has_classes:
        raise ValueError(
            f"{section}.guidance.guidance_scale is {scale:g}, but the data have no classes that guidance could leave "
            f"out. Use 1{alternative}."
        )


def check_labels(section: str, labels: str | Sequence[ClassLabel], classes: Sequence[str] | None) -> None:
    """Raise ValueError for labels of a section that the data do not have. classes: of the data; None if unknown or
    unused."""
    if classes is None or labels == "balanced":
        return
    if not classes:
        mistake, lack = ("is random", "no classes") if labels == "random" else ("names classes", "none")
        raise ValueError(f"{section}.labels {mistake}, but the data have {lack}. Leave it out.")
    if not isinstance(labels, str):
        chosen_classes(f"{section}.labels", labels, list(classes))


def chosen_classes(key: str, labels: Sequence[ClassLabel], classes: list[str]) -> list[int]:
    """Return the numbers of classes that are given by name or number. key: their configuration key, for the message.

    Raises ValueError for a class that does not exist.
    """
    return [class_number(key, label, classes) for label in labels]


def ten_of(steps: list[Tensor]) -> list[Tensor]:
    """Return ten steps evenly spread from the first to the last; all of them if there are no more."""
    return [steps[round(i * (len(steps) - 1) / 9)] for i in range(10)] if len(steps) > 10 else steps
