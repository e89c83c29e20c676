"""Trainings of a fraction of a second, for tests that train hundreds of times.

A system under test is a name in `SYSTEMS` and a function that builds the task to train.
"""

from __future__ import annotations

import math
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import dump, parse, read_yaml, to_yaml
from image_diffusion.core.files.atomic import write_text
from image_diffusion.core.files.weights import save_weights
from image_diffusion.core.pictures import save_picture
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import EMBEDDING, Batch, DataSpec, Losses, Network, Objective
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.sources.scikit_digits import PaintedDigits
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.features import base as features
from image_diffusion.metrics.features.classifier import InPipeDetector
from image_diffusion.metrics.features.classifier_training import DetectorTraining, train_detector
from image_diffusion.stages import embed, evaluate, reference, sample
from image_diffusion.systems import SYSTEMS, AnySystem
from image_diffusion.systems.diffusion.base import DiffusionSystem
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.diffusion.image_generation import ImageMaker
from image_diffusion.systems.pairs import contrastive
from image_diffusion.systems.prior import generation as making
from image_diffusion.systems.prior.prior import PriorSystem
from image_diffusion.systems.tokens.tokens import TokensSystem
from image_diffusion.text_encoders.hashing import HashingText
from image_diffusion.training import session as training_run
from image_diffusion.training.checkpoint.manager import State
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.monitor.reports import Reports
from image_diffusion.training.parallel import preflight
from image_diffusion.training.parallel.flat_parameters import Flat, Work
from image_diffusion.training.parallel.world import World
from image_diffusion.training.parallel.zero import SlicedFlat
from image_diffusion.training.session import run
from image_diffusion.training.trainer import Task, Trainer


class Latents:
    """Samples in memory, with the interface of shards. 53 is a prime: no batch divides an epoch."""

    def __init__(self, num_samples: int = 53, seed: int = 0) -> None:
        ids = torch.arange(num_samples)
        self.num_samples, self.shape, self.dtype = num_samples, (4, 8, 8), torch.float32
        self.labels: NDArray[np.int64] = (ids % 3).numpy()
        self.manifest = {"kind": "crops"}
        self._stored = Streams(seed, torch.zeros_like(ids), ids).normal("latents", self.shape)

    def gather(
        self, indices: NDArray[np.int64], flip: NDArray[np.bool_] | None = None, out: Tensor | None = None
    ) -> Tensor:
        stored = self._stored[torch.from_numpy(indices)]
        if flip is not None:
            rows = torch.from_numpy(np.flatnonzero(flip))
            stored[rows] = stored[rows].flip(-1)
        return stored

    beside: ClassVar[dict[str, Any]] = {}

    def gather_joined(self, indices: NDArray[np.int64], flip: NDArray[np.bool_] | None = None) -> tuple[Tensor, ...]:
        return ()

    def verified(self) -> None: ...


class Denoiser(nn.Module):
    """Two layers, an embedding table of classes, and dropout, which draws from PyTorch's own generator."""

    def __init__(self, size: int = 256, hidden: int = 24) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(size, hidden), nn.Linear(hidden, size)
        self.label, self.time = nn.Embedding(4, hidden), nn.Linear(1, hidden)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor, t: Tensor, *, label: Tensor) -> Tensor:
        hidden = self.first(x.flatten(1)) + self.time(t[:, None]) + self.label(label)
        return self.scale * self.last(self.dropout(torch.nn.functional.silu(hidden))).view_as(x)


