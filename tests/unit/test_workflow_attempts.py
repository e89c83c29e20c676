"""Which failed jobs are sent again, by what the stage noted and what Slurm says."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from image_diffusion.core.attempt import VARIABLE, Attempt, note, read_attempt
from image_diffusion.core.command import Parser
from image_diffusion.workflow.attempts import (
    OFTEN_SHORT,
    is_news,
    send_again_if_it_helps,
    times_to_send,
    times_to_send_all,
)
from image_diffusion.workflow.machine import Machine
from plans import a_plan, plans_of

ROOT = Path(__file__).parents[2]
SACCT = """#!/bin/sh
echo 'OUT_OF_MEMORY|0:125||n1'
echo 'OUT_OF_MEMORY|0:125|1996K|n1'
"""
SCONTROL = """#!/bin/sh
echo "JobId=$4 JobName=x UserId=a(1) JobState=NODE_FAIL Reason=NodeDown ExitCode=1:0 NodeList=n1"
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.fixture
def machine() -> Machine:
    return Machine(plans_of(a_plan(), a_plan("two")), {}, queued=True, remote=False)


class Wildcards(dict[str, str]):
    """As Snakemake has them: their text says all of them, and they are their values in order."""

    def __iter__(self) -> Any:
        return iter(self.values())


def job(restart_times: int = 20, rule_name: str = "train") -> Any:
    rule = SimpleNamespace(name=rule_name, restart_times=restart_times)
    return SimpleNamespace(rule=rule, log=["logs/one/train.log"], wildcards=Wildcards(experiment="one"))


