"""What is changed of Snakemake is there, or Snakemake is refused in one line."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from snakemake.persistence import PersistenceBase
from snakemake.settings.types import DAGSettings

from image_diffusion.workflow.incomplete import count_no_parts, make_unfinished_again


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PersistenceBase, "incomplete", PersistenceBase.incomplete)
    monkeypatch.setattr(DAGSettings, "force_incomplete", DAGSettings.force_incomplete)
    monkeypatch.setattr(PersistenceBase, "_input_changed", PersistenceBase._input_changed)


def test_damaged_outputs_count_as_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unfinished(self: object, job: object) -> list[str]:
        return ["half"]

    monkeypatch.setattr(PersistenceBase, "incomplete", unfinished)
    make_unfinished_again(lambda outputs: "bad" in outputs)
    found = [
        asyncio.run(PersistenceBase.incomplete(SimpleNamespace(), SimpleNamespace(output=output)))  # type: ignore[arg-type]
        for output in (["bad", "good"], ["good"])
    ]
    assert found == [["bad", "good"], ["half"]]
    assert DAGSettings(force_incomplete=False).force_incomplete is True


@pytest.mark.parametrize("missing", ["incomplete", "force_incomplete", "_input_changed"])
def test_a_snakemake_that_keeps_it_elsewhere_is_refused(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing != "force_incomplete":
        monkeypatch.delattr(PersistenceBase, missing)
    else:
        fields = {name: field for name, field in DAGSettings.__dataclass_fields__.items() if name != missing}
        monkeypatch.setattr(DAGSettings, "__dataclass_fields__", fields)
    with pytest.raises(
        SystemExit, match=r"^error: Snakemake 9\.\S+ notes elsewhere what is unfinished than 9\.27, which"
    ):
        make_unfinished_again(None)


def test_what_a_result_was_made_of_is_compared_beside_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(*parts: str) -> list[str]:
        return ["config.yaml", *(f"out/samples/{part}" for part in parts)]

    monkeypatch.setattr(PersistenceBase, "_input_changed", lambda self, job, file=None: job != self.input(file))
    monkeypatch.setattr(PersistenceBase, "_input", lambda self, job: job)
    count_no_parts()

    def changed(made_of: list[str], now: list[str]) -> bool:
        recorded = SimpleNamespace(input=lambda file: made_of, _input=lambda job: job)
        return PersistenceBase._input_changed(recorded, now, "samples.npz")  # type: ignore[arg-type]

    two, three = of("part-0-of-2.npz", "part-1-of-2.npz"), of("part-0-of-3.npz", "part-1-of-3.npz", "part-2-of-3.npz")
    assert not changed(two, three) and not changed(of(), of("part-0-of-1.done")) and not changed(two, two)
    assert changed(two, [*two, "other.yaml"]) and changed(of(), of("part-0-of-2.json"))
