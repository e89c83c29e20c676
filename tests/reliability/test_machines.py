"""A machine and a bucket: machines are killed with their disks, others go on, and the bytes are the same."""

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
"""Machines to kill."""
FAULTS = 20
"""Faults of the store, at least."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with Bucket(tmp_path_factory.mktemp("store")) as bucket:
        yield bucket


@pytest.fixture(scope="module")
def soak(store: Bucket, tmp_path_factory: pytest.TempPathFactory) -> MachinesSoak:
    """Rounds of one small training, which a machine has done undisturbed."""
    return MachinesSoak(Machines(warm_server(), tmp_path_factory.mktemp("machines"), ["rin"]), store, 1)


def test_machines_are_killed_and_others_go_on_with_the_same_bytes(soak: MachinesSoak) -> None:
    number = 0
    while soak.tally.kills.total() < KILLS:
        soak.round(number, lambda tally: tally.kills.total() >= KILLS)
        number += 1
    assert soak.tally.healed["killed machine"] == KILLS
    assert soak.tally.told.total() == soak.tally.silent.total() == 0


def test_faults_of_the_store_are_healed_or_told(soak: MachinesSoak) -> None:
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


def test_the_second_of_two_machines_stops_with_a_line_before_it_writes(soak: MachinesSoak, store: Bucket) -> None:
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


def test_a_machine_that_was_stopped_for_longer_than_the_silence_stops(soak: MachinesSoak, store: Bucket) -> None:
    url = f"s3://{BUCKET}/stopped"
    with soak.machines.new(url) as one, soak.machines.new(url) as other:
        first = soak.machines.command(one, **store.settings)
        wait_for_stage(one, "crop")  # seconds before its end
        one.stop()
        second = soak.machines.command(other, **store.settings)
        until = time.monotonic() + 60
        while not other.running()[1:]:  # a stage runs: the mirror is its own
            assert time.monotonic() < until and second.poll() is None, second.said()
            time.sleep(0.05)
        time.sleep(SILENCE_S / 4)
        one.go_on()
        assert first.wait(60) not in (0, None)
        told = [line for line in first.said().splitlines() if line.startswith("error: ")]
        assert len(told) == 1 and f"on {other.name} works with {url}" in told[0]
        assert second.wait(120) == 0, second.said()
        assert soak.machines.found(other) == soak.expected
