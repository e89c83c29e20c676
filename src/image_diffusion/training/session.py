"""One start of a training: join the other processes, resume from a checkpoint if any, train, and write the outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from image_diffusion.core.config.base import dump, parse
from image_diffusion.core.files.weights import read_model, read_weights
from image_diffusion.core.journal.writer import Journal, NullJournal
from image_diffusion.core.process.errors import log_line
from image_diffusion.core.types import DataSpec
from image_diffusion.systems import AnySystem
from image_diffusion.systems.base import System
from image_diffusion.systems.pairs.inputs import pairs_by_kind
from image_diffusion.systems.warm_start import Change, Trained, fitted, other_settings, table
from image_diffusion.training.checkpoint.capture import resume
from image_diffusion.training.checkpoint.manager import NullState, State, part_writer
from image_diffusion.training.checkpoint.stop_signal import Stop
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.finetune import plain_name
from image_diffusion.training.loop import train
from image_diffusion.training.monitor.reports import Reports
from image_diffusion.training.optim.numerics import DTYPES, faster_precision, switches
from image_diffusion.training.parallel import preflight
from image_diffusion.training.parallel.world import HANG_S, World, join
from image_diffusion.training.trainer import Task, Trainer

_THAW = "Take it out of train.freeze, or name it in train.lora.whole."


def run(
    build: Callable[[World], Task],
    config: TrainConfig,
    model: dict[str, Any],
    data: dict[str, Any],
    output: Path,
    journal: Path | None = None,
    start: Path | None = None,
    hang_s: float = HANG_S,
    split: str = "",
) -> None:
    """Train, or resume training, and write `output`: weights.safetensors and model.json; checkpoints in its `state`.

    build: builds the task; called with PyTorch's generator seeded, for the initial weights. model: plain data that
    rebuilds the network ("system", "spec", "codec", "classes"), kept in model.json. data: plain data that describes the
    training data. journal: the folder of journals; None: no journal. start: the weights folder to start from, if
    `init_from` names an experiment. hang_s: seconds that a process waits for another. split: digest of the split into
    training and held-out images, stored in checkpoints; a run only continues with the same split.

    `model`, `data` and the configuration identify the run; checkpoints of another run are never continued. Raises
    Stopped, ValueError or OSError as `loop.train` does.
    """
    with ExitStack() as stack:
        world = stack.enter_context(join(hang_s))
        if start is None and isinstance(config.init_from, str):
            start = Path(config.init_from)
        identity = _identity(config, model, data, start) if world.is_main else {}
        advice, asked = config.advice(), dump(config)
        config = config.on_hardware(world)
        stop = stack.enter_context(Stop(world, config.max_hours, config.checkpoint.every_seconds))
        stack.enter_context(switches(config.deterministic, config.tf32, bool(config.compile)))
        preflight.check(world, DTYPES[config.precision])

        torch.manual_seed(config.seed)
        task = build(world)
        warm = _warm_start(task.network, model, start) if world.is_main and start is not None else None
        trainer = Trainer(task, config, world)

        state: State | NullState = NullState()
        book: Journal | NullJournal = NullJournal()
        checkpoint = None
        if world.is_main:
            state = State(output / "state", identity, config.checkpoint, config.steps, hang_s, split)
            state.claim()
            checkpoint = state.load()
            state.check_previews()
            _print_advice(trainer, warm if checkpoint is None else None)
            for sentence in advice:
                log_line(f"warning: {sentence}")
        step, pending = resume(trainer, checkpoint)
        if trainer.flat.writers > 1:
            state = _with_parts(trainer, output / "state", state, hang_s)
        if isinstance(state, State) and journal is not None:
            resumed, before = (None, {}) if checkpoint is None else (step, checkpoint.attempts)
            book = Journal.open(journal, "train", resumed, {"fingerprint": state.fingerprint}, after=before)

        with book:
            book.params({"train": asked, **model, **data})
            train(trainer, Reports(trainer, stop, step, pending, state, book), stop, step)
            if world.is_main and trainer.last_step < trainer.steps:
                print(
                    f"The training ends at step {trainer.last_step:,} of {trainer.steps:,}: the validation loss is "
                    f"smallest, {trainer.patience.loss:.4g}, at step {trainer.patience.step:,}, and train.patience is "
                    f"{trainer.patience.share:g}.",
                    flush=True,
                )
                book.params({"ended_early_at": trainer.last_step})
        for shards in filter(None, (task.data, task.validation)):
            shards.verified()
        started = {"started_from": sha256} if (sha256 := identity.get("init_from")) else {}
        _write(trainer, {**model, "train": asked, "data": data, **started}, output, state)


def _with_parts(trainer: Trainer, root: Path, state: State | NullState, hang_s: float) -> State | NullState:
    """Return the state of this process if several processes write checkpoints. state: the state of the first process.
    All processes call it together."""
    world = trainer.world
    run = (state.fingerprint, state.token) if isinstance(state, State) else ("", "")
    fingerprint, token = world.broadcast_object(run)
    if world.is_main or world.rank >= trainer.flat.writers:
        return state
    return part_writer(root, fingerprint, token, hang_s)


def _print_advice(trainer: Trainer, warm: tuple[str, list[str]] | None) -> None:
    """Print advice before a training begins. warm: result of `_warm_start`; None if it does not start from other
    weights."""
    if advice := faster_precision(trainer.precision.dtype, trainer.world.device):
        print(advice, flush=True)
    if warm is not None:
        summary, class_tables = warm
        print(summary, flush=True)
        for name in set(class_tables) - {plain_name(parameter) for parameter in trainer.flat.parameters}:
            log_line(f"warning: {name} is new for other classes, but frozen. {_THAW}")


def _identity(config: TrainConfig, model: dict[str, Any], data: dict[str, Any], start: Path | None) -> dict[str, Any]:
    """Return the plain data that identify a run."""
    sha256 = None if start is None else read_model(start)["sha256"]
    identity = {"train": config.identity(), **model, "data": data, "init_from": sha256}
    identity.pop("missing_numbers", None)  # follows from the data, and is absent in trainings of earlier versions
    plain: dict[str, Any] = json.loads(json.dumps(identity))  # tuples become lists, as in a checkpoint that is read
    return plain


def _warm_start(network: nn.Module, model: dict[str, Any], folder: Path) -> tuple[str, list[str]]:
    """Load the weights in a folder into a network, as far as they fit. model: description of the training's model."""
    tensors, other = read_weights(folder)
    changes: list[Change] = []
    class_tables: list[str] = []
    settings = ""
    if any(other.get(key) != model.get(key) for key in ("system", "spec", "classes", "pairs")):
        before = _weights_info(other, f"{folder}/model.json", named="train" in other)
        now = _weights_info(model, "train.yaml", named=True)
        try:
            tensors, changes = fitted(network, now, tensors, before)
        except ValueError as error:
            raise ValueError(f"train.init_from is {folder}. {error}") from None
        if differing := other_settings(now, before):
            settings = f"They were trained with other settings: {', '.join(differing)}."
        class_tables = [
            change.name for change in changes if change.here and change.name in now.system.warm_start.class_rows
        ]
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise ValueError(f"The weights in {folder} do not fit the network. {words}") from None
    space = "" if other["codec"] == model["codec"] else _other_latents(model["codec"], other["codec"])
    summary = f"Starting from {folder}: {len(tensors) - len(changes)} of {len(tensors)} tensors as they are.{space}"
    return "\n".join(filter(None, [summary, settings, table(changes)])), class_tables