class Eps(Objective):
    """Predict the noise at a cosine of the time, which is drawn with weights learnt from the losses."""

    def __init__(self) -> None:
        self.memory = Quartiles()

    def __call__(self, network: Network, batch: Batch) -> Losses:
        u = batch.streams.uniform("timestep")
        history = self.memory.history
        edges = torch.cumsum(history / history.sum(), 0).to(u.device)
        t = 0.5 * u + 0.125 * torch.searchsorted(edges, u.double()).clamp(max=3)
        eps = batch.streams.normal("noise", tuple(batch.x.shape[1:]))
        angle = 0.5 * math.pi * t.view(-1, 1, 1, 1)
        label = torch.where(batch.streams.event("label_drop", 0.1), 3, batch.cond["label"])
        if torch.is_grad_enabled() and "DRAWN" in os.environ:
            rows = zip(batch.streams.epoch, batch.streams.sample, u, label, eps.double().sum((1, 2, 3)), strict=True)
            with Path(os.environ["DRAWN"]).open("a") as file:
                file.writelines(" ".join(repr(value.item()) for value in row) + "\n" for row in rows)
        prediction = network(torch.cos(angle) * batch.x + torch.sin(angle) * eps, t, label=label)
        mse = (prediction - eps).square().flatten(1).mean(1)
        return Losses(loss=mse, parts={"mse": mse.detach()}, time=t)


class Quartiles:
    """A moving average of the loss in each quartile of the time."""

    def __init__(self) -> None:
        self.history = torch.ones(4, dtype=torch.float64)

    def observe(self, losses: Losses) -> None:
        assert losses.time is not None
        for quartile, loss in zip((losses.time * 4).long().tolist(), losses.loss.tolist(), strict=True):
            self.history[quartile] = 0.9 * self.history[quartile] + 0.1 * loss

    def state_dict(self) -> dict[str, Tensor]:
        return {"history": self.history}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.history = state["history"].clone()


def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
    return Batch(stored + 0.01 * streams.normal("posterior", tuple(stored.shape[1:])), {"label": label}, streams)


def mlp(world: World) -> Task:
    """A denoiser of two layers, with every feature that a task can have."""
    return Task(Denoiser(), Eps(), prepare, Latents(), Latents(29, seed=1))  # type: ignore[arg-type]


def _nan_loss(rank: int) -> None:
    """Make the loss of one sample NaN."""
    whole = Eps.__call__

    def call(self: Eps, network: Network, batch: Batch) -> Losses:
        losses = whole(self, network, batch)
        hit = (batch.streams.sample == 17) & (batch.streams.epoch == 1)
        return Losses(torch.where(hit, torch.nan, losses.loss), losses.parts, losses.time)

    Eps.__call__ = call  # type: ignore[method-assign]


