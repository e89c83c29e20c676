"""Failures of queued jobs: reasons from the notes of stages and from Slurm, and memory requests of later attempts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from image_diffusion.core.process.command import ATTEMPT, JobOutcome, Parser, note, read_attempts
from image_diffusion.workflow.jobs import slurm_queue
from image_diffusion.workflow.jobs.slurm_queue import ask_slurm, report_failed_jobs
from image_diffusion.workflow.resources import MOST_OUT_OF_MEMORY, Machine
from plans import a_plan, plans_of

ROOT = Path(__file__).parents[2]
SACCT = """#!/bin/sh
echo '7|OUT_OF_MEMORY|0:125|'
echo '7.batch|OUT_OF_MEMORY|0:125|996K'
echo '7.0|OUT_OF_MEMORY|0:125|1996K'
echo '8|TIMEOUT|0:0|'
"""
LATER = 4e9
ONE, DATA = {"experiment": "one"}, {"dataset": "dots-16"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.fixture
def machine() -> Machine:
    return Machine(plans_of(a_plan(), a_plan("two")), {}, queued=True, remote=False)


def ended(*endings: tuple[Any, str], job: str = "7", stage: str = "one/train", began: float = LATER) -> Path:
    """Add an attempt on n1 to the note of a stage, with the endings that its processes wrote."""
    path = Path(f"logs/{stage}.log.attempt")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{job} n1 {began:.0f}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ATTEMPT, str(path))
        for ending in endings:
            note(*ending)
    return path


def slurm(name: str, script: str) -> None:
    Path(name).write_text(script)
    Path(name).chmod(0o755)


@pytest.fixture
def reported(capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that reports failed jobs and returns the printed lines."""

    def report(*jobs: str) -> list[str]:
        Path("snakemake.log").write_text("".join(f"SLURM-job '{job}' failed, SLURM status is: 'F'\n" for job in jobs))
        report_failed_jobs(["snakemake.log"], LATER)
        return capsys.readouterr().err.splitlines()

    return report


def test_a_mistake_is_one_line(reported: Any) -> None:
    ended(("mistake", "Gradient is not finite at step 4 (rank 1)."), ("stopped", "another rank"))
    assert reported("7") == [
        "error: one/train (job 7, n1) failed and would fail so again: Gradient is not finite at step 4 (rank 1)."
    ]


def test_mistake_in_a_job_of_several_stages_is_one_line(reported: Any) -> None:
    """Snakemake's log lacks the numbers of jobs that stages share."""
    ended(("mistake", "Loss is not finite at step 3."))
    ended(("mistake", "of an earlier command"), stage="one/sample", began=LATER - 1)
    assert reported() == ["error: one/train (job 7, n1) failed and would fail so again: Loss is not finite at step 3."]


def test_the_last_attempt_of_a_stage_is_reported(reported: Any) -> None:
    ended(("accident", "NCCL"))
    ended(("stopped", "Step 8,180 is saved."), job="8")
    assert reported("7", "8") == [
        "error: one/train (job 8, n1) was stopped; the same command continues it: Step 8,180 is saved."
    ]
    ended(job="9")
    assert reported("7", "8") == [], "it succeeded at last"


def test_slurm_reason_of_a_killed_job_is_reported(reported: Any) -> None:
    ended()
    ended(job="8", stage="datasets/dots-16/crop")
    assert reported("7") == ["error: one/train (job 7, n1) failed."], "there is no Slurm"
    slurm("squeue", "#!/bin/sh\necho '7|NODE_FAIL|NodeDown'\necho '8|FAILED|None'\n")
    assert reported("7", "8") == [
        "error: datasets/dots-16/crop (job 8, n1) failed. Slurm: FAILED.",
        "error: one/train (job 7, n1) failed. Slurm: NODE_FAIL, NodeDown.",
    ]
    slurm("sacct", SACCT)
    assert reported("7", "8")[1] == (
        "error: one/train (job 7, n1) failed. Slurm: OUT_OF_MEMORY, exit code 0:125, 1996K of memory used."
    )


def test_hanging_slurm_is_queried_once_with_a_timeout(reported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_queue, "SLURM_ANSWERS_S", 0.2)
    slurm("sacct", "#!/bin/sh\necho asked >>asked\nexec sleep 20\n")
    for job in range(20):
        ended(job=str(job), stage=f"one/part-{job}")
    began = time.monotonic()
    assert len(reported(*map(str, range(20)))) == 20
    assert time.monotonic() - began < 5 and Path("asked").read_text() == "asked\n"


