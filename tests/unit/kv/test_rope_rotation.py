"""Keys that are moved equal keys that the model computes at the new positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from kvboost.kv import rope
from kvboost.kv.layout import HeadRange, KVLayout, Packed, SlabSpec, probe_layout
from kvboost.kv.rope import (
    LENGTH_REASON,
    KeyRotation,
    Turn,
    approximate_limit_tokens,
    learn_rotation,
)
from tests.tiny_models import random_ids, tiny_model

FAR = 8000  # how far keys are moved, both ways
TOKENS = 20
CPU = torch.device("cpu")
LONG = {"max_position_embeddings": 20_000}
# architecture of tiny_models and what is changed
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {}),
    "linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 5_000,
            }
        },
    ),
    "partial_phi": ("phi", {}),
    "partial_stablelm": ("stablelm", {}),
    "two_bases": ("gemma3", {}),
    "some_layers": ("smollm3", {}),
    "normed_keys": ("qwen3", {}),
    "interleaved": ("llama", {"model_type": "cohere"}),
    "interleaved_partial": (
        "llama",
        {"model_type": "glm", "head_dim": 16, "partial_rotary_factor": 0.5},
    ),
}


@cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    architecture, changes = ROPES[name]
    return tiny_model(architecture, dtype=dtype, **LONG, **changes)


@cache
def learned(name: str, dtype: torch.dtype = torch.float32) -> tuple[KVLayout, KeyRotation]:
    model = model_of(name, dtype)
    layout = probe_layout(model)
    rotation = learn_rotation(model, layout)
    assert isinstance(rotation, KeyRotation), rotation
    return layout, rotation


def kv_at(model: Any, layout: KVLayout, position: int) -> Packed:
    """What the model itself computes for a text that begins at `position`."""
    cache = DynamicCache()
    positions = torch.arange(position, position + TOKENS).unsqueeze(0)
    ids = torch.tensor([random_ids(TOKENS, seed=5)])
    with torch.no_grad():
        model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    return layout.pack(tuple((layer.keys, layer.values) for layer in cache.layers))


def key_errors(layout: KVLayout, got: Packed, want: Packed) -> list[float]:
    """Norm-relative error of every layer's keys."""
    pairs = zip(layout.unpack(got), layout.unpack(want), strict=True)
    return [float((a[0] - b[0]).double().norm() / b[0].double().norm()) for a, b in pairs]


def turned_by_the_book(keys: torch.Tensor, turn: Turn | None, shift: int) -> torch.Tensor:
    """`[heads, tokens, head_dim]` turned pair by pair, in float64."""
    turned = keys.double().clone()
    pairs = len(turn.inv_freq) if turn else 0
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if turn.interleaved else (i, i + pairs)  # type: ignore[union-attr]
        angle = torch.tensor(turn.inv_freq[i] * shift, dtype=torch.float64)  # type: ignore[union-attr]
        x, y = keys[..., a].double(), keys[..., b].double()
        turned[..., a] = x * angle.cos() - y * angle.sin()
        turned[..., b] = x * angle.sin() + y * angle.cos()
    return turned


# --- against the model ---


@pytest.mark.parametrize("name", ROPES)
@settings(max_examples=25, deadline=None)
@given(start=st.integers(0, FAR), target=st.integers(0, FAR))
@example(start=0, target=FAR)
@example(start=FAR, target=0)
@example(start=1, target=0)
def test_moved_keys_equal_those_computed_there(name: str, start: int, target: int) -> None:
    layout, rotation = learned(name)
    packed = kv_at(model_of(name), layout, start)
    rotation.rotate_(packed, layout, 0, TOKENS, target - start)
    errors = key_errors(layout, packed, kv_at(model_of(name), layout, target))
    assert max(errors) <= 1e-4, errors


