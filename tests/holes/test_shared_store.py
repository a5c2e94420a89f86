"""Found by attack on the store that several machines share: each of these was once true of it."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from transformers import AutoModelForCausalLM, dynamic_module_utils

from kvboost import KVBoost
from kvboost.disk import serde
from kvboost.parts import engine_parts
from kvboost.remote import cache, parts
from kvboost.remote.byte_store import MOST_VALUE_BYTES, UNREACHABLE, StoreError
from kvboost.remote.fingerprints import TailPlace
from kvboost.remote.keys import RemoteKeys, part
from kvboost.remote.lookup import chain_digests
from tests.fixture_types import MakeEngine
from tests.remote.servers import RedisServer, need_redis
from tests.tiny_models import random_ids, tiny_model
from tests.unit.remote.memory_store import MemoryStore

PROMPT = random_ids(700, seed=1)
Sharing = Callable[..., KVBoost]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    made = MemoryStore()
    monkeypatch.setattr(engine_parts, "open_store", lambda _address: made)
    return made


@pytest.fixture
def sharing(store: MemoryStore, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Sharing:
    assert not store.is_closed
    monkeypatch.setattr(cache, "_LEAST_S", 5.0)

    def make(*arguments: Any, **options: Any) -> KVBoost:
        return make_engine(*arguments, remote_cache="redis://in-memory", **{"chunk_size": 128, **options})

    return make


def remote_of(engine: KVBoost) -> Any:
    return engine.core.parts.remote


def filled(sharing: Sharing, **options: Any) -> KVBoost:
    engine = sharing(**options)
    engine.generate(PROMPT, max_new_tokens=3)
    assert remote_of(engine).flush(10.0)
    return engine


def names_of(engine: KVBoost) -> tuple[RemoteKeys, str, list[str]]:
    """The names of an engine without salt, the root of the prompt's chain, and its digests."""
    namespace = engine.core.parts.fit.namespace("")
    ids = np.array(PROMPT, dtype=np.int64)
    digests = chain_digests(ids, engine.core.parts.writer.cuts(ids), namespace.key)
    return RemoteKeys.of(namespace, engine.core.parts.codec.form), namespace.key, digests


def records(store: MemoryStore) -> int:
    return sum(value.startswith(parts.MAGIC) for value in store.values.values())


def answered_as_without(engine: KVBoost) -> Any:
    expected = engine.generate(PROMPT, max_new_tokens=3, mode="baseline")
    result = engine.generate(PROMPT, max_new_tokens=3)
    assert result.token_ids == expected.token_ids
    return result


# --- peers that write what they like, with checksums that are right --------------------------------


def rewritten(
    engine: KVBoost,
    store: MemoryStore,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    **meta: Any,
) -> None:
    """The records of the prompt with other tensors or fields, sealed as a peer would seal them."""
    keys, _, digests = names_of(engine)
    for digest in digests:
        name = keys.record(digest)
        joined = parts.join([store.values.get(part(name, 0))], name, digest)
        if isinstance(joined, str):
            continue
        header, tensors = joined
        kept = {key: value for key, value in header.meta.items() if key not in ("kind", "key", "tensors")}
        named = {spec.name: change(each) for spec, each in zip(header.specs, tensors, strict=True)}
        made = serde.record_of("kv", digest, named, header.token_ids, **{**kept, **meta})
        store.values[part(name, 0)] = b"".join(parts.split(made, name)[0])


@pytest.mark.parametrize(
    ("count", "total"), [(1, 1 << 50), (2**32 - 1, 100), (1, 2**64 - 1)], ids=["bytes", "parts", "all"]
)
def test_a_header_that_promises_too_much_makes_nobody_allocate(
    count: int, total: int, sharing: Sharing, store: MemoryStore
) -> None:
    """Names of all these parts were made: gigabytes, and seconds in which nothing else ran."""
    filled(sharing)
    engine = sharing()
    keys, _, digests = names_of(engine)
    name = keys.record(digests[0])
    checked = parts._CHECKED.pack(parts.VERSION, 0, count, 10, total, parts.owner_of(name), b"12345678")
    start = parts.MAGIC + struct.pack("<I", xxhash.xxh32_intdigest(checked)) + checked
    store.values[part(name, 0)] = start + bytes(26)
    store.asked.clear()
    assert answered_as_without(engine).cached_tokens == 0
    assert len(store.asked) < 1_000
    assert remote_of(engine).stats()["misses"] == {parts.CORRUPT: 1}


