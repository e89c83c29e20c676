"""Locks: a folder belongs to one Snakemake at a time; locks and jobs of a killed one are cleaned up."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from image_diffusion.workflow.jobs import slurm_queue as queue_module
from image_diffusion.workflow.jobs.slurm_queue import is_in_queue, orphans, settle_orphans, tell_of_unseen_jobs
from image_diffusion.workflow.start import lock_results, take_over

HERE = socket.gethostname()


def locked(folder: Path, host: str) -> Path:
    """Write the lock of a Snakemake that was killed on this host, and return its path."""
    lock = folder / ".snakemake" / "locks" / "0.input.lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (folder / ".snakemake" / "owner").write_text(host)
    return lock


def queue(folder: Path, jobs: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a fake Slurm that lists these jobs, and return the file where it records cancelled ones."""
    cancelled = folder / "cancelled"
    for name, script in {"squeue": f"cat <<'END'\n{jobs}\nEND", "scancel": f'echo "$@" >> {cancelled}'}.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return cancelled


@pytest.fixture(autouse=True)
def _on_a_login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_unused_folder_is_claimed(tmp_path: Path) -> None:
    with take_over(tmp_path).file:
        assert (tmp_path / ".snakemake" / "owner").read_text() == HERE


def test_locks_of_a_killed_snakemake_are_removed(tmp_path: Path) -> None:
    lock = locked(tmp_path, HERE)
    with take_over(tmp_path).file:
        assert not lock.exists()


