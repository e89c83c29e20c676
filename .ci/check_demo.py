"""Did the demo do what it promises? Reads results/demo and ends with a status; needs nothing but Python."""

import json
import sys
from pathlib import Path

FILES = [
    "train/weights.safetensors",
    "samples/samples.npz",
    "samples/grid.png",
    "metrics.json",
    "report/index.html",
    "tracked.json",
]


def main(folder: Path) -> None:
    missing = [name for name in FILES if not (folder / name).is_file() or not (folder / name).stat().st_size]
    if missing:
        sys.exit(f"ci: the demo did not make {', '.join(missing)} in {folder}.")
    result = json.loads((folder / "metrics.json").read_text())
    agreement = result["metrics"]["inpipe_agreement"]["value"]
    if agreement < 0.9:
        sys.exit(f"ci: of the demo's samples {agreement:.0%} are recognised; expected 90% or more.")
    first, last = (point["inpipe_fd"] for point in (result["curve"][0], result["curve"][-1]))
    if not last < first / 2:
        sys.exit(f"ci: the demo's distance went from {first:.3g} to {last:.3g} in training; expected less than half.")
    print(f"ci: the demo is good: agreement {agreement:.0%}, distance {first:.3g} -> {last:.3g}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