def _weights_info(model: dict[str, Any], where: str, *, named: bool) -> Trained:
    """Return the description of weights. named: True if classes have names; classes of published weights are only
    numbers."""
    system: System = parse(AnySystem, model["system"], where)
    pairs = pairs_by_kind(model.get("pairs"), system.joined_kinds or ("pairs",))
    return Trained(system, parse(DataSpec, model["spec"], where), model["classes"] if named else None, pairs)


def _other_latents(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return a sentence on the latent space that weights were trained in, if it differs from the training's."""
    if ours["identity"] != theirs["identity"]:
        return f" They were trained in the space of another codec, {theirs['identity']}."
    return " Their latents were normalised otherwise." if ours != theirs else ""


def _write(trainer: Trainer, model: dict[str, Any], output: Path, state: State | NullState) -> None:
    """Write the weights, which all processes gather together. model: includes the section `train` as configured."""
    carried, end = trainer.task.carried, trainer.last_step
    ended = {"ended_early_at": end} if end < trainer.steps else {}

    def described(step: int, average: str | None) -> dict[str, Any]:
        seen = step * trainer.global_batch
        return {**model, "step": step, "examples_seen": seen, "ema": average, **ended}

    if trainer.keeps_raw:
        state.save_weights(output / "raw", trainer.raw_weights(), described(end, None), carried)
    else:
        state.remove(output / "raw")
    step = trainer.best.step or end
    state.save_weights(output, trainer.weights(), described(step, trainer.average), carried)