def test_a_tail_of_four_billion_tokens(sharing: Sharing, store: MemoryStore) -> None:
    engine = sharing()
    keys, root, digests = names_of(engine)
    start = TailPlace.of(digests[0], np.array(PROMPT)).start
    store.values[keys.tail(root)] = TailPlace(digests[0], 2**32 - 1, start).to_bytes()
    assert answered_as_without(engine).cached_tokens == 0
    assert len(store.asked) < 1_000


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_taken(value: float, sharing: Sharing, store: MemoryStore) -> None:
    """It was served as exact, and the answer was another."""
    engine = filled(sharing)
    rewritten(engine, store, lambda tensor: tensor.index_fill(1, torch.tensor([5]), value))
    other = sharing()
    assert answered_as_without(other).cached_tokens == 0
    assert remote_of(other).stats()["read_chunks"] == 0


def test_scales_that_are_no_numbers_are_not_taken(sharing: Sharing, store: MemoryStore) -> None:
    """Of chunks in fewer bits, every byte is set: steps and minima are not numbers then."""
    rewritten(filled(sharing, kv_cache_bits=8), store, lambda tensor: torch.full_like(tensor, 255))
    engine = sharing(kv_cache_bits=8)
    assert answered_as_without(engine).cached_tokens == 0
    assert remote_of(engine).stats()["read_chunks"] == 0


@pytest.mark.parametrize(
    "fields",
    [{"parent": "\ud800"}, {"parent": "0" * 64}, {"position_start": -5}, {"position_start": 10**30}],
    ids=["no text", "another parent", "negative", "far"],
)
def test_fields_that_cannot_be_are_misses(
    fields: dict[str, Any], sharing: Sharing, store: MemoryStore
) -> None:
    """A parent that cannot be encoded was an exception out of generate; others stayed in the store."""
    rewritten(filled(sharing), store, **fields)
    engine = sharing(remote_write="reused")
    assert answered_as_without(engine).cached_tokens == 0
    remote_of(engine)._readers.submit(lambda: None).result(5.0)
    assert set(remote_of(engine).stats()["misses"]) == {parts.CORRUPT}


def test_values_of_other_types_and_sizes_in_redis(tmp_path: Path) -> None:
    """A list under one name failed the look-up and every trial after it; large values were read whole."""
    need_redis()
    from kvboost.remote.redis_store import RedisStore

    server = RedisServer(tmp_path)
    store = RedisStore(server.url)
    try:
        with server.client() as client:
            client.lpush("kvb:list", "x")
            client.set("kvb:text", b"yyyy")
            client.set("kvb:large", bytes(4 * MOST_VALUE_BYTES))
        assert store.peek(["kvb:list", "kvb:text", "kvb:none"], 2) == [None, b"yy", None]
        store.ping()
        found = store.read(["kvb:text", "kvb:list", "kvb:large"])
        assert found[:2] == [b"yyyy", None]
        assert len(found[2] or b"") == MOST_VALUE_BYTES
    finally:
        store.close()
        server.kill()


# --- weights that changed unseen -------------------------------------------------------------------


def test_what_is_being_written_is_taken_back_too(sharing: Sharing, store: MemoryStore) -> None:
    """The rest of a batch was written after what had been written was deleted, and stayed for ever."""
    engine, began, write = sharing(), threading.Event(), store.write

    def slowly(values: Any) -> None:
        began.set()
        time.sleep(0.2)
        write(values)

    store.write = slowly  # type: ignore[method-assign]
    engine.generate(PROMPT, max_new_tokens=3)
    assert began.wait(5.0)
    engine.core.parts.forget_all()
    assert remote_of(engine).flush(10.0)
    assert records(store) == 0


def test_what_cannot_be_taken_back_now_is_later(sharing: Sharing, store: MemoryStore) -> None:
    engine = filled(sharing)
    store.error = StoreError(UNREACHABLE)
    started = time.monotonic()
    engine.core.parts.forget_all()
    assert time.monotonic() - started < 1.0, "requests do not wait for it"
    time.sleep(0.2)
    assert records(store)
    store.error = None
    until = time.monotonic() + 10.0
    while records(store) and time.monotonic() < until:
        time.sleep(0.05)
    assert records(store) == 0


