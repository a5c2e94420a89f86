"""The worker: a queue, a running batch, answers on their way; whatever happens, everyone hears the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvboost import GenerationMode, KVBoost
from kvboost.batching import scheduler as scheduler_module
from kvboost.errors import InvalidRequestError, KVBoostError
from kvboost.server.tickets import FairQueue, QueueFullError, RequestTimeoutError, ShuttingDownError, Ticket
from kvboost.server.worker import Worker
from tests.checked_requests import read_request
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids


def with_worker(
    engine: KVBoost, body: Callable[[Worker], Awaitable[None]], closing_s: float = 5.0, **options: Any
) -> Worker:
    """Run `body` in an event loop; the worker must end in time."""
    worker = Worker(engine, **options)

    async def main() -> None:
        try:
            await asyncio.wait_for(body(worker), 60)
        finally:
            await asyncio.to_thread(worker.close, closing_s)

    asyncio.run(main())
    assert not worker.is_alive
    if worker.scheduler is not None:
        assert not worker.scheduler.sequences
    return worker


async def tokens_of(ticket: Ticket) -> list[int]:
    return [token async for token in ticket]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("mode", ["prefix_cache", "chunk_kv_reuse", "baseline"])
def test_answers_equal_generate(make_engine: MakeEngine, batching: bool, mode: str) -> None:
    engine = make_engine()
    prompts = [random_ids(60, 1) + random_ids(5 + n, n + 2) for n in range(12)]
    expected = [engine.generate(p, 6, mode=GenerationMode.BASELINE).token_ids for p in prompts]

    async def body(worker: Worker) -> None:
        tickets = [worker.submit(read_request(engine, p, 6, mode)) for p in prompts]
        found = await asyncio.gather(*(tokens_of(ticket) for ticket in tickets))
        assert found == expected
        assert [ticket.result.token_ids for ticket in tickets] == expected
        await until(lambda: worker.stats.answered == 12)  # what is stored comes after the answer
        assert worker.stats.running == worker.stats.waiting == 0

    worker = with_worker(engine, body, batching=batching, max_sequences=4, batch_tokens=2_000)
    if worker.scheduler is not None and mode == "prefix_cache":
        assert worker.scheduler.counts.joined == 12


def test_who_goes_away_frees_the_place(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def body(worker: Worker) -> None:
        long = [
            worker.submit(read_request(engine, random_ids(20, n), 900, min_new_tokens=900)) for n in (1, 2)
        ]
        waiting = worker.submit(read_request(engine, random_ids(20, 3), 4))
        gone = worker.submit(read_request(engine, random_ids(20, 4), 4))
        await until(lambda: worker.stats.running == 2)
        gone.cancel()
        long[0].cancel()
        assert len(await tokens_of(waiting)) == 4
        with pytest.raises(KVBoostError, match="cancelled"):
            await tokens_of(gone)
        assert long[0].is_over
        assert not long[1].is_over
        long[1].cancel()
        await until(lambda: worker.stats.running == 0)
        assert worker.stats.cancelled == 3
        assert 0 < len(await tokens_of(long[1])) < 900
        assert long[1].result.finish_reason == "cancelled"

    with_worker(engine, body, max_sequences=2, batch_tokens=2_500)


@pytest.mark.parametrize("batching", [True, False])
def test_limits(make_engine: MakeEngine, batching: bool) -> None:
    """A full queue, time that is up, and what never fits."""
    engine = make_engine()

    def read(n: int, new: int = 900) -> Any:
        return read_request(engine, random_ids(20, n), new, min_new_tokens=new)

    async def body(worker: Worker) -> None:
        running = worker.submit(read(1))
        await until(lambda: worker.stats.running == 1)
        late = worker.submit(read(2), timeout_s=0.05)
        queued = worker.submit(read(3, 2))
        with pytest.raises(QueueFullError) as refused:
            worker.submit(read(4))
        assert 1 <= refused.value.retry_after_s <= 60
        assert worker.stats.refused == 1
        if worker.scheduler is not None:
            with pytest.raises(InvalidRequestError, match="need room for"):
                worker.submit(read_request(engine, random_ids(100, 5), 900))
        running.cancel()
        with pytest.raises(RequestTimeoutError):
            await tokens_of(late)
        assert len(await tokens_of(queued)) == 2
        if worker.scheduler is not None:  # and while it runs
            slow = worker.submit(read(6), timeout_s=0.2)
            with pytest.raises(RequestTimeoutError):
                await tokens_of(slow)
            await until(lambda: not worker.scheduler or not worker.scheduler.sequences)

    with_worker(engine, body, batching=batching, max_sequences=1, batch_tokens=1_060, max_waiting=2)


def test_closing_finishes_or_fails(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ends: list[Any] = []

    async def body(worker: Worker) -> None:
        quick = worker.submit(read_request(engine, random_ids(20, 1), 5))
        slow = worker.submit(read_request(engine, random_ids(20, 2), 1_000, min_new_tokens=1_000))
        waiting = worker.submit(read_request(engine, random_ids(20, 3), 1_000, min_new_tokens=1_000))
        await until(lambda: worker.stats.running == 2)
        closing = asyncio.create_task(asyncio.to_thread(worker.close, 0.3))
        await asyncio.sleep(0.05)
        with pytest.raises(ShuttingDownError):
            worker.submit(read_request(engine, random_ids(20, 4), 5))
        assert len(await tokens_of(quick)) == 5
        ends.extend(await asyncio.gather(tokens_of(slow), tokens_of(waiting), return_exceptions=True))
        await closing
        with pytest.raises(ShuttingDownError):
            worker.call(lambda: None).result()

    with_worker(engine, body, max_sequences=2, batch_tokens=4_000)
    assert isinstance(ends[1], ShuttingDownError)
    assert isinstance(ends[0], ShuttingDownError)
    assert engine.explain([*random_ids(20, 1), 5]).cached_tokens >= 16  # what was computed is kept


def test_a_broken_step_is_survived(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    async def body(worker: Worker) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(
                scheduler_module.PackedModel,
                "extend",
                lambda *_args: (_ for _ in ()).throw(RuntimeError("no memory")),
            )
            with pytest.raises(RuntimeError, match="no memory"):
                await tokens_of(worker.submit(read_request(engine, random_ids(20, 1), 5)))
        assert len(await tokens_of(worker.submit(read_request(engine, random_ids(20, 1), 5)))) == 5
        await until(lambda: worker.stats.answered == 1)
        assert worker.stats.failed == 1

    with_worker(engine, body)


def test_reading_ahead_and_calls_between_steps(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_ids(64, 1)

    async def body(worker: Worker) -> None:
        ticket = worker.submit(read_request(engine, prompt, 1), answers=False)
        assert await tokens_of(ticket) == []
        assert ticket.result.prompt_tokens == 64
        found = await asyncio.wrap_future(worker.call(lambda: engine.explain([*prompt, 5]).cached_tokens))
        assert found == 64
        with pytest.raises(ZeroDivisionError):
            await asyncio.wrap_future(worker.call(lambda: 1 // 0))

    with_worker(engine, body)


def test_tenants_take_turns() -> None:
    class Waiting:
        def __init__(self, tenant: str, number: int) -> None:
            self.tenant, self.number = tenant, number

    queue = FairQueue(10)
    for tenant, number in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)]:
        queue.add(Waiting(tenant, number))  # type: ignore[arg-type]
    assert len(queue) == 6
    removed = queue.remove_if(lambda ticket: ticket.number == 2)  # type: ignore[attr-defined]
    assert [each.number for each in removed] == [2]  # type: ignore[attr-defined]
    taken = [queue.pop(queue.firsts()[0].tenant) for _ in range(5)]
    assert [ticket.number for ticket in taken] == [1, 4, 5, 3, 6]  # type: ignore[attr-defined]
    assert queue.firsts() == []
    assert len(queue) == 0


@pytest.mark.timed
def test_many_clients_that_come_and_go(make_engine: MakeEngine) -> None:
    """Some vanish, some are late, the arena is small: nobody waits for ever, and no place is lost."""
    engine = make_engine(max_chunks=8)
    ended: list[str] = []

    async def client(worker: Worker, number: int) -> None:
        await asyncio.sleep(number % 7 * 0.01)
        prompt = random_ids(40, number % 3) + random_ids(number % 11 + 1, number)
        try:
            ticket = worker.submit(
                read_request(engine, prompt, 12),
                tenant=str(number % 4),
                timeout_s=0.3 if number % 5 == 0 else 20,
            )
        except QueueFullError:
            ended.append("refused")
            return
        if number % 4 == 0:
            await asyncio.sleep(0.02)
            ticket.cancel()
        try:
            await tokens_of(ticket)
            ended.append(ticket.result.finish_reason)
        except KVBoostError as error:
            ended.append(type(error).__name__)

    async def body(worker: Worker) -> None:
        started = time.monotonic()
        await asyncio.gather(*(client(worker, number) for number in range(80)))
        assert time.monotonic() - started < 30
        await until(lambda: worker.stats.waiting == worker.stats.running == 0)
        assert worker.scheduler is not None
        assert worker.scheduler.radix_tree.pool.free + worker.scheduler.radix_tree.tokens == 300

    with_worker(engine, body, max_sequences=3, batch_tokens=300, max_waiting=30)
    assert len(ended) == 80
    assert {"length", "refused"} <= set(ended)


def test_a_failure_between_two_steps_ends_nobody_elses_service(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a client that has gone leaves behind cannot be stored: all hear of it, later ones are answered."""
    engine = make_engine()
    expected = engine.generate(random_ids(20, 3), 4, mode=GenerationMode.BASELINE).token_ids

    async def body(worker: Worker) -> None:
        requests = [read_request(engine, random_ids(20, n), 900, min_new_tokens=900) for n in (1, 2)]
        gone, other = (worker.submit(request) for request in requests)
        for ticket in (gone, other):
            assert await anext(aiter(ticket)) is not None
        assert worker.scheduler is not None
        store = worker.scheduler._storer.store
        monkeypatch.setattr(worker.scheduler._storer, "store", _broken)
        gone.cancel()
        with pytest.raises(OSError, match="no room"):
            await tokens_of(other)
        monkeypatch.setattr(worker.scheduler._storer, "store", store)
        assert await tokens_of(worker.submit(read_request(engine, random_ids(20, 3), 4))) == expected
        assert worker.is_alive

    with_worker(engine, body, max_sequences=4, batch_tokens=4_000)
    assert "requests failed together" in caplog.text


