"""Machines with one bucket: they are killed with their disks, others resume, and the bytes are the same."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("s3fs", reason="the extra `s3`")

from machines_soak import SILENCE_S, Machines, MachinesSoak, Tally

from bucket import BUCKET, Bucket
from machines import NEEDED, Machine, is_permitted
from warm import warm_server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_permitted(), reason=NEEDED)]

KILLS = int(os.environ.get("IMAGE_DIFFUSION_MACHINES", "5"))
"""Number of machines to kill."""
FAULTS = 20
"""Least number of faults of the store."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with Bucket(tmp_path_factory.mktemp("store")) as bucket:
        yield bucket


@pytest.fixture(scope="module")
def soak(store: Bucket, tmp_path_factory: pytest.TempPathFactory) -> MachinesSoak:
    """Rounds of one small training, of which an undisturbed run is finished."""
    return MachinesSoak(Machines(warm_server(), tmp_path_factory.mktemp("machines"), ["rin"]), store, 1)


def test_other_machines_resume_killed_ones_bit_exactly(soak: MachinesSoak) -> None:
    number = 0
    while soak.tally.kills.total() < KILLS:
        soak.round(number, lambda tally: tally.kills.total() >= KILLS)
        number += 1
    assert soak.tally.healed["killed machine"] == KILLS
    assert soak.tally.told.total() == soak.tally.silent.total() == 0


def test_store_faults_are_healed_or_reported(soak: MachinesSoak) -> None:
    before = soak.tally.kills.total()

    def is_enough(tally: Tally) -> bool:
        return tally.kills.total() > before

    soak.round(1000, is_enough, 0.2)
    faults = soak.tally.injected.total() - soak.tally.injected["killed machine"]
    assert faults >= FAULTS, soak.tally.table()
    assert soak.tally.silent.total() == 0


def wait_for_stage(machine: Machine, name: str) -> None:
    until = time.monotonic() + 120
    while name not in machine.running():
        assert time.monotonic() < until, machine.running()
        time.sleep(0.01)


def test_second_machine_with_same_mirror_stops_before_writing(soak: MachinesSoak, store: Bucket) -> None:
    url = f"s3://{BUCKET}/two"
    with soak.machines.new(url) as one, soak.machines.new(url) as other:
        first = soak.machines.command(one, **store.settings)
        wait_for_stage(one, "crop")
        second = soak.machines.command(other, **store.settings)
        assert second.wait(120) == 1
        told = [line for line in second.said().splitlines() if line.startswith("error: ")]
        assert len(told) == 1 and f"on {one.name} works with {url}" in told[0]
        assert not list((other.folder / "project").glob("results/**/*.*"))
        assert first.wait(120) == 0, first.said()
        assert soak.machines.found(one) == soak.expected


def test_machine_paused_longer_than_silence_s_ends_with_error(soak: MachinesSoak, store: Bucket) -> None:
    url = f"s3://{BUCKET}/stopped"
    with soak.machines.new(url) as one, soak.machines.new(url) as other:
        first = soak.machines.command(one, **store.settings)
        wait_for_stage(one, "crop")  # seconds before the stage ends
        one.stop()
        second = soak.machines.command(other, **store.settings)
        until = time.monotonic() + 60
        while not other.running()[1:]:  # a stage runs: it holds the mirror
            assert time.monotonic() < until and second.poll() is None, second.said()
            time.sleep(0.05)
        time.sleep(SILENCE_S / 4)
        one.go_on()
        assert first.wait(60) not in (0, None)
        told = [line for line in first.said().splitlines() if line.startswith("error: ")]
        assert len(told) == 1 and f"on {other.name} works with {url}" in told[0]
        assert second.wait(120) == 0, second.said()
        assert soak.machines.found(other) == soak.expected