@contextmanager
def rotary_replaced(model: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, `forward(original, x, position_ids)` gives the model its cos and sin."""
    rotary = model.model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda x, position_ids: forward(original, x, position_ids)
    try:
        yield
    finally:
        del rotary.forward


@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn", "normed_keys"])
@settings(max_examples=10, deadline=None)
@given(shift=st.integers(-FAR, FAR))
@example(shift=FAR)
def test_what_remains_is_the_rounding_of_the_models_own_angles(name: str, shift: int) -> None:
    """Models take angles in float32, 5e-4 off at position 16,000; from exact ones nothing remains."""
    layout, rotation = learned(name)
    model = model_of(name)

    def exact(_original: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rotary = model.model.rotary_emb
        angles = (position_ids[..., None].double() * rotary.inv_freq.double()).repeat(1, 1, 2)
        return tuple((part * rotary.attention_scaling).to(x.dtype) for part in (angles.cos(), angles.sin()))

    with rotary_replaced(model, exact):
        packed = kv_at(model, layout, FAR)
        rotation.rotate_(packed, layout, 0, TOKENS, shift)
        errors = key_errors(layout, packed, kv_at(model, layout, FAR + shift))
    assert max(errors) <= 1e-5, errors


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moved_keys_in_lower_precision(name: str, dtype: torch.dtype) -> None:
    layout, rotation = learned(name, dtype)
    packed = kv_at(model_of(name, dtype), layout, 0)
    rotation.rotate_(packed, layout, 0, TOKENS, 501)
    errors = key_errors(layout, packed, kv_at(model_of(name, dtype), layout, 501))
    assert max(errors) <= {torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype], errors


# --- what is learned ---


def test_frequencies_are_those_of_the_formula() -> None:
    _, rotation = learned("default")
    (turn,) = set(rotation.layers)
    assert turn is not None
    assert turn.inv_freq == pytest.approx([10_000.0 ** (-i / 8) for i in range(8)], rel=1e-6)
    assert not turn.interleaved


@pytest.mark.parametrize(
    ("name", "channels", "interleaved"),
    [
        ("partial_phi", 8, False),
        ("partial_stablelm", 4, False),
        ("interleaved", 16, True),
        ("interleaved_partial", 8, True),
        ("yarn", 16, False),
    ],
)
def test_channels_and_pairs_are_learned(name: str, channels: int, interleaved: bool) -> None:
    _, rotation = learned(name)
    assert [(turn.channels, turn.interleaved) for turn in rotation.layers if turn] == [
        (channels, interleaved)
    ] * 3


def test_layers_without_rotation_are_found() -> None:
    _, rotation = learned("some_layers")
    assert [turn is None for turn in rotation.layers] == [False, True, False]


def test_layers_of_two_bases_are_told_apart() -> None:
    _, rotation = learned("two_bases")
    local, full, last = rotation.layers
    assert local == last
    assert local is not None
    assert full is not None
    assert local.inv_freq[1] == pytest.approx(10_000.0**-0.1, rel=1e-6)
    assert full.inv_freq[1] == pytest.approx(1_000_000.0**-0.1, rel=1e-6)


def test_loud_channels_that_hardly_turn_hide_nothing() -> None:
    """Biases as large as Qwen2's, where keys at other positions differ by one percent in all."""
    theta = {"rope_type": "default", "rope_theta": 1e6}
    model = tiny_model("qwen2", **LONG, hidden_size=256, rope_parameters=theta)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.view(2, 2, 32)[:, :, 28:] = 200.0
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        layout = probe_layout(model)
        assert isinstance(learn_rotation(model, layout), KeyRotation)
        with wrong_angles(model, 1.001):
            assert "the keys of layer 0" in str(learn_rotation(model, layout))


# --- what is refused ---


def wrong_angles(model: Any, factor: float) -> AbstractContextManager[None]:
    """Inside, the model turns its keys by other frequencies than its rotary module shows."""
    return rotary_replaced(model, lambda original, x, positions: original(x, positions * factor))


def watch_first_position(model: Any) -> list[int]:
    """The position of the first token of every forward, from now on; 0 where the model chose it."""
    seen: list[int] = []

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        seen.append(0 if positions is None else int(positions[0, 0]))

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.mark.parametrize("factor", [1.5, 1.01, -1.0])
def test_other_frequencies_are_refused(factor: float) -> None:
    model = tiny_model("llama", **LONG)
    with wrong_angles(model, factor):
        reason = learn_rotation(model, probe_layout(model))
    assert isinstance(reason, str)
    assert reason.startswith("exact reuse only: the keys of layer 0 do not turn with their position (error ")


def test_a_rotation_hardly_better_than_none_is_refused() -> None:
    """Turning so slowly that every answer is within the tolerance of bfloat16, the wrong one too."""
    slow = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 10_000.0}
    model = tiny_model("llama", **LONG, dtype=torch.bfloat16, num_hidden_layers=1, rope_parameters=slow)
    layout = probe_layout(model)
    assert isinstance(learn_rotation(model, layout), KeyRotation)
    with wrong_angles(model, 1.5):
        reason = learn_rotation(model, layout)
    assert "the keys of layer 0 do not turn with their position (error 0.0" in str(reason)


def test_one_layer_that_does_not_fit_is_named() -> None:
    model = tiny_model("llama", **LONG)
    keys = model.model.layers[2].self_attn.k_proj
    first_position = watch_first_position(model)
    keys.register_forward_hook(lambda _m, _a, out: out + 0.01 * first_position[-1])
    reason = learn_rotation(model, probe_layout(model))
    assert "exact reuse only: the keys of layer 2 do not turn" in str(reason)


