"""Time limits and signals make a training save and stop."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from image_diffusion.training.checkpoint import stop_signal
from image_diffusion.training.checkpoint.stop_signal import SIGNALS, Stop
from image_diffusion.training.parallel.world import World

ALONE = World(0, 1, torch.device("cpu"))


class Clock:
    """A clock that tests set, in seconds."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stop_signal, "time", clock)
    return clock


def test_saves_are_due_a_fixed_time_after_the_last_one(clock: Clock) -> None:
    stop = Stop(ALONE, None, save_every_s=10)
    saves = []
    for now in (100, 109.9, 110, 111, 120, 125, 131, 140.9, 141):
        clock.now = now
        assert not stop.poll()
        saves.append((now, stop.saves))
    assert [now for now, due in saves if due] == [110, 120, 131, 141]


def test_time_limit_stops_and_saves(clock: Clock) -> None:
    stop = Stop(ALONE, max_hours=0.5, save_every_s=1e9)
    clock.now = 100 + 1799.9
    assert (stop.poll(), stop.saves) == (False, False)
    clock.now = 100 + 1800
    assert (stop.poll(), stop.saves) == (True, True)
    assert stop.reason == "train.max_hours"


def test_without_limits_neither_stops_nor_saves(clock: Clock) -> None:
    stop = Stop(ALONE, None)
    clock.now = 1e12
    assert (stop.poll(), stop.saves) == (False, False)


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_stop_and_handlers_are_restored(number: signal.Signals, clock: Clock) -> None:
    before = signal.getsignal(number)
    with Stop(ALONE, None) as stop:
        assert not stop.poll()
        os.kill(os.getpid(), number)
        assert stop.poll() and stop.saves and stop.reason == number.name
        assert stop.interruptible(lambda: 1) is None
    assert signal.getsignal(number) == before


def test_interruptible_work_is_abandoned_on_a_signal(clock: Clock) -> None:
    done = []

    def work() -> str:
        done.append("begun")
        os.kill(os.getpid(), signal.SIGUSR1)
        done.append("ended")
        return "made"

    with Stop(ALONE, None) as stop:
        assert stop.interruptible(lambda: "made") == "made"
        assert stop.interruptible(work) is None
    assert done == ["begun"]


def test_signals_do_not_interrupt_other_work(clock: Clock) -> None:
    with Stop(ALONE, None) as stop:
        assert stop.interruptible(lambda: "made") == "made"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.poll()


@pytest.mark.parametrize("under_torchrun", [False, True])
def test_a_second_signal_ends_the_process_unless_torchrun_repeats_them(
    under_torchrun: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with Stop(ALONE, None) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.poll() and not ended
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.poll() and ended == ([] if under_torchrun else [128 + signal.SIGTERM])
