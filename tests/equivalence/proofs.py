"""The claims about exactness as functions of how many prompts they are tried on.

`make test` runs a sample, `make proof` the full counts; both call these.
"""

from __future__ import annotations

import json
import platform
import random
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from kvboost import KVBoost, __version__
from tests.equivalence.capture import generate_with_logits
from tests.texts import corpus_ids

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@dataclass
class PrefixCase:
    prefix_tokens: int
    prompt_tokens: int
    cached_tokens: int
    same_tokens: bool
    largest_logit_difference: float


def prefix_case(engine: KVBoost, seed: int, shortest: int, longest: int, new_tokens: int) -> PrefixCase:
    """Warm a text, leave it at an arbitrary token, and compare with BASELINE."""
    draw = random.Random(seed)
    cut = draw.randint(shortest, longest)
    text = corpus_ids(engine.tokenizer, cut + draw.randint(0, 200), seed)
    prompt = text[:cut] + corpus_ids(engine.tokenizer, draw.randint(5, 60), seed + 10_000)
    engine.clear()
    engine.warm(text)
    expected, expected_logits = generate_with_logits(
        engine, prompt, mode="baseline", max_new_tokens=new_tokens
    )
    result, logits = generate_with_logits(engine, prompt, mode="prefix_cache", max_new_tokens=new_tokens)
    return PrefixCase(
        prefix_tokens=cut,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        same_tokens=result.token_ids == expected.token_ids,
        largest_logit_difference=float((logits - expected_logits).abs().max()),
    )


@dataclass
class BitExactCase:
    prompt_tokens: int
    cached_tokens: int
    equal_to_baseline: bool
    equal_to_cold: bool


def bit_exact_cases(engine: KVBoost, count: int, longest: int) -> list[BitExactCase]:
    """Prompts that share prefixes with each other: warm logits against cold ones, bit by bit."""
    base = corpus_ids(engine.tokenizer, longest, seed=5)
    draw = random.Random(count)
    prompts = []
    for number in range(count):
        cut = draw.randint(engine.chunk_size, longest)
        prompts.append(base[:cut] + corpus_ids(engine.tokenizer, draw.randint(3, 90), 20_000 + number))
    cold = []
    for prompt in prompts:
        engine.clear()
        cold.append(generate_with_logits(engine, prompt, mode="prefix_cache", max_new_tokens=1)[1])
    engine.clear()
    engine.warm(base)
    cases = []
    for prompt, cold_logits in zip(prompts, cold, strict=True):
        baseline = generate_with_logits(engine, prompt, mode="baseline", max_new_tokens=1)[1]
        result, warm_logits = generate_with_logits(engine, prompt, mode="prefix_cache", max_new_tokens=1)
        cases.append(
            BitExactCase(
                prompt_tokens=result.prompt_tokens,
                cached_tokens=result.cached_tokens,
                equal_to_baseline=torch.equal(warm_logits, baseline),
                equal_to_cold=torch.equal(warm_logits, cold_logits),
            )
        )
    return cases


@dataclass
class ChatTurn:
    chat: int
    turn: int
    prompt_tokens: int
    computed_before: int
    cached_tokens: int
    same_as_baseline: bool
    reason: str


_OPENINGS = (
    "Tell me about the city of Paris.",
    "What is 17 plus 25? Show your work.",
    "Write a Python function that reverses a string.",
    "Name three animals that live in the sea.",
    "Explain what a cache is to a child.",
    "Give me a recipe with exactly 4 ingredients: rice, eggs, 2 onions, salt.",
    "Wie heißt die Hauptstadt von Österreich? (in German, please — with “quotes”)",
    "List the years 1999, 2004 and 2024 with one event each.",
)
_FOLLOW_UPS = ("Go on.", "Why is that so?", "Say it in other words, in 2 lines.", "Thanks! One more, please.")


def chat_turns(engine: KVBoost, chats: int, turns: int, new_tokens: int) -> list[ChatTurn]:
    """Chats through messages; every token whose KV was computed before should be served."""
    rows = []
    for chat in range(chats):
        engine.clear()
        messages: list[dict[str, Any]] = [{"role": "user", "content": _OPENINGS[chat]}]
        computed = 0
        for turn in range(turns):
            length = new_tokens + 7 * turn  # some answers end by themselves, some are cut off
            result = engine.generate(messages, max_new_tokens=length, mode="prefix_cache")
            expected = engine.generate(messages, max_new_tokens=length, mode="baseline")
            rows.append(
                ChatTurn(
                    chat=chat,
                    turn=turn + 1,
                    prompt_tokens=result.prompt_tokens,
                    computed_before=computed,
                    cached_tokens=result.cached_tokens,
                    same_as_baseline=result.token_ids == expected.token_ids,
                    reason=result.spans[-1].reason,
                )
            )
            computed = result.prompt_tokens + result.generated_tokens - 1
            messages.append({"role": "assistant", "content": result.output_text})
            messages.append({"role": "user", "content": _FOLLOW_UPS[turn % len(_FOLLOW_UPS)]})
    return rows


BUILTIN = "SmolLM2-135M-Instruct (built in)"


def write_result(name: str, summary: dict[str, Any], cases: list[Any], model: str | None = BUILTIN) -> None:
    """Keep a proof's outcome with machine, versions and date beside it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    document = {
        "proof": name,
        "date": date.today().isoformat(),
        "model": model,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {
            "kvboost": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "summary": summary,
        "cases": [asdict(case) for case in cases],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
