"""One start of a training: join the other processes, go on from the state there is, train, write what was declared."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from image_diffusion.core.config import dump
from image_diffusion.core.journal import Journal, NullJournal
from image_diffusion.core.verify import write_listing
from image_diffusion.core.weights import read_model, read_weights, save_weights
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.determinism import switches
from image_diffusion.training.distributed import World, join
from image_diffusion.training.loop import train
from image_diffusion.training.parts import Parts, Task
from image_diffusion.training.precision import faster_in_bf16
from image_diffusion.training.signals import Stop
from image_diffusion.training.state import State


def run(
    build: Callable[[World], Task],
    config: TrainConfig,
    model: dict[str, Any],
    data: dict[str, Any],
    output: Path,
    journal: Path | None = None,
) -> None:
    """Train, or go on training, and write `output`: weights.safetensors and model.json; checkpoints in its `state`.

    build: what to train on what; called with PyTorch's generator seeded, for the initial weights. model: plain data
    that rebuilds the network ("system", "spec", "codec", "classes"), kept in model.json. data: plain data that says
    what the training data are. journal: the folder of journals; None: none is kept.

    The run is what `model`, `data` and the configuration say it is; another run's checkpoints are never continued.
    Raises Stopped, ValueError or OSError as `loop.train` does.
    """
    with ExitStack() as stack:
        world = stack.enter_context(join())
        stop = stack.enter_context(Stop(world, config.max_hours, config.checkpoint.every_seconds))
        stack.enter_context(switches(config))
        torch.manual_seed(config.seed)
        task = build(world)
        if world.is_main and config.init_from is not None:
            _warm_start(task.network, Path(config.init_from))
        parts = Parts(task, config, world)
        if world.is_main and (advice := faster_in_bf16(config.precision, world.device)):
            print(advice, flush=True)
        state, checkpoint = None, None
        if world.is_main:
            state = State(output / "state", _identity(config, model, data), config.checkpoint, config.steps)
            state.claim()
            checkpoint = state.load()
        step, due = parts.restore(checkpoint)
        keeps = state is not None and journal is not None
        book: Journal | NullJournal = NullJournal()
        if state is not None and journal is not None:
            resumed = step if checkpoint is not None else None
            book = Journal.open(journal, "train", resumed, {"fingerprint": state.fingerprint})
        if world.is_main:
            for sentence in config.advice():
                print(f"warning: {sentence}", file=sys.stderr, flush=True)
        with book:
            if keeps:
                book.params({"train": dump(config), **model, **data})
            train(parts, step, due, state, book, stop)
        for read in filter(None, (task.data, task.validation)):
            read.verified()
        _write(parts, model, output, state)


def _identity(config: TrainConfig, model: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    start = None if config.init_from is None else read_model(Path(config.init_from))["sha256"]
    identity = {"train": config.identity(), **model, "data": data, "init_from": start}
    plain: dict[str, Any] = json.loads(json.dumps(identity))  # tuples become lists, as in a checkpoint that is read
    return plain


def _warm_start(network: nn.Module, folder: Path) -> None:
    """Begin with the weights in a folder."""
    tensors, _ = read_weights(folder)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise ValueError(f"The weights in {folder} do not fit the network. {words}") from None


def _write(parts: Parts, model: dict[str, Any], output: Path, state: State | None) -> None:
    """state: in the first process, which writes."""
    config = parts.config
    step = parts.best.step if config.weights == "best" and parts.best is not None else config.steps

    def save(folder: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        if state is not None:
            trained = {"train": dump(config), "fingerprint": state.fingerprint}
            save_weights(folder, tensors, {**model, **record, **trained}, state.permit)

    def record(step: int, average: str | None) -> dict[str, Any]:
        return {"step": step, "examples_seen": step * config.global_batch, "ema": average}

    if config.keep_raw:
        save(output / "raw", parts.raw_weights(), record(config.steps, None))
    elif state is not None:
        state.permit()
        shutil.rmtree(output / "raw", ignore_errors=True)
    if state is not None:
        write_listing(state.previews, "step-*")
    save(output, parts.weights(), record(step, None if config.weights == "raw" else config.average))
