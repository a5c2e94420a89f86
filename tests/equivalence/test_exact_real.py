"""Exactness on the built-in model: a sample in `make test`, the full counts in `make proof`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.choices import Origin
from tests.equivalence.proofs import bit_exact_cases, chat_turns, prefix_case, write_result

pytestmark = [pytest.mark.real_model, pytest.mark.exactness]


def _check_prefix(cases: list[Any]) -> dict[str, Any]:
    for case in cases:
        assert case.cached_tokens >= case.prefix_tokens, case
        assert case.same_tokens, case
        assert case.largest_logit_difference <= 1e-3, case
    return {
        "prompts": len(cases),
        "same_tokens": sum(case.same_tokens for case in cases),
        "largest_logit_difference": max(case.largest_logit_difference for case in cases),
    }


def test_prefix_reuse_equals_baseline(real: KVBoost) -> None:
    _check_prefix([prefix_case(real, seed, 150, 900, new_tokens=24) for seed in range(4)])


@pytest.mark.slow
def test_prefix_reuse_equals_baseline_full(real: KVBoost) -> None:
    cases = [prefix_case(real, seed, 150, 3_500, new_tokens=48) for seed in range(40)]
    write_result("proof-exact-prefix", _check_prefix(cases), cases)


def _check_bit_exact(dtype: torch.dtype, count: int, longest: int) -> tuple[dict[str, Any], list[Any]]:
    with KVBoost.from_pretrained("builtin", dtype=dtype, bit_exact=True, max_chunks=None) as engine:
        cases = bit_exact_cases(engine, count, longest)
        engine.cache_manager.check_integrity()
    for case in cases:
        assert case.cached_tokens >= 128, case
        assert case.equal_to_baseline, case
        assert case.equal_to_cold, case
    return {"prompts": count, "equal": sum(c.equal_to_baseline and c.equal_to_cold for c in cases)}, cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bit_exact_logits(dtype: torch.dtype) -> None:
    _check_bit_exact(dtype, count=3, longest=500)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bit_exact_logits_full(dtype: torch.dtype) -> None:
    summary, cases = _check_bit_exact(dtype, count=20, longest=2_000)
    write_result(f"proof-bit-exact-{str(dtype).removeprefix('torch.')}", summary, cases)


def _check_chats(turns: list[Any]) -> dict[str, Any]:
    for turn in turns:
        assert turn.same_as_baseline, turn
        assert turn.cached_tokens == turn.computed_before, turn
    return {"turns": len(turns), "computed_before": sum(t.computed_before for t in turns)} | {
        "cached": sum(t.cached_tokens for t in turns)
    }


def test_chats_reuse_all_that_was_computed(real: KVBoost) -> None:
    _check_chats(chat_turns(real, chats=2, turns=3, new_tokens=16))


@pytest.mark.slow
def test_chats_reuse_all_that_was_computed_full(real: KVBoost) -> None:
    turns = chat_turns(real, chats=8, turns=5, new_tokens=32)
    write_result("proof-chats", _check_chats(turns), turns)


def test_template_that_rewrites_history_is_named(real: KVBoost) -> None:
    """A template that trims answers changes tokens that were computed; the result says which."""
    template = real.tokenizer.chat_template
    real.tokenizer.chat_template = template.replace(
        "message['content']",
        "(message['content'] | replace('a', 'A') if not loop.last else message['content'])",
    )
    try:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me about cats."}]
        first = real.generate(messages, max_new_tokens=12, mode="prefix_cache")
        messages += [
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Go on."},
        ]
        second = real.generate(messages, max_new_tokens=12, mode="prefix_cache")
    finally:
        real.tokenizer.chat_template = template
    live = second.spans[-1]
    assert live.origin is Origin.LIVE
    assert live.reason.startswith(f"diverged at token {live.start}: expected "), live
    assert second.cached_tokens < first.prompt_tokens