def test_values_that_change_with_their_position_are_refused() -> None:
    model = tiny_model("llama", **LONG)
    first_position = watch_first_position(model)
    values = model.model.layers[1].self_attn.v_proj
    values.register_forward_hook(lambda _m, _a, out: out * (1 + 0.01 * first_position[-1]))
    reason = learn_rotation(model, probe_layout(model))
    assert "exact reuse only: the values of layer 1 change with their position (error " in str(reason)


def test_a_model_that_ignores_position_ids_is_refused() -> None:
    model = tiny_model("llama", **LONG)
    forward = model.model.forward
    model.model.forward = lambda *args, position_ids=None, **rest: forward(*args, **rest)  # noqa: ARG005
    assert learn_rotation(model, probe_layout(model)) == (
        "exact reuse only: no layer's keys turn with their position"
    )


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_refused(name: str) -> None:
    model = tiny_model(name)
    assert learn_rotation(model, probe_layout(model)) == LENGTH_REASON


def test_a_model_without_rotary_modules_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=2, n_head=2))
    reason = learn_rotation(model, probe_layout(model))
    assert reason == "exact reuse only: the model has no rotary frequencies"


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = tiny_model("gemma3").train(training)
    before = {name: tensor.clone() for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    learn_rotation(model, probe_layout(model))
    assert model.training is training
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        assert torch.equal(tensor, before[name]), name

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    layout = probe_layout(model)
    model.model.layers[1].mlp.forward = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        learn_rotation(model, layout)
    assert model.training is training


def test_a_short_context_is_not_left() -> None:
    model = tiny_model("llama", max_position_embeddings=64)
    first_position = watch_first_position(model)
    assert isinstance(learn_rotation(model, probe_layout(model)), KeyRotation)
    assert 0 < max(first_position) <= 64 - rope._PROBE_TOKENS


# --- rotation by itself ---

HALF = Turn(tuple(10_000.0 ** (-i / 4) for i in range(4)), interleaved=False)
PAIRS = Turn(tuple(500.0 ** (-i / 3) for i in range(3)), interleaved=True)


def layout_of(*layers: tuple[int, int], dtype: torch.dtype = torch.float32) -> KVLayout:
    """Layers given as (kv_heads, head_dim)."""
    return KVLayout.of(
        tuple((torch.zeros(1, heads, 1, dim, dtype=dtype),) * 2 for heads, dim in layers)  # type: ignore[misc]
    )


def filled(layout: KVLayout, *lead: int, tokens: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(*lead, spec.heads, tokens, spec.head_dim, generator=generator).to(spec.dtype)
        for spec in layout.slabs
    ]


CASES: dict[str, tuple[KVLayout, KeyRotation]] = {
    "regular": (layout_of(*[(3, 8)] * 5), KeyRotation((HALF,) * 5)),
    "interleaved": (layout_of(*[(2, 6)] * 4), KeyRotation((PAIRS,) * 4)),
    "partial": (layout_of(*[(2, 12)] * 3), KeyRotation((HALF, PAIRS, HALF))),
    "gaps": (layout_of(*[(2, 8)] * 6), KeyRotation((HALF, HALF, None, HALF, HALF, None))),
    "head counts": (layout_of((1, 8), (3, 8), (3, 8), (2, 8), (1, 8)), KeyRotation((HALF,) * 5)),
    "two slabs": (layout_of((2, 8), (1, 16), (2, 8), (1, 16)), KeyRotation((HALF, PAIRS, HALF, HALF))),
    "any order": (
        KVLayout(
            (SlabSpec(CPU, torch.float32, 8, 9),),
            (
                (HeadRange(0, 7, 9), HeadRange(0, 0, 2)),
                (HeadRange(0, 2, 4), HeadRange(0, 5, 7)),
            ),
        ),
        KeyRotation((HALF, HALF)),
    ),
    "none": (layout_of((2, 8), (2, 8)), KeyRotation((None, None))),
}


@pytest.fixture(params=["whole", "blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both with all tokens at once and in blocks of few."""
    if request.param == "blocks":
        monkeypatch.setattr(rope, "_CPU_BLOCK_ELEMENTS", 100)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 2)])
