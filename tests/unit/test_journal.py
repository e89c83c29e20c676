"""The journal: SIGKILL loses no record, repeated steps count once, and no heavy modules are imported."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from image_diffusion.core.journal import writer as journal_module
from image_diffusion.core.journal.reader import history_for_weights, logged_stages, read_journal, read_journals
from image_diffusion.core.journal.writer import Journal, NullJournal, open_journal, receipts_of
from image_diffusion.core.process.errors import Stopped


def test_journal_round_trips_its_records(tmp_path: Path) -> None:
    (tmp_path / "grid.png").write_bytes(b"picture")
    (tmp_path / "plot.svg").write_bytes(b"plot")
    with Journal.open(tmp_path / "journal", "train", tags={"rule": "train"}) as journal:
        journal.params({"train": {"steps": 10, "lr": 1e-4, "betas": [0.9, 0.999]}, "seed": 0, "none": None})
        journal.metrics({"loss": 0.5, "grad_norm": 1 / 3}, step=1, examples_seen=64)
        journal.metrics({"loss": math.nan, "grad_norm": math.inf}, step=2, examples_seen=128)
        journal.image("samples", tmp_path / "grid.png", step=2)
        journal.artifact(tmp_path / "plot.svg", "plots/plot.svg")
    (tmp_path / "grid.png").unlink()
    history = read_journal(tmp_path / "journal" / "train")
    assert history is not None
    assert history.params == {
        "train.steps": 10,
        "train.lr": 1e-4,
        "train.betas": "[0.9, 0.999]",
        "seed": 0,
        "none": None,
    }
    assert history.series("grad_norm") == ([1, 2], [1 / 3, math.inf])
    assert history.series("examples_seen") == ([1, 2], [64, 128])
    assert math.isnan(history.series("loss")[1][1])
    assert [(image.key, image.step, image.path.read_bytes()) for image in history.images] == [
        ("samples", 2, b"picture")
    ]
    assert [(a.name, a.path, a.size) for a in history.artifacts] == [("plots/plot.svg", tmp_path / "plot.svg", 4)]
    assert history.tags["rule"] == "train"
    assert (history.status, history.stage, history.superseded) == ("finished", "train", [])


def test_end_time_is_the_last_line_of_the_last_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000, 2000))
    monkeypatch.setattr(journal_module, "_now_ms", lambda: next(ticks))
    with pytest.raises(RuntimeError), Journal.open(tmp_path, "train") as journal:  # attempt, metrics, end: 1000 to 1002
        journal.metrics({"loss": 1.0}, step=1)
        raise RuntimeError
    history = read_journal(tmp_path / "train")
    assert history is not None and (history.starts, history.ended, history.status) == ([1000], 1002, "failed")
    with Journal.open(tmp_path, "train") as journal:  # 1003 to 1006
        journal.metrics({"loss": 1.0}, step=1)
        journal.metrics({"loss": 0.5}, step=2)
    history = read_journal(tmp_path / "train")
    assert history is not None and (history.starts, history.ended, history.status) == ([1000, 1003], 1006, "finished")
    path = sorted((tmp_path / "train").glob("attempt-*.jsonl"))[-1]
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:-1]))  # killed before its end
    (receipts_of(path.parent) / f"{path.stem}.json").unlink()
    history = read_journal(tmp_path / "train")
    assert history is not None and (history.ended, history.status) == (1005, "killed")
    assert [(point.step, point.time) for point in history.points] == [(1, 1004), (2, 1005)]


def test_attempts_with_five_digits_are_ordered_by_number(tmp_path: Path) -> None:
    for step, status in ((1, "failed"), (2, "finished")):
        journal = Journal.open(tmp_path, "train", tags={"fingerprint": "a"}, resume_step=step - 1)
        journal.metrics({"loss": float(step)}, step=step)
        journal.close(status)
        if step == 1:
            journal.path.rename(tmp_path / "train" / "attempt-9999.jsonl")
    assert journal.path.name == "attempt-10000.jsonl"
    history = read_journal(tmp_path / "train")
    assert history is not None and history.status == "finished" and history.starts == sorted(history.starts)
    assert history.series("loss") == ([1, 2], [1.0, 2.0])


def test_redone_steps_are_superseded(tmp_path: Path) -> None:
    for resume, steps in ((None, range(1, 8)), (4, range(5, 7)), (2, range(3, 10))):
        with Journal.open(tmp_path, "train", resume_step=resume, tags={"fingerprint": "a"}) as journal:
            for step in steps:
                journal.metrics({"loss": 100 * (resume or 0) + step}, step=step)
    history = read_journal(tmp_path / "train")
    assert history is not None
    assert history.series("loss") == (list(range(1, 10)), [1, 2, *(200 + step for step in range(3, 10))])
    assert sorted(point.value for point in history.superseded) == [3, 4, 5, 6, 7, 405, 406]
    assert len(history.starts) == 3


def test_last_value_of_a_step_counts_within_an_attempt(tmp_path: Path) -> None:
    with Journal.open(tmp_path, "evaluate") as journal:
        journal.metrics({"fid": 9.0}, step=5)
        journal.metrics({"fid": 8.0}, step=5)
    history = read_journal(tmp_path / "evaluate")
    assert history is not None and history.series("fid") == ([5], [8.0])


def test_attempts_are_ordered_by_number_not_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "attempt-9999.jsonl").touch()  # an attempt killed before its first line
    for value in (1.0, 2.0):
        with Journal.open(tmp_path, "train", resume_step=0 if value == 2.0 else None) as journal:
            journal.metrics({"loss": value}, step=1)
    assert sorted(path.name for path in folder.glob("*.jsonl"))[0] == "attempt-10000.jsonl"
    history = read_journal(folder)
    assert history is not None and history.series("loss") == ([1], [2.0])


def test_other_parameters_are_another_run_and_the_latest_run_is_last(tmp_path: Path) -> None:
    for seed, resume in ((0, None), (1, None), (0, 5)):
        with Journal.open(tmp_path, "train", resume) as journal:
            journal.params({"seed": seed})
    histories = read_journals(tmp_path / "train")
    assert [(history.params["seed"], len(history.starts)) for history in histories] == [(1, 1), (0, 2)]


def test_restart_is_a_new_run_after_finishing_but_not_after_a_crash(tmp_path: Path) -> None:
    for value, status in ((1.0, "failed"), (2.0, "finished"), (3.0, "finished")):
        journal = Journal.open(tmp_path, "evaluate")
        journal.metrics({"fid": value}, step=7)
        journal.close("failed" if status == "failed" else "finished")
    histories = read_journals(tmp_path / "evaluate")
    assert [history.series("fid")[1] for history in histories] == [[2.0], [3.0]]
    assert [point.value for point in histories[0].superseded] == [1.0]


def test_attempts_with_one_fingerprint_are_one_run_with_changed_parameters(tmp_path: Path) -> None:
    for steps in (10, 20):
        with Journal.open(tmp_path, "train", resume_step=steps - 10, tags={"fingerprint": "f"}) as journal:
            journal.params({"steps": steps, "seed": 0})
    (history,) = read_journals(tmp_path / "train")
    assert history.params == {"steps": 10, "seed": 0}
    assert history.changed == {"steps": 20}


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("x"), "failed"), (Stopped("x"), "stopped"), (None, "finished")]
)
def test_final_status_of_a_stage_is_recorded(tmp_path: Path, error: Exception | None, status: str) -> None:
    def stage() -> None:
        with Journal.open(tmp_path, "train"):
            if error is not None:
                raise error

    if error is None:
        stage()
    else:
        with pytest.raises(type(error)):
            stage()
    history = read_journal(tmp_path / "train")
    assert history is not None and history.status == status


def test_sigkill_loses_no_record(tmp_path: Path) -> None:
    program = (
        "import itertools, sys; from pathlib import Path; from image_diffusion.core.journal.writer import Journal\n"
        "journal = Journal.open(Path(sys.argv[1]), 'train')\n"
        "for step in itertools.count(1):\n"
        "    journal.metrics({'loss': step}, step=step)\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(50):
        process.stdout.readline()
    running = read_journal(tmp_path / "train")
    process.send_signal(signal.SIGKILL)
    printed = "50\n" + process.stdout.read()
    process.wait()
    last = int(printed[: printed.rindex("\n")].splitlines()[-1])  # the last line may be incomplete
    killed = read_journal(tmp_path / "train")
    assert running is not None and running.status == "running" and running.ended is None
    assert killed is not None and killed.status == "killed" and killed.ended is not None
    steps, _ = killed.series("loss")
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= last


def test_truncated_and_zeroed_lines_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal.open(tmp_path, "train") as journal:
        journal.metrics({"loss": 1.0}, step=1)
    with journal.path.open("ab") as file:
        file.write(b"\0\0\0\0\n" + b'{"type":"metrics","time":1,"step":2,"val')
    history = read_journal(tmp_path / "train")
    assert history is not None and history.series("loss") == ([1], [1.0])
    assert "line 4 is damaged" in capsys.readouterr().err


def test_bytes_lost_to_a_full_disk_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal.open(tmp_path, "train") as journal:
        size = journal.path.stat().st_size
        monkeypatch.setattr(os, "write", full)
        journal.metrics({"loss": 1.0}, step=1)
    first, last = capsys.readouterr().err.splitlines()
    assert "it cannot be written: [Errno 28] No space left on device. The stage continues." in first
    assert re.search(r"journal .*: [1-9]\d* bytes could not be written\. The stage continues\.$", last)
    assert journal.path.stat().st_size == size


def test_journal_recovers_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, full = os.write, [False]

    def limited(file: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:7])  # every write is partial

    monkeypatch.setattr(os, "write", limited)
    with Journal.open(tmp_path, "train") as journal:
        for step in range(10):
            full[0] = 3 <= step < 7
            journal.metrics({"loss": step}, step=step)
    history = read_journal(tmp_path / "train")
    assert history is not None and history.series("loss") == (list(range(10)), list(range(10)))
    assert capsys.readouterr().err.count("No space left") == 1


def test_failed_flushes_are_reported_once_and_do_not_stop_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flush = os.fsync

    def limited(file: int) -> None:
        if file == journal._file:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        flush(file)

    with Journal.open(tmp_path, "train") as journal:
        monkeypatch.setattr(os, "fsync", limited)
        for step in range(3):
            journal.metrics({"loss": step}, step=step)
            journal.sync()
    history = read_journal(tmp_path / "train")
    assert history is not None and history.series("loss") == ([0, 1, 2], [0, 1, 2])
    assert capsys.readouterr().err.count("Disk quota") == 1


def test_missing_images_and_artifacts_are_reported_without_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Journal.open(tmp_path, "train") as journal:
        journal.image("samples", tmp_path / "none.png", step=1)
        journal.artifact(tmp_path / "none.bin")
    assert capsys.readouterr().err.count("is lost") == 2


def test_only_listed_environment_variables_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    with Journal.open(tmp_path, "train") as journal:
        pass
    text = journal.path.read_text()
    assert json.loads(text.splitlines()[0])["tags"]["slurm_job_id"] == "4711"
    assert "s3cr3t" not in text


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys, image_diffusion.core.journal.writer\n"
        "print([m for m in ('torch', 'mlflow', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_null_journal_has_every_method(tmp_path: Path) -> None:
    public = [name for name in vars(Journal) if not name.startswith("_") and name not in ("open", "path")]
    assert set(public) <= set(vars(NullJournal))
    with open_journal(None, "train") as journal:
        journal.metrics({"loss": 1.0}, step=1)
    assert isinstance(journal, NullJournal) and list(tmp_path.iterdir()) == []
    with open_journal(tmp_path, "train", {"fingerprint": "f"}) as journal:
        journal.metrics({"loss": 1.0}, step=1)
    history = read_journal(tmp_path / "train")
    assert history is not None and history.tags["fingerprint"] == "f" and len(history.points) == 1


def test_flipped_bits_never_change_recorded_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grid.png").write_bytes(b"picture")
    with Journal.open(tmp_path, "train", tags={"fingerprint": "f"}) as journal:
        journal.metrics({"loss": 0.125}, step=1, examples_seen=64)
        journal.image("samples", tmp_path / "grid.png", step=1)
        journal.metrics({"loss": 0.0625}, step=2, examples_seen=128)
    whole = read_journal(tmp_path / "train")
    assert whole is not None and not whole.damaged
    path = journal.path
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    for place in range(len(data)):
        folder = tmp_path / f"{place}"  # a new path, since damage of a file is reported once
        folder.mkdir()
        (folder / path.name).write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        found = read_journal(folder)
        number = sum(start <= place for start in starts)
        assert f"warning: journal {folder / path.name}: line {number} is damaged" in capsys.readouterr().err
        if number == 1:
            assert found is None
        else:
            assert found is not None and found.damaged[0] == f"{path.name} line {number}"
            assert set(found.points) < set(whole.points) or number not in (2, 4)
            assert found.points == [point for point in whole.points if point in found.points]


def test_lines_without_checksums_are_read_in_old_journals_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Journal.open(tmp_path, "train") as journal:
        journal.metrics({"loss": 1.0}, step=1)
    lines = journal.path.read_text().splitlines()
    old = [re.sub(r',"crc32":"\w+"}$', "}", line) for line in lines]
    journal.path.write_text("".join(line + "\n" for line in old))
    history = read_journal(tmp_path / "train")
    assert history is not None and history.series("loss") == ([1], [1.0]) and history.status == "finished"
    journal.path.write_text("".join(line + "\n" for line in [lines[0], *old[1:]]))
    history = read_journal(tmp_path / "train")
    assert history is not None and not history.points
    assert "line 2 is damaged and left out: its checksum is missing." in capsys.readouterr().err


def test_removed_attempts_are_detected_by_later_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tags = {"fingerprint": "a"}
    with Journal.open(tmp_path, "train", tags=tags) as first:
        first.metrics({"loss": 1.0}, step=1)
    with Journal.open(tmp_path, "train", 1, tags, after=first.attempts) as second:
        second.metrics({"loss": 0.5}, step=2)
    with Journal.open(tmp_path, "train", 2, tags, after=second.attempts):
        pass
    whole = read_journal(tmp_path / "train")
    assert whole is not None and whole.damaged == [] and whole.series("loss") == ([1, 2], [1.0, 0.5])
    second.path.unlink()
    history = read_journal(tmp_path / "train")
    assert history is not None and history.series("loss") == ([1], [1.0])
    assert history.damaged == [f"attempt {second.id[:8]}"]
    assert f"all records of attempt {second.id[:8]} are lost" in capsys.readouterr().err


def test_truncated_attempts_are_detected_by_later_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file alone looks like that of an attempt killed earlier."""
    tags = {"fingerprint": "a"}
    first = Journal.open(tmp_path, "train", tags=tags)
    for step in (1, 2, 3):
        first.metrics({"loss": 1.0}, step=step)
    led_here = first.attempts
    first.metrics({"loss": 1.0}, step=4)  # after the checkpoint, so it may be lost
    with Journal.open(tmp_path, "train", 3, tags, after=led_here) as second:
        second.metrics({"loss": 1.0}, step=4)
    lines = first.path.read_text().splitlines(keepends=True)
    first.path.write_text("".join(lines[:-1]))
    history = read_journal(tmp_path / "train")
    assert history is not None and history.damaged == [] and history.series("loss")[0] == [1, 2, 3, 4]
    first.path.write_text("".join(lines[:-3]) + lines[-3][:9])
    history = read_journal(tmp_path / "train")
    assert history is not None and history.series("loss")[0] == [1, 4]
    assert history.damaged == [f"attempt {first.id[:8]}"]
    assert f"2 of 4 records of attempt {first.id[:8]} are lost" in capsys.readouterr().err