def _full_disk(rank: int) -> None:
    """Limit files to 20,000 bytes, as a full disk would."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def _clock_jumps(rank: int) -> None:
    """Let the wall clock jump by days, back and forth."""
    real, draw = time.time, random.Random(rank)
    time.time = lambda: real() + draw.uniform(-1e6, 1e6)  # type: ignore[assignment]
    time.time_ns = lambda: int(time.time() * 1e9)  # type: ignore[assignment]


def _a_minute() -> None:
    """Wait a minute, and signal that by a file `waiting` in the folder of the run."""
    Path(os.environ["RUN"], "waiting").touch()
    time.sleep(60)


def _slow_step(rank: int) -> None:
    """Let every step take a minute."""
    whole = Eps.__call__

    def call(self: Eps, network: Network, batch: Batch) -> Losses:
        _a_minute()
        return whole(self, network, batch)

    Eps.__call__ = call  # type: ignore[method-assign]


def _slow_validation(rank: int) -> None:
    """Let a validation take a minute."""
    whole = Latents.gather

    def gather(self: Latents, *arguments: Any, **options: Any) -> Tensor:
        if self.num_samples == 29:
            _a_minute()
        return whole(self, *arguments, **options)

    Latents.gather = gather  # type: ignore[method-assign]


def _no_dropout(rank: int) -> None:
    """Switch dropout off: its masks depend on the process."""
    nn.Dropout.forward = lambda self, x: x  # type: ignore[method-assign]


def _previews(rank: int) -> None:
    """Draw previews in the first process, of more samples than a process is given."""

    def grid(network: nn.Module, step: int, folder: Path) -> dict[str, Path | float]:
        assert rank == 0
        x = Latents(7, seed=2).gather(np.arange(7))
        outputs = [network(x, torch.full((7,), t), label=torch.arange(7) % 4) for t in (0.2, 0.8)]
        picture = folder / f"step-{step:07d}.png"
        save_picture(Image.new("L", (step + 1, 1)), picture)
        return {"preview": torch.stack(outputs).square().mean().item(), "picture": picture}

    SYSTEMS["mlp"] = lambda world: replace(mlp(world), grid=grid)


def _slow_previews(rank: int) -> None:
    """Let the first preview take longer than `hang_s`."""
    global run

    def grid(network: nn.Module, step: int, folder: Path) -> dict[str, Path | float]:
        if step == 0:
            time.sleep(6.0)
        return {}

    SYSTEMS["mlp"] = lambda world: replace(mlp(world), grid=grid)
    run = partial(run, hang_s=4.0)


def _held(where: Any, name: str, is_last: Callable[..., bool]) -> Callable[[int], None]:
    """Delay the last call of a function until there is a file `go` in the folder of the run."""

    def inject(rank: int) -> None:
        _previews(rank)
        whole, folder = getattr(where, name), Path(os.environ["RUN"])

        def held(*arguments: Any) -> Any:
            if is_last(*arguments) and not (folder / "waiting").exists():
                (folder / "waiting").touch()
                while not (folder / "go").exists():
                    time.sleep(0.02)
            return whole(*arguments)

        setattr(where, name, held)

    return inject


def _half(rank: int) -> None:
    """Raise an error if a process keeps more than half of an average, of tensors with the same layout, or of the
    weights if those are sharded as well."""

    def check(trainer: Trainer, sharding: str) -> None:
        flat = trainer.flat
        kept = flat.values, flat.gradient, *trainer.optimizer.moments.values(), *trainer.averages.vectors.values()
        parameters = flat.parameters.values()
        total = sum(parameter.numel() for parameter in parameters)
        if sharding == "full":
            assert sum(cast(Any, parameter).to_local().numel() for parameter in parameters) <= 0.51 * total
        assert all(vector.numel() <= 0.51 * total for vector in kept)

    _check_updates(check)


def _check_updates(check: Callable[[Trainer, str], None]) -> None:
    """Call a check with the trainer and the configured sharding after each update."""
    prepare, whole, configured = Trainer.__init__, Trainer.update, list[str]()

    def init(self: Trainer, task: Task, config: TrainConfig, world: World) -> None:
        configured.append(config.sharding)
        prepare(self, task, config, world)

    def update(self: Trainer, step: int) -> None:
        whole(self, step)
        check(self, configured[-1])

    Trainer.__init__ = init  # type: ignore[method-assign]
    Trainer.update = update  # type: ignore[method-assign]


def _overflow(rank: int) -> None:
    """Make the second process's last gradient infinite in the first two steps."""
    left = [2]

    def of(whole: Callable[..., Work]) -> Callable[..., Work]:
        def begin_sum(self: Flat, start: int, stop: int) -> Work:
            if rank == 1 and left[0] and stop == self.size:
                left[0] -= 1
                self.local[self.slots[-1].start] = math.inf
            return whole(self, start, stop)

        return begin_sum

    for kind in (Flat, SlicedFlat):
        kind.begin_sum = of(kind.begin_sum)  # type: ignore[method-assign]


def _two_machines(rank: int) -> None:
    """Simulate two machines with two of four processes each; `machine` shares a machine's state between its two."""
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))

    def check(trainer: Trainer, sharding: str) -> None:
        total = sum(math.prod(parameter.shape) for parameter in trainer.flat.parameters.values())
        share = len(trainer.flat.values) / total
        least = 0.5 if sharding == "machine" else 0.25
        assert least <= share < 1.5 * least, share

    _check_updates(check)


