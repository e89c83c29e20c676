"""Send planned entries to MLflow. Sending again adds nothing; failed entries are sent the next time.

A file that the server refuses as too large withholds no other entries; the error is raised after them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from image_diffusion.core.files.atomic import digest, read_json, sha256_file
from image_diffusion.tracking.connection import LINK, Connection, Part, deferring_too_large, locked
from image_diffusion.tracking.models import Models
from image_diffusion.tracking.plan import (
    PARENT,
    TRACE,
    PlannedRun,
    Request,
    data_sets,
    final_weights,
    journals,
    plan,
    registered_name,
    request_of,
    score_of,
    swept_weights,
    synthetic_sets,
    tags_of,
    used_by,
)
from image_diffusion.tracking.run_summary import card, headline_of, sentence
from image_diffusion.tracking.runs import GROUP, HEADLINE, Runs

_ENDINGS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "killed": "KILLED"}


class Tracker:
    """Sends experiments to one MLflow experiment of a store. Raises TrackingError, an OSError, if the store refuses."""

    def __init__(self, store: str, project: str) -> None:
        self._connection = Connection(store, project)
        self._runs = Runs(self._connection)

    def send(self, request: Request, live: bool = False) -> dict[str, Any]:
        """Send new results; return the contents of `tracked.json`.

        live: True if stages may be running, even on machines whose locks are not visible here: no stage is then marked
        as killed, and no model is logged, which would take 0.7 GB.
        """
        with deferring_too_large() as part:
            return self._send(request, live, part)

    def _send(self, request: Request, live: bool, part: Part) -> dict[str, Any]:
        with ExitStack() as stack:
            for folder in journals(request):  # one tracker reads at a time, so that none sends superseded points
                stack.enter_context(locked(folder / ".lock"))
            planned = plan(request.experiment, request.datasets, request.best_metric)
            ids = send(self._connection, self._runs, planned, request, live, part)
        return self._describe_runs([_summary(run, ids[run.history.id]) for run in planned])

    def send_study(self, folder: Path, results: Path) -> dict[str, Any]:
        """Send the runs of a study with the tags `study`, `variant` and `seed`, and its page, table and numbers as a
        separate run; return the contents of its `tracked.json`. folder: results/studies/<study>."""
        plan, sent = read_json(folder / "plan.json"), list[dict[str, Any]]()
        name = str(plan["study"])
        with deferring_too_large() as part:
            for variant in plan["variants"]:
                for seed, run in zip(plan["seeds"], variant["runs"], strict=True):
                    sent += self._send(request_of(results, run), False, part)["runs"]
                    trained = next(record for record in reversed(sent) if record["stage"] == PARENT)
                    tags = {"study": name, "variant": variant["name"], "seed": str(seed)}
                    self._runs.send_tags(trained["run_id"], tags | {f"study.{name}": variant["name"]})
            made = (folder / "plan.json").stat().st_mtime_ns // 10**6
            key = f"study/{name}/{plan['variants'][0]['runs'][0]}"
            run_id = self._runs.run(key, f"study {name}", made, {"stage": "study", "study": name})
            wrong = self._runs.remove_damaged(run_id)
            rule = f"Its runs: `tags.study.{name} != ''`, or group by the tags `study` and `variant`.\n\n"
            self._runs.send_note(run_id, rule + (folder / "study.md").read_text(encoding="utf-8"))
            for path in (folder / page for page in ("index.html", "study.csv", "study.md")):
                with part():
                    self._runs.send_file(run_id, path, path.name, sha256_file(path))
            self._runs.note_sent(run_id, wrong)
            self._runs.send_end(run_id, "FINISHED", made)
        return self._describe_runs(list({record["run_id"]: record for record in sent}.values()))

    def _describe_runs(self, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        page = f"/#/experiments/{self._connection.experiment_id}/runs"
        return {
            "format": 1,
            "store": self._connection.shown_uri,
            "project": self._connection.project,
            "page": f"{page}{LINK}",
            "charts": f"{page}?workflowType=machine_learning&compareRunsMode=CHART",
            "runs": list(runs),
            "sent": self._connection.shown_listings,
        }


def send(
    connection: Connection, runs: Runs, planned: Sequence[PlannedRun], request: Request, live: bool, part: Part
) -> dict[str, str]:
    """Send the planned entries to the store; return the MLflow id of every run by its key. live: see `Tracker.send`.
    part: context of each part that has files, see `deferring_too_large`.
    """
    ids: dict[str, str] = {}
    models = Models(connection)
    model: tuple[str, str] | None = None  # key of the run that trained it, id of the logged model
    data = [item for folder in request.datasets for item in data_sets(folder)] + [*synthetic_sets(request.experiment)]
    for run in planned:
        history = run.history
        tags = tags_of(run, request.experiment) | ({"mlflow.parentRunId": ids[run.parent]} if run.parent else {})
        used = used_by(history, data)
        dataset = used[0].name.partition("/")[0] if used else None
        if dataset is not None:
            tags["data"] = dataset
        run_id = ids[history.id] = runs.run(history.id, run.name, history.starts[0], tags)
        wrong = runs.remove_damaged(run_id)
        small = [file for file in run.files if file.path.stat().st_size <= request.largest]
        for file in run.files:
            if file not in small:
                tags |= {f"path/{file.name}": str(file.path.resolve()), f"{TRACE}sha256/{file.name}": file.sha256}
        runs.send_tags(run_id, tags)
        runs.send_params(run_id, run.params)
        for item in used:
            runs.send_dataset(run_id, item, history.stage)
        model_id = model[1] if model is not None and run.latest and model[0] == run.parent else None
        if model_id is not None:
            models.record_model_use(run_id, model_id)
        measured_on = (used[0].name, used[0].digest) if used else None
        for step, earlier in ({} if live else swept_weights(run, run_id, request)).items():
            of_step = [point for point in run.points if point.step == step]
            with part():
                runs.send_points(run_id, of_step, run.superseded, models.log(earlier), measured_on)
        runs.send_points(run_id, run.points, run.superseded, model_id, measured_on)
        with part():
            runs.send_images(run_id, history.images)
        for file in small:
            with part():
                runs.send_file(run_id, file.path, file.name, file.sha256)
        runs.note_sent(run_id, wrong)
        if history.stage == PARENT and history.status == "finished" and run.latest and not live:
            weights = final_weights(run, run_id, request)
            if weights is not None:
                name = registered_name(connection.project, used, request.best_metric)
                of_all = (
                    f"Trainings that can be compared, a version each: of one data set, {dataset or 'unnamed'}, by "
                    f"{request.best_metric}. The alias `best` is the one where that is lowest."
                )
                of_this, score = sentence(request.experiment, dataset), score_of(run, request.best_metric)
                with part():
                    logged = models.log(weights)
                    models.register(name, logged, run_id, weights.tags, score, of_all, of_this)
                    model = (history.id, logged)
        if history.stage == PARENT and run.latest:
            _send_card(runs, run_id, request, dataset, registered_name(connection.project, used, request.best_metric))
        if history.ended is not None and not (live and history.status == "killed"):
            runs.send_end(run_id, _ENDINGS[history.status], history.ended)
    return ids


def _send_card(runs: Runs, run_id: str, request: Request, dataset: str | None, group: str) -> None:
    """Send the note at the top of a training's page, and the tags for comparing it with other runs."""
    runs.send_view(request.best_metric)
    own = headline_of(request.experiment, request.best_metric)
    tags = dict.fromkeys((GROUP, HEADLINE, "headline"), "")
    if own is not None:
        tags = {GROUP: group, HEADLINE: json.dumps([own.metric, own.value, own.interval]), "headline": str(own)}
    runs.send_tags(run_id, tags)
    others = runs.headlines(group, run_id) if own is not None else []
    runs.send_note(run_id, card(request.experiment, dataset, request.best_metric, others))


def _summary(run: PlannedRun, run_id: str) -> dict[str, Any]:
    history = run.history
    sent = {
        "params": {key: str(value) for key, value in run.params.items()},
        "points": [[point.key, repr(point.value), point.step, point.time] for point in run.points],
        "images": [[image.key, image.step, image.time] for image in history.images],
        "files": [[file.name, file.sha256] for file in run.files],
    }
    return {
        "name": run.name,
        "stage": history.stage,
        "run_id": run_id,
        "status": history.status,
        "attempts": len(history.starts),
        **{name: len(values) for name, values in sent.items()},
        "missing": run.missing,
        "sha256": digest(sent),
    }
