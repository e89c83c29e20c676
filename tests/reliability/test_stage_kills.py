"""Stages that are interrupted resume where they stopped: the bytes of an undisturbed run, and no batch twice."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempt, Attempts, finished, fresh, killed_run
from test_sample_kills import written
from tiny_runs import write_data, write_diffusion

from image_diffusion.core.files.atomic import digest
from image_diffusion.core.files.partial_results import partial_folder

pytestmark = pytest.mark.slow

NUMBERS = [
    pytest.param(signal.SIGKILL, id="kill"),
    pytest.param(signal.SIGTERM, id="time limit", marks=pytest.mark.long),
]


def calls(folder: Path) -> int:
    """Return how often a batch was begun for a folder, in all starts."""
    noted = folder.with_suffix(".calls")
    return len(noted.read_text()) if noted.exists() else 0


def of_images(folder: Path) -> Path:
    """Return the name under which batches of images drawn for an evaluation are counted."""
    return folder.with_name(f"{folder.name}-made")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all inputs of the stages."""
    folder = tmp_path_factory.mktemp("stages")
    write_diffusion(folder / "model")
    write_data(folder / "data")
    return folder


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("stage", "batches", "output"),
    [
        ({"system": "images"}, 6, "samples.npz"),
        ({"system": "images", "changes": {"part": "1/2"}}, 3, "part-1-of-2.npz"),
    ],
    ids=["sample", "a part of sample"],
)
def test_no_batch_is_made_twice(
    attempts: Attempts, work: Path, stage: dict[str, Any], batches: int, output: str, number: int
) -> None:
    name = digest([stage, number])[:8]
    undisturbed, folder = work / f"undisturbed-{name}", work / f"stopped-{name}"
    finished(attempts, undisturbed, **stage)
    assert calls(undisturbed) == batches
    for stop_at in (batches, 2, 1):
        fresh(folder).with_suffix(".calls").unlink(missing_ok=True)
        stop = stage.get("changes", {}) | {"stop_at": stop_at, "number": int(number)}
        assert attempts(Attempt(str(folder), system=stage["system"], changes=stop)).codes == [-number]
        assert not (folder / output).exists()
        done = finished(attempts, folder, **stage)
        assert calls(folder) == batches, "each once, in both starts together"
        assert (f"{output}: {stop_at - 1} of {batches} batches" in done.output[0]) == (stop_at > 1)
        assert written(folder) == written(undisturbed)
        assert not partial_folder(folder / output).exists()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("system", "changes", "output"),
    [
        ("reference", {}, "reference.json"),
        ("reference", {"part": "1/2"}, "part.npz"),
        ("metrics", {}, "metrics.json"),
        ("metrics", {"keep": False}, "metrics.json"),
    ],
    ids=["reference", "a part of reference", "evaluate", "evaluate what is not stored"],
)
def test_no_batch_passes_detector_twice(
    attempts: Attempts, work: Path, system: str, changes: dict[str, Any], output: str, number: int
) -> None:
    """Except for a batch that had no file yet: two batches share one here."""
    name = digest([system, changes, number])[:8]
    undisturbed, folder = work / f"undisturbed-{name}", work / f"stopped-{name}"
    finished(attempts, undisturbed, system=system, changes=changes)
    in_all = calls(undisturbed)
    for stop_at in (in_all, in_all // 2, 1):
        for each in (fresh(folder), of_images(folder)):
            each.with_suffix(".calls").unlink(missing_ok=True)
        stop = changes | {"stop_at": stop_at, "number": int(number)}
        assert attempts(Attempt(str(folder), system=system, changes=stop)).codes == [-number]
        assert not (folder / output).exists()
        assert partial_folder(folder / output).exists() or stop_at <= 2
        made = calls(of_images(folder))
        done = finished(attempts, folder, system=system, changes=changes)
        assert calls(folder) <= in_all + 1, "of both starts together"
        assert ("batches are reused from an earlier run" in done.output[0]) == (stop_at > 2 or made > 0)
        assert written(folder) == written(undisturbed)
        assert not partial_folder(folder / output).exists()
        if stop_at == in_all and made:
            assert calls(of_images(folder)) - made < calls(of_images(undisturbed)), "nor are all images made again"


@pytest.mark.parametrize("number", NUMBERS)
def test_embed_resumes_its_training_and_its_shards(attempts: Attempts, work: Path, number: int) -> None:
    undisturbed, folder = work / f"undisturbed-pairs-{number}", work / f"stopped-pairs-{number}"
    finished(attempts, undisturbed, system="pairs")
    steps, embedded = calls(undisturbed), calls(of_images(undisturbed))
    for of, stop_at in (("steps", steps), ("steps", steps // 2), ("shards", embedded), ("steps", 1)):
        for each in (fresh(folder), of_images(folder)):
            each.with_suffix(".calls").unlink(missing_ok=True)
        stop = {"of": of, "stop_at": stop_at, "number": int(number)}
        assert attempts(Attempt(str(folder), system="pairs", changes=stop)).codes == [-number]
        assert not (folder / "manifest.json").exists()
        before = calls(of_images(folder))
        finished(attempts, folder, system="pairs")
        assert calls(folder) <= steps + 1, "two steps are kept together"
        assert written(folder) == written(undisturbed)
        assert not partial_folder(folder / "manifest.json").exists()
        assert calls(of_images(folder)) - before < embedded or of == "steps", "the first shard was there"


def test_images_killed_at_random_instants_end_with_the_same_bytes(attempts: Attempts, kills: int, work: Path) -> None:
    usual = finished(attempts, work / "usual", system="images")
    draw, done = random.Random(0), 0
    while done < kills // 15:
        done += killed_run(attempts, fresh(work / "killed"), draw, 4, usual, system="images")
        assert written(work / "killed") == written(work / "usual"), f"after {done} kills"
