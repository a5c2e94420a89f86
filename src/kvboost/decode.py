"""Running a model over a cache: prefill in blocks, then transformers' own generate.

Decoding goes through `model.generate` with our cache, so every generation option, logits
processor, stopping criterion and streamer of transformers works. Knows how to run a model, not
what is in the cache or where it came from.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache

from kvboost import attention, linears
from kvboost.compat import ASSISTED_FEEDS_WHOLE_PROMPT
from kvboost.errors import InvalidRequestError

_CALL_OPTIONS = frozenset(
    {
        "logits_processor",
        "stopping_criteria",
        "prefix_allowed_tokens_fn",
        "assistant_model",
        "assistant_tokenizer",
        "streamer",
        "negative_prompt_ids",
        "negative_prompt_attention_mask",
    }
)
_REFUSED_OPTIONS: dict[str, str] = {
    "max_length": "use max_new_tokens",
    "use_cache": "use mode='baseline' to run without reuse",
    "cache_implementation": "kvboost brings its own cache",
    "cache_config": "kvboost brings its own cache",
    "max_cache_len": "kvboost brings its own cache",
    "past_key_values": "kvboost brings its own cache",
    "prefill_chunk_size": "use the engine's prefill_block",
    "return_dict_in_generate": "the result has token_ids and spans; use prepare() for more",
    "output_scores": "use prepare() and your own model.generate",
    "output_logits": "use prepare() and your own model.generate",
    "output_attentions": "use prepare() and your own model.generate",
    "output_hidden_states": "use prepare() and your own model.generate",
    "token_healing": "it rewrites the prompt after it was looked up",
    "generation_config": "pass its fields as options",
}
_TINY, _MANY = 1e-6, float("inf")
_RANGES: dict[str, tuple[float, float]] = {  # what transformers takes without a word and then ignores
    "top_p": (_TINY, 1),
    "min_p": (0, 1),
    "typical_p": (_TINY, 1),
    "top_k": (0, _MANY),
    "num_beams": (1, _MANY),
    "repetition_penalty": (_TINY, _MANY),
    "min_new_tokens": (0, _MANY),
    "no_repeat_ngram_size": (0, _MANY),
}
# Longest stretch that is prefilled in one forward, and the largest mask that one may need.
_MAX_PREFILL_TOKENS = 32_768
_MAX_MASK_ELEMENTS = 1 << 24

_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()


def model_lock(model: Any) -> threading.RLock:
    """The lock that serializes forwards of `model`, shared by all engines that use it."""
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


@dataclass(frozen=True)
class GenerationOptions:
    """Checked options of one request, in transformers' terms."""

    config: GenerationConfig
    max_new_tokens: int
    seed: int | None
    call_options: Mapping[str, Any]

    @property
    def num_rows(self) -> int:
        """Rows that the request's cache needs (one per beam)."""
        return int(self.config.num_beams or 1)

    def with_streamer(self, streamer: Any) -> GenerationOptions:
        """The same options, with tokens handed to `streamer` as they come."""
        return dataclasses.replace(self, call_options={**self.call_options, "streamer": streamer})


def read_options(
    model: Any,
    max_new_tokens: int,
    temperature: float,
    do_sample: bool,
    seed: int | None,
    options: Mapping[str, Any],
) -> GenerationOptions:
    """Check generation options and turn them into a GenerationConfig on top of the model's own."""
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise InvalidRequestError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if do_sample and not temperature > 0:
        raise InvalidRequestError(
            f"temperature must be greater than 0 with do_sample=True, got {temperature}; "
            "for greedy decoding pass do_sample=False"
        )
    if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise InvalidRequestError(f"seed must be an integer from 0 to 2**63 - 1, got {seed}")
    config = copy.deepcopy(model.generation_config)
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    for name in options:
        if name in _REFUSED_OPTIONS:
            raise InvalidRequestError(f"the option {name} is not supported: {_REFUSED_OPTIONS[name]}")
        if name not in fields and name not in _CALL_OPTIONS:
            raise InvalidRequestError(f"unknown generation option {name!r}")
    if options.get("num_return_sequences", 1) not in (1, None):
        raise InvalidRequestError(
            f"num_return_sequences must be 1, got {options['num_return_sequences']}; "
            "call generate several times"
        )
    for name, (low, high) in _RANGES.items():
        value = options.get(name)
        if value is not None and not low <= value <= high:
            raise InvalidRequestError(f"{name} must be from {low:g} to {high:g}, got {value}")
    settings = {name: value for name, value in options.items() if name in fields}
    config.update(max_new_tokens=max_new_tokens, max_length=None, do_sample=do_sample, num_return_sequences=1)
    if do_sample:
        config.update(temperature=float(temperature))
    else:  # what only sampling uses would be reported as unused
        neutral = GenerationConfig()
        config.update(
            **{
                name: getattr(neutral, name)
                for name in ("temperature", "top_p", "top_k", "min_p", "typical_p")
            }
        )
    config.update(**settings)
    if config.pad_token_id is None:
        eos = config.eos_token_id
        config.pad_token_id = eos[0] if isinstance(eos, list) else eos
    try:
        config.validate()
    except ValueError as error:
        raise InvalidRequestError(f"the generation options do not fit together: {error}") from error
    call_options = {name: value for name, value in options.items() if name in _CALL_OPTIONS}
    return GenerationOptions(config, max_new_tokens, seed, call_options)


