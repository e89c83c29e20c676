"""The best prediction for a network of few channels and large patches: the table of docs/recipes.md.

    python tests/bench/bench_predictions.py

Digits of 32 x 32 in patches of 16: 4 tokens of 256 numbers in 128 channels. 800 steps of 64 images, one seed, 300
samples by 15 steps of Heun's method with guidance 2. Prints a table in Markdown as it goes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trained_digits import JIT, PATCHES_OF_16, train

ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "x0, loss in the velocity, network of JiT": ("x0", "velocity", JIT),
    "x0, loss in the velocity": ("x0", "velocity", {}),
    "x0, loss in x0": ("x0", "x0", {}),
    "velocity": ("velocity", "velocity", {}),
    "eps": ("eps", "eps", {}),
}


def main() -> None:
    print("| Prediction | Labels right | Error to the nearest digit | CPU seconds |\n| --- | --- | --- | --- |")
    for name, (prediction, loss, changes) in ROWS.items():
        objective = {
            "type": "flow_matching",
            "prediction": prediction,
            "loss": loss,
            "label_drop_probability": 0.1,
        }
        found = train(800, network=PATCHES_OF_16 | changes, objective=objective)
        print(f"| {name} | {found.agreement:.2f} | {found.error:.3f} | {found.cpu_s:.0f} |", flush=True)


if __name__ == "__main__":
    main()