def test_attempt_belongs_to_the_run_of_the_attempts_it_resumes(tmp_path: Path) -> None:
    """Eight steps, shortened to six, restarted from scratch since no checkpoint was readable, and extended again: the
    last checkpoint of the first attempt still exists."""
    tags = {"fingerprint": "a"}
    with Journal.open(tmp_path, "train", tags=tags) as first:
        for step in (2, 4, 6, 8):
            first.metrics({"loss": 10.0 - step}, step=step)
    with Journal.open(tmp_path, "train", 6, tags, after=first.attempts) as shortened:
        shortened.metrics({"validation/loss": 4.0}, step=6)
    with Journal.open(tmp_path, "train", tags=tags) as anew:
        anew.metrics({"loss": 8.0}, step=2)
    with Journal.open(tmp_path, "train", 8, tags, after=first.attempts):
        pass
    other, history = read_journals(tmp_path / "train")
    assert other.id == anew.id
    assert history.id == first.id and history.damaged == [] and history.status == "finished"
    assert history.series("loss") == ([2, 4, 6, 8], [8.0, 6.0, 4.0, 2.0])


def test_journal_of_another_run_is_not_used_for_the_weights(tmp_path: Path) -> None:
    for fingerprint in ("a", "b"):
        with Journal.open(tmp_path, "train", tags={"fingerprint": fingerprint}) as journal:
            journal.metrics({"loss": 1.0}, step=1)
    weights = {"fingerprint": "b"}
    history = read_journal(tmp_path / "train")
    assert history is not None and history_for_weights(history, weights) is history
    journal.path.unlink()
    shutil.rmtree(receipts_of(tmp_path / "train"))  # older versions wrote no receipts
    history = read_journal(tmp_path / "train")
    assert history is not None and history_for_weights(history, weights).damaged == ["run b"]
    with Journal.open(tmp_path, "train", tags={"fingerprint": "c"}):  # an unfinished training has not made the weights
        history = read_journal(tmp_path / "train")
        assert history is not None and history_for_weights(history, weights) is history