class Watch(StoppingCriteria):
    """Notes when the first token is there, and stops when it is told to."""

    def __init__(self) -> None:
        self.first_token_at: float | None = None
        self.cancelled = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.first_token_at is None:
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            self.first_token_at = time.perf_counter()
        return torch.full((input_ids.shape[0],), self.cancelled.is_set(), device=input_ids.device)


@dataclass
class Decoded:
    """What generate gave: the new tokens, when the first one came, and why it ended."""

    token_ids: list[int] = field(default_factory=list)
    first_token_at: float = 0.0
    finish_reason: str = "length"


def generate(
    model: Any,
    tokenizer: Any,
    token_ids: np.ndarray,
    cache: Cache | None,
    options: GenerationOptions,
    watch: Watch,
) -> Decoded:
    """Answer `token_ids` `[tokens]`, of which `cache` may hold all but the last."""
    device = model.get_input_embeddings().weight.device
    input_ids = torch.from_numpy(token_ids).to(device).unsqueeze(0)
    extra = dict(options.call_options)
    extra["stopping_criteria"] = StoppingCriteriaList([*(extra.get("stopping_criteria") or []), watch])
    if options.config.stop_strings or "assistant_tokenizer" in extra:
        extra["tokenizer"] = tokenizer
    if cache is not None:
        extra["past_key_values"] = cache
    with torch.no_grad(), _seeded(options.seed, device), _feeding_only_new_tokens(model, cache, options):
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=options.config,
            **extra,
        )
    new_ids: list[int] = output[0, len(token_ids) :].tolist()
    first = watch.first_token_at
    return Decoded(
        new_ids,
        first_token_at=first if first is not None else time.perf_counter(),
        finish_reason=finish_reason(new_ids, options, cancelled=watch.cancelled.is_set()),
    )


def finish_reason(new_ids: list[int], options: GenerationOptions, *, cancelled: bool = False) -> str:
    """Why an answer ended: "stop", "length" or "cancelled"."""
    eos = options.config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    if new_ids and new_ids[-1] in ends:
        return "stop"
    if cancelled:
        return "cancelled"
    return "length" if len(new_ids) >= options.max_new_tokens else "stop"


@contextmanager
def _feeding_only_new_tokens(model: Any, cache: Cache | None, options: GenerationOptions) -> Iterator[None]:
    """Let assisted decoding leave out, in its first forward, what the cache holds already."""
    assisted = options.call_options.get("assistant_model") or options.config.prompt_lookup_num_tokens
    if cache is None or not assisted or not ASSISTED_FEEDS_WHOLE_PROMPT:
        yield
        return
    own = model.prepare_inputs_for_generation
    held_tokens = cache.get_seq_length

    @functools.wraps(own)
    def prepare(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is cache and kwargs.get("next_sequence_length") is None:
            kwargs["next_sequence_length"] = input_ids.shape[1] - held_tokens()
        return own(input_ids, *args, **kwargs)

    model.prepare_inputs_for_generation = prepare
    try:
        yield
    finally:
        del model.prepare_inputs_for_generation


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw from `seed` inside, and leave the caller's random state as it was."""
    if seed is None:
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def prefill(
    model: Any,
    token_ids: np.ndarray,
    cache: Cache,
    end: int,
    *,
    block: int | None = None,
    position_offset: int = 0,
) -> None:
    """Run tokens from the cache's length up to `end` through the model, filling the cache.

    With `block`, forwards end at multiples of it; otherwise they are as long as memory allows.
    """
    device = model.get_input_embeddings().weight.device
    start = cache.get_seq_length()
    with torch.no_grad():
        while start < end:
            stop = min(end, next_stop(start, end, block))
            positions = torch.arange(start, stop, device=device).unsqueeze(0) + position_offset
            model(
                input_ids=torch.from_numpy(token_ids[start:stop]).to(device).unsqueeze(0),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            start = stop


def next_stop(start: int, end: int, block: int | None) -> int:
    """Where the forward that begins at `start` should end."""
    if block is not None:
        return (start // block + 1) * block
    if start == 0:  # plain causal attention needs no mask
        return _MAX_PREFILL_TOKENS
    return start + max(64, min(_MAX_PREFILL_TOKENS, _MAX_MASK_ELEMENTS // end))


@contextmanager
def running(model: Any, *, fast: bool) -> Iterator[None]:
    """Hold the model for forwards, in eval mode; with `fast` on our kernels where they apply."""
    with model_lock(model):
        was_training = model.training
        if was_training:
            model.eval()
        try:
            with ExitStack() as kernels:
                if fast:
                    kernels.enter_context(linears.faster(model))
                if fast and attention.can_engage(model):
                    kernels.enter_context(attention.folded(model))
                yield
        finally:
            if was_training:
                model.train()
