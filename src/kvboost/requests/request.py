"""Requests that were checked before anything is done for them.

Knows prompts, options and the model's limits, no cache.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvboost.choices import GenerationMode, Origin, choice
from kvboost.errors import InvalidRequestError
from kvboost.identity.namespace import Namespace
from kvboost.kv import rope
from kvboost.models import GenerationResult, ScoreResult, Span
from kvboost.requests.encoding import check_text
from kvboost.requests.prompts import Prompt, PromptReader, TokenizedPrompt
from kvboost.run.decode import Decoded, Watch
from kvboost.run.options import GenerationOptions, read_options

_log = logging.getLogger(__name__)
_MAX_SEED = 2**63
_WITH_STATE = ("logits_processor", "stopping_criteria")  # a caller's own; they may note what they have seen
# Parts of them that are shared and not copied: they are large, or they are there to be shared.
_BY_REFERENCE = (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    threading.Event,
    type(threading.Lock()),
    type(threading.RLock()),
)


_ANSWERED = (
    "%s: %d tokens, the first after %.0f ms; of %d prompt tokens %d from the cache exactly, %d "
    "approximately, %d computed again"
)
RepairOptions = tuple[float | None, str | None]  # recompute_ratio and selector


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a caller asks for beside the prompt, as it was given. `options` are transformers' own.

    `repair` are a ratio and a selector in place of the engine's own; None = as the engine does.
    """

    max_new_tokens: int = 64
    mode: GenerationMode | str = GenerationMode.PREFIX_CACHE
    temperature: float = 1.0
    do_sample: bool = False
    cache_salt: str | None = None
    seed: int | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    repair: RepairOptions = (None, None)


class Request:
    """A checked request: its tokens, its options, and the namespace its KV belongs to.

    `index` is its number among those that came together, `repair` how its moved text is repaired; None = as
    the engine does it.
    """

    def __init__(
        self,
        prompt: TokenizedPrompt,
        mode: GenerationMode,
        options: GenerationOptions,
        namespace: Namespace,
        started: float,
        index: int = 0,
        repair: Any = None,
    ) -> None:
        self.prompt = prompt
        self.mode = mode
        self.options = options
        self.namespace = namespace
        self.started = started
        self.index = index
        self.repair = repair
        self.watch = Watch()
        self.looked_ahead = False  # a store that several machines share was asked
        self.token_ids = prompt.token_ids  # `[tokens]`, to be read by the model
        self.needed = len(self.token_ids) + options.max_new_tokens  # positions, with the answer
        self.limit = len(self.token_ids) - 1  # so many may come from elsewhere: generation needs one

    def result(
        self, decoded: Decoded, spans: tuple[Span, ...], text: str, ended: float | None = None
    ) -> GenerationResult:
        """The answer `decoded`, whose text is `text`, with the origin of every prompt token."""
        total_s = (time.perf_counter() if ended is None else ended) - self.started
        cached = sum(span.length for span in spans if span.origin is not Origin.LIVE)
        tokens = len(decoded.token_ids)
        result = GenerationResult(
            mode=self.mode.value,
            prompt=self.prompt.text,
            output_text=text,
            generated_tokens=tokens,
            ttft_ms=(decoded.first_token_at - self.started) * 1e3,
            total_ms=total_s * 1e3,
            tokens_per_sec=tokens / total_s if total_s else 0.0,
            kv_reuse_ratio=cached / len(self.prompt),
            prompt_tokens=len(self.prompt),
            cached_tokens=cached,
            token_ids=decoded.token_ids,
            spans=spans,
            recomputed_tokens=sum(span.length for span in spans if span.origin is Origin.RECOMPUTED),
            finish_reason=decoded.finish_reason,
        )
        if _log.isEnabledFor(logging.DEBUG):
            counts = result.exact_tokens, result.approximate_tokens, result.recomputed_tokens
            what = self.mode.value, tokens, result.ttft_ms, len(self.prompt), *counts
            _log.debug(_ANSWERED, *what)
        return result