def _one_gpu(rank: int) -> None:
    """Let all processes share the first GPU, and reduce through gloo: NCCL requires a GPU for each."""
    whole = dist.init_process_group

    def init(backend: str, **options: Any) -> None:
        options.pop("device_id", None)
        whole("gloo", **options)

    dist.init_process_group = init
    os.environ["LOCAL_RANK"] = "0"


def _on_two_machines(change: Callable[[], None]) -> Callable[[int], None]:
    """Simulate a machine for each process, and change something on the second."""

    def inject(rank: int) -> None:
        os.environ["SLURMD_NODENAME"] = f"node{rank}"
        if rank == 1:
            change()

    return inject


def _wrong_product() -> None:
    """Make one number of a product wrong."""
    whole = preflight.linear

    def linear(*given: Any) -> Tensor:
        product = whole(*given)
        product[7, 5] += 1
        return product

    preflight.linear = linear


def _slow_product() -> None:
    """Let a product take 20 ms."""
    whole = preflight.linear

    def linear(*given: Any) -> Tensor:
        time.sleep(0.02)
        return whole(*given)

    preflight.linear = linear


def _wrong_sum() -> None:
    """Change a number of a sum over all processes."""

    def check(*given: Any) -> None:
        with patch.object(dist, "all_reduce", all_reduce):
            whole_check(*given)

    def all_reduce(tensor: Tensor, *given: Any, **named: Any) -> None:
        whole(tensor, *given, **named)
        tensor.view(-1)[3] += 1

    whole, whole_check, preflight.check = dist.all_reduce, preflight.check, check


def _no_preflight(rank: int) -> None:
    """Skip all checks before the first step."""
    preflight.check = lambda *given: None


def _late() -> None:
    """Let each loss take 50 ms longer."""
    whole = Eps.__call__

    def call(self: Eps, network: Network, batch: Batch) -> Losses:
        time.sleep(0.05)
        return whole(self, network, batch)

    Eps.__call__ = call  # type: ignore[method-assign]


INJECTED: dict[str, Callable[[int], None]] = {
    "nan": _nan_loss,
    "full disk": _full_disk,
    "clock jumps": _clock_jumps,
    "slow step": _slow_step,
    "slow validation": _slow_validation,
    "no dropout": _no_dropout,
    "previews": _previews,
    "slow previews": _slow_previews,
    "half": _half,
    "overflow": _overflow,
    "two machines": _two_machines,
    "held before the weights": _held(training_run, "_write", lambda *_: True),
    "held before a checkpoint": _held(State, "save", lambda state, checkpoint: checkpoint.step == 13),
    "held before a picture": _held(Reports, "_draw", lambda reports, step: step == 13),
    "one gpu": _one_gpu,
    "no preflight": _no_preflight,
    "two hosts": _on_two_machines(lambda: None),
    "wrong product": _on_two_machines(_wrong_product),
    "slow product": _on_two_machines(_slow_product),
    "wrong sum": _on_two_machines(_wrong_sum),
    "late": _on_two_machines(_late),
}
"""Injected faults and settings by name: functions of a process's rank."""

