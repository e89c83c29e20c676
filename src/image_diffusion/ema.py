"""Other weights of a finished training, without training again: another average, or those of an earlier step.

    python -m image_diffusion.ema --state results/x/train/state/0123456789abcdef \\
        --weights results/x/train/weights.safetensors --width 0.15 --output results/x/ema-0.15/weights.safetensors

The training must have had `ema: {type: power}` and kept checkpoints on the way (`checkpoint.keep_every`): the more of
them, the closer the reconstruction (Karras et al. 2024, section 3.2).

    python -m image_diffusion.ema --state results/x/train/state --step 50000 \\
        --weights results/x/train/weights.safetensors --output results/x/step-50000/weights.safetensors

writes the weights of a step whose checkpoint was kept, averaged as those at the end are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from image_diffusion.core import command
from image_diffusion.core.weights import read_model, save_weights
from image_diffusion.training.kept import weights_at
from image_diffusion.training.posthoc import reconstruct


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m image_diffusion.ema", description=__doc__.split("\n")[0])
    parser.add_argument("--state", type=Path, required=True, help="state folder of the run; with --step, of all runs")
    parser.add_argument("--weights", type=Path, required=True, help="weights.safetensors that train wrote")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--width", type=float, help="relative width sigma_rel, between 0 and 0.28")
    which.add_argument("--step", type=int, help="step of the training whose weights are written")
    parser.add_argument("--output", type=Path, required=True, help="weights.safetensors to write")
    arguments = parser.parse_args()
    if arguments.step is not None:
        tensors, model = weights_at(arguments.state, arguments.weights.parent, arguments.step)
        del model["format"], model["sha256"]
        save_weights(arguments.output.parent, tensors, model)
        print(f"ema: the weights of step {arguments.step:,} are in {arguments.output}")
        return
    if not 0 < arguments.width < 0.28:
        raise ValueError(f"--width is {arguments.width}. Give a relative width above 0 and below 0.28, such as 0.1.")
    model = read_model(arguments.weights.parent)
    tensors, step = reconstruct(arguments.state, arguments.width)
    examples = model["examples_seen"] // model["step"] * step
    record = {**model, "step": step, "examples_seen": examples, "ema": f"ema-{arguments.width:g}"}
    save_weights(arguments.output.parent, tensors, record)
    print(f"ema: the average of width {arguments.width:g} at step {step:,} is in {arguments.output}")


if __name__ == "__main__":
    command.run(main)
