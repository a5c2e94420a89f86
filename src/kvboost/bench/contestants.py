"""Ways to answer a prompt whose beginning was seen before, all from token ids to token ids, and their times.

Each pays for everything between its call and its answer; what a method may do between answers
(cropping a cache back, for instance) is done in `settle`, outside the clock. All are timed from outside, the
same way: the clock starts at the call, and a stopping criterion notes when each token is there, so nothing
that is measured has to be trusted to report its own times.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import DynamicCache, StoppingCriteriaList

from kvboost.engine import InferenceEngine
from kvboost.errors import InvalidRequestError


class Stamps:
    """A stopping criterion that never stops and notes the time of every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_options: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class Answer:
    """What a contestant hands back: the new tokens, and how many prompt tokens it did not compute."""

    token_ids: list[int]
    reused_tokens: int = 0


@dataclass(frozen=True)
class TimedAnswer:
    """An answer with its times. Decoding is counted from the first token to the last."""

    answer: Answer
    ttft_ms: float
    decode_tokens_per_s: float | None


def timed(call: Callable[[Stamps], Answer]) -> TimedAnswer:
    """Run `call`, which passes the stamps on as a stopping criterion; earlier work is waited for first."""
    stamps = Stamps()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    answer = call(stamps)
    times = stamps.times
    decoding_s = times[-1] - times[0]
    return TimedAnswer(
        answer,
        ttft_ms=(times[0] - started) * 1e3,
        decode_tokens_per_s=(len(times) - 1) / decoding_s if decoding_s > 0 else None,
    )


class Contestant(Protocol):
    """Answers prompts; `name` is its key in the record."""

    name: str

    def settle(self) -> None:
        """Get ready for the next answer, outside the clock."""

    def answer(self, token_ids: list[int], new_tokens: int, stamps: Stamps) -> Answer:
        """Continue `token_ids` greedily by exactly `new_tokens`."""


class Plain:
    """The model's own generate, which reads the whole prompt every time."""

    name = "plain"

    def __init__(self, model: Any) -> None:
        self._model = model

    def settle(self) -> None:
        """Nothing is kept."""

    def answer(self, token_ids: list[int], new_tokens: int, stamps: Stamps) -> Answer:
        return Answer(_generate(self._model, token_ids, new_tokens, stamps))


class HandMade:
    """The best reuse that can be written by hand: one DynamicCache of the prefix, cropped after use."""

    name = "hand_made"

    def __init__(self, model: Any, prefix: list[int]) -> None:
        self._model = model
        self._prefix_tokens = len(prefix)
        self._cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=_tensor(model, prefix), past_key_values=self._cache, logits_to_keep=1)

    def settle(self) -> None:
        surplus = self._cache.get_seq_length() - self._prefix_tokens
        if not surplus:
            return
        try:
            self._cache.crop(-surplus)
        except RuntimeError as error:
            raise InvalidRequestError(
                f"this model's cache cannot be cropped back for the hand-made reuse ({error}); "
                "choose lengths below its sliding window"
            ) from error

    def answer(self, token_ids: list[int], new_tokens: int, stamps: Stamps) -> Answer:
        new_ids = _generate(self._model, token_ids, new_tokens, stamps, past_key_values=self._cache)
        return Answer(new_ids, self._prefix_tokens)


class KVBoostWarm:
    """kvboost, when the last request began with the same text."""

    name = "kvboost"

    def __init__(self, engine: InferenceEngine, prefix: list[int]) -> None:
        self._engine = engine
        self._prefix = prefix

    def settle(self) -> None:
        self._engine.generate(self._prefix, 1, mode="prefix_cache")

    def answer(self, token_ids: list[int], new_tokens: int, stamps: Stamps) -> Answer:
        return engine_answer(self._engine, token_ids, new_tokens, stamps)


class KVBoostCopied:
    """kvboost, when the last request was about something else: all KV is copied out of the store."""

    name = "kvboost_copied"
    _SALT = "bench-copied"  # a store of its own, so that nothing is in place from another contestant

    def __init__(self, engine: InferenceEngine, prefix: list[int]) -> None:
        self._engine = engine
        self._other = prefix[:1]
        engine.warm(prefix, cache_salt=self._SALT)

    def settle(self) -> None:
        self._engine.warm(self._other)
        self._engine.core.resident.drop()

    def answer(self, token_ids: list[int], new_tokens: int, stamps: Stamps) -> Answer:
        return engine_answer(self._engine, token_ids, new_tokens, stamps, cache_salt=self._SALT)


def engine_answer(
    engine: InferenceEngine, token_ids: list[int], new_tokens: int, stamps: Stamps, **options: Any
) -> Answer:
    """An answer through `engine.generate`, in PREFIX_CACHE mode unless `options` say otherwise."""
    result = engine.generate(
        token_ids,
        new_tokens,
        **{"mode": "prefix_cache", **options},
        min_new_tokens=new_tokens,
        stopping_criteria=StoppingCriteriaList([stamps]),
    )
    return Answer(result.token_ids, result.cached_tokens)


@contextlib.contextmanager
def noting_logits(model: Any, stamps: Stamps, seen: list[torch.Tensor]) -> Iterator[None]:
    """Note the logits of the last position of every forward up to the first token.

    It is here because the engine knows that hooks of its own package change no numbers; beside any other
    hook it reuses nothing.
    """

    def note(_model: Any, _inputs: Any, output: Any) -> None:
        if not stamps.times:
            seen.append(output.logits[0, -1].detach().float().cpu().clone())

    hook = model.register_forward_hook(note)
    try:
        yield
    finally:
        hook.remove()


def _generate(model: Any, token_ids: list[int], new_tokens: int, stamps: Stamps, **options: Any) -> list[int]:
    input_ids = _tensor(model, token_ids)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([stamps]),
        **options,
    )
    new_ids: list[int] = output[0, len(token_ids) :].tolist()
    return new_ids


def _tensor(model: Any, token_ids: list[int]) -> torch.Tensor:
    """`[1, tokens]` on the model's device."""
    return torch.tensor([token_ids], device=model.get_input_embeddings().weight.device)
