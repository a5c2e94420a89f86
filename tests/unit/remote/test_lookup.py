"""What is asked about a prompt, and what the answers mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvboost.disk.serde import record_of
from kvboost.models import chained_hash
from kvboost.remote import fingerprints, parts
from kvboost.remote.fingerprints import TailPlace, WindowPlace
from kvboost.remote.keys import RemoteKeys, part
from kvboost.remote.lookup import PEEK_BYTES, Question, Wanted, chain_digests
from tests.unit.remote.test_fingerprints import tokens

KEYS = RemoteKeys("salt", "family")
ROOT = "ee" * 32
SIZE = 64
EVERY = 16


class Text:
    """A text of a machine: cut into chunks, and what the store has of it."""

    def __init__(self, ids: np.ndarray, size: int = SIZE) -> None:
        self.ids = ids
        self.cuts = list(range(size, len(ids) + 1, size))
        self.digests = chain_digests(ids, self.cuts, ROOT)
        self.size = size

    def values(self, numbers: Sequence[int] | None = None) -> dict[str, bytes]:
        """Names and values of these chunks: records, tails and windows."""
        found: dict[str, bytes] = {}
        for number in range(len(self.cuts)) if numbers is None else numbers:
            start, end = self.cuts[number] - self.size, self.cuts[number]
            digest, parent = self.digests[number], self.digests[number - 1] if number else ROOT
            record = record_of("opaque", digest, {"x": torch.zeros(5)})
            name = KEYS.record(digest)
            found[part(name, 0)] = b"".join(parts.split(record, name)[0])
            found[KEYS.tail(parent)] = TailPlace.of(digest, self.ids[start:end]).to_bytes()
            before = self.ids[max(0, start - fingerprints.context_tokens(EVERY)) : start]
            last = fingerprints.last_sample(before, EVERY)
            new = fingerprints.samples_known_with(before, self.ids[start:end], EVERY)
            for offset, value in [*(each for each in last if each[0] >= -self.size), *new]:
                parent_tokens = self.size if number else 0
                place = WindowPlace(digest, parent, offset, self.size, parent_tokens)
                found[KEYS.window(value)] = place.to_bytes()
        return found


def ask(
    ids: np.ndarray, store: dict[str, bytes], known: int = 0, *, anywhere: bool = False
) -> tuple[list[Wanted], list[Wanted]]:
    text = Text(ids)
    every = EVERY if anywhere else None
    question = Question(KEYS, ids, text.cuts, text.digests, ROOT, known, len(ids) - 1, every)
    found = question.answered(
        [store[name][:PEEK_BYTES] if name in store else None for name in question.names]
    )
    return found.exact, found.moved


def test_digests_are_those_of_the_store() -> None:
    ids = tokens(150, 1)
    digests = chain_digests(ids, [64, 128, 150], ROOT)
    assert digests[0] == chained_hash(ids[:64].tolist(), ROOT)
    assert digests[2] == chained_hash(ids[128:].tolist(), digests[1])


def test_a_chain_up_to_the_first_that_is_missing() -> None:
    text = Text(tokens(330, 1))
    exact, moved = ask(text.ids, text.values())
    assert [wanted.digest for wanted in exact] == text.digests
    assert [(wanted.start, wanted.end) for wanted in exact] == [(n * 64, n * 64 + 64) for n in range(5)]
    assert all(wanted.record_bytes for wanted in exact)
    assert not moved
    exact, _ = ask(text.ids, text.values([0, 1, 3, 4]))
    assert [wanted.digest for wanted in exact] == text.digests[:2]
    exact, _ = ask(text.ids, text.values([1, 2]))
    assert exact == []
    assert ask(text.ids, {}) == ([], [])


def test_behind_what_is_known() -> None:
    text = Text(tokens(330, 1))
    exact, _ = ask(text.ids, text.values(), known=3)
    assert [wanted.start for wanted in exact] == [192, 256]
    exact, _ = ask(text.ids, text.values(), known=5)
    assert exact == []


def test_what_was_read_last_behind_it() -> None:
    """A chunk that begins as the prompt goes on, and is cut elsewhere."""
    text = Text(tokens(330, 1))
    tail = tokens(40, 2)
    store = text.values()
    store[KEYS.tail(text.digests[-1])] = TailPlace.of("ab" * 32, tail).to_bytes()
    exact, _ = ask(np.concatenate([text.ids[:320], tail]), store)
    assert exact[-1] == Wanted("ab" * 32, 320, 40)
    exact, _ = ask(np.concatenate([text.ids[:320], tail[:20]]), store)
    assert exact[-1].digest == "ab" * 32
    exact, _ = ask(np.concatenate([text.ids[:320], tokens(40, 3)]), store)
    assert [wanted.digest for wanted in exact] == text.digests


def test_damaged_answers_are_none() -> None:
    text = Text(tokens(330, 1))
    store = text.values()
    for name, value in store.items():
        store[name] = b"\0" + value[1:]
    assert ask(text.ids, store, anywhere=True) == ([], [])
    short = {name: value[:40] for name, value in text.values().items()}
    assert ask(text.ids, short, anywhere=True) == ([], [])
    swapped = dict(zip(text.values(), reversed(text.values().values()), strict=True))
    exact, _ = ask(text.ids, swapped, anywhere=True)
    assert exact == []


def test_text_at_another_place() -> None:
    text = Text(tokens(640, 1))
    for shift, start, end in ((100, 0, 640), (37, 64, 448), (5, 200, 500)):
        prompt = np.concatenate([tokens(shift, 9), text.ids[start:end], tokens(60, 8)])
        exact, moved = ask(prompt, text.values(), anywhere=True)
        assert exact == []
        chunks = {digest: (number * 64, number * 64 + 64) for number, digest in enumerate(text.digests)}
        covered = np.zeros(len(prompt), dtype=bool)
        for wanted in moved:
            assert wanted.start == chunks[wanted.digest][0] - start + shift
            covered[max(0, wanted.start) : wanted.end] = True
        assert covered[shift : shift + end - start].all(), "up to its first and last token"
        assert moved == sorted(moved, key=lambda wanted: wanted.start)
    assert ask(text.ids[100:], text.values(), anywhere=False) == ([], [])


def test_a_common_run_that_ends_with_a_chunk_is_found() -> None:
    """Which windows at its end are sampled shows only in the chunk behind it."""
    missed = 0
    for seed in range(40):
        text = Text(tokens(192, seed))
        run = text.ids[128 - 47 : 128]
        prompt = np.concatenate([tokens(50, seed + 100), run, tokens(50, seed + 200)])
        _, moved = ask(prompt, text.values(), anywhere=True)
        missed += text.digests[1] not in {wanted.digest for wanted in moved}
    assert missed == 0


def test_one_text_is_preferred_to_pieces_of_many() -> None:
    """The same document in several texts: as few as cover it."""
    document = tokens(256, 1)
    store: dict[str, bytes] = {}
    for number in range(4):
        store.update(
            Text(np.concatenate([tokens(64 * number, 5 + number), document, tokens(70, number)])).values()
        )
    prompt = np.concatenate([tokens(41, 77), document, tokens(40, 78)])
    _, moved = ask(prompt, store, anywhere=True)
    assert len(moved) <= 6
    assert sum(wanted.tokens for wanted in moved) <= 6 * 64


def test_a_repetitive_text_asks_for_little() -> None:
    """The same window everywhere is asked for once per place, and found once."""
    ids = np.full(2_000, 7, dtype=np.uint32)
    text = Text(ids)
    _, moved = ask(np.concatenate([tokens(9, 1), ids[:500]]), text.values(), anywhere=True)
    assert len({wanted.digest for wanted in moved}) == len(moved)
