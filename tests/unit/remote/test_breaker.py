"""When a shared store is asked, and when nobody asks it any more."""

from __future__ import annotations

import pytest

from kvboost.remote import breaker as module
from kvboost.remote.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_it_opens_after_a_few_failures_in_a_row() -> None:
    breaker = Breaker()
    assert not breaker.is_open
    breaker.failed("no answer in time")
    assert not breaker.is_open
    breaker.succeeded()
    breaker.failed("no answer in time")
    assert not breaker.is_open, "not in a row"
    breaker.failed("no answer in time")
    assert breaker.is_open
    assert breaker.reason == "no answer in time"
    assert breaker.num_opened == 1


def test_some_failures_are_enough_by_themselves() -> None:
    breaker = Breaker()
    breaker.failed("access denied", at_once=True)
    assert breaker.is_open
    breaker.failed("not reachable")
    assert breaker.reason == "not reachable"
    assert breaker.num_opened == 1, "still the same outage"


def test_a_trial_every_second_until_one_succeeds(clock: Clock) -> None:
    breaker = Breaker()
    assert not breaker.is_trial_due
    breaker.failed("not reachable", at_once=True)
    assert not breaker.is_trial_due
    clock.now += 1.0
    assert breaker.is_trial_due
    breaker.failed("not reachable")
    assert not breaker.is_trial_due
    clock.now += 1.0
    assert breaker.is_trial_due
    breaker.succeeded()
    assert not breaker.is_open
    assert not breaker.is_trial_due
    breaker.failed("x")
    breaker.failed("x")
    assert breaker.num_opened == 2


def test_what_is_measured_is_followed() -> None:
    breaker = Breaker()
    for _ in range(20):
        breaker.measured_trip(0.1)
        breaker.measured_read(10_000_000, 0.1)
    assert breaker.trip_s == pytest.approx(0.1, rel=0.01)
    assert breaker.bytes_per_s == pytest.approx(1e8, rel=0.01)
    breaker.measured_read(1, 0.0)
