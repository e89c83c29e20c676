"""Patches of Snakemake: each takes effect, or the version of Snakemake is rejected in one line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from image_diffusion.workflow.start import count_damaged_as_unfinished, ignore_parts_in_records


def persistence_class() -> Any:
    """Return the class that keeps Snakemake's records, whose name depends on the version."""
    from snakemake import persistence  # slow to import

    return getattr(persistence, "PersistenceBase", None) or persistence.Persistence


def parse_args(words: list[str]) -> Any:
    """Return the arguments as Snakemake parses them."""
    from snakemake.cli import parse_args as parse  # slow to import

    return parse(words)


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence_class(), "incomplete", persistence_class().incomplete)
    monkeypatch.setattr(persistence_class(), "_input_changed", persistence_class()._input_changed)


def test_damaged_outputs_count_as_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:

    async def unfinished(self: object, job: object) -> list[str]:
        return ["half"]

    monkeypatch.setattr(persistence_class(), "incomplete", unfinished)
    count_damaged_as_unfinished(lambda outputs: "bad" in outputs)
    found = [
        asyncio.run(persistence_class().incomplete(SimpleNamespace(), SimpleNamespace(output=output)))  # type: ignore[arg-type]
        for output in (["bad", "good"], ["good"])
    ]
    assert found == [["bad", "good"], ["half"]]


@pytest.mark.parametrize("missing", ["incomplete", "_input_changed"])
def test_snakemake_without_the_patched_methods_is_rejected(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(persistence_class(), missing)
    with pytest.raises(SystemExit, match=r"^error: Snakemake 9\.\S+ keeps its records in another way .* 'snakemake>=9"):
        count_damaged_as_unfinished(lambda outputs: False)


@pytest.mark.parametrize("arguments", [[], ["--profile", "slurm"]])
def test_profiles_of_a_clone_rerun_incomplete_outputs(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert parse_args(arguments)[1].rerun_incomplete


def test_the_default_profile_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for snakefile in ("Snakefile", "workflow/Snakefile"):
        assert parse_args(["--snakefile", str(Path(__file__).parents[2] / snakefile)])[1].rerun_incomplete


def test_number_of_parts_does_not_count_as_changed_input(monkeypatch: pytest.MonkeyPatch) -> None:

    def of(*parts: str) -> list[str]:
        return ["config.yaml", *(f"out/samples/{part}" for part in parts)]

    monkeypatch.setattr(persistence_class(), "_input_changed", lambda self, job, file=None: job != self.input(file))
    monkeypatch.setattr(persistence_class(), "_input", lambda self, job: job)
    ignore_parts_in_records()

    def changed(made_of: list[str], now: list[str]) -> bool:
        recorded = SimpleNamespace(input=lambda file: made_of, _input=lambda job: job)
        return persistence_class()._input_changed(recorded, now, "samples.npz")  # type: ignore[arg-type]

    two, three = of("part-0-of-2.npz", "part-1-of-2.npz"), of("part-0-of-3.npz", "part-1-of-3.npz", "part-2-of-3.npz")
    assert not changed(two, three) and not changed(of(), of("part-0-of-1.done")) and not changed(two, two)
    assert changed(two, [*two, "other.yaml"]) and changed(of(), of("part-0-of-2.json"))
