"""Configuration of the training: the section `train` of an experiment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from image_diffusion.core.config.base import Config, Sparse, dump
from image_diffusion.core.devices import has_bf16
from image_diffusion.core.process.errors import log_line
from image_diffusion.core.types import WeightsOf
from image_diffusion.data.augment import Augment
from image_diffusion.data.shards.order import share
from image_diffusion.training.optim import Optimizer
from image_diffusion.training.optim.adam import AdamW
from image_diffusion.training.optim.ema import Ema, ExponentialEma, RampUp, Rate, average_name
from image_diffusion.training.optim.numerics import Mode
from image_diffusion.training.optim.schedule import Constant, Schedule
from image_diffusion.training.parallel.world import World


class CheckpointConfig(Config):
    """When to save the state from which a run resumes."""

    every_steps: int = Field(1000, gt=0)
    """Number of steps between checkpoints. A checkpoint is also saved after the last step and on a request to stop."""
    every_seconds: float | None = Field(None, gt=0)
    """Also save at intervals of this many seconds; unset: by steps alone. Changes no result."""
    keep_last: int = Field(2, gt=0)
    """Number of newest checkpoints to keep."""
    keep_every: int | None = Field(None, gt=0)
    """Keep the checkpoints of multiples of this number of steps permanently; unset: none."""

    def most_kept(self, steps: int) -> int:
        """Return the maximum number of checkpoints on disk: the last, the one being written, and permanent ones."""
        saves = -(-steps // self.every_steps)
        for_good = steps // self.keep_every if self.keep_every else 0
        return min(self.keep_last + 1, saves) + for_good


@dataclass(frozen=True)
class Intervals:
    """Steps between reports; None: never. save: steps between checkpoints. draw: steps between grids of samples.
    validation_samples: number of samples of a validation."""

    log: int
    save: int
    validate: int | None
    draw: int | None
    validation_samples: int


class Lora(Config):
    """Adapters that are trained instead of the weights. Needs the package peft."""

    rank: int = Field(16, gt=0)
    """Rank of an adapter's update of a weight."""
    alpha: float = Field(16.0, gt=0)
    """The update of an adapter is multiplied by alpha / rank."""
    layers: tuple[str, ...] = Field(("*",), min_length=1)
    """Linear layers with an adapter, by name: ["blocks.*.attn.*"]. * matches any characters."""
    whole: tuple[str, ...] = ()
    """Parameters to train directly, in addition to the adapters, by name, such as a table of new classes."""


