"""Send what the stages logged to MLflow. Sending again adds nothing; what could not be sent is sent the next time.

    python -m image_diffusion.track --store sqlite:///mlflow.db --project demo \
        --experiment results/demo --dataset results/datasets/digits-32 --output results/demo/tracked.json

Training knows nothing of this: it writes its journal. `follow` does the same while the stages run.
"""

from __future__ import annotations

from pathlib import Path

from image_diffusion.core.command import Parser, run
from image_diffusion.core.files import write_json
from image_diffusion.core.secrets import store_named
from image_diffusion.tracking.plan import Request, journals


def main() -> None:
    parser = Parser(prog="python -m image_diffusion.track", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--store",
        help="MLflow tracking URI, e.g. sqlite:///mlflow.db; unset: MLFLOW_TRACKING_URI, where no one sees a password",
    )
    parser.add_argument("--project", required=True, help="the MLflow experiment that holds the runs")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--experiment", type=Path, help="folder: results/<experiment>")
    which.add_argument("--ledger", type=Path, help="folder: results/ledgers/<ledger>, for all its runs and its page")
    parser.add_argument("--results", type=Path, default=Path("results"), help="of --ledger: the folder of all results")
    parser.add_argument("--dataset", action="extend", nargs="+", type=Path, default=[], help="results/datasets/<name>")
    parser.add_argument(
        "--codec-weights", type=Path, help="weights.safetensors of the experiment that trained the codec"
    )
    parser.add_argument("--best-metric", default="fid", help="the registered model with the lowest is `best`")
    parser.add_argument("--largest-file-mb", type=float, default=64.0, help="larger files are noted, not copied")
    parser.add_argument("--output", type=Path, help="summary to write when everything was sent: tracked.json")
    options = parser.parse_args()
    request = None
    if options.experiment is not None:
        request = Request(
            options.experiment,
            options.dataset,
            options.codec_weights.parent if options.codec_weights else None,
            options.best_metric,
            int(options.largest_file_mb * 2**20),
        )
        journals(request)  # before a store is made for nothing
    # It imports MLflow: seconds, which a mistake should not cost.
    from image_diffusion.tracking.tracker import Tracker

    tracker = Tracker(store_named(options.store), options.project)
    tracked = tracker.send_ledger(options.ledger, options.results) if request is None else tracker.send(request)
    if options.output is not None:
        write_json(options.output, tracked)
    points = sum(run["points"] for run in tracked["runs"])
    print(f"track: {len(tracked['runs'])} runs and {points:,} points are in {tracked['store']}, page {tracked['page']}")


if __name__ == "__main__":
    run(main)