def test_locks_of_a_running_snakemake_are_kept(tmp_path: Path) -> None:
    lock = locked(tmp_path, HERE)
    code = (
        "import sys; from pathlib import Path; from image_diffusion.workflow.start import take_over;"
        "mine = take_over(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as living:
        assert living.stdout is not None
        living.stdout.readline()
        lock.touch()
        with take_over(tmp_path).file:
            assert lock.exists()
        living.kill()
    with take_over(tmp_path).file:
        assert not lock.exists()


def test_locks_of_another_machine_are_kept(tmp_path: Path) -> None:
    lock = locked(tmp_path, "login2")
    with take_over(tmp_path).file:
        assert lock.exists()
    assert (tmp_path / ".snakemake" / "owner").read_text() == "login2"


def job(name: str, config: Path, *wildcards: str) -> Any:
    """Return a stand-in for a job of Snakemake."""
    return SimpleNamespace(
        rule=SimpleNamespace(name=name), wildcards=wildcards, input=SimpleNamespace(config=str(config))
    )


def test_orphaned_jobs_are_awaited_if_wanted_and_cancelled_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    then, later = "2026-01-01T12:00:00", "2026-01-01T13:00:00"
    noon = datetime.fromisoformat(then).timestamp()
    jobs = [
        f"11|{later}|rule_train_wildcards_one|{tmp_path}",
        f"12|{then}|rule_diffusion_train_wildcards_two|{tmp_path}",
        f"13|{later}|my own job|{tmp_path}",
        f"14|{later}|rule_train|{tmp_path}/elsewhere",
        f"15|{later}|rule_sample_wildcards_one|{tmp_path}",
        f"16|{later}|rule_train_wildcards_three|{tmp_path}",
    ]
    cancelled = queue(tmp_path, "\n".join(jobs), monkeypatch)
    config = tmp_path / "train.yaml"
    config.touch()
    os.utime(config, (noon + 60, noon + 60))
    wanted = [job("train", config, "one"), job("diffusion_train", config, "two"), job("sample", config, "one")]
    left = orphans(tmp_path)
    assert [each.job for each in left] == ["11", "12", "15", "16"]
    monkeypatch.setattr(queue_module.time, "sleep", lambda pause_s: queue(tmp_path, "", monkeypatch))
    settle_orphans(left, wanted, wait=True)
    assert cancelled.read_text() == "12 15 16\n", "of an old configuration, of a stage that begins anew, of nobody"
    first, second = capsys.readouterr().err.splitlines()
    assert first == "Cancelling what a killed Snakemake left in the queue: 12 15 16"
    assert second.startswith("Waiting for Slurm job 11 (rule_train_wildcards_one), which a Snakemake has left ")
    settle_orphans(left, wanted, wait=False)
    assert cancelled.read_text().endswith("11 12 15 16\n")


def test_job_submitted_in_the_second_of_its_configuration_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    then = "2026-01-01T12:00:00"
    cancelled = queue(tmp_path, f"11|{then}|rule_train_wildcards_one|{tmp_path}", monkeypatch)
    config = tmp_path / "train.yaml"
    config.touch()
    written = datetime.fromisoformat(then).timestamp() + 0.7
    os.utime(config, (written, written))
    left = orphans(tmp_path)
    monkeypatch.setattr(queue_module.time, "sleep", lambda pause_s: queue(tmp_path, "", monkeypatch))
    settle_orphans(left, [job("train", config, "one")], wait=True)
    assert capsys.readouterr().err.startswith("Waiting for Slurm job 11")
    assert not cancelled.exists() or cancelled.read_text() == ""


def test_job_older_than_its_configuration_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = queue(tmp_path, f"11|2026-01-01T12:00:00|rule_train_wildcards_one|{tmp_path}", monkeypatch)
    (tmp_path / "train.yaml").touch()
    settle_orphans(orphans(tmp_path), [job("train", tmp_path / "train.yaml", "one")], wait=True)
    assert cancelled.read_text() == "11\n"


def test_take_over_cancels_no_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = queue(tmp_path, f"11|2026-01-01T12:00:00|rule_train_wildcards_one|{tmp_path}", monkeypatch)
    locked(tmp_path, HERE)
    with take_over(tmp_path).file:
        assert not cancelled.exists()


@pytest.mark.parametrize(("jobs", "ours"), [("7|2026-01-01T12:00:00|head|/", False), ("", True)])
def test_locks_of_a_head_job_are_removed_after_it_ended(
    jobs: str, ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(tmp_path, jobs, monkeypatch)
    lock = locked(tmp_path, "n1 7")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    owner = take_over(tmp_path)
    with owner.file:
        assert (owner.is_ours, lock.exists()) == (ours, not ours)
        assert not ours or (tmp_path / ".snakemake" / "owner").read_text() == f"{HERE} 8"


def test_jobs_are_assumed_queued_when_the_queue_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(tmp_path, "", monkeypatch)
    (tmp_path / "bin/squeue").write_text("#!/bin/sh\nexit 1\n")
    assert is_in_queue("7") and not orphans(tmp_path)


def test_locks_are_removed_on_a_machine_without_a_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    lock = locked(tmp_path, HERE)
    take_over(tmp_path).file.close()
    assert not lock.exists()


def test_jobs_that_left_no_log_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "seen.log").touch()
    said = [
        f"Job 1 has been submitted with SLURM jobid 21 (log: {tmp_path}/seen.log).",
        f"Job 2 has been submitted with SLURM jobid 22 (log: {tmp_path}/unseen.log).",
        f"Job 3 has been submitted with SLURM jobid 23 (log: {tmp_path}/running.log).",
        "Error in rule train: message: SLURM-job '21' failed, SLURM status is: 'FAILED'.",
    ]
    log = tmp_path / "snakemake.log"
    log.write_text("\n".join(said))
    tell_of_unseen_jobs([log])
    assert capsys.readouterr().err == ""
    log.write_text("\n".join([*said, "SLURM-job '22' failed, SLURM status is: 'FAILED'."]))
    tell_of_unseen_jobs([str(log)])
    told = capsys.readouterr().err
    assert told.startswith("error: Slurm job 22 left no log: a node does not see ")
    assert told.count("\n") == 1


def test_unwritable_lock_files_give_one_line_errors(tmp_path: Path) -> None:
    (tmp_path / "one/.snakemake/owner").mkdir(parents=True)
    (tmp_path / "two").mkdir()
    (tmp_path / "two/.snakemake").touch()
    (tmp_path / "three/.owner").mkdir(parents=True)
    for name, path in {"one": ".snakemake/owner", "two": ".snakemake", "three": ".owner"}.items():
        with pytest.raises(SystemExit) as error:
            lock_results(tmp_path / name) if name == "three" else take_over(tmp_path / name)
        told = str(error.value)
        assert told.startswith(f"error: {tmp_path / name / path} cannot be written: ")
        assert told.endswith(". Remove it and start again.") and "\n" not in told


def test_impossible_results_folder_gives_a_one_line_error() -> None:
    with pytest.raises(SystemExit) as error:
        lock_results(Path("/proc/x"))
    told = str(error.value)
    assert told.startswith("error: /proc/x cannot be written: ") and told.endswith(". Name another folder.")


def test_results_on_an_unmounted_disk_give_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "results").symlink_to(tmp_path / "disk/results")
    with pytest.raises(SystemExit) as error:
        lock_results(tmp_path / "results")
    assert str(error.value) == (
        f"error: {tmp_path}/results is a link to {tmp_path}/disk/results, which is missing. Mount its disk, or make "
        f"that folder."
    )


def test_results_belong_to_one_snakemake_whatever_its_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "there")
    first = lock_results(tmp_path / "results")
    with lock_results(tmp_path / "results"):  # same working folder: Snakemake's own locks apply
        first.close()  # as a dry run that ends before the other
        monkeypatch.chdir(tmp_path / "here")
        with pytest.raises(SystemExit) as told:
            lock_results(tmp_path / "results")
        assert str(told.value).startswith(
            f"error: Another Snakemake works in {tmp_path / 'results'}: process {os.getpid()} "
        )
        assert f"started in {tmp_path / 'there'}. Wait until it has ended, or set `results`" in str(told.value)
    lock_results(tmp_path / "results").close()
