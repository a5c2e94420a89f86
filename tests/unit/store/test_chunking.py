"""Where texts are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.choices import ChunkStrategy
from kvboost.errors import InvalidRequestError
from kvboost.store.chunking import ChunkRegistry, boundary_token_ids

END = 9  # the token that ends a sentence in these tests
texts = st.lists(st.sampled_from([1, 2, 3, END]), max_size=80)
sizes = st.integers(1, 12)


def cuts_of(registry: ChunkRegistry, ids: list[int]) -> list[int]:
    return registry.cuts(ids, boundary_tokens=[END])


@st.composite
def registries(draw: st.DrawFn) -> ChunkRegistry:
    size = draw(sizes)
    return ChunkRegistry(
        size,
        draw(st.sampled_from(list(ChunkStrategy))),
        draw(st.integers(1, 8)),
        boundary_window=draw(st.integers(0, size - 1)),
    )


@given(registries(), texts, st.booleans())
@settings(deadline=None, max_examples=200)
def test_chunks_cover_the_text_without_gaps(registry: ChunkRegistry, ids: list[int], ends: bool) -> None:
    chunks = registry.split(ids, boundary_tokens=[END] if ends else None)
    position = 0
    for start, end, part in chunks:
        assert start == position < end
        assert part == ids[start:end]
        position = end
    assert position == len(ids)
    assert [end for _, end, _ in chunks] == registry.cuts(ids, boundary_tokens=[END] if ends else None)


@given(sizes, texts)
@settings(deadline=None, max_examples=50)
def test_fixed_cuts_at_multiples(size: int, ids: list[int]) -> None:
    lengths = [end - start for start, end, _ in ChunkRegistry(size).split(ids, boundary_tokens=[END])]
    assert all(length == size for length in lengths[:-1])
    assert not lengths or 1 <= lengths[-1] <= size


@given(texts)
@settings(deadline=None, max_examples=20)
def test_document_makes_one_chunk(ids: list[int]) -> None:
    chunks = ChunkRegistry(4, "document").split(ids, boundary_tokens=[END])
    assert chunks == ([(0, len(ids), ids)] if ids else [])


@given(st.integers(2, 12), st.data(), texts)
@settings(deadline=None, max_examples=200)
def test_a_window_moves_a_cut_to_the_nearest_sentence_end_or_not_at_all(
    size: int, data: st.DataObject, ids: list[int]
) -> None:
    window = data.draw(st.integers(1, size - 1))
    cuts = cuts_of(ChunkRegistry(size, boundary_window=window), ids)
    ends = [index + 1 for index, token in enumerate(ids) if token == END]
    for target in range(size, len(ids), size):
        near = [end for end in ends if abs(end - target) <= window]
        if not near:
            assert target in cuts, "a cut without a sentence end nearby stays"
        else:
            distance = min(abs(end - target) for end in near)
            wanted = {target - distance, target + distance} & set(near)
            assert wanted & set(cuts), "a cut goes to the nearest sentence end"
    for cut in cuts[:-1]:
        is_target = cut % size == 0
        moved_to_end = cut in ends and any(
            abs(cut - target) <= window for target in range(size, len(ids), size)
        )
        assert is_target or moved_to_end


@given(st.integers(2, 12), st.data(), texts, texts, texts)
@settings(deadline=None, max_examples=150)
def test_common_starts_are_cut_alike(
    size: int, data: st.DataObject, start: list[int], left: list[int], right: list[int]
) -> None:
    window = data.draw(st.integers(0, size - 1))
    for registry, reach in (
        (ChunkRegistry(size, boundary_window=window), 2 * window),
        (ChunkRegistry(size, "semantic", 2), size + 2),
    ):
        # a cut may look ahead by the window, and the end of a text may swallow its last cut
        safe = len(start) - reach
        one = [cut for cut in cuts_of(registry, start + left) if cut < safe]
        two = [cut for cut in cuts_of(registry, start + right) if cut < safe]
        assert one == two


@given(st.integers(4, 12), texts)
@settings(deadline=None, max_examples=100)
def test_semantic_chunks_end_at_the_last_sentence_end_that_fits(size: int, ids: list[int]) -> None:
    least = 2
    chunks = ChunkRegistry(size, "semantic", least).split(ids, boundary_tokens=[END])
    for start, end, part in chunks[:-1]:
        assert least <= end - start <= size
        later_end = END in ids[end : start + size]
        assert not later_end, "a later sentence end would have fitted"
        if part[-1] != END:
            assert end - start == size
            assert END not in part[least - 1 :]
    if len(chunks) > 1:
        start, end, _ = chunks[-1]
        assert least <= end - start < size + least


def test_semantic_joins_a_short_rest_to_its_neighbour() -> None:
    registry = ChunkRegistry(8, "semantic", 4)
    assert registry.cuts([1] * 10, boundary_tokens=[END]) == [10]
    assert registry.cuts([1] * 12, boundary_tokens=[END]) == [8, 12]


def test_semantic_passes_over_sentence_ends_that_are_too_near() -> None:
    ids = [1, END, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert ChunkRegistry(6, "semantic", 4).cuts(ids, boundary_tokens=[END]) == [6, 12]
    assert ChunkRegistry(6, "semantic", 2).cuts(ids, boundary_tokens=[END]) == [2, 8, 12]


def test_window_examples() -> None:
    ids = [1] * 30
    ids[9] = END  # a sentence ends at 10
    registry = ChunkRegistry(8, boundary_window=2)
    assert registry.cuts(ids, boundary_tokens=[END]) == [10, 16, 24, 30]
    assert registry.cuts(ids, boundary_tokens=[]) == [8, 16, 24, 30]
    assert registry.cuts(ids[:10], boundary_tokens=[END]) == [10]
    ids[6] = END  # 7 is nearer to 8 than 10
    assert registry.cuts(ids, boundary_tokens=[END]) == [7, 16, 24, 30]


def test_without_boundary_tokens_sentence_ends_come_from_the_text() -> None:
    text = "abcdefghi." + "k" * 30  # one token per character
    registry = ChunkRegistry(8, boundary_window=2)
    assert registry.cuts(list(range(40)), text) == [10, 16, 24, 32, 40]
    assert registry.cuts(list(range(40))) == [8, 16, 24, 32, 40]


def test_paragraph_ends_count_in_text() -> None:
    text = "abcdefg\n" + "k" * 12
    assert ChunkRegistry(10, "semantic", 2).cuts(list(range(20)), text) == [8, 18, 20]


def test_an_empty_text_has_no_chunks() -> None:
    for strategy in ChunkStrategy:
        assert ChunkRegistry(4, strategy).split([]) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"chunk_size": 0}, "chunk_size"),
        ({"min_chunk_tokens": 0}, "min_chunk_tokens"),
        ({"chunk_size": 8, "boundary_window": 8}, "boundary_window"),
        ({"boundary_window": -1}, "boundary_window"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        ChunkRegistry(**arguments)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="sentence"):
        ChunkRegistry(4, "sentence")


def test_needs_boundaries() -> None:
    assert not ChunkRegistry(8).needs_boundaries
    assert not ChunkRegistry(8, "document").needs_boundaries
    assert ChunkRegistry(8, "semantic").needs_boundaries
    assert ChunkRegistry(8, boundary_window=1).needs_boundaries


def test_boundary_token_ids_are_those_that_end_a_sentence_or_line() -> None:
    words = ["a", ".", "a.", ". ", "\n", "\n\n", "!", "?", ".a", " ", ""]
    found = boundary_token_ids(len(words), lambda ids: words[ids[0]])
    assert {words[index] for index in found} == {".", "a.", ". ", "\n", "\n\n", "!", "?"}
