"""Collect the metrics at each value of a setting: a curve, its plot, and the best value.

    python -m image_diffusion sweep --axis guidance_scale --points 1=one/metrics.json 2=two/metrics.json \
        --headline inpipe_fd --output curve.json --plot curve.png

Each point is a metrics.json of `evaluate`; nothing is sampled or measured here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from image_diffusion.core.files.atomic import read_json, sha256_file, write_json
from image_diffusion.core.files.checksums import describe
from image_diffusion.core.journal.writer import open_journal
from image_diffusion.core.process import command
from image_diffusion.metrics.choice import parse_rule, reading
from image_diffusion.metrics.curves import plot_sweep, sweep_curve


def point_of(text: str) -> tuple[str, Path]:
    """Return the value and the path of a point: "1.5=a/metrics.json" -> ("1.5", the path)."""
    value, separator, path = text.partition("=")
    if not separator or not value or not path:
        raise argparse.ArgumentTypeError(f"'{text}' is not a point. Write VALUE=PATH, such as 1.5=a/metrics.json.")
    return value, Path(path)


def main() -> None:
    parser = command.Parser(
        prog="image-diffusion sweep", description="Collect the metrics at each value of a setting as a curve."
    )
    parser.add_argument("--axis", required=True, help="setting that the sweep varies")
    parser.add_argument(
        "--points", type=point_of, nargs="+", required=True, help="points of the sweep, VALUE=metrics.json, in order"
    )
    parser.add_argument("--headline", required=True, help="metric to plot; lower is better")
    parser.add_argument(
        "--choose", metavar="RULE", help='rule that chooses a point: "distance where copies.upper < 0.03"'
    )
    parser.add_path("--output", "curve.json to write", required=True)
    parser.add_path("--plot", "curve.png to write", required=True)
    parser.add_path("--journal", "folder of the journal")
    arguments = parser.parse_args()

    results = {value: read_json(path) for value, path in arguments.points}
    rule = parse_rule(arguments.choose) if arguments.choose else None
    curve = sweep_curve(arguments.axis, results, arguments.headline, rule)
    stage = f"sweep-{arguments.axis}"
    identity = [
        arguments.headline,
        rule and rule.text,
        [[value, sha256_file(path)] for value, path in arguments.points],
    ]
    with open_journal(arguments.journal, stage, identity=identity) as journal:
        journal.params({"axis": arguments.axis, "values": list(results), "headline": arguments.headline})
        journal.params({"best": curve["best"], "best_is_apart": curve["apart"]})
        if rule is not None:
            journal.params({"choose": rule.text, "chosen": curve["choice"]["step"]})
        for number, point in enumerate(curve["points"]):
            # A whole number is its own step; for other values the step is the position in the list.
            step = int(point["value"]) if point["value"].isdecimal() else number
            entries = point["metrics"].items()
            journal.metrics({name: entry["value"] for name, entry in entries if entry["value"] is not None}, step)
        headlines = reading([point["metrics"][arguments.headline] for point in curve["points"]])
        journal.metrics({f"best_{arguments.headline}": min(headlines)}, 0)
        plot_sweep(curve, arguments.plot)
        journal.image("curve", arguments.plot, 0)
        write_json(arguments.output, curve | {"files": describe(arguments.output.parent, [arguments.plot])})
    print(
        f"sweep: {arguments.headline} is lowest, {min(headlines):.5g}, at {arguments.axis} {curve['best']}"
        f"{'' if curve['apart'] else ', which is not apart from the others'}"
    )
    if rule is not None and curve["choice"]["fulfilled"]:
        print(f"sweep: {curve['choice']['reason']}")
    elif rule is not None:
        print(f"warning: {curve['choice']['reason']}", file=sys.stderr, flush=True)
