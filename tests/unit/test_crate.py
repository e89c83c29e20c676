"""Command that describes an experiment as an RO-Crate, and its deprecated form."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

import image_diffusion.__main__
from image_diffusion.stages import export


def run_export(monkeypatch: pytest.MonkeyPatch, *options: str | Path) -> None:
    monkeypatch.setattr("sys.argv", ["export", *map(str, options)])
    export.main()


def test_deprecated_crate_command_runs_export_with_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("image_diffusion.__main__.run", lambda main: ran.append((main.__module__, sys.argv[1:])))
    old = ["crate", "--experiment", "results/x", "--snakefile", "Snakefile", "--inputs", "manifest.json"]
    monkeypatch.setattr("sys.argv", ["image-diffusion", *old])
    image_diffusion.__main__.main()
    gc.enable()
    assert ran == [("image_diffusion.stages.export", ["--crate", *old[2:]])]
    assert capsys.readouterr().err == (
        "warning: the command crate is an option of export: export --crate EXPERIMENT …\n"
    )


def test_crate_requires_snakefile_and_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="give its --snakefile and its --inputs as well"):
        run_export(monkeypatch, "--crate", tmp_path)
    with pytest.raises(ValueError, match=r"--inputs names no manifest\.json"):
        run_export(monkeypatch, "--crate", tmp_path, "--snakefile", "Snakefile", "--inputs", "crop.yaml")
    assert not (tmp_path / "crate").exists()


def test_other_exports_require_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_export(monkeypatch, "--read", "weights.pt")
    assert ended.value.code == 2 and "--output is required: the folder to write" in capsys.readouterr().err