TINY: dict[str, dict[str, Any]] = {
    "dit": {"network": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4}},
    "aligned": {
        "type": "dit",
        "network": {"depth": 2, "width": 16, "num_heads": 2, "patch": 4},
        "alignment": {"block": 1, "projector": "mlp", "projector_width": 8, "until_step": 9},
    },
    "decoder": {
        "type": "dit",
        "condition": {"type": "embedding"},
        "network": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4},
    },
    "iddpm": {
        "network": {
            "channels": 32,
            "multipliers": [1],
            "num_res_blocks": 1,
            "attention_resolutions": [],
            "dropout": 0.1,
        },
        "process": {"type": "discrete", "num_timesteps": 20},
        "objective": {
            "type": "denoising",
            "variance": "learned_range",
            "loss": "hybrid",
            "timestep_sampling": {"type": "loss_second_moment", "history": 2},
        },
    },
    "super_resolution": {
        "type": "iddpm",
        "network": {
            "channels": 32,
            "multipliers": [1],
            "num_res_blocks": 1,
            "attention_resolutions": [],
        },
        "condition": [{"type": "label"}, {"type": "image", "from": "self", "shrink": 2}],
        "process": {"type": "discrete", "num_timesteps": 20},
    },
    "edges": {
        "type": "dit",
        "condition": [{"type": "label"}, {"type": "image", "from": "self", "edges": True}],
        "network": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4},
    },
    "hole": {
        "type": "rin",
        "condition": [{"type": "label"}, {"type": "image", "from": "self", "hole": {}}],
        "network": {"width": 16, "patch": 4, "depth": 1, "num_latents": 4, "num_heads": 1, "head_width": 8},
        "objective": {"type": "denoising", "prediction": "v", "label_drop_probability": 0.2},
    },
    "rin": {
        "network": {"width": 16, "patch": 4, "depth": 1, "num_latents": 4, "num_heads": 1, "head_width": 8},
        "objective": {"type": "denoising", "prediction": "v"},
    },
    "autoencoder": {"network": {"block_channels": [4, 8], "latent_channels": 2, "norm_groups": 2}},
    "dvae": {
        "network": {"num_tokens": 8, "codebook_dim": 4, "num_layers": 2, "num_resnet_blocks": 1, "hidden_dim": 8},
        "objective": {"kl_weight": 0.1, "temperature": {"rate": 0.05}},
    },
    "vector_dvae": {
        "type": "dvae",
        "network": {
            "num_tokens": 8,
            "codebook_dim": 4,
            "vector_quantiser": {"decay": 0.9, "dead_below": 0.5},
            "num_layers": 2,
            "num_resnet_blocks": 1,
            "hidden_dim": 8,
        },
    },
    "adversarial": {
        "type": "dvae",
        "network": {"levels": [3, 3], "num_layers": 2, "num_resnet_blocks": 1, "hidden_dim": 8},
        "adversarial": {"width": 16, "num_layers": 1},
    },
    "tokens": {"network": {"depth": 1, "width": 16, "num_heads": 2}},
    "prior": {
        "network": {
            "depth": 1,
            "num_heads": 2,
            "head_width": 8,
            "max_text_len": 4,
            "ff_mult": 1,
            "self_cond": True,
            "attention_dropout": 0.1,
            "ff_dropout": 0.1,
        },
        "process": {"type": "discrete", "schedule": {"type": "cosine"}, "num_timesteps": 20},
    },
}
"""Settings that make a system small enough to be trained hundreds of times, by its type, or by a name and its type."""


def _small(kind: str) -> Callable[[World], Task]:
    """Build a tiny system of the package."""

    def build(world: World) -> Task:
        system = parse(AnySystem, {"type": kind, **TINY[kind]}, kind)
        if isinstance(system, PriorSystem):
            return _small_prior(system)
        if isinstance(system, TokensSystem):
            return _small_tokens(system)
        features = (4, 8, 8) if kind == "aligned" else None
        told = {EMBEDDING: (32,)} if kind == "decoder" else {}
        spec = DataSpec(channels=4, resolution=8, num_classes=0 if told else 3, conditions=told, features=features)
        labelled = "sample" in system.sections and not told
        image = system.conditioning.image if isinstance(system, DiffusionSystem) else None
        if image is not None:
            spec = system.conditioning.spec(spec, {})

        def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
            cond = {"label": label} if labelled else {}
            if told:
                cond[EMBEDDING] = stored[:, 0, :4].flatten(1)
            if image is not None:
                cond |= image.degraded(stored, streams)
            return Batch(stored, cond, streams, features=stored if spec.features else None)

        network = system.build_network(spec)
        return Task(network, system.build_objective(spec), prepare, Latents(), Latents(29, seed=1))  # type: ignore[arg-type]

    return build


