"""Write the weights of another average or an earlier step of a training, without training again.

    python -m image_diffusion ema --state results/x/train/state --average 0.999 --step 50000 \\
        --weights results/x/train/weights.safetensors --output results/x/step-50000/weights.safetensors

writes the average with one rate or width (or the weights without averaging: raw) at a step whose checkpoint was kept
(`checkpoint.keep_every`). The default step is the last one; the default average is that of the written weights. Without
--weights, the training may still be running: its newest checkpoint is used. Only checkpoints are read, so the training
is not affected. --chosen-in CURVE uses the step that a sweep has chosen.

    python -m image_diffusion ema --state results/x/train/state/0123456789abcdef \\
        --weights results/x/train/weights.safetensors --width 0.15 --output results/x/ema-0.15/weights.safetensors

writes an average of any width. The training must have used `ema: {type: power}` and kept checkpoints; the more of them,
the more accurate the reconstruction (Karras et al. 2024, section 3.2).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from image_diffusion.core.files.atomic import read_json, write_bytes
from image_diffusion.core.files.weights import read_model, save_weights
from image_diffusion.core.names import carried_files, inside
from image_diffusion.core.process import command
from image_diffusion.training.checkpoint.averaged_weights import reconstruct, weights_at, weights_in
from image_diffusion.training.optim.ema import average_name


def main() -> None:
    parser = command.Parser(prog="image-diffusion ema", description=__doc__.split("\n")[0])
    parser.add_path("--state", "state folder of one run, or of all runs", required=True)
    parser.add_path("--weights", "weights.safetensors of train (default: the training may still run)")
    parser.add_path("--trained-by", "train.yaml of the run, while it is training")
    parser.add_argument("--average", metavar="RATE", help="rate or width of a stored average, or raw")
    parser.add_argument("--step", type=int, help="step of the weights (default: the last)")
    parser.add_path("--chosen-in", "curve.json of a sweep, which names the chosen step", metavar="CURVE")
    parser.add_argument("--width", type=float, help="relative width sigma_rel of a new average, above 0 and below 0.28")
    parser.add_path("--output", "weights.safetensors to write", required=True)
    arguments = parser.parse_args()
    if arguments.weights is not None and arguments.trained_by is not None:
        raise ValueError("--weights and --trained-by both name a run. Leave out one of the two.")
    if arguments.chosen_in is not None:
        if arguments.step is not None:
            raise ValueError("--step and --chosen-in both name a step. Leave out one of the two.")
        arguments.step = _chosen_step(arguments.chosen_in)
    if arguments.width is not None:
        if arguments.step is not None or arguments.average is not None:
            raise ValueError("--width makes an average of its own, at the last step. Leave out --step and --average.")
        tensors, model = _reconstructed(arguments.state, arguments.weights, arguments.width)
    elif arguments.weights is not None:
        tensors, model = weights_at(arguments.state, arguments.weights.parent, arguments.step, arguments.average)
    else:
        tensors, model = weights_in(arguments.state, arguments.step, arguments.average, arguments.trained_by)
    described = {key: value for key, value in model.items() if key not in ("format", "sha256")}
    carried = described.pop("carried", {})
    if arguments.weights is not None and carried:
        described["carried"] = carried
        for name, path in carried_files(arguments.weights.parent, model).items():
            write_bytes(inside(arguments.output.parent, name), path.read_bytes())
    save_weights(arguments.output.parent, tensors, described)
    print(f"ema: {model['ema'] or 'the weights as trained'} at step {model['step']:,} is in {arguments.output}")


def _reconstructed(state: Path, weights: Path | None, width: float) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not 0 < width < 0.28:
        raise ValueError(f"--width is {width}. Give a relative width above 0 and below 0.28, such as 0.1.")
    if weights is None:
        raise ValueError("--width needs --weights, the file that the training ended with.")
    model = read_model(weights.parent)
    end = model.get("ended_early_at", model.get("train", {}).get("steps", sys.maxsize))  # the best step may be earlier
    tensors, step = reconstruct(_run_of(state, weights, model), width, end)
    examples = model["examples_seen"] // model["step"] * step
    return tensors, {**model, "step": step, "examples_seen": examples, "ema": average_name(width)}


def _run_of(state: Path, weights: Path, model: dict[str, Any]) -> Path:
    """Return the folder of the run that ended with these weights. state: of that run, or of all."""
    fingerprint: str = model.get("fingerprint", state.absolute().name)  # weights of other programs have none
    if state.absolute().name == fingerprint:
        return state
    if not (state / fingerprint).is_dir():
        raise ValueError(
            f"{state} is not of the run {fingerprint}, which ended with {weights}. Give its folder as --state."
        )
    return state / fingerprint


def _chosen_step(curve: Path) -> int:
    choice = read_json(curve).get("choice")
    if choice is None:
        raise ValueError(f"{curve} names no step, since it was made without a rule. Set sweep.choose, or give --step.")
    return int(choice["step"])
