"""Configuration of the training: the section `train` of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from image_diffusion.core.config.base import Config, Sparse, dump
from image_diffusion.core.types import WeightsOf
from image_diffusion.data.augment.operations import Augment
from image_diffusion.training.finetune.lora import Lora
from image_diffusion.training.optim import Optimizer
from image_diffusion.training.optim.adam import AdamW
from image_diffusion.training.optim.determinism import Mode
from image_diffusion.training.optim.ema import Ema, ExponentialEma, RampUp, Rate, average_name
from image_diffusion.training.optim.schedule import Constant, Schedule

LARGEST_INITIAL_SHARE = 0.05
"""Largest share that the initial weights may have in an average at the end of a training without a warning."""


class CheckpointConfig(Config):
    """When to save the state from which a run resumes."""

    every_steps: int = Field(1000, gt=0)
    """Steps from one checkpoint to the next; the last step and a request to stop save as well."""
    every_seconds: float | None = Field(None, gt=0)
    """Also save whenever this long has passed since the clock last asked; unset: by steps alone. Changes no result."""
    keep_last: int = Field(2, gt=0)
    """Number of newest checkpoints that are kept."""
    keep_every: int | None = Field(None, gt=0)
    """Keep the checkpoint of every multiple of this many steps for good; unset: none."""


class TrainConfig(Sparse):
    """Configuration of the training. Everything but `steps` has a value that works."""

    if_set: ClassVar[frozenset[str]] = frozenset({"patience"})

    steps: int = Field(gt=0)
    """Updates of the weights in all."""
    global_batch: int = Field(256, gt=0)
    """Examples of one update, over all processes."""
    microbatch: int | None = Field(None, gt=0)
    """Examples a process computes at once; unset: its whole share. Follows from memory. The result stays the same to
    rounding, but for the masks of dropout, and to the bit with `deterministic: strict`, which computes `strict_chunk`
    at once."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of everything random: initial weights, order, flips, noise, timesteps, dropout."""
    optimizer: Optimizer = AdamW()
    """Optimizer, which turns gradients into updates."""
    schedule: Schedule = Constant()
    """The learning rate over time."""
    grad_clip: float | None = Field(None, gt=0)
    """Largest norm of the gradient; unset: no limit."""
    ema: Ema = ExponentialEma(warmup=RampUp())
    """Running averages of the weights."""
    weights: Literal["ema", "raw", "best"] | Rate = "ema"
    """Weights that are written at the end. ema: the first average; a number: the average of that rate (or width). raw:
    the weights as trained. best: the first average as it was at the validation with the smallest loss, which
    checkpoints then hold beside the latest."""
    keep_raw: bool = False
    """Also write the weights as trained, into the folder `raw` beside the others."""
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    """Precision that the network computes in; weights, moments and averages are float32 always. fp16 scales the
    loss."""
    tf32: bool = True
    """Let a GPU round the factors of float32 matrix products to 10 bits, which is several times faster."""
    compile: bool | Literal["cuda_graphs"] = False
    """Compile the network with torch.compile, each of its blocks on its own. Takes a minute or so at the start.
    cuda_graphs: on a GPU also record what each block launches and launch it as one, for networks so small that the GPU
    waits for launches; takes more memory."""
    channels_last: bool = False
    """Lay images out with their channels innermost, which suits convolutions."""
    sharding: Literal["none", "optimizer", "full", "machine"] = "none"
    """State that processes divide among them. optimizer: each updates a slice of the weights, and keeps moments and
    averages of that slice alone (ZeRO-1): less memory, and less to do in a step. full: each also keeps its share of
    weights and gradient alone, and gathers the weights of a block when it computes (FSDP): for networks that do not fit
    in memory otherwise; slower. machine: as full, but within each machine, and the machines add up their gradients
    (HSDP): for several machines whose network is slower than what connects the GPUs of one. Each setting resumes from
    the checkpoints of any other, on any number of processes."""
    reduce: Literal["float32", "bf16"] = "float32"
    """Precision in which processes send one another their gradients to be added up. bf16: half of the traffic, for
    networks between machines that are slower than their GPUs; sums are rounded to 8 bits."""
    deterministic: Mode = "run"
    """off: whatever kernels are fastest. run: the same bytes again on the same machines with the same number of
    processes, after any kill. strict: with any number of processes, by adding in a fixed order; slower."""
    strict_chunk: int = Field(8, gt=0)
    """Examples computed at once with `deterministic: strict`; part of the result's last bits."""
    flip_probability: float = Field(0.5, ge=0, le=1)
    """Probability with which an example is mirrored."""
    augment: Augment | None = None
    """Augmentation for small data sets, with its parameters as a condition of the network: {} for the paper's. Unset:
    mirroring alone (`flip_probability`)."""
    balance_classes: bool = False
    """Show every class as often as any other, however many images it has: of C classes every C examples hold one each,
    and no image comes again before all others of its class have come."""
    init_from: WeightsOf | str | None = None
    """Weights to start from, with a fresh optimizer: {experiment: NAME} for those of another experiment, or a weights
    folder, as `export --read` makes of published ones. Other classes start from those of the same name, or from the
    mean of all; another resolution interpolates positions. Unset: random weights."""
    freeze: tuple[str, ...] = ()
    """Parameters that stay as they are, by name: ["blocks.0.*", "t_embedder.*"]. A * stands for anything."""
    lora: Lora | None = None
    """Train low-rank adapters in place of the weights, to which they are added at the end; unset: the weights."""
    layer_decay: float | None = Field(None, gt=0, le=1)
    """Learning rates that fall towards the input: the last of the network's blocks has this factor, the one before its
    square, and so on; what lies behind the blocks keeps the whole rate. Unset: one rate for all."""
    lr_factors: dict[str, Annotated[float, Field(gt=0)]] = Field({})
    """Factors of the learning rate for parameters by name: {"y_embedder.*": 10}. A * stands for anything; factors of
    several patterns, and of `layer_decay`, are multiplied."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save the state from which a run resumes."""
    log_every_steps: int = Field(100, gt=0)
    """Steps from one log line to the next; each gives means over the steps since the last."""
    validate_every_steps: int | None = Field(1000, gt=0)
    """Steps from one loss on the validation split to the next; unset: never."""
    validation_samples: int = Field(1024, gt=0)
    """Number of samples of the validation split that are used, or all if the split has fewer."""
    patience: float | None = Field(None, gt=0, le=1)
    """End the training at the validation after which the loss has not improved for this share of `steps`; unset: at the
    last step. The schedule keeps its length."""
    grid_every_steps: int | None = Field(5000, gt=0)
    """Steps from one grid of samples to the next; unset: never."""
    max_hours: float | None = Field(None, gt=0)
    """Save and stop after this long, to be continued by the same command; unset: no limit."""

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        if self.weights == "ema" and not self.ema.names:
            raise ValueError("weights is ema but ema.rates is empty. Name a rate, or set weights to raw.")
        if isinstance(self.weights, float) and self.average is None:
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
        if self.spreads_weights:
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
        """Return the average that is used for previews and validation and that is written; None: the weights as
        trained."""
        if self.weights == "raw":
            return None
        if isinstance(self.weights, float):
            named = average_name(self.weights)
            return named if named in self.ema.names else None
        return next(iter(self.ema.names), None)

    @property
    def records(self) -> bool:
        """True if a GPU records the kernels of the network's blocks as graphs."""
        return self.compile == "cuda_graphs"

    @property
    def spreads_weights(self) -> bool:
        """True if each process holds only a share of the weights."""
        return self.sharding in ("full", "machine")

    @property
    def microbatch_key(self) -> str:
        """Return the key of the examples computed at once."""
        return "train.strict_chunk" if self.deterministic == "strict" else "train.microbatch"

    def share_of(self, processes: int) -> int:
        """Return the examples of a step that one of several processes computes, the most that any of them has; whole
        chunks with `strict`."""
        if self.deterministic != "strict":
            return -(-self.global_batch // processes)
        chunks = -(-self.global_batch // self.strict_chunk)
        return min(self.global_batch, -(-chunks // processes) * self.strict_chunk)

    def check_pairs(self, shares: Sequence[int] = ()) -> None:
        """Raise ValueError if the neighbours of a global batch would be computed apart. shares: examples of each
        process, where they are known."""
        sizes = {"train.global_batch": self.global_batch}
        sizes |= {f"the share of process {i}": size for i, size in enumerate(shares)}
        at_once = self.strict_chunk if self.deterministic == "strict" else self.microbatch
        sizes |= {} if at_once is None else {self.microbatch_key: at_once}
        for name, size in sizes.items():
            if size % 2:
                raise ValueError(
                    f"The objective pairs the samples of a batch, but {name} is {size}, an odd number. Use even "
                    f"numbers, and processes that share the global batch evenly; or set objective.contrastive to 0."
                )

    @property
    def tunes(self) -> bool:
        """True if the section names or counts parts of the network, which has to be built to check them."""
        return bool(self.freeze or self.lora or self.layer_decay or self.lr_factors or self.optimizer.looks_inside)

    def advice(self) -> list[str]:
        """Return a sentence for each setting that works but was hardly intended."""
        if self.average is None or not isinstance(self.ema, ExponentialEma):
            return []  # of the initial weights a power average has nothing, since its first update copies
        share = self.ema.initial_share(self.average, self.steps)
        if share <= LARGEST_INITIAL_SHARE:
            return []
        fitting = self.ema.fitting_rate(self.steps, LARGEST_INITIAL_SHARE)
        rates = f"train.ema.rates: [{fitting:g}] or less, or " if fitting > 0 else ""
        return [
            f"After {self.steps:,} steps {share:.0%} of the initial weights are still in the average {self.average}. "
            f"Take {rates}train.ema.warmup: {{type: ramp_up}}."
        ]

    def keeps(self, step: int) -> bool:
        """True if the weights of a step are available after the training: those of the end, and of checkpoints kept."""
        every = self.checkpoint.keep_every
        is_saved = step % self.checkpoint.every_steps == 0
        return step == self.steps or (step < self.steps and is_saved and every is not None and step % every == 0)

    def check_average(self, number: float | Literal["raw"]) -> None:
        """Raise ValueError unless the average of a rate or width, or the weights as trained, can be had of the end."""
        if self.weights == "best":
            raise ValueError("train.weights is best, whose step may be earlier than the end. Leave out one of the two.")
        if number != "raw" and average_name(number) not in self.ema.names:
            averages = ", ".join(self.ema.names) or "none"
            raise ValueError(f"the averages of train.ema are: {averages}. Name the number of one of them, or raw.")

    @property
    def _has_horizon(self) -> bool:
        """Return whether what a step does depends on the number of steps."""
        ends = self.augment is not None and self.augment.probability > 0 and self.augment.until < 1
        return self.schedule.has_horizon or self.patience is not None or ends

    def identity(self) -> dict[str, Any]:
        """Return the part of this section that identifies a run: a checkpoint of another identity is never resumed.

        Left out is what may change from start to start: how long, how often to log or save, what the machine offers.
        The order of the averages does not count, unless the losses of the first decide the weights or the end.
        """
        free = {
            "microbatch", "weights", "keep_raw", "compile", "channels_last", "sharding", "init_from", "checkpoint",
            "log_every_steps", "validate_every_steps", "validation_samples", "grid_every_steps", "max_hours",
        }  # fmt: skip
        validated = self.weights == "best" or self.patience is not None
        if validated:  # the state holds the best of the validations there were
            free -= {"weights", "validate_every_steps", "validation_samples"}
        if not self._has_horizon:
            free.add("steps")
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
        if self.deterministic == "run":  # the same numbers but for last bits, as with `compile`
            identity["deterministic"] = "off"
        if not validated:  # of the first average, unless `weights` names another
            key = "rates" if isinstance(self.ema, ExponentialEma) else "widths"
            identity["ema"][key].sort()
        return identity