def _small_prior(system: PriorSystem) -> Task:
    """Build a tiny prior: the 32 rows of 8 numbers are an image, its caption, and the caption's tokens."""

    spec = DataSpec(channels=8, resolution=1)

    def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
        return system.batch(stored.flatten(1, 2), label, streams, spec, None)  # type: ignore[arg-type]

    return Task(
        system.build_network(spec),
        system.build_objective(spec),
        prepare,
        Latents(),
        Latents(29, seed=1),  # type: ignore[arg-type]
    )


def _small_tokens(system: TokensSystem) -> Task:
    """Build a tiny token system: four tokens, by the signs of two channels."""
    spec = DataSpec(channels=4, resolution=8, num_classes=3)

    def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
        signs = (stored > 0).long()
        return system.batch(signs[:, 0] + 2 * signs[:, 1], label, streams, spec, codec=None)  # type: ignore[arg-type]

    return Task(
        system.build_network(spec),
        system.build_objective(spec),
        prepare,
        Latents(),
        Latents(29, seed=1),  # type: ignore[arg-type]
    )


KINDS = [kind.model_fields["type"].default for kind in SYSTEMS]

assert set(KINDS) <= set(TINY), "a system has no tiny settings"
SYSTEMS: dict[str, Callable[[World], Task]] = {"mlp": mlp, **{kind: _small(kind) for kind in TINY}}
"""Tasks to train, by name: a stand-in with every feature of a task, and every system of the package."""

MODEL = {
    "system": {"type": "mlp"},
    "spec": {"channels": 4, "resolution": 8, "num_classes": 3},
    "codec": {},
    "classes": [],
}


def config(**changes: Any) -> TrainConfig:
    """Return a short training whose checkpoints, log lines and validations do not coincide."""
    settings: dict[str, Any] = {
        "steps": 13,
        "global_batch": 12,
        "microbatch": 5,
        "optimizer": {"type": "adamw", "lr": 1e-2, "weight_decay": 0.01},
        "schedule": {"type": "cosine", "warmup_steps": 3},
        "grad_clip": 1.0,
        "ema": {
            "type": "exponential",
            "rates": [0.9, 0.99],
            "warmup": {"type": "inverse_power", "update_after_step": 2},
        },
        "weights": "best",
        "checkpoint": {"every_steps": 4, "keep_last": 2},
        "log_every_steps": 3,
        "validate_every_steps": 5,
        "strict_chunk": 3,
    }
    return TrainConfig.model_validate(settings | changes)


def start(folder: Path, system: str = "mlp", **changes: Any) -> None:
    """Start a training in a folder, or another job of `STAGES`."""
    if system in STAGES:
        STAGES[system](folder, **changes)
    else:
        run(SYSTEMS[system], config(**changes), MODEL, {"digest": "x"}, folder / "train", folder / "journal")


def write_prior(folder: Path) -> None:
    """Write an untrained prior, and the settings with which `sample` makes embeddings by it."""
    torch.manual_seed(0)
    system, spec = parse(PriorSystem, {"type": "prior", **TINY["prior"]}, "prior"), DataSpec(channels=8, resolution=1)
    described = {
        "system": dump(system),
        "spec": dump(spec),
        "codec": {"config": dump(Rgb()), "identity": Rgb().identity, "scale": None},
        "classes": [],
        "step": 1,
        "examples_seen": 1,
        "pairs": {"text": HashingText(8, 4).identity},
    }
    save_weights(folder, system.build_network(spec).state_dict(), described)
    settings = {"prompts": ["a dark one", "a light one"], "sampler": {"type": "ddim", "num_steps": 2}, "batch_size": 4}
    chosen = dump(parse(making.PriorSampleConfig, settings | {"num_candidates": 2}, "sample"))
    write_text(folder / "sample.yaml", to_yaml({"sample": chosen}))


