"""One start of a training: join the other processes, go on from the state there is, train, write what was declared."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from image_diffusion.core.config import dump, parse
from image_diffusion.core.files import write_bytes
from image_diffusion.core.journal import Journal, NullJournal
from image_diffusion.core.types import DataSpec
from image_diffusion.core.verify import tell_of_previews
from image_diffusion.core.weights import read_model, read_weights, save_weights
from image_diffusion.systems import AnySystem
from image_diffusion.systems.starting import Change, Trained, fitted, table
from image_diffusion.systems.system import System
from image_diffusion.training import preflight
from image_diffusion.training.background import Background
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.determinism import switches
from image_diffusion.training.distributed import HANG_S, World, join
from image_diffusion.training.loop import train
from image_diffusion.training.lora import plain_name
from image_diffusion.training.parts import Parts, Task
from image_diffusion.training.precision import dtype_of, faster_in_bf16
from image_diffusion.training.signals import Stop
from image_diffusion.training.state import State, helper

_THAW = "Take it out of train.freeze, or name it in train.lora.whole."


def run(
    build: Callable[[World], Task],
    config: TrainConfig,
    model: dict[str, Any],
    data: dict[str, Any],
    output: Path,
    journal: Path | None = None,
    start: Path | None = None,
    carried: Mapping[str, Path] = MappingProxyType({}),
    hang_s: float = HANG_S,
) -> None:
    """Train, or go on training, and write `output`: weights.safetensors and model.json; checkpoints in its `state`.

    build: what to train on what; called with PyTorch's generator seeded, for the initial weights. model: plain data
    that rebuilds the network ("system", "spec", "codec", "classes"), kept in model.json. data: plain data that says
    what the training data are. journal: the folder of journals; None: none is kept. start: the weights folder to start
    from, where `init_from` names an experiment. carried: files that are written beside the weights, by name.
    hang_s: seconds that a process waits for another.

    The run is what `model`, `data` and the configuration say it is; another run's checkpoints are never continued.
    Raises Stopped, ValueError or OSError as `loop.train` does.
    """
    with ExitStack() as stack:
        world = stack.enter_context(join(hang_s))
        stop = stack.enter_context(Stop(world, config.max_hours, config.checkpoint.every_seconds))
        stack.enter_context(switches(config))
        preflight.check(world, dtype_of(config.precision))
        torch.manual_seed(config.seed)
        task = build(world)
        if start is None and isinstance(config.init_from, str):
            start = Path(config.init_from)
        told, rows = _warm_start(task.network, model, start) if world.is_main and start is not None else ("", [])
        parts = Parts(task, config, world)
        if world.is_main and (advice := faster_in_bf16(config.precision, world.device)):
            print(advice, flush=True)
        state, checkpoint = None, None
        if world.is_main:
            state = State(
                output / "state", _identity(config, model, data, start), config.checkpoint, config.steps, hang_s
            )
            state.claim()
            checkpoint = state.load()
            if told and checkpoint is None:
                print(told, flush=True)
                for name in set(rows) - {plain_name(each) for each in parts.flat.parameters}:
                    print(f"warning: {name} is new for other classes, but frozen. {_THAW}", file=sys.stderr)
        step, due = parts.restore(checkpoint)
        writes = _helper(parts, output / "state", state, hang_s) if parts.flat.writers > 1 else None
        if state is not None and checkpoint is None and not state.holds_any:
            shutil.rmtree(state.previews, ignore_errors=True)  # every one is drawn again; its listing may be damaged
        elif state is not None:
            tell_of_previews(state.previews)  # what those drawn by now are like, nobody else looks at before the end
        keeps = state is not None and journal is not None
        book: Journal | NullJournal = NullJournal()
        if state is not None and journal is not None:
            resumed, before = (None, {}) if checkpoint is None else (step, checkpoint.attempts)
            book = Journal.open(journal, "train", resumed, {"fingerprint": state.fingerprint}, after=before)
        if world.is_main:
            for sentence in config.advice():
                print(f"warning: {sentence}", file=sys.stderr, flush=True)
        with book:
            if keeps:
                book.params({"train": dump(config), **model, **data})
            train(parts, step, due, state, book, stop, writes)
        for read in filter(None, (task.data, task.validation)):
            read.verified()
        _write(parts, model, output, state, carried)


def _helper(parts: Parts, root: Path, state: State | None, hang_s: float) -> Background | None:
    """What writes this process's part of checkpoints, where it has one and is not the first. All processes call it
    together. state: in the first."""
    world = parts.world
    _, note = world.broadcast_small(None, "" if state is None else f"{state.fingerprint} {state.token}")
    if world.is_main or world.rank >= parts.flat.writers:
        return None
    fingerprint, token = note.split()
    return helper(root, fingerprint, token, hang_s)


def _identity(config: TrainConfig, model: dict[str, Any], data: dict[str, Any], start: Path | None) -> dict[str, Any]:
    sha256 = None if start is None else read_model(start)["sha256"]
    identity = {"train": config.identity(), **model, "data": data, "init_from": sha256}
    plain: dict[str, Any] = json.loads(json.dumps(identity))  # tuples become lists, as in a checkpoint that is read
    return plain


def _warm_start(network: nn.Module, model: dict[str, Any], folder: Path) -> tuple[str, list[str]]:
    """Begin with the weights in a folder, as far as they fit; what does not, for the user, and the tables of classes
    among that. model: of the training."""
    found, theirs = read_weights(folder)
    changes: list[Change] = []
    rows: list[str] = []
    if any(theirs[key] != model[key] for key in ("system", "spec", "classes")):
        there = _of(theirs, f"{folder}/model.json", named="train" in theirs)
        here = _of(model, "train.yaml", named=True)
        try:
            found, changes = fitted(network, here, found, there)
        except ValueError as error:
            raise ValueError(f"train.init_from is {folder}. {error}") from None
        rows = [each.name for each in changes if each.here and each.name in here.system.class_rows]
    try:
        network.load_state_dict(found)
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise ValueError(f"The weights in {folder} do not fit the network. {words}") from None
    other = "" if theirs["codec"] == model["codec"] else _other_latents(model["codec"], theirs["codec"])
    told = [f"Starting from {folder}: {len(found) - len(changes)} of {len(found)} tensors as they are.{other}"]
    return "\n".join([*told, *filter(None, [table(changes)])]), rows


def _of(model: dict[str, Any], where: str, *, named: bool) -> Trained:
    """What weights are of. named: classes have names; those of weights that others published are numbers alone."""
    system: System = parse(AnySystem, model["system"], where)
    return Trained(system, parse(DataSpec, model["spec"], where), model["classes"] if named else None)


def _other_latents(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """A sentence on the space that weights were trained in, where it is another one."""
    if ours["identity"] != theirs["identity"]:
        return f" They were trained in the space of another codec, {theirs['identity']}."
    return " Their latents were normalised otherwise." if ours != theirs else ""


def _write(parts: Parts, model: dict[str, Any], output: Path, state: State | None, carried: Mapping[str, Path]) -> None:
    """state: in the first process, which writes."""
    config = parts.config
    step = parts.best.step if config.weights == "best" and parts.best is not None else config.steps

    def save(folder: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        if state is not None:
            trained = {"train": dump(config), "fingerprint": state.fingerprint}
            for name, path in carried.items():
                state.permit()
                write_bytes(folder / name, path.read_bytes())
            save_weights(folder, tensors, {**model, **record, **trained}, state.permit)

    def record(step: int, average: str | None) -> dict[str, Any]:
        return {"step": step, "examples_seen": step * config.global_batch, "ema": average}

    if config.keep_raw:
        save(output / "raw", parts.raw_weights(), record(config.steps, None))
    elif state is not None:
        state.permit()
        shutil.rmtree(output / "raw", ignore_errors=True)
    save(output, parts.weights(), record(step, None if config.weights == "raw" else config.average))
