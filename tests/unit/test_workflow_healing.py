"""Damaged results are detected by the records that their stages wrote."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from image_diffusion.core.files import checksums
from image_diffusion.core.files.atomic import sha256_file, write_bytes, write_json, write_page
from image_diffusion.core.files.checksums import describe, write_checksums, write_listing
from image_diffusion.workflow import damage
from image_diffusion.workflow.damage import Damage

STORE = "sqlite:///mlflow.db"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with one small intact result of each kind."""
    monkeypatch.chdir(tmp_path)
    for name in ("train/weights.safetensors", "train/raw/weights.safetensors", "samples/samples.npz", "diffusers/a/b"):
        write_bytes(Path(name), name.encode())
    for folder in (Path("train"), Path("train/raw")):
        sha256 = sha256_file(folder / "weights.safetensors")
        write_json(folder / "model.json", {"sha256": sha256, "train": {"keep_raw": True}, "fingerprint": "f"})
    files = describe(Path("samples"), [Path("samples/samples.npz")])
    sha256 = sha256_file(Path("train/weights.safetensors"))
    write_json(Path("samples/samples.json"), {"files": files, "weights_sha256": sha256})
    write_json(Path("metrics.json"), {"protocol": {"weights": {"sha256": sha256}}})
    write_checksums(Path("diffusers"))
    write_page(Path("report/index.html"), "<p>ü</p>\n")
    with closing(sqlite3.connect("mlflow.db")) as database, database:
        database.execute("CREATE TABLE runs (run_uuid TEXT, artifact_uri TEXT)")
        database.execute("INSERT INTO runs VALUES ('one', ?)", [Path("mlruns/one one").absolute().as_uri()])
    Path("mlruns/one one").mkdir(parents=True)
    write_json(Path("tracked.json"), {"runs": [{"run_id": "one", "files": 1}]})


RESULTS = ["train/model.json", "samples/samples.json", "metrics.json", "diffusers", "report/index.html", "tracked.json"]


def test_intact_results_have_no_fault() -> None:
    assert [Damage(STORE).fault_of(Path(path)) for path in RESULTS] == [None] * len(RESULTS)


FAULTS: dict[str, tuple[str, Callable[[], object], str]] = {
    "weights": ("train/model.json", lambda: Path("train/weights.safetensors").write_bytes(b"x"), "not what was wr"),
    "raw": ("train/model.json", lambda: Path("train/raw/weights.safetensors").unlink(), "is missing"),
    "samples": ("samples/samples.json", lambda: Path("samples/samples.npz").unlink(), "samples.npz is missing"),
    "seal": ("samples/samples.json", lambda: Path("samples/samples.json").write_text('{"files": {}, "seal": 1}'), "is"),
    "other samples": (
        "samples/samples.json",
        lambda: write_json(Path("samples/samples.json"), {"weights_sha256": "0"}),
        "it is of other weights than those in train",
    ),
    "other metrics": (
        "metrics.json",
        lambda: write_json(Path("metrics.json"), {"protocol": {"weights": {"sha256": "0"}}}),
        "it is of other weights than those in train",
    ),
    "not complete": ("train/model.json", lambda: write_json(Path("train/model.json"), {}), "it is not complete"),
    "export": ("diffusers", lambda: Path("diffusers/a/b").write_bytes(b"x"), "diffusers/a/b is not what was written"),
    "no sums": ("diffusers", lambda: Path("diffusers/SHA256SUMS").unlink(), "No such file"),
    "page": ("report/index.html", lambda: Path("report/index.html").write_text("<p>u</p>"), "not what was written"),
    "no store": ("tracked.json", lambda: Path("mlflow.db").unlink(), "mlflow.db is not there"),
    "no database": ("tracked.json", lambda: Path("mlflow.db").write_bytes(b"x" * 4096), "file is not a database"),
    "no files": ("tracked.json", lambda: Path("mlruns/one one").rmdir(), "the files of 1 of its 1 runs are not there"),
    "fewer runs": (
        "tracked.json",
        lambda: write_json(Path("tracked.json"), {"runs": [{"run_id": each, "files": 0} for each in ("one", "two")]}),
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


def test_store_on_a_server_is_not_checked() -> None:
    Path("mlflow.db").unlink()
    assert Damage("http://127.0.0.1:1").fault_of(Path("tracked.json")) is None


def test_hashing_is_limited_per_start_and_continues_in_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checksums, "_SETTLED_S", -1.0)
    monkeypatch.setattr(damage, "AT_ONCE_BYTES", 10)
    for name in "abc":
        write_bytes(Path("big") / name, name.encode() * 8)
    files = {name: sha256_file(Path("big") / name) for name in "abc"}
    write_json(Path("big/curve.json"), {"files": files | {"c": "0" * 64}})
    for left in (2, 1, 0):
        fault = Damage(STORE).fault_of(Path("big/curve.json"))
        said = capsys.readouterr().err
        assert said.count("0.0 GB in big were not looked through") == (left > 0)
        assert (fault is None) == (left > 0)


def test_nothing_is_hashed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_SETTLED_S", -1.0)
    for path in RESULTS:
        Damage(STORE).fault_of(Path(path))
    monkeypatch.setattr(checksums, "sha256_file", lambda path: pytest.fail(f"{path} is hashed again"))
    assert [Damage(STORE).fault_of(Path(path)) for path in RESULTS] == [None] * len(RESULTS)


def test_damaged_preview_causes_a_warning_but_no_retraining(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("train/previews/f")
    for name in ("step-0000001.npz", "step-0000001.png"):
        write_bytes(folder / name, name.encode())
    write_listing(folder, "step-*")
    assert Damage(STORE).fault_of(Path("train/model.json")) is None and not capsys.readouterr().err
    (folder / "step-0000001.npz").write_bytes(b"x")
    assert Damage(STORE).fault_of(Path("train/model.json")) is None
    assert f"the previews in {folder} have changed since they were drawn: step-0000001.npz" in capsys.readouterr().err
    (folder / "listing.json").write_bytes(b"x")
    assert Damage(STORE).fault_of(Path("train/model.json")) is None and "is damaged" in capsys.readouterr().err


def test_damaged_listing_stays_reported_after_additions(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("train/previews/f")
    for step in (0, 1):
        write_bytes(folder / f"step-{step:07d}.npz", b"x")
        write_listing(folder, f"step-{step:07d}*")
    listing = folder / "listing.json"
    listing.write_text(listing.read_text().replace("step-0000000", "step-0000008"))  # a bit flip
    write_bytes(folder / "step-0000008.npz", b"x")
    write_listing(folder, "step-0000008*")
    assert Damage(STORE).fault_of(Path("train/model.json")) is None
    assert (
        f"the previews in {folder} have changed since they were drawn: {listing} is damaged" in capsys.readouterr().err
    )