def test_closing_checks_the_weights(sharing: Sharing, store: MemoryStore) -> None:
    """As it does where there is a disk: KV of other weights must not outlive the process."""
    engine = sharing(weights_check_seconds=None)
    engine.model.model.layers[0].mlp.down_proj.weight.data.view(-1)[1234:1240] = 5.0
    engine.generate(PROMPT, max_new_tokens=3)
    engine.close()
    assert records(store) == 0


# --- memory ----------------------------------------------------------------------------------------


def test_a_store_that_hangs_keeps_no_chunk_from_going(sharing: Sharing, store: MemoryStore) -> None:
    """The writer held chunks, and all before them, while it waited: new text was refused for want of room."""
    engine = sharing(max_chunks=6, remote_write="all")
    store.gate.clear()
    try:
        engine.generate(PROMPT, max_new_tokens=2, mode="prefix_cache")
        until = time.monotonic() + 5.0
        while not store.calls["claim"] and time.monotonic() < until:
            time.sleep(0.01)
        remote_of(engine)._is_closed = True  # asks no more, so that the request does not wait
        engine.warm(random_ids(700, seed=9))
        assert engine.cache_stats()["refused"] == {}
    finally:
        remote_of(engine)._is_closed = False
        store.gate.set()


def test_what_was_read_last_goes_with_the_chunk(sharing: Sharing) -> None:
    """Threads that wait for work kept what they had read before."""
    import gc
    import weakref

    filled(sharing)
    engine = sharing()
    engine.generate(PROMPT, max_new_tokens=1)
    remote = remote_of(engine)
    entries = engine.core.parts.manager._store.entries
    tensors = [weakref.ref(entry.chunk.kv.tensors[0]) for entry in entries.values() if entry.chunk.fetched_ms]
    assert tensors
    assert remote.stats()["read_chunks"]
    engine.clear()
    gc.collect()
    assert [each() for each in tensors if each() is not None] == []


def test_no_record_is_read_that_has_no_room(sharing: Sharing, store: MemoryStore) -> None:
    filled(sharing)
    engine = sharing(max_cache_bytes=1_000)
    store.calls.clear()
    assert answered_as_without(engine).cached_tokens == 0
    assert store.calls["read"] == 0


# --- what explain says -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"bit_exact": True}, {"overlap_k": 16}], ids=["bit-exact", "overlap"])
@pytest.mark.parametrize("tokens", [128, 256, 640])
@pytest.mark.usefixtures("approximate_reuse")
def test_explain_says_what_generate_does(options: dict[str, Any], tokens: int, sharing: Sharing) -> None:
    """Whole blocks only; and what saw little of the text before it is not exact."""
    prompt = PROMPT[:tokens]
    writer = sharing(**options)
    writer.generate(prompt, max_new_tokens=2)
    assert remote_of(writer).flush(10.0)
    engine = sharing(**options)
    explained = engine.explain(prompt)
    result = engine.generate(prompt, max_new_tokens=2)
    assert explained.cached_tokens == result.cached_tokens
    exact = [
        sum(s.end - s.start for s in each.spans if s.origin.value == "exact") for each in (explained, result)
    ]
    assert exact[0] == exact[1]


# --- whose KV it is --------------------------------------------------------------------------------

_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class MineForCausalLM(LlamaForCausalLM):
    config_class = LlamaConfig

    def forward(self, input_ids=None, **more):
        embedded = self.get_input_embeddings()(input_ids) * {scale}
        return super().forward(inputs_embeds=embedded, **more)
"""


def test_other_code_under_the_same_name_is_another_model(
    tmp_path: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's own code was told by the name of its file: a second revision of it read KV of the first."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    families = []
    for machine, scale in (("a", 1.0), ("b", 3.0), ("c", 1.0)):
        folder = tmp_path / machine / "model"
        tiny_model("llama").save_pretrained(folder)
        (folder / "modeling_mine.py").write_text(_CODE.format(scale=scale))
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
        (folder / "config.json").write_text(json.dumps(config))
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        families.append(make_engine(model=model.eval()).core.parts.fit.family)
    assert families[0] == families[2], "wherever it lies"
    assert families[0] != families[1]


def test_bits_of_another_processor_are_not_these(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines with AVX2 and AVX-512 shared KV that was to be equal to the last bit."""
    here = make_engine(bit_exact=True), make_engine()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")
    there = make_engine(bit_exact=True), make_engine()
    same = [a.core.parts.fit.family == b.core.parts.fit.family for a, b in zip(here, there, strict=True)]
    assert same == [False, True]
