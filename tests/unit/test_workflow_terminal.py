"""Terminal output of a run: a line at the start and end of each job, messages, and full output in dry runs."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from image_diffusion.core.files.atomic import write_json
from image_diffusion.workflow.plans import StudyPlan
from image_diffusion.workflow.terminal import VARIABLE, name_runs, places, use_brief_output
from plans import a_plan, plans_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Snakemake's logger with the terminal handler that Snakemake sets up."""
    logger = logging.getLogger("snakemake.logging")
    before, level = logger.handlers, logger.level
    handler = logging.StreamHandler(io.StringIO())
    handler.name = "DefaultStreamHandler"
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    yield logger
    logger.handlers = before
    logger.setLevel(level)


def settings(**changes: bool) -> Any:
    return SimpleNamespace(**{"dryrun": False, "verbose": False} | changes)


def printed(logger: logging.Logger, handler: logging.StreamHandler[io.StringIO]) -> list[str]:
    """Return the lines printed by a run of two jobs, without the time of day."""
    logger.info("Building DAG of jobs...")
    logger.info("Job stats:", extra={"event": LogEvent.RUN_INFO, "stats": {"sample_part": 2, "all": 1, "total": 3}})
    job = {"event": LogEvent.JOB_INFO, "rule_name": "sample_part", "output": ["a"], "log": ["logs/micro/part-0.log"]}
    logger.info("Rule: sample_part", extra=job | {"jobid": 4})
    logger.info("Job 4 has been submitted with SLURM jobid 21 (log: x.log).")
    logger.info("Finished", extra={"event": LogEvent.JOB_FINISHED, "job_id": 4})
    logger.info(None, extra={"event": LogEvent.PROGRESS, "done": 1, "total": 3})
    logger.info("Error in rule train:", extra={"event": LogEvent.JOB_ERROR})
    logger.error("Exiting because a job execution failed.")
    logger.info("Complete log(s): y.log")
    return [line[10:] if line[2:3] == ":" else line for line in handler.stream.getvalue().splitlines()]


def test_each_job_prints_two_lines_and_messages_are_kept(logger: logging.Logger) -> None:
    (handler,) = logger.handlers
    assert use_brief_output(settings())
    assert printed(logger, handler) == [  # type: ignore[arg-type]
        "3 jobs, which log to logs/",
        "sample_part 2",
        "micro/part-0",
        "Job 4 has been submitted with SLURM jobid 21 (log: x.log).",
        "micro/part-0 done in 0 s (1 of 3)",
        "Error in rule train:",
        "Exiting because a job execution failed.",
        "Complete log(s): y.log",
    ]


def test_lines_of_study_runs_name_variant_and_seed(logger: logging.Logger) -> None:
    (handler,) = logger.handlers
    assert use_brief_output(settings())
    variants = [{"name": name, "runs": [f"{name}-0", "micro"]} for name in ("base", "other")]
    name_runs([StudyPlan("rates", variants, [3, 4])])
    lines = printed(logger, handler)  # type: ignore[arg-type]
    assert {"micro/part-0 (base, seed 4)", "micro/part-0 (base, seed 4) done in 0 s (1 of 3)"} <= set(lines)


@pytest.mark.parametrize("option", ["dryrun", "verbose"])
def test_dry_runs_and_verbose_runs_print_all(logger: logging.Logger, option: str) -> None:
    before = list(logger.handlers)
    assert not use_brief_output(settings(**{option: True}))
    assert logger.handlers == before


@pytest.mark.parametrize("is_brief", [False, True])
def test_stage_log_keeps_lines_the_terminal_omits(tmp_path: Path, is_brief: bool) -> None:
    lines = [
        "micro/train: 4 of 8 steps (50%), 7.99 steps/s, 00:01 left, loss 1.0109",
        "inpipe_fd                1.726  4.73 x floor",
        "warning: The loss rises.",
        "error: The disk is full.",
        "[default0]:Training with 2 processes: 2 x CPU on node1.",
        "[default0]:warning: The first of several processes has a line.",
    ]
    logged = [
        ROOT / "workflow/scripts/logged",
        "logs/x.log",
        sys.executable,
        "-c",
        "\n".join(map("print({!r})".format, lines)),
    ]
    environment = os.environ | {VARIABLE: "1" if is_brief else ""}
    done = subprocess.run(logged, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert (tmp_path / "logs/x.log").read_text().splitlines() == lines
    messages = [*lines[2:4], "warning: The first of several processes has a line."]
    assert done.stdout.splitlines() == (messages if is_brief else lines)


def test_progress_is_one_moving_line_on_a_terminal(tmp_path: Path) -> None:
    main, side = pty.openpty()
    code = "print('a/train: 4 of 8 steps (50%)'); print('warning: x')"
    logged = [ROOT / "workflow/scripts/logged", "logs/x.log", sys.executable, "-c", code]
    subprocess.run(logged, cwd=tmp_path, env=os.environ | {VARIABLE: "1"}, stdout=side, check=True)
    shown = b""
    while not shown.endswith(b"\n"):
        shown += os.read(main, 1000)
    assert shown == b"\r\x1b[Ka/train: 4 of 8 steps (50%)\r\x1b[Kwarning: x\r\n"
    os.close(side)
    os.close(main)


def test_run_ends_with_paths_to_its_results(tmp_path: Path) -> None:
    plans = plans_of(a_plan("one"))
    assert places(plans, tmp_path, "sqlite:///mlflow.db") == ""
    grid = tmp_path / "one/samples/grid.png"
    write_json(grid, {})
    assert places(plans, tmp_path, "sqlite:///mlflow.db").splitlines() == [
        "",
        str(grid),
        "mlflow ui --backend-store-uri sqlite:///mlflow.db",
    ]
    write_json(tmp_path / "summary.html", {})
    assert str(tmp_path / "summary.html") in places(plans, tmp_path, "sqlite:///mlflow.db").splitlines()
    study = replace(plans, studies={"rates": StudyPlan("rates", [], [])})  # a study does not make that page
    assert str(tmp_path / "summary.html") not in places(study, tmp_path, "sqlite:///mlflow.db").splitlines()
    both = replace(study, requested=("one",))
    assert str(tmp_path / "summary.html") in places(both, tmp_path, "sqlite:///mlflow.db").splitlines()


def test_a_single_job_is_in_the_singular(logger: logging.Logger) -> None:
    (handler,) = logger.handlers
    assert use_brief_output(settings())
    logger.info("Job stats:", extra={"event": LogEvent.RUN_INFO, "stats": {"train": 1, "total": 1}})
    assert "1 job, which logs to logs/" in handler.stream.getvalue()  # type: ignore[attr-defined]
