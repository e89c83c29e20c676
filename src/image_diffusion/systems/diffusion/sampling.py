"""Images from a diffusion system: seeds and labels -> pixels, for the sample stage and for previews while training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from image_diffusion.codecs.codec import Codec
from image_diffusion.core.config import Config
from image_diffusion.core.streams import Streams
from image_diffusion.core.types import DataSpec, Network, SamplesOf
from image_diffusion.nn.blocks import compile_by_block
from image_diffusion.nn.precision import Precision, computing_in, tf32
from image_diffusion.process import Process
from image_diffusion.process.grid import Denoiser, Grid
from image_diffusion.process.parameterization import Variance
from image_diffusion.samplers import Sampler
from image_diffusion.samplers.ddim import Ddim
from image_diffusion.samplers.guidance import Guidance
from image_diffusion.samplers.noise import image_streams, initial_noise


class Denoises(Protocol):
    """What `Generator` asks of a system: a `DiffusionSystem`, or what an exported folder keeps of one (`Reading`)."""

    @property
    def process(self) -> Process:
        """How noise was added."""
        ...

    @property
    def variance(self) -> Variance:
        """What the network says of the variance."""
        ...

    @property
    def drops_labels(self) -> bool:
        """Whether it learnt to do without a label."""
        ...

    def denoiser(
        self, network: Network, grid: Grid, cond: Mapping[str, Tensor], guide: Callable[[Network], Network]
    ) -> Denoiser:
        """The network as a sampler on `grid` sees it, for one batch."""
        ...


class SampleConfig(Config):
    """Which images are made, and how."""

    num_samples: int = Field(64, ge=1)
    """Number of images."""
    first_seed: int = Field(0, ge=0)
    """Seed of the first image; image number i has seed first_seed + i."""
    seed: int = Field(0, ge=0)
    """Mixed into every image's own seed: another value makes another set of images."""
    labels: Literal["balanced", "random"] | list[int | str] = "balanced"
    """Classes of the images: each in turn, at random from the image's seed, or a list of names or numbers in turn."""
    prompts: tuple[str, ...] | str | None = None
    """Of a network that is told words: what the images are to show, each in turn. A list, or a file: `.txt` with one a
    line, or `.csv` or `.parquet` with a column "prompt"."""
    negative_prompt: str = ""
    """What guidance leads away from, in words; unset: from the empty caption."""
    sampler: Sampler = Ddim()
    """The sampler and its number of steps."""
    guidance: Guidance = Guidance()
    """Classifier-free guidance; a scale of 1 is none."""
    weaker_weights: str | None = None
    """A weights folder of a weaker network of the same data (smaller, or trained for less long): guidance then leads
    away from what it predicts (autoguidance), instead of from the prediction without a label."""
    small_images: Literal["validation"] | SamplesOf | str | None = None
    """What a super-resolution network enlarges: {experiment: NAME} for the samples of another experiment, validation
    for the held-out images made small, so that the result can be compared with them, or a path of a samples.npz. Seed s
    takes image s modulo their number, and the image's label in place of `labels`."""
    embeddings: SamplesOf | str | None = None
    """Of a network that is told embeddings: {experiment: NAME} for those that a prior makes of its prompts, or a folder
    of them as clip-retrieval writes it; unset: those of held-out images. Seed s takes number s modulo their number."""
    decoder: str | None = None
    """Another autoencoder of the same latents that decodes them (a folder or a name on the Hub), such as the mse one of
    Stable Diffusion for latents of its ema one, or a small one for previews; unset: the codec's own. Nothing is encoded
    or trained again for it."""
    batch_size: int = Field(50, ge=1)
    """Images made at once. Does not change them."""
    images_per_job: int = Field(5000, ge=1)
    """Images that one job makes; for more of them several run side by side. Does not change them."""
    precision: Precision = "tf32"
    """What the network computes in: float32; tf32, a GPU then rounds the factors of its products to 10 bits; or bf16.
    The sampler's own arithmetic is float32 always."""
    compile: bool = False
    """Compile the network's blocks with torch.compile: worth its minute for many images on a GPU."""
    pictures: bool = False
    """Also keep each image as a PNG named after its seed, in the folder `pictures`."""
    grid_images: int = Field(100, ge=1)
    """Images in the picture grid.png."""
    keep: bool = True
    """Store all images. false: `samples.npz` holds those of grid.png alone, and `evaluate` makes them all as it looks
    at them, in one job; metrics.json stays the same."""

    @property
    def num_jobs(self) -> int:
        """How many jobs make the images: each makes whole batches."""
        jobs = min(-(-self.num_samples // self.images_per_job), -(-self.num_samples // self.batch_size))
        return jobs if self.keep else 1

    @property
    def num_stored(self) -> int:
        """How many of the images are stored, the first ones."""
        return self.num_samples if self.keep else min(self.num_samples, self.grid_images)


def fitted(system: Denoises, codec: Codec, settings: SampleConfig) -> SampleConfig:
    """The settings with what the sampler takes from the model filled in."""
    sampler = settings.sampler.fitted(system.variance, codec.bounded)
    return settings.model_copy(update={"sampler": sampler})


class Generator:
    """Makes images from seeds, on the device of the network.

    weaker: the network of `settings.weaker_weights`, on the same device. null: what guidance leads away from, by name,
    where that is not the label of no class, or zeros. Networks are compiled where the settings say
    so, and are then always given `batch_size` images, some of them for nothing.

    Raises ValueError when the sampler or the guidance do not fit the system.
    """

    def __init__(
        self,
        network: nn.Module,
        system: Denoises,
        spec: DataSpec,
        codec: Codec,
        settings: SampleConfig,
        weaker: nn.Module | None = None,
        null: Mapping[str, Tensor] | None = None,
    ) -> None:
        scale, labelled, told = settings.guidance.guidance_scale, spec.num_classes > 0, spec.conditions
        if scale != 1 and (labelled or told) and weaker is None and not system.drops_labels:
            raise ValueError(
                f"sample.guidance.guidance_scale is {scale}, but the network never learnt to do without a label. "
                f"Use 1, or train with system.objective.label_drop_probability above 0."
            )
        self._device = next(network.parameters()).device
        if settings.decoder is not None:
            codec = codec.with_decoder(settings.decoder, self._device)
        self._spec, self._system, self._codec = spec, system, codec
        self.settings = fitted(system, codec, settings)
        self._sampler, self._seed = self.settings.sampler, settings.seed
        self._precision, self._whole_batch = settings.precision, settings.batch_size if settings.compile else 0
        self._grid = self._sampler.grid(system.process)
        nothing: dict[str, Tensor] = {}
        if weaker is None:
            nothing = {"label": torch.tensor(spec.num_classes)} if labelled else {}
            nothing |= {name: torch.zeros(shape) for name, shape in told.items()} | dict(null or {})
        nothing = {name: each.to(self._device) for name, each in nothing.items()}
        for each in (network, weaker):
            if each is not None and settings.compile:
                compile_by_block(each)
        negative = computing_in(cast("Network", weaker), settings.precision) if weaker is not None else None
        self._network = computing_in(cast("Network", network), settings.precision)
        self._guide: Callable[[Network], Network] = lambda plain: settings.guidance.build(
            plain, nothing, self._grid, negative
        )
        self._guide(self._network)  # raises now what does not fit

    @torch.no_grad()
    def __call__(
        self,
        seeds: Tensor,
        labels: Tensor | None,
        low_res: Tensor | None = None,
        told: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Uint8 images [N, C, H, W] of these seeds, int64 [N], and labels, int64 [N].

        low_res: float32 [N, C, h, w] in [-1, 1], the small images that a super-resolution network enlarges. told: what
        else the network is told of each image, by name.
        """
        row = self._rows(len(seeds))
        labels, low_res = (None if each is None else each[row] for each in (labels, low_res))
        more = {name: each[row] for name, each in (told or {}).items()}
        denoiser, noise, streams = self._start(seeds[row], labels, low_res, more)
        return self._decode(self._sampler(denoiser, self._grid, noise, streams)[: len(seeds)])

    @torch.no_grad()
    def trajectory(
        self,
        seeds: Tensor,
        labels: Tensor | None,
        low_res: Tensor | None = None,
        told: Mapping[str, Tensor] | None = None,
    ) -> list[Tensor]:
        """The noise as images [N, C, H, W], then those that each step predicts, from the first to the last. Never
        compiled."""
        denoiser, noise, streams = self._start(seeds, labels, low_res, told or {})
        with torch.compiler.set_stance("force_eager"):
            steps = self._sampler.trajectory(denoiser, self._grid, noise, streams)
            return [self._decode(x) for x in (noise, *(step.x0 for step in steps))]

    def _rows(self, count: int) -> Tensor:
        """Which rows a batch is made of, int64: the last one again and again, where a whole batch is wanted."""
        return torch.arange(max(count, self._whole_batch)).clamp(max=count - 1)

    def _decode(self, x: Tensor) -> Tensor:
        with tf32(self._precision != "float32"):
            return self._codec.decode(x).cpu()

    def _start(
        self, seeds: Tensor, labels: Tensor | None, low_res: Tensor | None, told: Mapping[str, Tensor]
    ) -> tuple[Denoiser, Tensor, Streams]:
        streams = image_streams(seeds.to(self._device), self._seed)
        noise = initial_noise(streams, (self._spec.channels, self._spec.resolution, self._spec.resolution))
        given = {"label": labels, "low_res": low_res, **told}
        cond = {name: value.to(self._device) for name, value in given.items() if value is not None}
        return self._system.denoiser(self._network, self._grid, cond, self._guide), noise, streams


def requested_labels(
    labels: str | list[int | str], num_samples: int, classes: list[str], seeds: Tensor, seed: int = 0
) -> Tensor | None:
    """The label of each sample, int64 [N]; None without classes.

    labels: "balanced" takes the classes in turn, "random" draws each from the sample's own seed and the `seed` that all
    share, a list of class names or numbers is repeated in turn. Raises ValueError for a class that does not exist.
    """
    if not classes:
        return None
    if labels == "random":
        return image_streams(seeds, seed).integers("label", len(classes))
    chosen = range(len(classes)) if isinstance(labels, str) else chosen_classes("sample.labels", labels, classes)
    return torch.tensor([chosen[i % len(chosen)] for i in range(num_samples)], dtype=torch.int64)


def chosen_classes(key: str, labels: list[int | str], classes: list[str]) -> list[int]:
    """The numbers of classes that are named or numbered. key: where they are written, for the message.

    Raises ValueError for a class that does not exist.
    """
    return [_class_number(key, label, classes) for label in labels]


def _class_number(key: str, label: int | str, classes: list[str]) -> int:
    if isinstance(label, str) and label in classes:
        return classes.index(label)
    if isinstance(label, int) and 0 <= label < len(classes):
        return label
    shown = ", ".join(classes[:12]) + (", …" if len(classes) > 12 else "")
    raise ValueError(f"{key} names the class {label!r}; the model knows 0 to {len(classes) - 1}: {shown}.")


def ten_of(steps: list[Tensor]) -> list[Tensor]:
    """Ten steps evenly spread from the first to the last; all, where there are no more."""
    return [steps[round(i * (len(steps) - 1) / 9)] for i in range(10)] if len(steps) > 10 else steps
