"""Before the first step, every process's results and speed are checked; during training, the slowest is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from attempts import Attempt, Attempts, finished
from comparison import results

from image_diffusion.core.journal.reader import read_journal

pytestmark = pytest.mark.slow


def test_processes_and_nodes_are_printed_if_there_are_several(attempts: Attempts, tmp_path: Path) -> None:
    alone = finished(attempts, tmp_path / "1", changes={"steps": 1}).output
    assert "Training with" not in alone[0]
    two = finished(attempts, tmp_path / "2", processes=2, inject="two hosts", changes={"steps": 1}).output
    assert [text.count("Training with") for text in two] == [1, 0]
    assert "Training with 2 processes: 1 x CPU on each of node0, node1.\n" in two[0]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_process_with_wrong_product_is_named_and_nothing_is_trained(
    attempts: Attempts, tmp_path: Path, precision: str
) -> None:
    changes = {"precision": precision}
    outcome = attempts(Attempt(str(tmp_path), processes=3, inject="wrong product", changes=changes))
    assert set(outcome.codes) == {1}, outcome.output
    assert outcome.output[0] == (
        "error: A product of known numbers is wrong on node1 (process 1, CPU). Take what computes wrongly out of use "
        "(on Slurm with --exclude=node1), and run the same command again.\n"
    )
    assert not (tmp_path / "train").exists()


def test_wrong_sum_over_processes_is_an_error(attempts: Attempts, tmp_path: Path) -> None:
    outcome = attempts(Attempt(str(tmp_path), processes=2, inject="wrong sum"))
    assert set(outcome.codes) == {1}, outcome.output
    assert outcome.output[0].startswith(
        "error: A sum of known numbers over all processes is wrong on node1 (process 1, CPU). Look"
    )


def test_slow_process_is_named_and_training_continues(attempts: Attempts, tmp_path: Path) -> None:
    outcome = finished(attempts, tmp_path, processes=2, inject="slow product", changes={"steps": 1})
    (warning,) = (line for line in outcome.output[0].splitlines() if line.startswith("warning: A product"))
    assert warning.endswith(
        " times as long as usual on node1 (process 1, CPU), and every step waits for it. Does something else run "
        "there, or is it hot?"
    )


@pytest.mark.parametrize("deterministic", ["run", "strict"])
def test_the_log_names_the_process_that_the_others_wait_for(
    attempts: Attempts, tmp_path: Path, deterministic: str
) -> None:
    changes = {"deterministic": deterministic, "log_every_steps": 4}
    outcome = finished(attempts, tmp_path, processes=2, inject="late", changes=changes)
    assert "slowest: node1 (process 1), " in outcome.output[0]
    history = read_journal(tmp_path / "journal/train")
    assert history is not None
    found = {(point.key, point.step): point.value for point in history.points}
    for step in (4, 8, 12, 13):
        assert found["speed/slowest_process", step] == 1
        assert 0 <= found["speed/median_share", step] < found["speed/slowest_share", step] <= 1


@pytest.mark.parametrize("processes", [1, 2])
def test_preflight_changes_no_result(attempts: Attempts, tmp_path: Path, processes: int) -> None:
    found = []
    for inject in (None, "no preflight"):
        folder = tmp_path / str(inject)
        finished(attempts, folder, processes=processes, inject=inject, changes={"deterministic": "run"})
        found.append(results(folder))
    assert found[0] == found[1]


def test_single_process_logs_no_slowest_process(attempts: Attempts, tmp_path: Path) -> None:
    assert "slowest" not in finished(attempts, tmp_path).output[0]
    history = read_journal(tmp_path / "journal/train")
    assert history is not None and not any("slowest" in point.key for point in history.points)
