"""Reading requests: shares, turns, deadlines, and work that nobody waits for any more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from typing import Any

import pytest

from kvboost.server.errors import ApiError
from kvboost.server.readers import THREADS, Readers, Reading
from kvboost.server.tickets import ShuttingDownError

Scenario = Callable[[Readers], Coroutine[Any, Any, None]]


def run(
    scenario: Scenario, max_reading: int = 100, max_body_bytes: int = 1_000, served: Iterable[str] = ()
) -> None:
    """Run a scenario while requests of the tenants `served` are being answered."""
    readers = Readers(max_reading, max_body_bytes, lambda: set(served))
    try:
        asyncio.run(asyncio.wait_for(scenario(readers), 20))
    finally:
        readers.close()
    assert not readers._reading
    assert not readers._bytes


class Gate:
    """Work that goes on when it is let, and who is at it."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.begun: list[str] = []

    def work(self, name: str) -> Callable[[], str]:
        def wait() -> str:
            self.begun.append(name)
            assert self.let.wait(10)
            return name

        return wait

    async def until_begun(self, count: int) -> None:
        while len(self.begun) < count:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert len(self.begun) == count


async def read(readers: Readers, tenant: str, work: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    with readers.reading(tenant, timeout_s) as reading:
        return await reading.run(work)


def test_a_tenant_has_half_of_the_threads() -> None:
    async def scenario(readers: Readers) -> None:
        gate = Gate()
        greedy = [asyncio.ensure_future(read(readers, "a", gate.work("a"))) for _ in range(10)]
        await gate.until_begun(THREADS // 2)
        assert await read(readers, "b", lambda: "b") == "b"
        gate.let.set()
        assert await asyncio.gather(*greedy) == ["a"] * 10

    run(scenario)


def test_tenants_take_turns() -> None:
    async def scenario(readers: Readers) -> None:
        gate = Gate()
        holding = [
            asyncio.ensure_future(read(readers, name, gate.work(name))) for name in ("x", "x", "y", "y")
        ]
        await gate.until_begun(THREADS)
        order: list[str] = []
        waiting = [
            asyncio.ensure_future(read(readers, name, lambda name=name: order.append(name)))  # type: ignore[misc]
            for name in ("a", "a", "a", "a", "b", "c")
        ]
        await asyncio.sleep(0.05)
        gate.let.set()
        await asyncio.gather(*holding, *waiting)
        assert max(order.index("b"), order.index("c")) <= 4

    run(scenario)


def test_a_tenant_may_have_so_many_at_once() -> None:
    async def scenario(readers: Readers) -> None:
        with readers.reading("a", 10), readers.reading("a", 10):
            with pytest.raises(ApiError) as caught, readers.reading("a", 10):
                raise AssertionError
            assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})
            with readers.reading("b", 10):
                pass
        with readers.reading("a", 10):
            pass

    run(scenario, max_reading=2)


def test_a_tenant_that_has_spent_its_time_may_have_few_at_once() -> None:
    async def scenario(readers: Readers) -> None:
        with ExitStack() as many:
            for _ in range(20):
                many.enter_context(readers.reading("a", 10))
            readers._allowance.spend("a", 10, is_alone=False)
            with pytest.raises(ApiError), readers.reading("a", 10):
                raise AssertionError
            for _ in range(20):
                many.enter_context(readers.reading("b", 10))

    run(scenario, served={"b"})