class ScoreRequest(Request):
    """A prompt with a continuation, whose tokens are to be scored.

    `token_ids` are those that the model has to read: the prompt's, and the continuation's but for the last.
    """

    def __init__(
        self,
        prompt: TokenizedPrompt,
        continuation: Sequence[int],
        mode: GenerationMode,
        options: GenerationOptions,
        namespace: Namespace,
        started: float,
        index: int,
        repair: Any = None,
    ) -> None:
        super().__init__(prompt, mode, options, namespace, started, index, repair)
        self.continuation = list(continuation)
        self.token_ids = np.concatenate([prompt.token_ids, np.asarray(continuation[:-1], dtype=np.int64)])
        self.needed = len(self.token_ids)

    def scored(
        self, log_likelihoods: Sequence[float], is_greedy: bool, spans: tuple[Span, ...], text: str
    ) -> ScoreResult:
        """The result; `spans` may go beyond the prompt, `text` is the continuation's."""
        own = tuple(
            dataclasses.replace(span, end=min(span.end, len(self.prompt)))
            for span in spans
            if span.start < len(self.prompt)
        )
        cached = sum(span.length for span in own if span.origin is not Origin.LIVE)
        return ScoreResult(
            mode=self.mode.value,
            prompt=self.prompt.text,
            continuation=text,
            log_likelihood=math.fsum(log_likelihoods),
            is_greedy=is_greedy,
            token_ids=self.continuation,
            token_log_likelihoods=list(log_likelihoods),
            total_ms=(time.perf_counter() - self.started) * 1e3,
            kv_reuse_ratio=cached / len(self.prompt),
            prompt_tokens=len(self.prompt),
            cached_tokens=cached,
            spans=own,
        )


