"""Send the journals of the stages to MLflow. Sending again adds nothing; a later call sends what is missing.

    python -m image_diffusion track --store sqlite:///mlflow.db --project demo \
        --experiment results/demo --output results/demo/tracked.json

Training does not use MLflow: it only writes its journal. With --follow, journals are sent while the stages run, until
standard input ends:

    python -m image_diffusion track --store sqlite:///mlflow.db --project demo --results results --follow demo
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

from image_diffusion.core.files.atomic import write_json
from image_diffusion.core.process.command import Parser
from image_diffusion.core.process.secrets import store_named
from image_diffusion.tracking.live import follow, send_in_subprocess, stop_at_end
from image_diffusion.tracking.plan import Request, journals, request_of
from image_diffusion.workflow.plans import plan_file


def main() -> None:
    parser = Parser(prog="image-diffusion track", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--store",
        help="MLflow tracking URI, e.g. sqlite:///mlflow.db (default: MLFLOW_TRACKING_URI, which hides a password)",
    )
    parser.add_argument("--project", required=True, help="MLflow experiment of the runs")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--experiment", type=Path, help="folder of the experiment, results/<experiment>")
    which.add_argument("--study", type=Path, help="folder of a study, results/studies/<study>")
    which.add_argument(
        "--follow", nargs="+", metavar="EXPERIMENT", help="experiments whose stages are running: send until stdin ends"
    )
    parser.add_path("--results", "with --study or --follow: folder of all results", default=Path("results"))
    parser.add_argument(
        "--every", type=float, default=10.0, metavar="SECONDS", help="with --follow: interval of checks (default: 10)"
    )
    parser.add_path(
        "--dataset", "results/datasets/<name> (default: the plan's)", action="extend", nargs="+", default=[]
    )
    parser.add_path("--codec-weights", "weights.safetensors of the trained codec (default: the plan's)")
    parser.add_argument(
        "--best-metric", help="metric that selects the best model; lower is better (default: the plan's, else fid)"
    )
    parser.add_argument("--largest-file-mb", type=float, default=64.0, help="largest file that is copied (default: 64)")
    parser.add_path("--output", "file to write once everything is sent, tracked.json")
    options = parser.parse_args()
    store = store_named(options.store)
    if options.follow is not None:
        stop, send = stop_at_end(), partial(send_in_subprocess, store, options.project)
        follow(send, [request_of(options.results, name) for name in options.follow], options.every, stop)
        return
    request = None
    if options.experiment is not None:
        request = _requested(options)
        journals(request)  # fails before a store is created
    # This imports MLflow, which takes seconds, so arguments are checked before.
    from image_diffusion.tracking.tracker import Tracker

    tracker = Tracker(store, options.project)
    tracked = tracker.send_study(options.study, options.results) if request is None else tracker.send(request)
    if options.output is not None:
        write_json(options.output, tracked)
    points = sum(run["points"] for run in tracked["runs"])
    print(f"track: {len(tracked['runs'])} runs and {points:,} points are in {tracked['store']}, page {tracked['page']}")


def _requested(options: argparse.Namespace) -> Request:
    """Return the request for one experiment: that of its plan, if it has one, with the values of the options."""
    experiment: Path = options.experiment
    has_plan = plan_file(experiment.parent, experiment.name).is_file()
    planned = request_of(experiment.parent, experiment.name) if has_plan else Request(experiment)
    return replace(
        planned,
        datasets=options.dataset or planned.datasets,
        codec_weights=options.codec_weights.parent if options.codec_weights else planned.codec_weights,
        best_metric=options.best_metric or planned.best_metric,
        largest=int(options.largest_file_mb * 2**20),
    )
