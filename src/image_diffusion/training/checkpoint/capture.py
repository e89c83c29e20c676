"""The state of a trainer as a checkpoint, and a trainer that goes on from a checkpoint."""

from __future__ import annotations

from typing import Any

from image_diffusion.training.checkpoint.checkpoint import (
    Checkpoint,
    Groups,
    StateDict,
    Stateful,
    add_tensors,
    load_in_place,
)
from image_diffusion.training.parallel.flat_parameters import Vector
from image_diffusion.training.trainer import Trainer

_WITH_TENSORS = "meter", "objective"
"""Components whose state is stored as tensor files of a checkpoint; the state of the others is in checkpoint.json."""


def capture(trainer: Trainer, step: int, reports_due: bool) -> Checkpoint:
    """Return a checkpoint of the current state on the device, or this process's part of it. All processes call it
    together."""
    groups: Groups = {"network": {}, "optimizer": {}, "meter": {}, "objective": {}}  # files even if they are empty
    groups |= {"best": {}} if trainer.best.step else {}
    rows: Groups = {}
    for group, state in _tensors(trainer).items():
        add_tensors(group, state, groups, rows)
    extra: dict[str, Any] = {"ended": step == trainer.last_step}
    for name, component in _components(trainer).items():
        if name in _WITH_TENSORS:
            groups[name] = dict(component.state_dict())
        elif plain := component.state_dict():
            extra[name] = plain
    examples = step * trainer.global_batch
    part, parts = trainer.world.rank, trainer.flat.writers
    return Checkpoint(step, examples, reports_due, groups, extra, rows=rows, part=part, parts=parts)


def resume(trainer: Trainer, checkpoint: Checkpoint | None) -> tuple[int, bool]:
    """Resume from the first process's checkpoint; return (step, True if its reports are due), or (0, False) without
    one."""
    small: tuple[int, bool, dict[str, Any], Groups] | None = None
    if checkpoint is not None:
        tensors = {group: checkpoint.groups[group] for group in _WITH_TENSORS}
        small = checkpoint.step, checkpoint.reports_due, checkpoint.extra, tensors
    small = trainer.world.broadcast_object(small)
    if small is None:
        return 0, False
    step, reports_due, extra, tensors = small
    for name, component in _components(trainer).items():
        if name in _WITH_TENSORS:
            component.load_state_dict(tensors[name])
        elif name in extra:
            component.load_state_dict(extra[name])
    for group, state in _tensors(trainer).items():
        load_in_place(state, None if checkpoint is None else checkpoint.groups[group], trainer.world)
    trainer.flat.update_network()
    was_intermediate = step == trainer.steps and not extra["ended"]  # the run was configured for more steps
    return step, reports_due or was_intermediate


def _components(trainer: Trainer) -> dict[str, Stateful]:
    """Return the components whose state is small, by name."""
    components: dict[str, Stateful] = {
        "meter": trainer.meter,
        "precision": trainer.precision.scaler,
        "best": trainer.best,
        "patience": trainer.patience,
    }
    memory = trainer.task.objective.memory
    return components if memory is None else {**components, "objective": memory}


def _tensors(trainer: Trainer) -> dict[str, StateDict]:
    """Return the tensors that a checkpoint is loaded into, by the name of their group. The network's are the vector of
    trained parameters, and the tensors that are not trained."""
    flat = trainer.flat
    fixed = {name: t for name, t in trainer.network.state_dict().items() if name not in flat.parameters}
    averages = {name: {"": Vector(flat, vector)} for name, vector in trainer.averages.vectors.items()}
    return {
        "network": {"": Vector(flat, flat.values), **fixed},
        **averages,
        "optimizer": trainer.optimizer.state_dict(),
        **({"best": trainer.best.tensors()} if trainer.best.step else {}),
    }