class TrainConfig(Sparse):
    """Configuration of the training. All keys except `steps` have defaults."""

    if_set: ClassVar[frozenset[str]] = frozenset({"patience"})

    steps: int = Field(gt=0)
    """Total number of updates of the weights."""
    global_batch: int = Field(256, gt=0)
    """Examples of one update, over all processes."""
    microbatch: int | None = Field(None, gt=0)
    """Examples that a process computes at once, as memory allows; unset: its whole share. Changes the result only by
    rounding and through the masks of dropout, and not at all with `deterministic: strict`, which computes
    `strict_chunk` examples at once."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of all random numbers: initial weights, order of the examples, flips, noise, timesteps, dropout."""
    optimizer: Optimizer = AdamW()
    """Optimizer, which turns gradients into updates."""
    schedule: Schedule = Constant()
    """The learning rate over time."""
    grad_clip: float | None = Field(None, gt=0)
    """Largest norm of the gradient; unset: no limit."""
    ema: Ema = ExponentialEma(warmup=RampUp())
    """Running averages of the weights."""
    weights: Literal["ema", "raw", "best"] | Rate = "ema"
    """Weights that are written at the end. ema: the first average. A number: the average of that rate (or width). raw:
    the weights as trained. best: the first average at the validation with the smallest loss; checkpoints then also
    contain it."""
    keep_raw: bool = False
    """Also write the weights as trained, into the subfolder `raw` of the output."""
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    """Precision of the network's computations; weights, moments and averages are always float32. fp16 scales the
    loss."""
    tf32: bool = True
    """Let a GPU round the factors of float32 matrix products to 10 bits, which is several times faster."""
    compile: bool | Literal["cuda_graphs"] = False
    """Compile each block of the network with torch.compile, which takes about a minute at the start. cuda_graphs: on a
    GPU also record the kernels of each block as a CUDA graph, for networks so small that the GPU waits for kernel
    launches; takes more memory."""
    channels_last: bool = False
    """Store images with the channels innermost (channels-last), which is faster for convolutions."""
    sharding: Literal["none", "optimizer", "full", "machine"] = "none"
    """State that is sharded across the processes. optimizer: each process updates a slice of the weights and stores
    only the moments and averages of that slice (ZeRO-1), which takes less memory and less time. full: each process also
    stores only its shard of the weights and gradients, and gathers the weights of a block to compute it (FSDP); slower,
    for networks that do not fit in memory otherwise. machine: full sharding within each machine, and gradients summed
    over the machines (HSDP), for a network between machines that is slower than the links between the GPUs of a
    machine. Each setting resumes from the checkpoints of any other, on any number of processes."""
    reduce: Literal["float32", "bf16"] = "float32"
    """Precision in which gradients are summed over the processes. bf16: half the traffic, for slow networks between
    machines; sums are rounded to 8 bits."""
    deterministic: Mode = "run"
    """Reproducibility. off: the fastest kernels. run: bit-identical weights on the same machines with the same number
    of processes, also after interruptions. strict: with any number of processes, by adding in a fixed order; slower."""
    strict_chunk: int = Field(8, gt=0)
    """Examples computed at once with `deterministic: strict`. Affects the last bits of the result."""
    flip_probability: float = Field(0.5, ge=0, le=1)
    """Probability that an example is mirrored."""
    augment: Augment | None = None
    """Augmentation for small data sets, with its parameters as a condition of the network; {}: the settings of the
    paper. Unset: only mirroring (`flip_probability`)."""
    balance_classes: bool = False
    """Sample all classes equally often, whatever their numbers of images: of C classes, every C examples contain one of
    each, and no image is repeated before all images of its class have been used."""
    init_from: WeightsOf | str | None = None
    """Weights to start from, with a new optimizer: {experiment: NAME} for those of another experiment, or a weights
    folder, such as `export --read` makes of published weights. Classes start from those of the same name, or else from
    the mean of all; position embeddings are interpolated to another resolution. Unset: random weights."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by name: ["blocks.0.*", "t_embedder.*"]. * matches anything."""
    lora: Lora | None = None
    """Train low-rank adapters, which are added to the weights at the end; unset: train the weights themselves."""
    layer_decay: float | None = Field(None, gt=0, le=1)
    """Factor by which the learning rate falls from block to block towards the input: the last block has this factor,
    the one before it its square, and so on; layers after the blocks have the full rate. Unset: one rate for all."""
    lr_factors: dict[str, Annotated[float, Field(gt=0)]] = Field({})
    """Factors of the learning rate of parameters by name: {"y_embedder.*": 10}. * matches any characters. Factors of
    several patterns, and of `layer_decay`, are multiplied."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save the state from which a run resumes."""
    log_every_steps: int = Field(100, gt=0)
    """Number of steps between log lines. Each line gives means over the steps since the previous one."""
    validate_every_steps: int | None = Field(1000, gt=0)
    """Number of steps between validations on the validation split; unset: never."""
    validation_samples: int = Field(1024, gt=0)
    """Number of samples of the validation split to use; all, if the split has fewer."""
    patience: float | None = Field(None, gt=0, le=1)
    """End the training at a validation if the loss has not improved for this share of `steps`; unset: train to the last
    step. The length of the learning rate schedule does not change."""
    grid_every_steps: int | None = Field(5000, gt=0)
    """Number of steps between grids of samples; unset: never."""
    max_hours: float | None = Field(None, gt=0)
    """Hours after which the training saves and stops. The same command continues it. Unset: no limit."""

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        if self.weights == "ema" and not self.ema.names:
            raise ValueError("weights is ema but ema.rates is empty. Name a rate, or set weights to raw.")
        if isinstance(self.weights, float) and average_name(self.weights) not in self.ema.names:
            averages = ", ".join(self.ema.names) or "none"
            raise ValueError(
                f"weights is {self.weights:g}, but the averages are: {averages}. Name the number of one of them."
            )
        if self.weights == "best" and self.validate_every_steps is None:
            raise ValueError(
                "weights is best but validate_every_steps is unset, so that no weights can be compared. Set a number."
            )
        if self.patience is not None and self.validate_every_steps is None:
            raise ValueError(
                "patience is set but validate_every_steps is unset, so that nothing can end it early. Set a number."
            )
        if self.augment is not None and self.augment.probability == self.flip_probability == 0:
            raise ValueError(
                "augment.probability and flip_probability are 0, so that no image is augmented. Leave augment out."
            )
        if self.lora is not None and self.freeze:
            raise ValueError("lora and freeze are both set, but with adapters all else is frozen. Leave freeze out.")
        if self.lora is not None and self.init_from is None:
            raise ValueError("lora is set, but there is nothing that adapters could adapt. Set init_from.")
        if (reason := self.optimizer.conflicts.get(self.sharding)) is not None:
            raise ValueError(
                f"sharding: {self.sharding} does not go with optimizer: {self.optimizer.type}, which {reason}. Leave "
                f"out one of the two."
            )
        if self.reduce == "bf16" and self.deterministic == "strict":
            raise ValueError(
                "reduce: bf16 does not go with deterministic: strict, whose sums are exact. Leave out one of the two."
            )
        if self.shards_weights:
            conflicts = {
                "deterministic: strict, whose sums have another order": self.deterministic == "strict",
                "precision: fp16, whose overflows each process sees on its own": self.precision == "fp16",
                "channels_last: true, whose weights have no rows to share": self.channels_last,
                "compile: cuda_graphs, which needs weights that stay where they are": self.records,
            }
            for conflict, exists in conflicts.items():
                if exists:
                    raise ValueError(
                        f"sharding: {self.sharding} does not go with {conflict}. Leave out one of the two."
                    )
        return self

    @property
    def average(self) -> str | None:
        """Return the name of the average that is validated, previewed and written; None: the weights as trained."""
        if self.weights == "raw":
            return None
        if isinstance(self.weights, float):
            return average_name(self.weights)
        return next(iter(self.ema.names), None)

    @property
    def records(self) -> bool:
        """True if a GPU records the kernels of the network's blocks as graphs."""
        return self.compile == "cuda_graphs"

    @property
    def shards_weights(self) -> bool:
        """True if each process holds only a share of the weights."""
        return self.sharding in ("full", "machine")

    @property
    def intervals(self) -> Intervals:
        """Return when to report, and on how many samples."""
        return Intervals(
            log=self.log_every_steps,
            save=self.checkpoint.every_steps,
            validate=self.validate_every_steps,
            draw=self.grid_every_steps,
            validation_samples=self.validation_samples,
        )

    @property
    def microbatch_key(self) -> str:
        """Return the configuration key for the number of examples computed at once."""
        return "train.strict_chunk" if self.deterministic == "strict" else "train.microbatch"

    def share_of(self, processes: int) -> int:
        """Return the largest number of examples of a step that one of several processes computes; whole chunks with
        `strict`."""
        if self.deterministic != "strict":
            return -(-self.global_batch // processes)
        chunks = -(-self.global_batch // self.strict_chunk)
        return min(self.global_batch, -(-chunks // processes) * self.strict_chunk)

    def check_pairs(self, processes: int = 1) -> None:
        """Raise ValueError if paired neighbours of a global batch would be computed apart."""
        sizes = {"train.global_batch": self.global_batch}
        if self.deterministic != "strict":
            parts = (share(0, self.global_batch, rank, processes) for rank in range(processes))
            sizes |= {f"the share of process {i}": stop - start for i, (start, stop) in enumerate(parts)}
        at_once = self.strict_chunk if self.deterministic == "strict" else self.microbatch
        sizes |= {} if at_once is None else {self.microbatch_key: at_once}
        for name, size in sizes.items():
            if size % 2:
                raise ValueError(
                    f"The objective pairs the samples of a batch, but {name} is {size}, an odd number. Use even "
                    f"numbers, and processes that share the global batch evenly; or set objective.contrastive to 0."
                )

    @property
    def checks_network(self) -> bool:
        """True if the section refers to parts of the network, so that checking it requires building the network."""
        return bool(self.freeze or self.lora or self.layer_decay or self.lr_factors or self.optimizer.needs_network)

    def on_hardware(self, world: World) -> Self:
        """Return the configuration with a precision that the GPU of every process supports, and print a change: fp16
        instead of bf16, or float32 if the weights are sharded, since then no loss is scaled. All processes call it
        together."""
        if self.precision != "bf16" or not world.any(not has_bf16(world.device)):
            return self
        chosen = "float32" if self.shards_weights else "fp16"
        if world.is_main:
            log_line(f"train.precision is bf16, which not every GPU here has: this start computes in {chosen}.")
        return self.model_copy(update={"precision": chosen})

    def advice(self) -> list[str]:
        """Return a sentence for each valid setting that is probably a mistake."""
        return [] if self.average is None else self.ema.advice(self.average, self.steps)

    def keeps(self, step: int) -> bool:
        """True if the weights of a step are available after the training: the last step and permanent checkpoints."""
        every = self.checkpoint.keep_every
        is_saved = step % self.checkpoint.every_steps == 0
        return step == self.steps or (step < self.steps and is_saved and every is not None and step % every == 0)

    def check_average(self, number: float | Literal["raw"]) -> None:
        """Raise ValueError if the average of a rate or width, or the weights as trained, are not known for the last
        step."""
        if self.weights == "best":
            raise ValueError("train.weights is best, whose step may be earlier than the end. Leave out one of the two.")
        if number != "raw" and average_name(number) not in self.ema.names:
            averages = ", ".join(self.ema.names) or "none"
            raise ValueError(f"the averages of train.ema are: {averages}. Name the number of one of them, or raw.")

    def identity(self) -> dict[str, Any]:
        """Return the part of this section that identifies a run. Only checkpoints of the same identity are resumed.

        Settings that may change between starts are excluded: number of steps, intervals, hardware. The order of the
        averages does not count, unless the losses of the first decide the weights or the end.
        """
        free = {
            "microbatch", "weights", "keep_raw", "compile", "channels_last", "sharding", "init_from", "checkpoint",
            "log_every_steps", "validate_every_steps", "validation_samples", "grid_every_steps", "max_hours",
        }  # fmt: skip
        validated = self.weights == "best" or self.patience is not None
        if validated:  # the state contains the best validation so far
            free -= {"weights", "validate_every_steps", "validation_samples"}
        augment_ends = self.augment is not None and self.augment.probability > 0 and self.augment.until < 1
        if not (self.schedule.has_horizon or self.patience is not None or augment_ends):
            free.add("steps")  # no update depends on it
        if self.deterministic != "strict":
            free.add("strict_chunk")
        if self.reduce == "float32":
            free.add("reduce")
        free |= {
            key
            for key in ("freeze", "lora", "layer_decay", "lr_factors", "balance_classes", "augment")
            if not getattr(self, key)
        }
        identity = {key: value for key, value in dump(self).items() if key not in free}
        if self.deterministic == "run":  # the same numbers except for the last bits, as with `compile`
            identity["deterministic"] = "off"
        if not validated:  # of the first average, unless `weights` names another
            identity["ema"][self.ema.numbers].sort()
        return identity