def test_shutting_down_outlives_a_failure(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    worker = Worker(engine, max_sequences=4, batch_tokens=4_000)

    async def main() -> None:
        tickets = []
        for n in (1, 2):
            request = read_request(engine, random_ids(20, n), 900, min_new_tokens=900)
            tickets.append(worker.submit(request))
            assert await anext(aiter(tickets[-1])) is not None
        monkeypatch.setattr(worker.scheduler._storer, "store", _broken)
        await asyncio.to_thread(worker.close, 0.01)
        for ticket in tickets:
            with pytest.raises(ShuttingDownError):
                await tokens_of(ticket)

    asyncio.run(main())
    assert not worker.is_alive
    assert caplog.text.count("was not stored") == 2


def test_an_answer_that_is_enough_counts_as_answered(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def body(worker: Worker) -> None:
        for mode in ("prefix_cache", "baseline"):  # in the batch, and alone
            ticket = worker.submit(read_request(engine, random_ids(20, 1), 300, mode, min_new_tokens=300))
            tokens = 0
            async for _ in ticket:
                tokens += 1
                if tokens == 3:
                    ticket.end()
            await until(lambda: worker.stats.running == 0)
        assert (worker.stats.answered, worker.stats.cancelled) == (2, 0)

    with_worker(engine, body, max_sequences=2, batch_tokens=2_000)


def test_a_call_that_nobody_waits_for_any_more(make_engine: MakeEngine) -> None:
    """Its future was cancelled: it is not run, and the worker lives."""
    engine = make_engine()
    ran: list[int] = []

    async def body(worker: Worker) -> None:
        holding, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            holding.set()
            go_on.wait(10)

        first = worker.call(hold)
        await asyncio.to_thread(holding.wait, 10)
        cancelled = worker.call(lambda: ran.append(1))
        assert cancelled.cancel()
        last = worker.call(lambda: ran.append(2))
        go_on.set()
        await asyncio.wrap_future(first)
        await asyncio.wrap_future(last)
        assert worker.is_alive

    with_worker(engine, body, max_sequences=2, batch_tokens=500)
    assert ran == [2]


def test_a_worker_that_cannot_go_on_tells_everybody(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even failing fails, as on a device that is gone: who runs, waits or comes later hears of it at once."""
    engine = make_engine()
    worker = Worker(engine, max_sequences=1, batch_tokens=1_000)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    async def main() -> None:
        tickets = [worker.submit(read_request(engine, random_ids(20, n), 300)) for n in (1, 2)]
        assert await anext(aiter(tickets[0])) is not None
        monkeypatch.setattr(worker.scheduler, "step", _broken)
        monkeypatch.setattr(worker.scheduler, "fail_all", _broken)
        for ticket in tickets:
            with pytest.raises((OSError, ShuttingDownError)):
                await asyncio.wait_for(tokens_of(ticket), 20)
        await until(lambda: not worker.is_alive)
        with pytest.raises(ShuttingDownError):
            worker.submit(read_request(engine, random_ids(20, 3), 4))
        with pytest.raises(ShuttingDownError):
            worker.call(lambda: None).result(5)

    asyncio.run(main())


def test_nobody_begins_alone_after_the_end(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run alone and wait when the time is up are told so, not served to their ends."""
    engine = make_engine()
    served: list[int] = []
    serve = engine.core.alone.serve

    def counting(request: Any) -> Any:
        served.append(1)
        return serve(request)

    monkeypatch.setattr(engine.core.alone, "serve", counting)
    worker = Worker(engine, max_sequences=1, batch_tokens=1_000)

    async def main() -> None:
        requests = [
            read_request(engine, random_ids(20, n), 900, "baseline", min_new_tokens=900) for n in range(4)
        ]
        tickets = [worker.submit(request) for request in requests]
        await until(lambda: bool(served))
        await asyncio.to_thread(worker.close, 0.05)
        for ticket in tickets:
            with pytest.raises(ShuttingDownError):
                await tokens_of(ticket)

    asyncio.run(main())
    assert len(served) == 1


def _broken(*_: Any) -> None:
    raise OSError("no room")