class OwnCopies(Mapping[str, Any]):
    """Options of a call for many prompts: whoever takes its logits processors and stopping criteria gets new
    ones, as the caller's were at the call. They are copied when they are taken: prompts that wait hold none.

    Models, tokenizers, weights and events are shared with the caller's; functions have no copies.
    """

    def __init__(self, options: Mapping[str, Any], *shared: Any) -> None:
        given = {name: list(options[name]) for name in _WITH_STATE if options.get(name)}
        self._shared = _by_reference([*shared, *(part for items in given.values() for part in _parts(items))])
        self._originals = self._copied(given)
        self._options = {**options, **self._originals}
        self._untaken: dict[str, list[Any]] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._originals:
            return self._options[name]
        if name not in self._untaken:  # all of them together: they may know each other
            self._untaken = self._copied(self._originals)
        return self._untaken.pop(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def _copied(self, lists: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        memo = dict(self._shared)
        return {name: [_copy_of(name, item, memo) for item in items] for name, items in lists.items()}


def _parts(items: Iterable[Any]) -> list[Any]:
    """What the attributes of `items` hold, as far as it is not to be copied."""
    held = [part for item in items for part in getattr(item, "__dict__", {}).values()]
    weights = [weight for part in held if isinstance(part, torch.nn.Module) for weight in part.parameters()]
    return [part for part in held if isinstance(part, _BY_REFERENCE)] + weights


def _by_reference(parts: Iterable[Any]) -> dict[int, Any]:
    """A memo for deepcopy that leaves `parts` as they are, and all that a model consists of."""
    memo = {}
    for part in parts:
        memo[id(part)] = part
        if isinstance(part, torch.nn.Module):
            memo |= {id(each): each for each in (*part.modules(), *part.parameters(), *part.buffers())}
    return memo


def _copy_of(name: str, item: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(item, memo)
    except MemoryError:
        raise
    except Exception as error:  # whatever its parts say about being copied
        raise InvalidRequestError(
            f"the {name} {type(item).__name__} may have a state: every prompt needs its own, and it cannot "
            f"be copied ({error}); pass one that copy.deepcopy can copy, or call generate for each prompt"
        ) from error


class RequestReader:
    """Checks prompts and options against what the model can do."""

    def __init__(self, model: Any, prompts: PromptReader) -> None:
        self._model = model
        self._prompts = prompts
        self._exact_range = rope.exact_range_tokens(model)
        self.max_positions = rope.max_positions(model)  # that the model has; None = any number

    def read(
        self,
        prompt: Prompt | TokenizedPrompt,
        arguments: Arguments,
        namespace: Namespace,
        started: float,
        repair: Any = None,
    ) -> Request:
        """One request, called at `started`."""
        mode, options = self._checked(arguments)
        return self._request(prompt, namespace, mode, options, started, repair)

    def read_all(
        self,
        prompts: Sequence[Prompt],
        arguments: Arguments,
        namespace: Namespace,
        started: float,
        repair: Any = None,
    ) -> list[Request]:
        """Requests with the same arguments, called together at `started`; number i draws from `seed` + i.

        Each has logits processors and stopping criteria of its own. An error names the prompt that is wrong.
        """
        if arguments.options.get("streamer") is not None:
            raise InvalidRequestError(
                "a streamer takes one answer; use stream, or stream_many for many prompts"
            )
        mode, options = self._checked(arguments)
        if len(checked_list(prompts)) > 1 and any(arguments.options.get(name) for name in _WITH_STATE):
            shared = (self._model, self._prompts.tokenizer)
            options = dataclasses.replace(options, call_options=OwnCopies(options.call_options, *shared))
        requests = []
        for index, prompt in enumerate(prompts):
            own = options
            if arguments.seed is not None:
                own = dataclasses.replace(options, seed=(arguments.seed + index) % _MAX_SEED)
            try:
                request = self._request(prompt, namespace, mode, own, started, repair, index)
                requests.append(request)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {index}: {error}") from error
        return requests

    def _checked(self, arguments: Arguments) -> tuple[GenerationMode, GenerationOptions]:
        """Mode and options, against what the model can do."""
        mode = self._checked_mode(arguments)
        options = _checked_options(arguments.options)
        return mode, read_options(
            self._model,
            arguments.max_new_tokens,
            arguments.temperature,
            arguments.do_sample,
            arguments.seed,
            options,
        )

    def _checked_mode(self, arguments: Arguments) -> GenerationMode:
        """The mode, and that it repairs at all where a caller says how."""
        mode = choice(GenerationMode, "mode", arguments.mode)
        if arguments.repair != (None, None) and mode is not GenerationMode.CHUNK_KV_REUSE:
            raise InvalidRequestError(
                "recompute_ratio and selector say how moved text is repaired, and mode "
                f'{mode.value!r} reuses none: leave them out, or pass mode="chunk_kv_reuse"'
            )
        return mode

    def read_scores(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Prompt],
        arguments: Arguments,
        namespace: Namespace,
        started: float,
        repair: Any = None,
    ) -> list[ScoreRequest]:
        """Pairs of a prompt and a continuation. An error names the pair that is wrong."""
        checked_mode = self._checked_mode(arguments)
        options = read_options(self._model, 1, 1.0, False, None, {})
        pairs = checked_list(prompts), checked_list(continuations, "continuations")
        if len(prompts) != len(continuations):
            raise InvalidRequestError(
                f"every prompt needs one continuation, got {len(prompts)} prompts and "
                f"{len(continuations)} continuations"
            )
        requests = []
        for index, (prompt, continuation) in enumerate(zip(*pairs, strict=True)):
            try:
                tokens = self._prompts.read(prompt, namespace.salt, warming=isinstance(prompt, str))
                ids = self._prompts.read_continuation(prompt, tokens, continuation)
                needed = len(tokens) + len(ids) - 1  # the last token is scored, and never read
                self.check_positions(needed, "prompt and continuation", len(tokens))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {index}: {error}") from error
            own = (options, namespace, started, index, repair)
            requests.append(ScoreRequest(tokens, ids, checked_mode, *own))
        return requests

    def _request(
        self,
        prompt: Prompt | TokenizedPrompt,
        namespace: Namespace,
        mode: GenerationMode,
        options: GenerationOptions,
        started: float,
        repair: Any,
        index: int = 0,
    ) -> Request:
        tokens = self._prompts.read(prompt, namespace.salt)
        request = Request(tokens, mode, options, namespace, started, index, repair)
        self.check_positions(request.needed, "prompt and max_new_tokens", len(tokens))
        return request

    def check_positions(self, needed: int, what: str, given: int) -> None:
        """Refuse what needs more positions than the model has."""
        if given < 0:
            raise InvalidRequestError(f"position_offset must be at least 0, got {given}")
        if self.max_positions is not None and needed > self.max_positions:
            raise InvalidRequestError(
                f"{what} need {needed} positions ({given} + {needed - given}), "
                f"the model has {self.max_positions}"
            )

    def is_gated(self, tokens: int) -> bool:
        """Whether the model's rope changes before so many tokens, so that nothing may be reused."""
        return self._exact_range is not None and tokens > self._exact_range


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with those refused that transformers would take, and fail over in the middle of a run."""
    checked = dict(options)
    for name in _WITH_STATE:
        own = checked.get(name)
        if own is None:
            continue
        if not isinstance(own, Sequence) or not all(callable(each) for each in own):
            raise InvalidRequestError(
                f"{name} must be a list of callables, got {type(own).__name__}; pass a list of one"
            )
    stops = checked.get("stop_strings")
    if stops is not None:
        stops = [stops] if isinstance(stops, str) else stops
        if not isinstance(stops, Sequence) or not all(isinstance(each, str) for each in stops):
            raise InvalidRequestError(f"stop_strings must be a text or a list of texts, got {stops!r}")
        for index, text in enumerate(stops):
            check_text(text, f"stop string {index}")
        checked["stop_strings"] = list(stops) or None
    return checked


def checked_list(prompts: Any, what: str = "prompts") -> Sequence[Any]:
    """`prompts`, refused if they are no list, or a single one; errors call them `what`."""
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        is_many = isinstance(prompts, Iterable) and not isinstance(prompts, (str, bytes, Mapping))
        hint = f"pass list({what})" if is_many else "for a single one pass a list of one"
        raise InvalidRequestError(f"{what} must be a list of {what}, got {type(prompts).__name__}; {hint}")
    if prompts and isinstance(prompts[0], (int, Mapping)):
        raise InvalidRequestError(
            f"{what} must be a list of {what}, and this is a single one; pass a list of one"
        )
    return prompts