def write_embeddings(folder: Path, num_samples: int = 23, num_parts: int = 0) -> None:
    """Run the stage `sample` of the folder `prior` next to this one, ten rows a file. num_parts: jobs, joined at the
    end."""
    making._ROWS = 10
    prior = folder.parent / "prior"
    given = ["--config", prior / "sample.yaml", "--weights", prior / "weights.safetensors"]
    given += ["--set", f"sample.num_samples={num_samples}"]
    parts = [folder / f"part-{i}-of-{num_parts}.npz" for i in range(num_parts)]
    for i, part in enumerate(parts):
        if not part.exists():
            sample.main([*map(str, given), "--part", f"{i}/{num_parts}", "--output", str(part)])
    made = ["--made", *parts] if parts else []
    sample.main(list(map(str, [*given, *made, "--output", folder / making.FILE])))


def counted(kind: Any, name: str, folder: Path, stop_at: int | None, number: int) -> None:
    """Record each call of a method by a dot in a file next to the folder; before this start's call of the given number,
    end the process by a signal."""
    original, done = getattr(kind, name), [0]

    def call(*given: Any, **named: Any) -> Any:
        done[0] += 1
        if done[0] == stop_at:
            os.kill(os.getpid(), number)
        with folder.with_suffix(".calls").open("a") as file:
            file.write(".")
        return original(*given, **named)

    setattr(kind, name, call)


def write_diffusion(folder: Path) -> None:
    """Write an untrained DiT, and the settings with which `sample` makes images by it."""
    torch.manual_seed(0)
    system, spec = parse(DiTSystem, {"type": "dit", **TINY["dit"]}, "system"), DataSpec(channels=3, resolution=8)
    codec = {"config": dump(Rgb()), "identity": Rgb().identity, "scale": None}
    described = {"system": dump(system), "spec": dump(spec), "codec": codec, "classes": []}
    network = system.build_network(spec)
    for each in network.parameters():
        nn.init.normal_(each, std=0.2)
    save_weights(folder, network.state_dict(), described | {"step": 1, "examples_seen": 1})
    settings = {"num_samples": 23, "batch_size": 4, "grid_images": 6, "sampler": {"type": "ddim", "num_steps": 2}}
    write_text(folder / "sample.yaml", to_yaml({"sample": dump(parse(SampleConfig, settings, "sample"))}))


def write_data(folder: Path) -> None:
    """Write crops of 90 pictures, and a detector trained on them."""
    draw = np.random.default_rng(0)
    for number in range(90):
        low = 100 * (number % 2)
        pixels = draw.integers(low, low + 128, (8, 8, 3), dtype=np.uint8)
        save_picture(Image.fromarray(pixels), folder / "in" / f"{number % 2}" / f"{number}.png")
    source = {"type": "folder", "path": str(folder / "in")}
    told = {"name": "x", "source": source, "resolution": 8, "num_shards": 2, "validation_fraction": 0.4}
    crop_dataset(DataConfig.model_validate(told), folder / "crops")
    splits = [open_shards(folder / "crops", split) for split in ("train", "validation")]
    train_detector(*splits, DetectorTraining(least_examples=500, epochs=1), folder / "detector")  # type: ignore[arg-type]
    write_text(folder / "reference.yaml", to_yaml({"detector": {"type": "inpipe"}}))
    write_text(folder / "evaluate.yaml", to_yaml({"evaluate": dump(EvaluateConfig())}))


def _looking(folder: Path, stop_at: int | None, number: int) -> list[str]:
    """Keep two detector batches together, and count the detector's calls."""
    features._KEPT_TOGETHER = 2 * features.AT_ONCE
    counted(InPipeDetector, "__call__", folder, stop_at, number)
    data = folder.parent / "data"
    return ["--data", str(data / "crops"), "--detector", str(data / "detector")]


