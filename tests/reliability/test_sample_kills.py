"""The stage that writes a prior's embeddings, killed at any instant: the same command ends with the same bytes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from attempts import Attempts, finished, fresh, killed_run
from tiny_runs import write_prior

from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.files.checksums import damaged

pytestmark = pytest.mark.slow


def written(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder but the output of processes."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("output-"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("num_parts", [0, 2])
def test_embeddings_killed_at_random_instants_end_with_the_same_bytes(
    attempts: Attempts, kills: int, tmp_path: Path, num_parts: int
) -> None:
    """In an empty folder, and over the embeddings of an older run with more files."""
    write_prior(tmp_path / "prior")
    settings = {"system": "embeddings", "changes": {"num_parts": num_parts}}
    usual = finished(attempts, tmp_path / "undisturbed", **settings)
    expected = written(tmp_path / "undisturbed")
    files = {f"img_emb/img_emb_{i}.npy" for i in range(3)} | {f"metadata/metadata_{i}.parquet" for i in range(3)}
    assert expected.keys() == files | {"embeddings.json"}, "23 rows of ten a file"
    described = read_json(tmp_path / "undisturbed" / "embeddings.json")["files"]
    assert described.keys() == files and not damaged(tmp_path / "undisturbed", described)
    assert sum(len(np.load(tmp_path / "undisturbed" / name)) for name in files if name.endswith("npy")) == 23

    draw, done, rounds = random.Random(num_parts), 0, 0
    while done < kills // 15 or rounds < 2:
        folder = fresh(tmp_path / "killed")
        if rounds % 2:
            finished(attempts, folder, system="embeddings", changes={"num_samples": 41})
        done += killed_run(attempts, folder, draw, 4, usual, **settings)
        assert written(folder) == expected, f"after {done} kills"
        rounds += 1
