"""What is changed of Snakemake is there, or Snakemake is refused in one line."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from snakemake.persistence import PersistenceBase
from snakemake.settings.types import DAGSettings

from image_diffusion.workflow.incomplete import make_unfinished_again


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PersistenceBase, "incomplete", PersistenceBase.incomplete)
    monkeypatch.setattr(DAGSettings, "force_incomplete", DAGSettings.force_incomplete)


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


@pytest.mark.parametrize("missing", ["incomplete", "force_incomplete"])
def test_a_snakemake_that_keeps_it_elsewhere_is_refused(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "incomplete":
        monkeypatch.delattr(PersistenceBase, "incomplete")
    else:
        fields = {name: field for name, field in DAGSettings.__dataclass_fields__.items() if name != missing}
        monkeypatch.setattr(DAGSettings, "__dataclass_fields__", fields)
    with pytest.raises(
        SystemExit, match=r"^error: Snakemake 9\.\S+ notes elsewhere what is unfinished than 9\.27, which"
    ):
        make_unfinished_again(None)
