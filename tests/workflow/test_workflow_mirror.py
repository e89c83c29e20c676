"""A project whose machine is lost: another machine with the same files and an empty disk resumes from the mirror."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest
from projects import Project, make_project

pytestmark = pytest.mark.slow


def mirrored(project: Project, bucket: Path) -> Project:
    """Give the project a mirror in a folder."""
    path = project / "config/config.yaml"
    section = f"mirror: {{url: 'file://{bucket}', every_s: 0.5, silence_s: 2}}"
    assert path.read_text().count("\nmirror:\n") == 1
    path.write_text(path.read_text().replace("\nmirror:\n", f"\n{section}\n"))
    return project


def results(project: Project) -> dict[str, bytes]:
    """Return the bytes of all results but pages and the files that each machine writes for its own disk and store."""
    folder = project / "results"
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    own = {
        ".verified.json",
        ".source-cache.json",
        ".owner",
        ".lock",
        "tracked.json",
        "summary.html",
        "index.html",
        "follow.json",
    }
    return {str(name): (folder / name).read_bytes() for name in names if name.name not in own}


def mirror(project: Project, *options: str) -> str:
    """Run `image-diffusion mirror` and return its output."""
    command = [project.command()[0], "-m", "image_diffusion", "mirror", *options]
    return subprocess.run(command, cwd=project.folder, capture_output=True, text=True, check=True).stdout


def test_empty_disk_is_restored_from_mirror_and_only_tracked_again(finished: Project, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    mirrored(finished, bucket)
    finished.run()
    made = results(finished)
    other = mirrored(make_project(tmp_path / "other"), bucket)
    said = other.run()
    assert "1 jobs" in said or "2 jobs" in said, said
    assert "micro/track done" in said and "micro/train" not in said
    assert results(other) == made
    assert other.planned() == set()
    assert "has left it" in mirror(other) and "results/micro" in mirror(other)
    chunks = bucket / "blobs"
    (chunks / ("0" * 64)).write_bytes(b"of a machine that was lost")
    before = len(list(chunks.iterdir()))
    assert "1 objects removed" in mirror(other, "--prune")
    assert len(list(chunks.iterdir())) == before - 1
    with (other / ".snakemake/mirror/lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(subprocess.CalledProcessError) as refused:
            mirror(other, "--prune")
    assert refused.value.stderr.startswith("error: Snakemake works in this folder, and with its mirror.")


def test_mistakes_are_one_line(fresh: Project, tmp_path: Path) -> None:
    done = fresh.snakemake("--config", "mirror=bucket")
    assert done.returncode == 1
    assert "error: mirror is bucket, which is no URL." in done.stdout and "Traceback" not in done.stdout
    done = fresh.snakemake("--config", "mirror=nosuch://bucket/x")
    assert done.returncode == 1
    assert "error: nosuch://bucket/x cannot be opened" in done.stdout and "Traceback" not in done.stdout
    assert not (fresh / "results/datasets").exists()