def test_only_failing_stages_of_a_shared_job_are_reported(reported: Any) -> None:
    ended(stage="one/sample")
    path = ended(("mistake", "steps is 0"))
    assert reported("7") == ["error: one/train (job 7, n1) failed and would fail so again: steps is 0"]
    path.write_text("7 n1 1\n")
    assert len(reported("7")) == 2, "neither says so: the node was lost"


def test_memory_request_grows_a_limited_number_of_times(machine: Machine) -> None:
    asked = []
    for attempt in range(1, MOST_OUT_OF_MEMORY + 3):
        asked.append(machine.training_memory_mb(ONE, attempt))
        ended(("memory", "Out of memory."))
    assert asked == [8000, 12_000, 18_000, 27_000, 27_000]
    assert machine.training_memory_mb({"experiment": "two"}, 2) == 8000, "another experiment has enough"
    assert machine.training_memory_mb(ONE, 1) == 8000


@pytest.mark.parametrize(("ending", "said"), [("stopped", "Step 3 is saved."), ("accident", "NCCL"), (None, "")])
def test_other_failures_do_not_raise_the_memory_request(machine: Machine, ending: Any, said: str) -> None:
    for _ in range(20):
        ended(*([(ending, said)] if ending else []))
    assert machine.training_memory_mb(ONE, 20) == 8000


def test_attempts_of_an_earlier_snakemake_do_not_raise_the_memory_request(machine: Machine) -> None:
    ended(("memory", "Out of memory."), began=machine.since - 60)
    assert machine.training_memory_mb(ONE, 2) == 8000


@pytest.mark.parametrize(("stage", "wildcards"), [("one/sample/part-0", ONE), ("datasets/dots-16/embed", DATA)])
def test_out_of_memory_kills_are_detected_without_slurm_accounting(
    machine: Machine, reported: Any, stage: str, wildcards: dict[str, str]
) -> None:
    log = Path(".snakemake/slurm_logs/rule_train/one/7.log")
    log.parent.mkdir(parents=True)
    log.write_text("slurmstepd: error: oom_kill")
    ended(stage=stage)
    assert machine.training_memory_mb(wildcards, 2) == 12_000
    assert reported("7") == [f"error: {stage} (job 7, n1) ran out of memory."]


def test_truncated_note_is_read_up_to_its_damage() -> None:
    path = ended(("mistake", "steps is 0"))
    path.write_text(path.read_text() + '8 n1 5\n["acc')
    assert read_attempts(path) == [JobOutcome("7", "n1", LATER, "mistake", "steps is 0"), JobOutcome("8", "n1", 5)]
    assert read_attempts(Path("nowhere")) == [] == list(ask_slurm(["7"]))


def test_invalid_options_are_noted_as_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("7 n1 5\n")
    monkeypatch.setenv(ATTEMPT, str(tmp_path / "note"))
    with pytest.raises(SystemExit):
        Parser().parse_args(["--no-such-option"])
    expected = JobOutcome("7", "n1", 5, "mistake", "unrecognized arguments: --no-such-option")
    assert read_attempts(tmp_path / "note") == [expected]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        ("ValueError('steps is 0')", ("mistake", "steps is 0")),
        ("OSError('stale file handle')", ("accident", "stale file handle")),
        ("RuntimeError('NCCL')", ("accident", "NCCL")),
        ("OSError(28, 'No space left on device')", "mistake"),
        ("RuntimeError('CUDA out of memory.')", "mistake"),
        ("MemoryError()", "memory"),
        ("Stopped('Step 3 is saved.')", ("stopped", "Step 3 is saved.")),
    ],
)
def test_queued_stage_records_how_it_ended(raised: str, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "from image_diffusion.core.process.command import run",
        "from image_diffusion.core.process.errors import Stopped",
    )
    code = "\n".join([*lines, "def main():", f"    raise {raised}", "run(main)"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    logged = [str(ROOT / "workflow/scripts/logged"), "logs/a b/x.log", sys.executable, "-c", code]
    assert subprocess.run(logged, capture_output=True, check=False).returncode != 0
    (found,) = read_attempts(Path("logs/a b/x.log.attempt"))
    assert (found.job, found.host) == ("7", "n1") and abs(found.began - time.time()) < 60
    assert ((found.ending, found.said) if isinstance(expected, tuple) else found.ending) == expected


def test_stage_outside_a_queue_records_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    subprocess.run([str(ROOT / "workflow/scripts/logged"), "logs/x.log", "true"], check=True, capture_output=True)
    assert [path.name for path in Path("logs").iterdir()] == ["x.log"]
