"""The sparse forward and the repairs built on it, against stock attention, on tiny models.

Sliding windows are set longer than the prompts here: with shorter ones nothing is moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from kvboost import CacheBlendRecompute, KVBoost, SelectiveRecompute
from kvboost.choices import AssemblyMode, Origin
from kvboost.kernels import scattered, scope
from kvboost.kv.arena import Arena
from kvboost.kv.layout import probe_layout
from kvboost.models import AssembledPrompt
from kvboost.reuse import repair
from kvboost.reuse.assembler import Lookup, PromptAssembler
from kvboost.reuse.costs import CostEstimate
from kvboost.reuse.repair import RepairStrategy
from kvboost.run import decode, sparse_forward
from tests.fixture_types import MakeEngine
from tests.threads import one_torch_thread
from tests.tiny_models import ARCHITECTURES, random_ids, tiny_model

pytestmark = pytest.mark.exactness
KV = list[tuple[torch.Tensor, torch.Tensor]]
WINDOW = 512
EAGER = ["llama", "gemma2", "gemma3", "stablelm"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@cache
def wide_model(architecture: str, *, eager: bool = False) -> Any:
    """A model whose sliding window, where it has one, is longer than all prompts here."""
    sliding = "sliding_window" in ARCHITECTURES[architecture]
    model = tiny_model(architecture, **({"sliding_window": WINDOW} if sliding else {}))
    if eager:
        model.set_attn_implementation("eager")
    return model


ALL_MODELS = [*((name, False) for name in ARCHITECTURES), *((name, True) for name in EAGER)]
MODELS = pytest.mark.parametrize(
    ("architecture", "eager"), ALL_MODELS, ids=[f"{n}-eager" if e else n for n, e in ALL_MODELS]
)


def stock_prefill(model: Any, ids: list[int]) -> tuple[KV, torch.Tensor]:
    """KV and last logits of a plain forward over everything."""
    stock = DynamicCache()
    with torch.no_grad():
        logits = model(torch.tensor([ids]), past_key_values=stock, use_cache=True).logits[0, -1]
    return [(layer.keys, layer.values) for layer in stock.layers], logits


def stock_sparse(model: Any, ids: list[int], positions: list[int], old: KV) -> KV:
    """KV `[1, kv_heads, tokens, head_dim]` with `positions` computed anew over `old`, by stock attention.

    The stock cache holds the other positions, and an explicit mask says who sees whom.
    """
    others = [p for p in range(len(ids)) if p not in set(positions)]
    stock = DynamicCache()
    for layer, (key, value) in enumerate(old):
        stock.update(key[:, :, others].clone(), value[:, :, others].clone(), layer)
    key_positions = torch.tensor([*others, *positions])
    visible = key_positions <= torch.tensor(positions)[:, None]
    mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        model(
            input_ids=torch.tensor([[ids[p] for p in positions]]),
            position_ids=torch.tensor([positions]),
            attention_mask=mask,
            past_key_values=stock,
            use_cache=True,
        )
    back = torch.argsort(key_positions)
    return [(layer.keys[:, :, back], layer.values[:, :, back]) for layer in stock.layers]


def filled_arena(model: Any, kv: KV, capacity: int) -> Arena:
    arena = Arena(probe_layout(model), capacity)
    tokens = kv[0][0].shape[2]
    arena.set_length(tokens)
    for layer, (key, value) in zip(arena.layers, kv, strict=True):
        layer.keys.copy_(key)
        layer.values.copy_(value)
    return arena


def assert_same_kv(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    for layer, (pair, wanted_pair) in enumerate(zip(found, wanted, strict=True)):
        for part, wanted_part in zip(pair, wanted_pair, strict=True):
            error = float((part - wanted_part).norm() / wanted_part.norm())
            assert error <= tolerance, f"layer {layer} is off by {error:.2g}"


def kl(wanted: torch.Tensor, got: torch.Tensor) -> float:
    wanted, got = torch.log_softmax(wanted.double(), -1), torch.log_softmax(got.double(), -1)
    return float((wanted.exp() * (wanted - got)).sum())


def last_logits(model: Any, ids: list[int], arena: Arena) -> torch.Tensor:
    """The logits of the last token over an arena that holds all before it."""
    arena.set_length(len(ids) - 1)
    with torch.no_grad():
        output = model(
            torch.tensor([ids[-1:]]),
            position_ids=torch.tensor([[len(ids) - 1]]),
            past_key_values=arena,
            use_cache=True,
        )
    return output.logits[0, -1]


# --- sparse_forward -----------------------------------------------------------------------------


@MODELS
@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
def test_all_positions_are_a_full_prefill(
    architecture: str, eager: bool, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks:
        monkeypatch.setattr(scattered, "_BLOCK_TOKENS", {False: 7, True: 7})
        monkeypatch.setattr(sparse_forward, "_MAX_MASK_ELEMENTS", {False: 1, True: 1})
    model = wide_model(architecture, eager=eager)
    own_attention = text_attention(model)
    ids = random_ids(150, seed=1)
    wanted, wanted_logits = stock_prefill(model, ids)
    wrong, _ = stock_prefill(model, random_ids(150, seed=2))
    arena = filled_arena(model, wrong, 160)  # filled beyond the positions: so they are no tail
    sparse_forward.sparse_forward(model, np.array(ids), arena, np.arange(149))
    assert arena.length == 150
    logits = last_logits(model, ids, arena)
    assert_same_kv(arena.as_past_key_values(), wanted)
    assert kl(wanted_logits, logits) < 1e-6
    assert text_attention(model) == own_attention


def text_attention(model: Any) -> str:
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


@MODELS
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_positions_equal_a_masked_reference(architecture: str, eager: bool, data: st.DataObject) -> None:
    model = wide_model(architecture, eager=eager)
    total = data.draw(st.integers(2, 90), "tokens")
    chosen = data.draw(st.sets(st.integers(0, total - 1), min_size=1), "positions")
    ids = random_ids(total, seed=3)
    old, _ = stock_prefill(model, random_ids(total, seed=4))
    positions = sorted(chosen)
    arena = filled_arena(model, old, total)
    sparse_forward.sparse_forward(model, np.array(ids), arena, np.array(positions))
    assert arena.length == total
    wanted = stock_sparse(model, ids, positions, old)
    assert_same_kv(arena.as_past_key_values(), wanted)
    rest = [p for p in range(total) if p not in chosen]
    for layer, (key, value) in zip(arena.layers, old, strict=True):  # not touched at all
        assert torch.equal(layer.keys[:, :, rest], key[:, :, rest])
        assert torch.equal(layer.values[:, :, rest], value[:, :, rest])


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "smollm3"])
@pytest.mark.parametrize("keep", [2, 3, 17])
def test_blocks_change_nothing(architecture: str, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scattered, "_BLOCK_TOKENS", {False: 5, True: 5})
    monkeypatch.setattr(sparse_forward, "_MAX_MASK_ELEMENTS", {False: 1, True: 1})
    model = wide_model(architecture)
    ids = random_ids(220, seed=5)
    old, _ = stock_prefill(model, random_ids(220, seed=6))
    positions = [p for p in range(220) if p % keep]
    assert len(positions) > 64  # more than one block of the forward
    arena = filled_arena(model, old, 256)
    sparse_forward.sparse_forward(model, np.array(ids), arena, np.array(positions))
    assert_same_kv(arena.as_past_key_values(), stock_sparse(model, ids, positions, old))


def test_holes_that_were_never_filled_may_be_filled_in_one_pass() -> None:
    model = wide_model("llama")
    ids = random_ids(80, seed=7)
    wanted, _ = stock_prefill(model, ids)
    arena = Arena(probe_layout(model), 80)
    known = [*range(10, 30), *range(45, 70)]
    for layer, (key, value) in zip(arena.layers, wanted, strict=True):
        layer.length = 80
        layer.keys[:, :, known] = key[:, :, known]
        layer.values[:, :, known] = value[:, :, known]
    arena.set_length(70)
    missing = [p for p in range(80) if p not in known]
    sparse_forward.sparse_forward(model, np.array(ids), arena, np.array(missing))
    assert arena.length == 80
    assert_same_kv(arena.as_past_key_values(), wanted)


@pytest.mark.parametrize(
    ("positions", "filled", "plain"),
    [
        (range(30, 50), 30, True),
        (range(30, 50), 50, True),
        (range(50), 0, True),
        (range(30, 49), 50, False),
        ([*range(30, 40), *range(41, 50)], 50, False),
    ],
)
def test_a_contiguous_tail_takes_the_plain_path(
    positions: Any, filled: int, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide_model("llama")
    ids = np.array(random_ids(50, seed=8))
    wanted, _ = stock_prefill(model, ids.tolist())
    arena = filled_arena(model, [(k[:, :, :filled], v[:, :, :filled]) for k, v in wanted], 50)
    prefills: list[int] = []
    own = decode.prefill

    def noted(*args: Any, **options: Any) -> None:
        prefills.append(1)
        own(*args, **options)

    monkeypatch.setattr(decode, "prefill", noted)
    sparse_forward.sparse_forward(model, ids, arena, np.array(list(positions)))
    assert bool(prefills) is plain
    assert arena.length == 50
    assert_same_kv(arena.as_past_key_values(), wanted)


def test_no_positions_change_nothing() -> None:
    model = wide_model("llama")
    kv, _ = stock_prefill(model, random_ids(20, seed=9))
    arena = filled_arena(model, kv, 30)
    sparse_forward.sparse_forward(model, np.arange(20), arena, np.zeros(0, dtype=np.int64))
    assert arena.length == 20
    for layer, (key, _) in zip(arena.layers, kv, strict=True):
        assert torch.equal(layer.keys, key)


def test_a_failing_forward_leaves_model_and_arena_usable() -> None:
    model = wide_model("llama")
    kv, _ = stock_prefill(model, random_ids(20, seed=10))
    arena = filled_arena(model, kv, 30)
    with pytest.raises(IndexError):
        sparse_forward.sparse_forward(model, np.array([10_000] * 20), arena, np.array([3, 7]))
    assert arena.length == 20
    assert arena.scatter_slots is None
    assert arena.stop_after_layer is None
    assert text_attention(model) == "sdpa"
    assert scope._SCOPE.get() is None


# --- repair -------------------------------------------------------------------------------------

DOCUMENTS = [random_ids(length, seed=100 + length) for length in (80, 70, 95)]


def shuffled_prompt() -> list[int]:
    one, two, three = DOCUMENTS
    return [*random_ids(9, seed=11), *three, *random_ids(5, seed=12), *one, *two, *random_ids(20, seed=13)]


def engine_with_documents(make_engine: MakeEngine, architecture: str, **options: Any) -> KVBoost:
    engine = make_engine(model=wide_model(architecture, eager=options.pop("eager", False)), **options)
    for document in DOCUMENTS:
        engine.warm(document)
    return engine


@MODELS
@pytest.mark.parametrize("selector", ["guided", "deviation"])
def test_all_recomputed_is_baseline(
    architecture: str, eager: bool, selector: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostEstimate, "pays", property(lambda _self: True))  # it never does at this ratio
    engine = engine_with_documents(
        make_engine, architecture, eager=eager, recompute_ratio=1.0, selector=selector
    )
    prompt = shuffled_prompt()
    expected = engine.generate(prompt, max_new_tokens=8, mode="baseline")
    result = engine.generate(prompt, max_new_tokens=8)
    assert result.cached_tokens == result.recomputed_tokens >= 240
    assert result.token_ids == expected.token_ids


def assembler_of(engine: KVBoost) -> PromptAssembler:
    return PromptAssembler(
        engine.cache_manager,
        AssemblyMode.CHUNK_REUSE,
        rotation=engine.assembler._rotation,
        lossy_from=engine.assembler._lossy_from,
    )


def at_reused(arena: Arena, assembled: AssembledPrompt) -> KV:
    where = np.concatenate([np.arange(run[0], run[1]) for run in assembled.runs])
    arena.set_length(max(where) + 1)
    return [(key[:, :, where], value[:, :, where]) for key, value in arena.as_past_key_values()]


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize(("architecture", "eager"), [("llama", False), ("gemma3", False), ("gemma2", True)])
@pytest.mark.parametrize("selector", ["guided", "deviation"])
def test_apply_gives_what_the_engines_arena_holds(
    architecture: str, eager: bool, selector: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostEstimate, "pays", property(lambda _self: True))  # not with two of three layers
    engine = engine_with_documents(
        make_engine, architecture, eager=eager, recompute_ratio=0.2, selector=selector
    )
    prompt = shuffled_prompt()
    assembled = assembler_of(engine).assemble(prompt, engine.namespace())
    assert assembled.has_approximate
    assert assembled.cached_past_kv is not None
    before = [(key.clone(), value.clone()) for key, value in assembled.cached_past_kv]
    applied = CacheBlendRecompute(0.2, 0.0, selector=selector).apply(assembled, engine.model)
    result = engine.generate(prompt, max_new_tokens=1)
    assert result.recomputed_tokens > 0
    kept = engine.core.parts.workspace._kept
    assert kept is not None
    assert_same_kv(applied.cached_past_kv, at_reused(kept.arena, assembled), 1e-5)
    assert_same_kv(assembled.cached_past_kv, before, 0.0)  # a copy was repaired
    assert applied.cached_past_kv is not None
    last_keys = applied.cached_past_kv[-1][0] - before[-1][0]  # in the last layer only the chosen ones differ
    changed = int((last_keys.abs().sum(dim=(0, 1, 3)) > 0).sum())
    assert changed == result.recomputed_tokens
    assert dataclass_rest(applied) == dataclass_rest(assembled)


def dataclass_rest(assembled: AssembledPrompt) -> dict[str, Any]:
    return {name: value for name, value in vars(assembled).items() if name != "cached_past_kv"}


@pytest.mark.parametrize(
    "strategy",
    [
        SelectiveRecompute(),
        SelectiveRecompute(5, side="before"),
        CacheBlendRecompute(),
        CacheBlendRecompute(selector="deviation"),
        CacheBlendRecompute(1.0),
        CacheBlendRecompute(0.0),
    ],
    ids=str,
)
def test_apply_is_the_function_that_the_engine_runs(
    strategy: SelectiveRecompute | CacheBlendRecompute, make_engine: MakeEngine
) -> None:
    engine = engine_with_documents(make_engine, "llama")
    prompt = shuffled_prompt()
    assembler = assembler_of(engine)
    assembled = assembler.assemble(prompt, engine.namespace())
    applied = strategy.apply(assembled, engine.model)
    ids = np.array(prompt)
    arena = Arena(engine.layout, len(ids))
    with assembler.planned(Lookup(ids, engine.namespace(), len(ids) - 1)) as plan:
        assembler.place(plan, arena)
    repairer: RepairStrategy = strategy
    chosen = repair.complete(engine.model, ids, arena, plan.repair_runs, repairer, end=len(ids) - 1)
    assert_same_kv(applied.cached_past_kv, at_reused(arena, assembled), 1e-5)
    if isinstance(strategy, CacheBlendRecompute) and strategy.recompute_ratio in (0.0, 1.0):
        assert len(chosen) == strategy.recompute_ratio * assembled.cached_length
    else:
        assert 0 < len(chosen) < assembled.cached_length


def test_apply_of_everything_is_the_full_prefill(make_engine: MakeEngine) -> None:
    engine = engine_with_documents(make_engine, "llama")
    assembled = assembler_of(engine).assemble(shuffled_prompt(), engine.namespace())
    applied = CacheBlendRecompute(1.0).apply(assembled, engine.model)
    wanted, _ = stock_prefill(engine.model, shuffled_prompt())
    where = np.concatenate([np.arange(run[0], run[1]) for run in assembled.runs])
    assert_same_kv(applied.cached_past_kv, [(k[:, :, where], v[:, :, where]) for k, v in wanted])
    untouched, _ = wanted[1]
    assert assembled.cached_past_kv is not None
    assert float((assembled.cached_past_kv[1][0] - untouched[:, :, where]).norm()) > 1.0  # it was needed


def test_apply_leaves_exact_prompts_alone(make_engine: MakeEngine) -> None:
    engine = engine_with_documents(make_engine, "llama")
    assembled = assembler_of(engine).assemble(DOCUMENTS[0], engine.namespace())
    assert not assembled.has_approximate
    assert CacheBlendRecompute().apply(assembled, engine.model) is assembled
    assert SelectiveRecompute().apply(assembled, engine.model) is assembled


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_moved_text_without_repair_is_turned_rightly(architecture: str, make_engine: MakeEngine) -> None:
    """A text that stands first in its prompt, moved as a whole: turning alone makes layer 0 exact."""
    engine = make_engine(model=wide_model(architecture), recompute_ratio=0.0)
    text = random_ids(96, seed=20)
    engine.warm(text)
    prompt = [*random_ids(40, seed=21), *text, *random_ids(5, seed=22)]
    result = engine.generate(prompt, max_new_tokens=1)
    assert next(span.start for span in result.spans if span.origin is Origin.APPROXIMATE) == 40
    assert result.recomputed_tokens == 0
    wanted, _ = stock_prefill(engine.model, prompt)
    kept = engine.core.parts.workspace._kept
    assert kept is not None
    first_layer = kept.arena.as_past_key_values()[0]
    moved = slice(40, 40 + 96)
    assert_same_kv([[part[:, :, moved] for part in first_layer]], [[part[:, :, moved] for part in wanted[0]]])
