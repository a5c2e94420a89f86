"""A second engine on the same folder answers as one that kept everything in RAM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost.choices import Origin
from tests.engine.disk.on_disk import (
    REAL_CALLS,
    answer,
    answers_as_baseline,
    check_exact_on_disk,
    flush,
    shape_of,
    tier_of,
)
from tests.engine.reuse_checks import approximate_tokens, pay_always
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids, tiny_model

ENCODINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "8 bits": {"kv_cache_bits": 8},
    "4 bits": {"kv_cache_bits": 4},
    "k8v4": {"kv_cache_bits": "k8v4"},
    "overlap": {"overlap_k": 8},
    "overlap and sink": {"overlap_k": 8, "sink_tokens": 4},
    "quantized overlap": {"overlap_k": 8, "kv_cache_bits": 8},
    "sink": {"sink_tokens": 4},
    "boundary window": {"chunk_boundary_window": 6},
    "salt": {"cache_salt": "ours"},
    "bit exact": {"bit_exact": True},
    "on the model's device": {"cache_device": "model"},
    "deviation": {"selector": "deviation"},
    "8 bits, small RAM": {"kv_cache_bits": 8, "max_chunks": 4},
    "small RAM": {"max_chunks": 4},
    "one byte of RAM": {"max_cache_bytes": 1},
}


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize("options", ENCODINGS.values(), ids=ENCODINGS.keys())
def test_a_second_engine_answers_as_one_that_kept_all_in_ram(
    options: dict[str, Any], disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    texts = [random_ids(70 + 13 * number, seed=number) for number in range(3)]
    with disk_engine(**{**options, "max_chunks": None, "max_cache_bytes": None}) as one:
        for text in texts:
            one.warm(text)
    unlimited = {**options, "max_chunks": None, "max_cache_bytes": None, "disk_cache_dir": None}
    in_ram = disk_engine(**unlimited)
    for text in texts:
        in_ram.warm(text)
    two = disk_engine(**options)
    assert two.cache_stats()["chunks"] == 0
    assert two.cache_stats()["chunks_on_disk_only"] == in_ram.cache_stats()["chunks"]
    is_exact = not options.get("overlap_k") and options.get("kv_cache_bits", 16) == 16
    keeps_all = not {"max_chunks", "max_cache_bytes"} & options.keys()
    prompts = [[*text, 9, 8] for text in texts]
    if not options.get("bit_exact"):
        prompts.append([*texts[2], *texts[1], *texts[0], 7])
    for number, prompt in enumerate(prompts):
        for mode in ("prefix_cache", "chunk_kv_reuse") if number < 3 else ("chunk_kv_reuse",):
            two.core.parts.workspace.drop()
            in_ram.core.parts.workspace.drop()
            stored = two.cache_stats()["stored_chunks"]
            result, wanted = answer(two, prompt, mode), answer(in_ram, prompt, mode)
            if keeps_all or is_exact or mode == "prefix_cache":
                assert result.token_ids == wanted.token_ids
            if keeps_all:
                assert shape_of(result) == shape_of(wanted)
            if number < 3 and not options.get("bit_exact"):
                assert result.cached_tokens >= len(texts[number])
            if number == 3:
                assert approximate_tokens(result) >= len(texts[0]) + len(texts[1]) - 32
            elif is_exact:
                assert result.token_ids == answer(two, prompt, "baseline").token_ids
            if number < 3:
                assert two.cache_stats()["stored_chunks"] - stored <= 1  # the question, not what was there
            two.cache_manager.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "phi", "gemma3", "smollm3"])
def test_other_models_and_dtypes(
    architecture: str, dtype: torch.dtype, make_engine: MakeEngine, tmp_path: Path
) -> None:
    model = tiny_model(architecture, dtype=dtype)
    text = random_ids(90, seed=1)
    with make_engine(model=model, disk_cache_dir=tmp_path) as one:
        one.warm(text)
        kept = {key: entry.chunk.kv.tensors for key, entry in one.cache_manager._store.entries.items()}
        wanted = answer(one, [*text, 9, 8])
    two = make_engine(model=model, disk_cache_dir=tmp_path)
    result = answer(two, [*text, 9, 8])
    assert result.cached_tokens >= 90
    assert result.token_ids == wanted.token_ids
    if dtype == torch.float32:
        assert result.token_ids == answer(two, [*text, 9, 8], "baseline").token_ids
    loaded = two.cache_manager._store.entries
    same = [key for key in kept if key in loaded and loaded[key].chunk.kv.is_loaded]
    assert len(same) >= 5
    for key in same:
        assert all(map(torch.equal, loaded[key].chunk.kv.tensors, kept[key]))


@pytest.mark.usefixtures("approximate_reuse")
def test_moved_documents_come_from_disk_and_repaired_in_full_give_baseline(
    disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    shelf = [random_ids(80 + 20 * number, seed=10 + number) for number in range(4)]
    with disk_engine() as one:
        for document in shelf:
            one.warm(document)
    two = disk_engine(recompute_ratio=1.0)
    prompt = [*random_ids(7, seed=1), *shelf[3], *shelf[0], *shelf[2], *shelf[1], 5]
    result = answer(two, prompt, "chunk_kv_reuse")
    assert approximate_tokens(result) == sum(map(len, shelf))
    assert result.token_ids == answer(two, prompt, "baseline").token_ids


@pytest.mark.usefixtures("approximate_reuse")
def test_approximate_never_becomes_exact_over_a_restart(
    disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    first, second, fresh = (random_ids(96, seed=seed) for seed in (1, 2, 3))
    with disk_engine() as one:
        one.warm(first)
        one.warm(second)
        prompt = [*second, *first, *fresh, 5]
        turn = answer(one, prompt, "chunk_kv_reuse")
        assert approximate_tokens(turn) == 96
        flush(one)
        assert check_exact_on_disk(one) == 12
    longer = [*prompt, *turn.token_ids, 8, 9]
    expected = answer(one, longer, "baseline").token_ids
    for mode in ("prefix_cache", "chunk_kv_reuse"):
        with disk_engine() as two:
            assert {span.origin for span in two.explain([*fresh, 7])} <= {
                Origin.APPROXIMATE,
                Origin.LIVE,
            }
            result = answer(two, longer, mode)
            assert sum(span.length for span in result.spans if span.origin is Origin.EXACT) == 96
            assert result.token_ids == expected or mode == "chunk_kv_reuse"
            assert (approximate_tokens(result) > 0) == (mode == "chunk_kv_reuse")
            two.clear()
        with disk_engine() as one:
            for text in (first, second):
                one.warm(text)
            answer(one, prompt, "chunk_kv_reuse")
    three = disk_engine()
    result = answer(three, [*random_ids(9, seed=9), *fresh, 7], "chunk_kv_reuse")
    assert approximate_tokens(result) >= 90  # its content is found


@pytest.mark.usefixtures("approximate_reuse")
def test_salts_on_disk_are_kept_apart(disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pay_always(monkeypatch)
    text = random_ids(100, seed=1)
    prompts = ([*text, 7], [*random_ids(9, seed=2), *text, 7])
    with disk_engine() as one:
        one.warm(text, cache_salt="mine")
    two = disk_engine()
    for prompt in prompts:
        for salt in ("", "yours"):
            explained = two.explain(prompt, cache_salt=salt)
            assert [(span.origin, span.reason) for span in explained] == [(Origin.LIVE, "never stored")]
            result = answer(two, prompt, "chunk_kv_reuse", cache_salt=f"{salt}-{len(prompt)}")
            assert {span.reason for span in result.spans} == {"never stored"}
    assert tier_of(two).misses.total() == 0
    assert answer(two, prompts[0], cache_salt="mine").cached_tokens == 100
    assert approximate_tokens(answer(two, prompts[1], "chunk_kv_reuse", cache_salt="mine")) == 100
    stored = b"".join(path.read_bytes() for path in tier_of(two).folder.iterdir() if path.is_file())
    assert b"mine" not in stored


@pytest.mark.usefixtures("approximate_reuse")
def test_text_at_an_offset_is_found_by_content_only(
    disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    text = random_ids(100, seed=1)
    with disk_engine() as one:
        one.warm(text, position_offset=64)
    two = disk_engine(recompute_ratio=1.0)
    assert answer(two, [*text, 7]).cached_tokens == 0
    two.clear()
    with disk_engine() as one:
        one.warm(text, position_offset=64)
    two = disk_engine(recompute_ratio=1.0)
    prompt = [*random_ids(64, seed=2), *text, 7]
    result = answer(two, prompt, "chunk_kv_reuse")
    assert approximate_tokens(result) == 100
    assert {span.reason for span in result.spans if span.donor} == {"behind other text"}
    assert result.token_ids == answer(two, prompt, "baseline").token_ids


def test_explain_reads_nothing(disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_ids(100, seed=1)
    with disk_engine() as one:
        one.warm(text)
    two = disk_engine()
    reads: list[Any] = []

    def counted(*arguments: Any) -> Any:
        reads.append(arguments)
        return REAL_CALLS["preadv"](*arguments)

    monkeypatch.setattr("kvboost.disk.slot_file.os.preadv", counted)
    before = two.cache_stats()
    assert two.explain([*text, 7]).cached_tokens == 100
    assert two.explain([*random_ids(9, seed=3), *text, 7]).prompt_tokens == 110
    assert two.cache_stats() == before
    assert not reads
    assert answer(two, [*text, 7]).cached_tokens == 100
    assert reads


def test_a_slice_of_a_cold_chunk(disk_engine: MakeEngine) -> None:
    text = random_ids(64, seed=1, high=100)
    with disk_engine() as one:
        one.warm(text)
    two = disk_engine(max_chunks=3)
    for leaves_at in (1, 15, 16, 17, 33, 63):
        prompt = [*text[:leaves_at], *random_ids(3, seed=leaves_at, low=100)]
        assert answers_as_baseline(two, prompt).cached_tokens == leaves_at
        two.core.parts.workspace.drop()
        two.cache_manager.check_integrity()


def test_prepare_and_commit(disk_engine: MakeEngine) -> None:
    text = random_ids(64, seed=1)
    with disk_engine() as one:
        one.warm(text)
    with disk_engine() as two:
        prepared = two.prepare([*text, 7], max_new_tokens=4)
        assert sum(span.length for span in prepared.spans if span.donor) == 64
        output = two.model.generate(**prepared, max_new_tokens=4, do_sample=False)
        expected = answer(two, [*text, 7], "baseline").token_ids
        assert output[0, 65:].tolist() == expected
        two.commit(prepared, output)
    assert disk_engine().explain([*text, 7, *expected[:3], 5]).cached_tokens == 68


# --- the public parts of the store -------------------------------------------------------------


def test_assemble_and_get_never_give_a_chunk_without_tensors(disk_engine: MakeEngine) -> None:
    text = random_ids(40, seed=1)
    with disk_engine() as one:
        one.warm(text)
        keys = list(one.cache_manager._store.entries)
    two = disk_engine()
    for key in keys:
        chunk = two.cache_manager.get(key)
        assert chunk is None or chunk.past_key_values[0][0].shape[2] == chunk.length
    assembled = two.assembler.assemble(text, two.namespace())
    assert assembled.cached_length + len(assembled.live_token_ids) == 40
    if assembled.cached_past_kv is not None:
        assert assembled.cached_past_kv[0][0].shape[2] == assembled.cached_length
