"""What is wrong with a result is found by what its stage has written about it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from image_diffusion.core.files import hashes, sha256_file, write_bytes, write_checksums, write_json, write_page
from image_diffusion.workflow.healing import Damage, fault_of

STORE = "sqlite:///mlflow.db"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A little of everything, whole."""
    monkeypatch.chdir(tmp_path)
    for name in ("train/weights.safetensors", "train/raw/weights.safetensors", "samples/samples.npz", "diffusers/a/b"):
        write_bytes(Path(name), name.encode())
    for folder in (Path("train"), Path("train/raw")):
        sha256 = sha256_file(folder / "weights.safetensors")
        write_json(folder / "model.json", {"sha256": sha256, "train": {"keep_raw": True}})
    write_json(Path("samples/samples.json"), {"files": hashes(Path("samples"), [Path("samples/samples.npz")])})
    write_checksums(Path("diffusers"))
    write_page(Path("report/index.html"), "<p>ü</p>\n")
    with closing(sqlite3.connect("mlflow.db")) as database, database:
        database.execute("CREATE TABLE runs (run_uuid TEXT)")
        database.execute("INSERT INTO runs VALUES ('one')")
    write_json(Path("tracked.json"), {"runs": [{"run_id": "one"}]})


RESULTS = ["train/model.json", "samples/samples.json", "diffusers", "report/index.html", "tracked.json"]


def test_whole_results_have_no_fault() -> None:
    assert [fault_of(Path(path), STORE) for path in RESULTS] == [None] * len(RESULTS)


FAULTS: dict[str, tuple[str, Callable[[], object], str]] = {
    "weights": ("train/model.json", lambda: Path("train/weights.safetensors").write_bytes(b"x"), "not what was wr"),
    "raw": ("train/model.json", lambda: Path("train/raw/weights.safetensors").unlink(), "is missing"),
    "samples": ("samples/samples.json", lambda: Path("samples/samples.npz").unlink(), "samples.npz is missing"),
    "seal": ("samples/samples.json", lambda: Path("samples/samples.json").write_text('{"files": {}, "seal": 1}'), "is"),
    "no files": ("samples/samples.json", lambda: write_json(Path("samples/samples.json"), {}), "it is not complete"),
    "export": ("diffusers", lambda: Path("diffusers/a/b").write_bytes(b"x"), "diffusers/a/b is not what was written"),
    "no sums": ("diffusers", lambda: Path("diffusers/SHA256SUMS").unlink(), "No such file"),
    "page": ("report/index.html", lambda: Path("report/index.html").write_text("<p>u</p>"), "not what was written"),
    "no store": ("tracked.json", lambda: Path("mlflow.db").unlink(), "mlflow.db is not there"),
    "no database": ("tracked.json", lambda: Path("mlflow.db").write_bytes(b"x" * 4096), "file is not a database"),
    "fewer runs": (
        "tracked.json",
        lambda: write_json(Path("tracked.json"), {"runs": [{"run_id": "one"}, {"run_id": "two"}]}),
        "lacks 1 of its 2 runs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_once(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, spoil, message = FAULTS[fault]
    spoil()
    damage = Damage(STORE)
    assert damage.among([path]) and damage.among(["nowhere", path])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"{path} is made again: ") and message in said


def test_a_server_is_not_asked() -> None:
    Path("mlflow.db").unlink()
    assert fault_of(Path("tracked.json"), "http://127.0.0.1:1") is None