def ended(*endings: tuple[Any, str]) -> Path:
    """A note of job 7 on n1, with what its processes wrote."""
    path = Path("logs/one/train.log.attempt")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("7 n1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(path))
        for ending in endings:
            note(*ending)
    return path


def slurm(name: str, script: str) -> None:
    Path(name).write_text(script)
    Path(name).chmod(0o755)


def test_a_mistake_is_told_and_not_sent_again(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    path = ended(("mistake", "Gradient is not finite at step 4 (rank 1)."), ("stopped", "another rank"))
    assert times_to_send(job(), machine) == 0
    assert not path.exists()
    assert capsys.readouterr().err == (
        "train of one (job 7, n1) is not sent again, since it would end so again: Gradient is not finite at step 4 "
        "(rank 1).\n"
    )


def test_an_accident_is_sent_again_and_slurm_says_why(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    slurm("scontrol", SCONTROL)
    ended()
    assert times_to_send(job(), machine) == 20
    assert capsys.readouterr().err == "train of one (job 7, n1) failed. Slurm: NODE_FAIL, exit code 1:0, NodeDown.\n"
    assert times_to_send(job(2), machine) == 2, "a job that could not begin has left no note"


def test_a_stop_in_time_is_no_error_in_what_snakemake_prints(machine: Machine) -> None:
    of_job = {"rule_name": "train", "log": ["logs/one/train.log", "7.log"]}
    of_group = {"groupid": "one", "job_error_info": [{"rule_name": "crop", "log": []}, of_job]}
    for told in (of_job, of_group):
        record = logging.makeLogRecord(told)
        ended(("mistake", "steps is 0"))
        assert is_news(record)
        path = ended(("stopped", "Step 8,180 is saved."))
        assert not is_news(record)
        path.unlink()
        assert is_news(record)
    ended(("stopped", "Step 8,180 is saved."))
    assert is_news(logging.makeLogRecord({"msg": "Trying to restart job 3."}))
    assert is_news(logging.makeLogRecord({"log": ["logs/one/train.log"], "jobid": 3})), "that it was sent again"


@pytest.mark.parametrize(("rule", "times"), [("sample", 20), ("ours_evaluate", 20), ("detect", 2)])
def test_a_stage_that_goes_on_where_it_was_may_run_out_of_time_often(machine: Machine, rule: str, times: int) -> None:
    slurm("sacct", "#!/bin/sh\necho 'TIMEOUT|0:0||n1'\n")
    ended()
    assert times_to_send(job(2, rule), machine) == times


def test_a_stop_in_time_is_one_line(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    ended(("stopped", "Step 8,180 is saved."))
    assert times_to_send(job(), machine) == 20
    assert capsys.readouterr().err == (
        "train of one (job 7, n1) was stopped and goes on in the next job: Step 8,180 is saved.\n"
    )


def test_out_of_memory_is_sent_again_with_more_and_not_for_ever(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm("sacct", SACCT)
    asked, times = [], []
    for attempt in range(1, OFTEN_SHORT + 2):
        asked.append(machine.training_memory_mb(Wildcards(experiment="one"), attempt))
        ended()
        times.append(times_to_send(job(), machine))
    assert asked == [8000, 12_000, 18_000, 27_000]
    assert times == [20, 20, 20, 0]
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == (
        "train of one (job 7, n1) ran out of memory; the next attempt asks for 1.5 times as much. Slurm: "
        "OUT_OF_MEMORY, exit code 0:125, 1996K of memory used."
    )
    assert last.startswith("train of one (job 7, n1) ran out of memory for the 4th time and is not sent again.")
    assert machine.training_memory_mb(Wildcards(experiment="two"), 2) == 8000, "another experiment has enough"
    assert machine.training_memory_mb(Wildcards(experiment="one")) == 8000, "and so has another stage"


@pytest.mark.parametrize(("ending", "said"), [("memory", "Out of memory."), (None, "slurmstepd: error: oom_kill")])
def test_memory_that_ran_out_is_known_without_accounting(machine: Machine, ending: Any, said: str) -> None:
    log = Path(".snakemake/slurm_logs/rule_train/one/7.log")
    log.parent.mkdir(parents=True)
    log.write_text(said)
    ended(*([(ending, said)] if ending else []))
    times_to_send(job(), machine)
    assert machine.training_memory_mb(Wildcards(experiment="one"), 2) == 12_000


def test_options_that_are_wrong_are_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("7 n1\n")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "note"))
    with pytest.raises(SystemExit):
        Parser().parse_args(["--no-such-option"])
    assert read_attempt(tmp_path / "note") == Attempt("7", "n1", "mistake", "unrecognized arguments: --no-such-option")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        ("ValueError('steps is 0')", Attempt("7", "n1", "mistake", "steps is 0")),
        ("OSError('stale file handle')", Attempt("7", "n1", "accident", "stale file handle")),
        ("RuntimeError('NCCL')", Attempt("7", "n1", "accident", "NCCL")),
        ("OSError(28, 'No space left on device')", "mistake"),
        ("RuntimeError('CUDA out of memory.')", "mistake"),
        ("MemoryError()", "memory"),
        ("Stopped('Step 3 is saved.')", Attempt("7", "n1", "stopped", "Step 3 is saved.")),
    ],
)
def test_a_stage_in_a_queue_notes_how_it_ended(raised: str, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("from image_diffusion.core.command import run", "from image_diffusion.core.errors import Stopped")
    code = "\n".join([*lines, "def main():", f"    raise {raised}", "run(main)"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    logged = [str(ROOT / "workflow/scripts/logged"), "logs/a b/x.log", sys.executable, "-c", code]
    assert subprocess.run(logged, capture_output=True, check=False).returncode != 0
    found = read_attempt(Path("logs/a b/x.log.attempt"))
    assert found is not None
    assert (found if isinstance(expected, Attempt) else found.ending) == expected


def test_outside_a_queue_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    subprocess.run([str(ROOT / "workflow/scripts/logged"), "logs/x.log", "true"], check=True, capture_output=True)
    assert [path.name for path in Path("logs").iterdir()] == ["x.log"]


def test_of_stages_that_share_a_job_those_tell_that_it_ended_in(machine: Machine) -> None:
    other = SimpleNamespace(
        rule=SimpleNamespace(name="sample", restart_times=2), log=["logs/one/sample.log"], wildcards=Wildcards()
    )
    ended(("mistake", "steps is 0"))
    assert times_to_send_all([other, job()], machine) == 0
    ended(("stopped", "Step 3 is saved."))
    assert times_to_send_all([other, job()], machine) == 20
    assert times_to_send_all(iter([other, job(5)]), machine) == 5, "none has told: the node was lost"


def test_snakemake_asks_the_job(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from snakemake.jobs import GroupJob, Job

    monkeypatch.setattr(Job, "restart_times", Job.restart_times)
    monkeypatch.setattr(GroupJob, "restart_times", GroupJob.restart_times)
    send_again_if_it_helps(machine)
    ended(("mistake", "steps is 0"))
    assert Job.restart_times.fget(job()) == 0
    assert Job.restart_times.fget(job()) == 20
    ended(("mistake", "steps is 0"))
    assert GroupJob.restart_times.fget(SimpleNamespace(jobs=[job()])) == 0


def test_a_snakemake_that_asks_elsewhere_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from snakemake.jobs import Job

    monkeypatch.setattr(Job, "restart_times", 3)
    with pytest.raises(SystemExit, match=r"error: Snakemake 9\.27\.\d+ asks elsewhere .* Run: python -m pip install"):
        send_again_if_it_helps(machine)
