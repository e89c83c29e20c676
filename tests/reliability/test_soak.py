"""A few minutes of the soak: every stage is killed three times, and nothing is silent."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from soak import STAGES, Tally, soak

LONGEST_S = 1800.0


@pytest.mark.slow
def test_every_stage_is_killed_three_times_and_nothing_is_silent(tmp_path: Path) -> None:
    until = time.monotonic() + LONGEST_S

    def is_enough(tally: Tally) -> bool:
        assert time.monotonic() < until, tally.table()
        return all(tally.kills[stage] >= 3 for stage in ["snakemake", *STAGES])

    tally = soak(tmp_path / "soak", 17, ["dit", "latent", "prior"], is_enough)
    assert sum(tally.silent.values()) == 0
    assert sum(tally.healed.values()) + sum(tally.told.values()) == sum(tally.injected.values())