def _damage(path: Path, kind: str) -> None:
    """Damage a file as by a full disk, a power failure or an edit."""
    data = path.read_bytes()
    match kind:
        case "cut":
            path.write_bytes(data[: len(data) * 7 // 10])
        case "zeroed":
            path.write_bytes(bytes(len(data)))
        case "zeroed from a page on":
            path.write_bytes(data[:500] + bytes(len(data) - 500))
        case "emptied":
            path.write_bytes(b"")
        case "removed":
            path.unlink()
        case "one bit flipped":
            middle = len(data) // 2
            path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        case "first line flipped":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "folder of the stage removed":
            shutil.rmtree(path.parent)
        case "folder of all journals removed":
            shutil.rmtree(path.parent.parent)


DAMAGE = {
    "cut": 7,
    "zeroed": 22,
    "zeroed from a page on": 20,
    "emptied": 22,
    "removed": 22,
    "one bit flipped": 1,
    "first line flipped": 1,
    "folder of the stage removed": 22,
    "folder of all journals removed": 22,
}
"""Kinds of damage to a journal of 23 records, and the least number of records that each loses."""


@pytest.mark.parametrize("kind", DAMAGE)
def test_lost_records_are_counted_and_the_run_stays_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    with Journal.open(tmp_path / "journal", "train", tags={"fingerprint": "a"}) as journal:
        journal.params({"lr": 0.5})
        for step in range(20):
            journal.metrics({"loss": 1.0 / (1 + step)}, step=step)
    whole = read_journal(tmp_path / "journal" / "train")
    assert whole is not None and (whole.num_records, whole.num_lost, whole.loss) == (23, 0, None)
    assert capsys.readouterr().err == ""
    _damage(journal.path, kind)
    assert logged_stages(tmp_path / "journal") == [tmp_path / "journal" / "train"]
    history = read_journal(tmp_path / "journal" / "train")
    assert history is not None and history.num_records == 23 and DAMAGE[kind] <= history.num_lost <= 23
    assert history.loss == f"{history.num_lost} of 23 records are lost"
    assert (history.id, history.status, history.params) == (whole.id, "finished", whole.params)
    assert (history.starts, history.ended, history.tags) == (whole.starts, whole.ended, whole.tags)
    assert set(history.points) <= set(whole.points) and history.damaged
    assert "lost" in (said := capsys.readouterr().err) or "is damaged and left out" in said


@pytest.mark.parametrize("kind", ["removed", "emptied", "cut"])
def test_lost_records_of_earlier_attempts_are_counted(tmp_path: Path, kind: str) -> None:
    """Stages that start from scratch record no previous attempt."""
    first = Journal.open(tmp_path / "journal", "sample")
    first.params({"seed": 0})
    first.metrics({"speed/images_per_s": 1.0}, step=1)
    first.close("stopped")
    with Journal.open(tmp_path / "journal", "sample") as second:
        second.params({"seed": 0})
        second.metrics({"speed/images_per_s": 1.0}, step=2)
    _damage(first.path, kind)
    (history,) = read_journals(tmp_path / "journal" / "sample")
    assert history.id == first.id and history.num_lost > 0 and history.status == "finished"


def test_numbers_of_removed_attempts_are_not_reused(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal", "train", tags={"fingerprint": "a"}) as first:
        first.metrics({"loss": 1.0}, step=1)
    first.path.unlink()
    with Journal.open(tmp_path / "journal", "train", 1, {"fingerprint": "a"}, after=first.attempts) as second:
        second.metrics({"loss": 0.5}, step=2)
    assert second.path.name == "attempt-0002.jsonl"
    (history,) = read_journals(tmp_path / "journal" / "train")
    assert history.id == first.id and history.num_lost == 3 and history.series("loss") == ([2], [0.5])


def test_damaged_receipt_is_reported_and_the_journal_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Journal.open(tmp_path / "journal", "train") as journal:
        journal.metrics({"loss": 1.0}, step=1)
    receipt = receipts_of(journal.path.parent) / "attempt-0001.json"
    _damage(receipt, "one bit flipped")
    history = read_journal(tmp_path / "journal" / "train")
    assert history is not None and history.series("loss") == ([1], [1.0]) and not history.num_lost
    assert f"{receipt} cannot be read" in capsys.readouterr().err


def test_killed_attempts_do_not_count_as_lost_records(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal", "train")
    journal.metrics({"loss": 1.0}, step=1)
    journal.sync()
    journal.metrics({"loss": 1.0}, step=2)
    os.close(journal._file)  # as when the process is killed
    with journal.path.open("ab") as file:
        file.write(b'{"type":"metr')
    history = read_journal(tmp_path / "journal" / "train")
    assert history is not None and history.status == "killed" and history.num_lost == 0 and not history.damaged
    assert history.series("loss")[0] == [1, 2]


def test_git_commit_is_recorded_only_if_the_repository_tracks_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if the package is merely installed inside the repository, as in .venv."""
    (tmp_path / "writer.py").touch()
    monkeypatch.setattr(journal_module, "__file__", str(tmp_path / "writer.py"))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=me", "-c", "user.email=me@localhost"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "mine"], check=True)
    assert "git_commit" not in journal_module._provenance()
    subprocess.run([*git, "add", "writer.py"], check=True)
    assert journal_module._provenance()["git_dirty"] == "true"
