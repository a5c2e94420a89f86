"""What is stored, found and evicted, and why something was not a hit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvboost.errors import InvalidRequestError
from kvboost.identity.namespace import Namespace
from kvboost.models import CachedChunk, chained_hash, content_hash_from_tokens
from kvboost.store import chunks as chunk_store
from kvboost.store import inserter
from kvboost.store.forest import ROOT
from kvboost.store.manager import KVCacheManager
from kvboost.store.matching import PrefixMatch
from tests.unit.fake_kv import (
    CODEC,
    TOKEN_SIZE,
    check_cover,
    check_kv,
    extractor,
    past_of,
    store,
    user_chunk,
)

CHUNK = 4
MINE = Namespace("1" * 64, "family one", "mine")
THEIRS = Namespace("2" * 64, "family one", "theirs")  # another salt of the same model
OTHER_MODEL = Namespace("3" * 64, "family two", "mine")


def manager_of(
    max_chunks: int | None = None, max_tokens: int | None = None, chunk_size: int = CHUNK
) -> KVCacheManager:
    budget = None if max_tokens is None else max_tokens * TOKEN_SIZE
    return KVCacheManager(max_chunks, budget, chunk_size=chunk_size)


def found(manager: KVCacheManager, tokens: Sequence[int], namespace: Namespace = ROOT) -> PrefixMatch:
    """Look up without counting a use, and check what came."""
    match = manager.match_prefix(tokens, namespace)
    check_cover(match.matches, match.length)
    check_kv(match.matches, tokens)
    return match


def use(manager: KVCacheManager, tokens: Sequence[int], times: int = 1) -> None:
    for _ in range(times):
        manager.release(manager.match_prefix(tokens, hold=True))


def texts_from(first: int, count: int, length: int = CHUNK) -> list[list[int]]:
    """Texts that share nothing."""
    return [list(range(1000 * n, 1000 * n + length)) for n in range(first, first + count)]


# --- against a model -------------------------------------------------------------------------


class ManagerMachine(RuleBasedStateMachine):
    """Random stores, look-ups, holds and pins under a small budget."""

    tokens = st.lists(st.sampled_from([0, 1, 256]), min_size=1, max_size=14)
    namespaces = st.sampled_from([ROOT, MINE, THEIRS])

    @initialize(
        max_chunks=st.one_of(st.none(), st.integers(0, 6)),
        max_tokens=st.one_of(st.none(), st.integers(0, 20)),
    )
    def start(self, max_chunks: int | None, max_tokens: int | None) -> None:
        self.manager = manager_of(max_chunks, max_tokens)
        self.max_chunks = max_chunks
        self.max_bytes = None if max_tokens is None else max_tokens * TOKEN_SIZE
        self.ever: set[tuple[str, tuple[int, ...]]] = set()  # (namespace, text) that was stored whole
        self.held: list[tuple[Namespace, list[int], PrefixMatch]] = []
        self.pins: list[tuple[Namespace, list[int], int]] = []

    def stored_texts(self, namespace: Namespace) -> list[list[int]]:
        """Every stored chunk's tokens behind those of its ancestors, by the chunks' own account."""
        chunks = {key: entry.chunk for key, entry in self.manager._store.entries.items()}
        texts = []
        for chunk in chunks.values():
            text, parent = list(chunk.token_ids), chunk.parent_hash
            while parent in chunks:
                text = [*chunks[parent].token_ids, *text]
                parent = chunks[parent].parent_hash
            if parent == namespace.key:
                assert len(text) == chunk.position_end
                texts.append(text)
        return texts

    @rule(tokens=tokens, namespace=namespaces, data=st.data())
    def store_prefix(self, tokens: list[int], namespace: Namespace, data: st.DataObject) -> None:
        before = self.manager.match_prefix(tokens, namespace).length
        cuts = None
        if data.draw(st.booleans()):  # cuts that a boundary window moved
            cuts = sorted({*data.draw(st.sets(st.integers(1, len(tokens)))), len(tokens)})
        report = store(self.manager, tokens, namespace, cuts)
        assert report.stored_bytes <= len(tokens) * TOKEN_SIZE
        assert report.stored or report.present or report.refused
        after = found(self.manager, tokens, namespace).length
        assert after >= before
        if not report.refused:
            assert after == len(tokens)
            self.ever.add((namespace.key, tuple(tokens)))

    @rule(tokens=tokens, namespace=namespaces, data=st.data())
    def look_up(self, tokens: list[int], namespace: Namespace, data: st.DataObject) -> None:
        known = self.stored_texts(namespace)
        if known:  # make long hits likely
            tokens = data.draw(st.sampled_from(known))[: data.draw(st.integers(0, 14))] + tokens
        match = found(self.manager, tokens, namespace)
        assert match.length == max((common(text, tokens) for text in known), default=0)
        assert bool(match.miss_reason) == (match.length < len(tokens))

    @rule(tokens=tokens, namespace=namespaces)
    def hold(self, tokens: list[int], namespace: Namespace) -> None:
        self.held.append((namespace, tokens, self.manager.match_prefix(tokens, namespace, hold=True)))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), used=st.one_of(st.none(), st.integers(0, 14)))
    def release(self, data: st.DataObject, used: int | None) -> None:
        _, _, match = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.manager.release(match, used_tokens=used)

    @rule(tokens=tokens, namespace=namespaces)
    def pin(self, tokens: list[int], namespace: Namespace) -> None:
        length = self.manager.pin(tokens, namespace)
        assert length == self.manager.match_prefix(tokens, namespace).length
        self.pins.append((namespace, tokens, length))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin_all(self) -> None:
        for namespace, tokens, _ in self.pins:
            self.manager.unpin(tokens, namespace)
        self.pins.clear()

    @rule()
    def clear(self) -> None:
        self.manager.clear()
        self.ever.clear()
        if not self.held and not self.pins:
            assert len(self.manager) == 0

    @invariant()
    def everything_agrees(self) -> None:
        self.manager.check_integrity()

    @invariant()
    def budgets_hold(self) -> None:
        stats = self.manager.stats()
        alive = sum(
            part.untyped_storage().nbytes()
            for entry in self.manager._store.entries.values()
            for part in entry.chunk.kv.tensors
        )
        assert stats["bytes"] == alive
        assert self.max_bytes is None or alive <= self.max_bytes
        assert self.max_chunks is None or len(self.manager) <= self.max_chunks

    @invariant()
    def what_is_held_stays(self) -> None:
        for namespace, tokens, match in self.held:
            check_kv(match.matches, tokens)
            assert self.manager.match_prefix(tokens, namespace).length >= match.length

    @invariant()
    def what_is_pinned_stays(self) -> None:
        for namespace, tokens, length in self.pins:
            assert self.manager.match_prefix(tokens, namespace).length >= length

    @invariant()
    def nothing_is_lost_before_the_budget_is_reached(self) -> None:
        if self.manager.stats()["evicted_chunks"] == 0:
            for key, text in self.ever:
                namespace = next(n for n in (ROOT, MINE, THEIRS) if n.key == key)
                assert self.manager.match_prefix(text, namespace).length == len(text)


class MixedMachine(ManagerMachine):
    """The same, with chunks that callers made themselves among them."""

    @rule(
        tokens=ManagerMachine.tokens,
        sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    )
    def store_own_chunks(self, tokens: list[int], sizes: list[int]) -> None:
        parent, start = None, 0
        for size in sizes:
            end = min(start + size, len(tokens))
            if start == end:
                break
            chunk = user_chunk(tokens, start, end, parent)
            self.manager.store(chunk)
            parent, start = chunk.prefix_hash, end


def common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


_MACHINE = settings(
    deadline=None,
    max_examples=60,
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow],
    report_multiple_bugs=False,
)
ManagerMachine.TestCase.settings = _MACHINE
MixedMachine.TestCase.settings = _MACHINE
TestManagerMachine = ManagerMachine.TestCase
TestMixedMachine = MixedMachine.TestCase


# --- finding ---------------------------------------------------------------------------------


def test_a_prefix_is_found_by_whole_chunks_and_then_token_by_token() -> None:
    manager = manager_of()
    store(manager, range(10))
    match = found(manager, [0, 1, 2, 3, 4, 5, 6, 99, 100])
    assert match.length == 7
    assert [(m.start, m.end, m.approximate) for m in match.matches] == [(0, 4, False), (4, 7, False)]
    assert found(manager, [0]).length == 1
    assert found(manager, range(10)).miss_reason == ""
    assert found(manager, range(12)).length == 10
    assert found(manager, [5, 6]).length == 0


def test_tails_of_any_length_are_stored() -> None:
    manager = manager_of()
    report = store(manager, range(9))
    assert (report.stored, report.stored_bytes, report.present) == (3, 9 * TOKEN_SIZE, 0)
    assert found(manager, range(9)).length == 9


def test_storing_again_stores_nothing() -> None:
    manager = manager_of()
    store(manager, range(10))
    calls = []

    def must_not_run(start: int, end: int) -> tuple[torch.Tensor, ...]:
        calls.append((start, end))
        return extractor(range(10))(start, end)

    report = manager.store_prefix(range(10), [4, 8, 10], CODEC, must_not_run)
    assert (report.stored, report.present, calls) == (0, 3, [])
    assert manager.stats()["stored_chunks"] == 3


def test_a_start_of_a_stored_chunk_is_there_already() -> None:
    manager = manager_of()
    store(manager, range(8))
    report = store(manager, range(6))
    assert (report.stored, report.present) == (0, 2)
    assert len(manager) == 2
    manager.check_integrity()


def test_stored_chunks_carry_what_the_contract_says() -> None:
    manager = manager_of()
    tokens = list(range(6))
    manager.store_prefix(tokens, [4, 6], CODEC, extractor(tokens), text_of=lambda ids: f"<{list(ids)}>")
    first, second = (match.chunk for match in manager.find_matching_chunks(tokens))
    assert first.chunk_id == first.prefix_hash == chained_hash(tokens[:4])
    assert second.chunk_id == second.prefix_hash == chained_hash(tokens[4:], first.prefix_hash)
    assert second.content_hash == content_hash_from_tokens(tokens[4:])
    assert second.parent_hash == first.prefix_hash
    assert (second.position_start, second.position_end, list(second.token_ids)) == (4, 6, [4, 5])
    assert second.text == "<[4, 5]>"
    assert second.memory_bytes() == 2 * TOKEN_SIZE
    assert not second.recomputed


def test_positions_count_from_the_offset() -> None:
    manager = manager_of()
    namespace = MINE.at_offset(100)
    manager.store_prefix(range(6), [4, 6], CODEC, extractor(range(6)), namespace, position_offset=100)
    chunks = [match.chunk for match in manager.find_matching_chunks(range(6), namespace)]
    assert [(chunk.position_start, chunk.position_end) for chunk in chunks] == [(100, 104), (104, 106)]
    prefix = found(manager, range(6), MINE)
    assert (prefix.length, prefix.miss_reason) == (0, "never stored")


def test_get_counts_a_use_and_misses_with_none() -> None:
    manager = manager_of()
    store(manager, range(4))
    key = chained_hash(range(4))
    chunk = manager.get(key)
    assert chunk is not None
    assert chunk.access_count == 1
    assert manager.get("nothing") is None


def test_find_matching_chunks_counts_uses_and_match_prefix_does_not() -> None:
    manager = manager_of()
    store(manager, range(8))
    manager.match_prefix(range(8))
    first, second = manager.find_matching_chunks(range(5))
    assert (first.chunk.access_count, second.chunk.access_count) == (1, 1)
    assert (second.start, second.end) == (4, 5)


def test_release_counts_only_what_was_used() -> None:
    manager = manager_of()
    store(manager, range(8))
    match = manager.match_prefix(range(8), hold=True)
    manager.release(match, used_tokens=4)
    assert [found.chunk.access_count for found in match.matches] == [1, 0]


# --- chunks made elsewhere -------------------------------------------------------------------


def test_user_made_chunks_in_a_plain_chain_are_found() -> None:
    manager = manager_of()
    tokens = list(range(11))
    parent = None
    for start, end in ((0, 4), (4, 8), (8, 11)):
        chunk = user_chunk(tokens, start, end, parent)
        assert manager.store(chunk) is True
        parent = chunk.prefix_hash
    manager.check_integrity()
    matches = manager.find_matching_chunks(tokens)
    check_cover(matches, 11)
    check_kv(matches, tokens)
    assert manager.get(parent or "") is matches[-1].chunk


def test_user_made_chunks_and_stored_texts_share_one_tree() -> None:
    manager = manager_of()
    tokens = list(range(8))
    store(manager, tokens[:4])
    assert manager.store(user_chunk(tokens, 4, 8, chained_hash(tokens[:4])))
    assert found(manager, tokens).length == 8
    report = store(manager, [*tokens, 8, 9])
    assert (report.present, report.stored) == (2, 1)


def test_a_chunk_is_kept_apart_from_its_makers_tensors() -> None:
    manager = manager_of()
    chunk = user_chunk(range(4), 0, 4)
    manager.store(chunk)
    for pair in chunk.past_key_values:
        for tensor in pair:
            tensor.zero_()
    found(manager, range(4))


def test_storing_a_chunk_twice_is_fine() -> None:
    manager = manager_of()
    assert manager.store(user_chunk(range(4), 0, 4))
    assert manager.store(user_chunk(range(4), 0, 4))
    assert len(manager) == 1


def test_a_chunk_without_its_parent_is_only_got_by_key() -> None:
    manager = manager_of()
    tokens = list(range(8))
    orphan = user_chunk(tokens, 4, 8, chained_hash(tokens[:4]))
    assert manager.store(orphan)
    assert manager.find_matching_chunks(tokens) == []
    assert manager.find_matching_chunks(tokens[4:]) == []
    kept = manager.get(orphan.prefix_hash)
    assert kept is not None
    assert list(kept.token_ids) == tokens[4:]
    manager.check_integrity()


def test_two_chunks_with_one_key_and_other_tokens_do_not_mix() -> None:
    manager = manager_of()
    first = user_chunk(range(4), 0, 4)
    second = user_chunk(range(10, 14), 0, 4)
    second.chunk_id = second.prefix_hash = first.prefix_hash
    assert manager.store(first)
    assert manager.store(second) is False
    assert manager.stats()["refused"] == {"hash collision": 1}
    assert found(manager, range(4)).length == 4
    assert found(manager, range(10, 14)).length == 0
    manager.check_integrity()


def test_a_chunk_is_stored_under_its_prefix_hash_even_if_its_id_differs() -> None:
    manager = manager_of()
    tokens = list(range(8))
    first = user_chunk(tokens, 0, 4)
    first.chunk_id = first.content_hash
    assert manager.store(first)
    assert manager.get(first.prefix_hash) is not None
    assert manager.store(user_chunk(tokens, 4, 8, first.prefix_hash))
    assert found(manager, tokens).length == 8
    manager.check_integrity()


def test_a_longer_user_chunk_does_not_hide_what_follows_a_shorter_one() -> None:
    manager = manager_of()
    tokens = [1, 2, 3]
    short = user_chunk(tokens, 0, 2)
    manager.store(short)
    manager.store(user_chunk(tokens, 2, 3, short.prefix_hash))
    manager.store(user_chunk([1, 2, 4], 0, 3))
    manager.check_integrity()
    assert found(manager, tokens).length == 3


@pytest.mark.parametrize("length", [0, 3, 5])
def test_a_chunk_whose_ids_do_not_fill_its_positions_is_refused(length: int) -> None:
    chunk = user_chunk(range(4), 0, 4)
    chunk.token_ids = list(range(length))
    with pytest.raises(InvalidRequestError, match="token"):
        manager_of().store(chunk)


@pytest.mark.parametrize(
    "past", [(), past_of(range(9), 0, 3), past_of(range(9), 0, 5)], ids=["none", "fewer", "more"]
)
def test_a_chunk_whose_tensors_do_not_fill_its_positions_is_refused(past: tuple[()]) -> None:
    manager = manager_of()
    chunk = user_chunk(range(4), 0, 4)
    chunk.past_key_values = past
    with pytest.raises(InvalidRequestError):
        manager.store(chunk)
    manager.check_integrity()
    assert len(manager) == 0


# --- collisions ------------------------------------------------------------------------------


def test_a_hash_collision_never_serves_wrong_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inserter, "chained_hash_from_bytes", lambda *_: "the same for all")
    manager = manager_of()
    store(manager, [1, 2, 3, 4])
    report = store(manager, [5, 6, 7, 8])
    assert report.refused == {"hash collision": 1}
    assert found(manager, [1, 2, 3, 4]).length == 4
    assert found(manager, [5, 6, 7, 8]).length == 0
    report = store(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (report.present, report.refused["hash collision"]) == (1, 1)
    assert found(manager, [1, 2, 3, 4, 5, 6, 7, 8]).length == 4
    assert manager.stats()["refused"] == {"hash collision": 2}
    manager.check_integrity()


def test_few_hashes_never_serve_wrong_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    real = inserter.chained_hash_from_bytes
    monkeypatch.setattr(inserter, "chained_hash_from_bytes", lambda *a: real(*a)[:1])
    manager = manager_of(max_chunks=8)
    for number in range(60):
        tokens = [number % 3, number % 5, number % 7, number, number % 2, 7]
        store(manager, tokens)
        found(manager, tokens)
        manager.check_integrity()


# --- eviction --------------------------------------------------------------------------------


def limits_told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "max_chunks" in record.message]


def test_the_limit_on_chunks_is_told_once_with_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(max_chunks=3)
    reports = [store(manager, text) for text in texts_from(0, 8)]
    assert [report.evicted for report in reports] == [0, 0, 0, 1, 1, 1, 1, 1]
    (message,) = limits_told(caplog)
    assert message.startswith("max_chunks=3 ")
    assert "max_chunks=None with max_cache_bytes" in message


def test_the_limit_on_bytes_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(max_chunks=100, max_tokens=3 * CHUNK)
    for text in texts_from(0, 8):
        store(manager, text)
    assert manager.stats()["evicted_chunks"] == 5
    assert limits_told(caplog) == []


def test_frequently_used_chunks_outlive_one_off_ones() -> None:
    manager = manager_of(max_chunks=4)
    favourite = list(range(CHUNK))
    store(manager, favourite)
    use(manager, favourite, times=3)
    for text in texts_from(1, 50):
        store(manager, text)
    assert found(manager, favourite).length == CHUNK
    assert manager.stats()["evicted_chunks"] == 47


def test_oldest_goes_first_among_equals() -> None:
    manager = manager_of(max_chunks=3)
    texts = texts_from(0, 5)
    for text in texts:
        store(manager, text)
    assert [found(manager, text).length for text in texts] == [0, 0, CHUNK, CHUNK, CHUNK]


def test_a_use_saves_from_being_the_oldest() -> None:
    manager = manager_of(max_chunks=3)
    texts = texts_from(0, 4)
    for text in texts[:3]:
        store(manager, text)
    for text in (texts[1], texts[2], texts[0]):
        use(manager, text)
    store(manager, texts[3])
    assert [found(manager, text).length for text in texts] == [CHUNK, 0, CHUNK, CHUNK]


def test_leaves_go_before_roots() -> None:
    manager = manager_of(max_chunks=4)
    long = list(range(3 * CHUNK))
    store(manager, long)
    for number, text in enumerate(texts_from(1, 3), start=1):
        store(manager, text)
        assert found(manager, long).length == len(long) - max(0, number - 1) * CHUNK
        manager.check_integrity()


def test_a_root_stays_while_its_leaf_is_used() -> None:
    manager = manager_of(max_chunks=3)
    long = list(range(2 * CHUNK))
    store(manager, long)
    leaf = chained_hash(long[CHUNK:], chained_hash(long[:CHUNK]))
    for text in texts_from(1, 10):
        manager.get(leaf)  # the leaf is popular, the root by itself never used
        store(manager, text)
        assert found(manager, long).length == len(long)


def test_old_favourites_fade() -> None:
    manager = manager_of(max_chunks=2)
    old, new, newest = texts_from(0, 3)
    store(manager, old)
    use(manager, old, times=4)
    store(manager, new)
    for text in texts_from(10, 12):
        use(manager, new, times=2)
        store(manager, text)
        use(manager, text, times=5)
    store(manager, newest)
    assert found(manager, old).length == 0


@pytest.mark.parametrize(("max_chunks", "max_tokens"), [(2, None), (None, 2 * CHUNK), (None, 3 * CHUNK - 1)])
def test_a_prompt_larger_than_the_budget_keeps_its_earliest_chunks(
    max_chunks: int | None, max_tokens: int | None
) -> None:
    manager = manager_of(max_chunks, max_tokens)
    for text in texts_from(1, 2):
        store(manager, text)
    long = list(range(5 * CHUNK))
    report = store(manager, long)
    assert (report.stored, report.refused) == (2, {"no room": 1})
    assert found(manager, long).length == 2 * CHUNK
    assert len(manager) == 2
    manager.check_integrity()


def test_bytes_are_counted_to_the_last_one() -> None:
    full = manager_of(max_tokens=10)
    store(full, range(10))
    assert full.stats()["bytes"] == 10 * TOKEN_SIZE
    less = KVCacheManager(None, 10 * TOKEN_SIZE - 1, chunk_size=CHUNK)
    report = store(less, range(10))
    assert report.refused == {"no room": 1}
    assert less.stats()["bytes"] == 8 * TOKEN_SIZE


def test_what_can_never_fit_says_so_and_evicts_nothing() -> None:
    manager = manager_of(max_tokens=CHUNK, chunk_size=CHUNK)
    store(manager, range(CHUNK))
    report = store(manager, range(100, 110), cuts=[10])
    assert report.refused == {"larger than the budget": 1}
    assert found(manager, range(CHUNK)).length == CHUNK


@pytest.mark.parametrize(("max_chunks", "max_bytes"), [(0, None), (None, 0)])
def test_a_budget_of_nothing_stores_nothing(max_chunks: int | None, max_bytes: int | None) -> None:
    manager = KVCacheManager(max_chunks, max_bytes, chunk_size=CHUNK)
    assert store(manager, range(8)).stored == 0
    assert manager.store(user_chunk(range(4), 0, 4)) is False
    assert len(manager) == 0
    manager.check_integrity()


@pytest.mark.parametrize("arguments", [{"max_chunks": -1}, {"max_cache_bytes": -1}])
def test_negative_budgets_are_refused_by_name(arguments: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(arguments))):
        KVCacheManager(**arguments)


def test_a_refused_store_does_not_evict_others_for_nothing() -> None:
    """Room that cannot be made is not looked for at the expense of what is there."""
    manager = manager_of(max_tokens=12)
    manager.store_prefix(range(8), [4, 8], CODEC, extractor(range(8)))
    manager.pin(range(8))
    small = [100, 101, 102, 103]
    store(manager, small)
    report = store(manager, range(200, 206), cuts=[6])
    assert report.refused == {"no room": 1}
    assert found(manager, small).length == 4


def test_clear_keeps_what_is_pinned_or_held() -> None:
    manager = manager_of()
    pinned, held, other = texts_from(0, 3)
    for text in (pinned, held, other):
        store(manager, text)
    manager.pin(pinned)
    match = manager.match_prefix(held, hold=True)
    manager.clear()
    assert [found(manager, text).length for text in (pinned, held, other)] == [CHUNK, CHUNK, 0]
    assert found(manager, other).miss_reason == "never stored"
    manager.release(match)
    manager.unpin(pinned)
    manager.clear()
    assert (len(manager), manager.stats()["bytes"]) == (0, 0)
    manager.check_integrity()


# --- pins and tails --------------------------------------------------------------------------


def test_pins_keep_chunks_until_as_many_were_taken_back() -> None:
    manager = manager_of(max_chunks=2)
    pinned = list(range(CHUNK))
    store(manager, pinned)
    assert manager.pin(pinned) == CHUNK
    assert manager.pin(pinned) == CHUNK
    for number, text in enumerate(texts_from(1, 6)):
        if number == 3:
            manager.unpin(pinned)
        store(manager, text)
    assert found(manager, pinned).length == CHUNK
    assert manager.stats()["pinned_chunks"] == 1
    manager.unpin(pinned)
    assert manager.stats()["pinned_chunks"] == 0
    for text in texts_from(10, 2):
        store(manager, text)
    assert found(manager, pinned).length == 0


def test_pin_says_how_many_tokens_it_keeps() -> None:
    manager = manager_of()
    store(manager, range(6))
    assert manager.pin(range(12)) == 6
    assert manager.pin([9, 9]) == 0
    assert manager.unpin([9, 9]) == 0
    manager.check_integrity()


def test_everything_pinned_means_no_room() -> None:
    manager = manager_of(max_chunks=1)
    store(manager, range(4))
    manager.pin(range(4))
    assert store(manager, range(50, 54)).refused == {"no room": 1}
    assert manager.stats()["refused"] == {"no room": 1}


def test_a_tail_is_replaced_by_the_longer_chunk_that_extends_it() -> None:
    manager = manager_of()
    tokens = list(range(8))
    store(manager, tokens[:6])
    assert len(manager) == 2
    report = store(manager, tokens)
    assert report.stored == 1
    assert len(manager) == 2, "the tail of two tokens and the chunk of four are not both kept"
    match = found(manager, tokens)
    assert [(m.start, m.end) for m in match.matches] == [(0, 4), (4, 8)]
    assert manager.stats()["bytes"] == 8 * TOKEN_SIZE
    manager.check_integrity()


def test_a_tail_that_grows_turn_by_turn_stays_one_chunk() -> None:
    manager = manager_of(chunk_size=16)
    for end in range(3, 16, 3):
        store(manager, range(end))
        assert len(manager) == 1
        assert found(manager, range(end)).length == end


def test_a_tail_fits_by_replacing_where_both_would_not() -> None:
    manager = manager_of(max_tokens=8)
    store(manager, range(6))
    report = store(manager, range(8))
    assert not report.refused
    assert found(manager, range(8)).length == 8


def test_pins_move_along_when_a_tail_is_replaced() -> None:
    manager = manager_of(max_chunks=2)
    tokens = list(range(8))
    store(manager, tokens[:6])
    manager.pin(tokens[:6])
    store(manager, tokens)
    assert found(manager, tokens).length == 8
    assert manager.stats()["pinned_chunks"] == 2
    for text in texts_from(1, 3):
        store(manager, text)
    assert found(manager, tokens).length == 8
    manager.unpin(tokens[:6])
    assert manager.stats()["pinned_chunks"] == 0


def test_a_tail_in_use_is_not_replaced() -> None:
    manager = manager_of()
    tokens = list(range(8))
    store(manager, tokens[:6])
    match = manager.match_prefix(tokens[:6], hold=True)
    store(manager, tokens)
    check_kv(match.matches, tokens)
    assert manager.get(match.matches[-1].chunk.chunk_id) is not None, "it is still in the books"
    assert found(manager, tokens).length == 8
    manager.release(match)
    manager.check_integrity()


def test_a_cut_inside_a_stored_chunk_does_not_end_the_storing() -> None:
    """With a boundary window, two texts with a common start may be cut at different places."""
    manager = manager_of()
    left, right = [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 14, 15, 16]
    store(manager, left, cuts=[5, 6])
    store(manager, right, cuts=[3, 7])
    assert found(manager, right).length == 7
    assert found(manager, left).length == 6
    manager.check_integrity()


def test_a_tail_with_a_branch_stays_and_both_are_found() -> None:
    manager = manager_of()
    left, right = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 16, 17]
    store(manager, left[:6])
    store(manager, left, cuts=[4, 6, 8])
    store(manager, right)
    assert found(manager, left).length == found(manager, right).length == 8
    manager.check_integrity()


# --- reasons ---------------------------------------------------------------------------------


def test_divergence_names_token_expected_and_got() -> None:
    manager = manager_of()
    store(manager, range(8))
    reason = found(manager, [0, 1, 2, 3, 4, 5, 77, 7, 8]).miss_reason
    assert reason == "diverged at token 6: expected 6, got 77"
    reason = found(manager, [0, 1, 2, 3, 70_000]).miss_reason
    assert reason == "diverged at token 4: expected 4, got 70000"


def test_what_goes_on_behind_the_known_was_never_stored() -> None:
    manager = manager_of()
    store(manager, range(8))
    assert found(manager, range(10)).miss_reason == "never stored"
    assert found(manager, [50, 51]).miss_reason == "never stored"
    assert manager_of().match_prefix([1, 2]).miss_reason == "never stored"


def test_another_salt_reads_never_stored() -> None:
    manager = manager_of()
    store(manager, range(8), THEIRS)
    assert manager.match_prefix(range(8), MINE).miss_reason == "never stored"
    store(manager, range(50, 58), MINE)  # with a root of its own it must not tell either
    assert manager.match_prefix(range(8), MINE).miss_reason == "never stored"
    assert manager.match_prefix(range(8), MINE).length == 0


def test_another_salt_reads_never_stored_after_eviction_too() -> None:
    manager = manager_of(max_chunks=1)
    store(manager, range(4), THEIRS)
    store(manager, range(50, 54), THEIRS)
    assert manager.match_prefix(range(4), THEIRS).miss_reason == "evicted"
    assert manager.match_prefix(range(4), MINE).miss_reason == "never stored"


def test_another_family_reads_other_namespace() -> None:
    manager = manager_of()
    store(manager, range(8), OTHER_MODEL)
    match = manager.match_prefix(range(8), MINE)
    assert (match.length, match.miss_reason) == (0, "other namespace")
    assert manager.match_prefix(range(90, 98), MINE).miss_reason == "never stored"
    assert manager.match_prefix(range(8), THEIRS).miss_reason == "never stored"


def test_evicted_reads_evicted() -> None:
    manager = manager_of(max_chunks=2)
    gone, half, last = list(range(8)), list(range(100, 104)), list(range(200, 204))
    store(manager, gone)
    store(manager, half)
    assert found(manager, gone).length == 4
    assert found(manager, gone).miss_reason == "evicted"
    store(manager, last)
    assert found(manager, gone).length == 0
    assert found(manager, gone).miss_reason == "evicted"
    store(manager, gone)
    assert found(manager, gone).miss_reason == ""


def test_an_evicted_tail_reads_evicted() -> None:
    manager = manager_of(max_chunks=1)
    store(manager, range(3))
    store(manager, range(100, 104))
    assert found(manager, range(3)).miss_reason == "evicted"
    assert found(manager, range(7)).miss_reason == "evicted"


def test_the_number_of_empty_roots_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_store, "_MAX_EMPTY_ROOTS", 10)
    manager = manager_of(max_chunks=1)
    for number in range(100):
        store(manager, [number], Namespace(f"{number:064}", "family", str(number)))
    assert len(manager._store.forest) <= 11
    manager.check_integrity()


# --- accounts --------------------------------------------------------------------------------


def test_requests_are_booked() -> None:
    manager = manager_of(max_chunks=9, max_tokens=99)
    store(manager, range(8))
    manager.count_request(reused=6, total=10, reason="diverged at token 6: expected 6, got 77")
    manager.count_request(reused=0, total=5, reason="never stored")
    manager.count_request(reused=4, total=5, reason="computed: generation needs it")
    stats = manager.stats()
    assert (stats["requests"], stats["prompt_tokens"], stats["tokens_saved"]) == (3, 20, 10)
    assert stats["hits"]["exact"] == 2
    assert stats["misses"] == {"diverged": 1, "never stored": 1}
    assert (stats["chunks"], stats["bytes"]) == (2, 8 * TOKEN_SIZE)
    assert (stats["max_chunks"], stats["max_bytes"]) == (9, 99 * TOKEN_SIZE)
    assert (stats["stored_chunks"], stats["evicted_chunks"], stats["refused"]) == (2, 0, {})


def test_integrity_checks_can_fail() -> None:
    manager = manager_of()
    store(manager, range(8))
    manager.check_integrity()
    entry = next(iter(manager._store.entries.values()))
    entry.size_bytes += 1
    with pytest.raises(AssertionError):
        manager.check_integrity()
    entry.size_bytes -= 1
    chunk: CachedChunk = entry.chunk
    chunk.token_ids = [9, 9, 9, 9]
    with pytest.raises(AssertionError, match="tokens"):
        manager.check_integrity()