def test_a_tenant_may_hold_half_of_the_bytes() -> None:
    async def scenario(readers: Readers) -> None:
        with readers.reading("a", 10) as one, readers.reading("b", 10) as other:
            readers.hold("a", readers._max_bytes // 2)
            with pytest.raises(ApiError, match="too many bytes"):
                await one.hold(1)
            await other.hold(readers._max_bytes // 2)
            with readers.reading("c", 10) as third, pytest.raises(ApiError):
                await third.hold(1_000_000)
            with readers.reading("c", 10) as third:
                await third.hold(1_000)  # who has nothing yet is let in
            readers.hold("a", -readers._max_bytes // 2)
        with readers.reading("a", 10) as one:
            await one.hold(1_000)

    run(scenario)


def test_large_bodies_fit_in_any_case() -> None:
    async def scenario(readers: Readers) -> None:
        with readers.reading("a", 10) as one:
            await one.hold(500_000_000)

    run(scenario, max_body_bytes=500_000_000)


@pytest.mark.timed
def test_reading_has_a_deadline() -> None:
    async def scenario(readers: Readers) -> None:
        ended = threading.Event()

        def work(reading: Reading) -> None:
            try:
                while True:
                    time.sleep(0.005)
                    reading.go_on()
            finally:
                ended.set()

        started = time.monotonic()
        with readers.reading("a", 0.1) as reading, pytest.raises(ApiError) as caught:
            await reading.run(lambda: work(reading))
        assert caught.value.status == 408
        assert time.monotonic() - started < 2
        await asyncio.to_thread(ended.wait, 2)
        assert ended.is_set()

    run(scenario)


@pytest.mark.timed
def test_work_that_does_not_look_is_not_waited_for() -> None:
    async def scenario(readers: Readers) -> None:
        gate = Gate()
        started = time.monotonic()
        with pytest.raises(ApiError, match="too long"):
            await read(readers, "a", gate.work("a"), timeout_s=0.1)
        assert time.monotonic() - started < 2
        gate.let.set()

    run(scenario)


def test_what_waits_too_long_for_a_thread_is_never_begun() -> None:
    async def scenario(readers: Readers) -> None:
        gate = Gate()
        holding = [asyncio.ensure_future(read(readers, "a", gate.work("a"))) for _ in range(2)]
        await gate.until_begun(2)
        with pytest.raises(ApiError):
            await read(readers, "a", gate.work("late"), timeout_s=0.1)
        gate.let.set()
        await asyncio.gather(*holding)
        assert await read(readers, "a", lambda: 1) == 1
        assert "late" not in gate.begun

    run(scenario)


def test_work_ends_when_nobody_waits_for_it() -> None:
    async def scenario(readers: Readers) -> None:
        looked = threading.Event()
        ended: list[Exception] = []

        def work(reading: Reading) -> None:
            looked.set()
            try:
                while True:
                    time.sleep(0.005)
                    reading.go_on()
            except Exception as error:
                ended.append(error)
                raise

        async def ask() -> None:
            with readers.reading("a", 10) as reading:
                await reading.run(lambda: work(reading))

        task = asyncio.ensure_future(ask())
        while not looked.is_set():
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while not ended or readers._running:
            await asyncio.sleep(0.005)
        assert await read(readers, "a", lambda: 1) == 1

    run(scenario)


def _busy() -> None:
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass


async def _flood(readers: Readers, tenant: str, seconds: float) -> float:
    """Seconds that a tenant gets if it reads one thing after the other."""
    until, done = time.monotonic() + seconds, 0

    async def client() -> None:
        nonlocal done
        while time.monotonic() < until:
            await read(readers, tenant, _busy)
            done += 1

    await asyncio.gather(*(client() for _ in range(4)))
    return 0.02 * done


@pytest.mark.timed
@pytest.mark.parametrize(("tenants", "share"), [(1, 0.2), (2, 0.1)])
def test_tenants_have_little_time_while_others_are_served(tenants: int, share: float) -> None:
    """A thread that runs Python keeps the model from running."""

    async def scenario(readers: Readers) -> None:
        spent = await asyncio.gather(*(_flood(readers, f"a{n}", 2.0) for n in range(tenants)))
        assert max(spent) <= 0.3 + 2.5 * share + 0.2

    run(scenario, served={"b"})


@pytest.mark.timed
def test_a_tenant_alone_may_take_its_time_and_owes_nothing() -> None:
    async def scenario(readers: Readers) -> None:
        assert await _flood(readers, "a", 1.0) > 0.5
        assert readers._allowance.left("a") >= -0.05

    run(scenario, served={"a"})


@pytest.mark.timed
def test_a_place_that_somebody_holds_slows_nobody_down() -> None:
    async def scenario(readers: Readers) -> None:
        with readers.reading("b", 10):
            assert await _flood(readers, "a", 1.0) > 0.5

    run(scenario)


def test_long_work_is_paid_for() -> None:
    async def scenario(readers: Readers) -> None:
        readers._allowance.spend("a", 1.5, is_alone=False)
        assert readers._allowance.left("a") < -1.1

    run(scenario, served={"b"})


@pytest.mark.timed
def test_bytes_take_time_too() -> None:
    async def upload(readers: Readers) -> float:
        started = time.monotonic()
        with readers.reading("a", 10) as reading:
            for _ in range(70):
                await reading.hold(1_000_000)
                readers.hold("a", -1_000_000)
                reading._held_bytes = 0
        return time.monotonic() - started

    async def among_others(readers: Readers) -> None:
        assert await upload(readers) > 0.2

    async def alone(readers: Readers) -> None:
        assert await upload(readers) < 0.2

    run(among_others, served={"b"})
    run(alone)


def test_what_nobody_waits_for_is_not_kept() -> None:
    """A body of megabytes may stand in line behind others for a while."""

    async def scenario(readers: Readers) -> None:
        gate = Gate()
        holding = [asyncio.ensure_future(read(readers, "a", gate.work("a"))) for _ in range(3)]
        await gate.until_begun(2)
        task = asyncio.ensure_future(read(readers, "a", lambda: None))
        await asyncio.sleep(0.05)
        assert [len(jobs) for jobs in readers._waiting.values()] == [2]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [len(jobs) for jobs in readers._waiting.values()] == [1]
        gate.let.set()
        await asyncio.gather(*holding)

    run(scenario)


def test_an_iteration_that_stops_is_an_error() -> None:
    async def scenario(readers: Readers) -> None:
        for _ in range(THREADS):
            with pytest.raises(RuntimeError):
                await read(readers, "a", lambda: next(iter(())))
        assert await read(readers, "a", lambda: 1) == 1

    run(scenario)


def test_who_waits_is_told_that_it_ends() -> None:
    async def scenario(readers: Readers) -> None:
        gate = Gate()
        tasks = [asyncio.ensure_future(read(readers, "a", gate.work("a"))) for _ in range(4)]
        await gate.until_begun(2)
        await asyncio.to_thread(readers.close)
        done, waiting = await asyncio.wait(tasks, timeout=2)
        assert [type(task.exception()) for task in done] == [ShuttingDownError] * 2
        gate.let.set()
        assert await asyncio.gather(*waiting) == ["a", "a"]
        with pytest.raises(ShuttingDownError):
            await read(readers, "a", lambda: 1)

    run(scenario)


def test_an_error_reaches_who_waits() -> None:
    async def scenario(readers: Readers) -> None:
        def fail() -> None:
            raise ArithmeticError("so it is")

        with pytest.raises(ArithmeticError, match="so it is"):
            await read(readers, "a", fail)
        assert await read(readers, "a", lambda: 2) == 2

    run(scenario)