def write_reference(folder: Path, part: str = "", stop_at: int | None = None, number: int = 0) -> None:
    """Run the stage `reference` of the data in the folder next to this one, or of a part of them."""
    given = ["--config", str(folder.parent / "data" / "reference.yaml"), *_looking(folder, stop_at, number)]
    given += ["--part", part, "--output", str(folder / "part.npz")] if part else ["--output", str(folder)]
    _command(reference.main, given)


def write_metrics(folder: Path, keep: bool = True, stop_at: int | None = None, number: int = 0) -> None:
    """Run the stage `evaluate` of stored images, or of images that it draws. The network's batches count too."""
    model, name = folder.parent / "model", "stored" if keep else "not-stored"
    samples = folder.parent / name / "samples.npz"
    with_model = ["--config", str(model / "sample.yaml"), "--weights", str(model / "weights.safetensors")]
    if not samples.exists():
        sample.main(
            [*with_model, "--set", "sample.num_samples=70", "--set", f"sample.keep={keep}", "--output", str(samples)]
        )
        write_text(folder.parent / f"{name}.yaml", to_yaml(_with(model / "sample.yaml", num_samples=70, keep=keep)))
    given = [*_looking(folder, stop_at, number), "--config", str(folder.parent / "data" / "evaluate.yaml")]
    if not keep:
        given += ["--making", str(folder.parent / f"{name}.yaml")]
        counted(ImageMaker, "__call__", folder.with_name(f"{folder.name}-made"), None, 0)
    given += [*with_model[2:], "--samples", str(samples), "--report", str(folder / "report")]
    _command(evaluate.main, [*given, "--output", str(folder / "metrics.json")])


def write_pairs(folder: Path, stop_at: int | None = None, number: int = 0, of: str = "steps") -> None:
    """Run the stage `embed` of painted digits: train a small CLIP on them, then embed them in two shards. Steps are
    counted, or embedded batches, next to `folder`-shards; either may end the process."""
    data = folder.parent / "painted"
    source = PaintedDigits(num_images=120)
    if not data.exists():
        told = {"name": "x", "source": source, "resolution": 32, "num_shards": 2, "validation_fraction": 0.2}
        crop_dataset(DataConfig.model_validate(told), data)
        pairs = {"type": "contrastive", "captions": {"type": "beside"}, "num_tokens": 4}
        pairs |= {"training": {"epochs": 8, "batch_size": 16}}
        stage = {"name": "x", "source": dump(source), "num_shards": 2, "max_bad_fraction": 0.0, "pairs": pairs}
        write_text(data / "embed.yaml", to_yaml(stage))
    counted(contrastive, "contrastive_loss", folder, stop_at if of == "steps" else None, number)
    shards = folder.with_name(f"{folder.name}-made")
    counted(contrastive.ImageTower, "images", shards, stop_at if of == "shards" else None, number)
    given = ["--config", str(data / "embed.yaml"), "--data", str(data / "manifest.json")]
    _command(embed.main, [*given, "--output", str(folder / "manifest.json")])


def _with(path: Path, **changes: Any) -> dict[str, Any]:
    data = read_yaml(path)
    return {"sample": data["sample"] | changes}


def _command(main: Callable[[], None], given: list[str]) -> None:
    sys.argv = ["command", *given]
    main()


def write_images(folder: Path, part: str = "", stop_at: int | None = None, number: int = 0) -> None:
    """Run the stage `sample` of the model in the folder next to this one, six batches, or those of a part alone."""
    counted(ImageMaker, "__call__", folder, stop_at, number)
    model = folder.parent / "model"
    given = ["--config", model / "sample.yaml", "--weights", model / "weights.safetensors"]
    name = f"part-{part.replace('/', '-of-')}.npz" if part else "samples.npz"
    sample.main(list(map(str, [*given, *(["--part", part] if part else []), "--output", folder / name])))


STAGES: dict[str, Callable[..., None]] = {
    "embeddings": write_embeddings,
    "images": write_images,
    "reference": write_reference,
    "metrics": write_metrics,
    "pairs": write_pairs,
}
"""Other jobs that are started and killed, by name."""