@pytest.mark.parametrize("shift", [1, -1, 4_321, -7_777])
def test_only_the_keys_of_the_span_turn(case: str, lead: tuple[int, ...], shift: int) -> None:
    layout, rotation = CASES[case]
    slabs = filled(layout, *lead)
    want = [slab.clone() for slab in slabs]
    for turn, (where, _) in zip(rotation.layers, layout.layers, strict=True):
        keys = want[where.slab][..., where.start : where.end, 2:11, :]
        keys.copy_(turned_by_the_book(keys, turn, shift))
    before = [slab.clone() for slab in slabs]
    rotation.rotate_(slabs, layout, 2, 11, shift)
    for got, expected, old in zip(slabs, want, before, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
        untouched = expected == old
        assert torch.equal(got[untouched], old[untouched]), "what does not turn keeps every bit"


@pytest.mark.parametrize("case", CASES)
@given(shift=st.integers(-FAR, FAR))
@settings(max_examples=20, deadline=None)
def test_there_and_back_again(case: str, shift: int) -> None:
    layout, rotation = CASES[case]
    slabs = filled(layout)
    rotation.rotate_(slabs, layout, 0, 12, shift)
    rotation.rotate_(slabs, layout, 0, 12, -shift)
    for got, want in zip(slabs, filled(layout), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("start", "end", "shift"), [(0, 12, 0), (5, 5, 99), (12, 12, 1)])
def test_nothing_to_do_changes_no_bit(start: int, end: int, shift: int) -> None:
    layout, rotation = CASES["regular"]
    slabs = filled(layout)
    rotation.rotate_(slabs, layout, start, end, shift)
    assert all(torch.equal(got, want) for got, want in zip(slabs, filled(layout), strict=True))


@pytest.mark.parametrize("case", ["regular", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_is_rounded_once(case: str, dtype: torch.dtype) -> None:
    layout, rotation = CASES[case]
    exact = [slab.to(dtype).float() for slab in filled(layout)]
    rounded = [slab.to(dtype) for slab in exact]
    for slabs in (exact, rounded):
        rotation.rotate_(slabs, layout, 0, 12, 1_234)
    for got, want in zip(rounded, exact, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, want.to(dtype))


@pytest.mark.parametrize("case", ["regular", "interleaved"])
def test_float64_stays_float64(case: str) -> None:
    layout, rotation = CASES[case]
    slabs = [slab.double() for slab in filled(layout)]
    where, _ = layout.layers[0]
    want = turned_by_the_book(slabs[0][where.start : where.end], rotation.layers[0], FAR)
    rotation.rotate_(slabs, layout, 0, 12, FAR)
    torch.testing.assert_close(slabs[0][where.start : where.end], want, rtol=0, atol=1e-14)


def test_a_key_keeps_its_length() -> None:
    """Yarn's factor is in the keys already."""
    layout, rotation = learned("yarn")
    packed = kv_at(model_of("yarn"), layout, 0)
    before = [slab.norm(dim=-1) for slab in packed]
    rotation.rotate_(packed, layout, 0, TOKENS, 3_000)
    for got, want in zip(packed, before, strict=True):
        torch.testing.assert_close(got.norm(dim=-1), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (4, 3), (0, 13)])
def test_a_span_outside_is_an_error(start: int, end: int) -> None:
    layout, rotation = CASES["regular"]
    with pytest.raises(ValueError, match=r"expected 0 <= start <= end <= 12 tokens"):
        rotation.rotate_(filled(layout), layout, start, end, 1)


def test_a_layout_of_other_layers_is_an_error() -> None:
    layout, _ = CASES["regular"]
    with pytest.raises(ValueError):
        KeyRotation((HALF,)).rotate_(filled(layout), layout, 0, 12, 1)


@pytest.fixture
def count_turns(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    calls: list[int] = []
    turn = rope._turn_
    monkeypatch.setattr(rope, "_turn_", lambda *args: (calls.append(1), turn(*args)))
    return lambda: len(calls)


@pytest.mark.parametrize(("case", "expected"), [("regular", 1), ("two slabs", 3), ("gaps", 2), ("none", 0)])
def test_layers_that_turn_alike_turn_together(
    case: str, expected: int, count_turns: Callable[[], int]
) -> None:
    layout, rotation = CASES[case]
    rotation.rotate_(filled(layout), layout, 0, 12, 5)
    assert count_turns() == expected


def test_long_spans_turn_in_blocks(count_turns: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    layout, rotation = CASES["regular"]
    monkeypatch.setattr(rope, "_CPU_BLOCK_ELEMENTS", 4 * 5 * 3 * 8)
    rotation.rotate_(filled(layout), layout, 0, 10, 5)
    assert count_turns() == 3, "4 + 4 + 2 tokens"


# --- sliding windows ---


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        *((name, 40) for name in ("mistral", "qwen2_sliding", "phi3", "gemma2", "gemma3")),
        *((name, None) for name in ("llama", "qwen2", "qwen3", "phi", "gemma", "smollm3")),
    ],
)
def test_the_limit_is_the_window_in_use(architecture: str, expected: int | None) -> None:
    assert approximate_limit_tokens(tiny_model(architecture)) == expected


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("phi3", {"sliding_window": None}),
        ("qwen2_sliding", {"max_window_layers": 3}),
        ("qwen2_sliding", {"use_sliding_window": False}),
        ("gemma3", {"layer_types": ["full_attention"] * 3}),
    ],
)
def test_a_window_that_no_layer_uses_is_no_limit(architecture: str, changes: dict[str, Any]) -> None:
    assert approximate_limit_tokens(tiny_model(architecture, **changes)) is None
