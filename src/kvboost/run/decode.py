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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode as DecodingKind

from kvboost.compat import ASSISTED_FEEDS_WHOLE_PROMPT
from kvboost.errors import InvalidRequestError
from kvboost.kernels import linears
from kvboost.kernels.folded import FoldedAttention, can_fold
from kvboost.kernels.scope import forward_scope
from kvboost.locks import model_lock

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
# What a model's own generation config may ask for and the form of our answers has no room for.
_NEUTRAL: dict[str, Any] = {
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "num_return_sequences": 1,
    "max_length": None,
    "prefill_chunk_size": None,
}
# Decoding that no longer comes with transformers, and what asks for it.
_GONE_KINDS = ("contrastive_search", "dola_generation", "group_beam_search", "constrained_beam_search")
# With these a cache holds what the model computed; with others ("quantized") it holds less.
_LOSSLESS_CACHES = (None, "dynamic", "dynamic_full", "static", "hybrid", "hybrid_chunked", "sliding_window")
_OFFLOADED = ("offloaded", "offloaded_static", "offloaded_hybrid", "offloaded_hybrid_chunked")
_ASSISTANCE = ("assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp")
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


@dataclass(frozen=True)
class GenerationOptions:
    """Checked options of one request, in transformers' terms.

    `config` is for runs on our cache, `stock_config` for those without: there the model's own generation
    config decides which cache it uses, if any.
    """

    config: GenerationConfig
    max_new_tokens: int
    seed: int | None
    call_options: Mapping[str, Any]
    stock_config: GenerationConfig | None = None

    @property
    def kind(self) -> DecodingKind:
        """How transformers decodes with these options, as it decides itself."""
        return self.config.get_generation_mode(self.call_options.get("assistant_model"))

    @property
    def why_plain(self) -> str:
        """Why the model must run as it is, on a cache of its own; empty where it need not."""
        asked = (self.stock_config or self.config).cache_implementation
        if asked not in (*_LOSSLESS_CACHES, *_OFFLOADED):
            return f"gated: the generation config asks for a {asked} cache"
        if self.kind is DecodingKind.ASSISTED_GENERATION and not self._is_assisted_by_others:
            return "gated: the model assists itself"
        return ""

    @property
    def why_not_prepared(self) -> str:
        """Why the model's own generate would not go on from a cache that holds a part; empty if it does."""
        if self.kind is DecodingKind.ASSISTED_GENERATION:
            return "gated: the generation config asks for assisted generation"
        if (self.stock_config or self.config).use_cache is False:
            return "gated: the generation config asks for no cache"
        return ""

    @property
    def _is_assisted_by_others(self) -> bool:
        """Assisted by another model or by the prompt: our cache is fed each token once, as is tested."""
        by_itself = self.config.assistant_early_exit is not None or getattr(self.config, "use_mtp", None)
        if by_itself:
            return False
        by_prompt = self.config.prompt_lookup_num_tokens is not None
        return by_prompt or self.call_options.get("assistant_model") is not None

    @property
    def num_sequences(self) -> int:
        """Sequences that the request's cache must hold (one per beam)."""
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
    if not isinstance(temperature, (int, float)) or isinstance(temperature, bool):
        raise InvalidRequestError(f"temperature must be a number, got {temperature!r}")
    if not isinstance(do_sample, bool):
        raise InvalidRequestError(f"do_sample must be True or False, got {do_sample!r}")
    if do_sample and not temperature > 0:
        raise InvalidRequestError(
            f"temperature must be greater than 0 with do_sample=True, got {temperature}; "
            "for greedy decoding pass do_sample=False"
        )
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63):
        raise InvalidRequestError(f"seed must be an integer from 0 to 2**63 - 1, got {seed}")
    config = copy.deepcopy(model.generation_config) or GenerationConfig()
    if config.token_healing:
        raise InvalidRequestError(
            "model.generation_config.token_healing rewrites the prompt after it was looked up; switch it off"
        )
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
        if value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidRequestError(f"{name} must be from {low:g} to {high:g}, got {value}")
    settings = {name: value for name, value in options.items() if name in fields}
    config.update(**_NEUTRAL, max_new_tokens=max_new_tokens, do_sample=do_sample)
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
    stock = copy.deepcopy(config)
    config.update(use_cache=True, cache_implementation=None, cache_config=None)
    checked = GenerationOptions(config, max_new_tokens, seed, call_options, stock)
    if checked.kind.value in _GONE_KINDS:
        raise InvalidRequestError(
            f"{checked.kind.value.replace('_', ' ')} is no longer part of transformers; leave out what asks "
            "for it among the options and in model.generation_config"
        )
    return checked


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
    config = options.config
    if cache is not None:
        extra["past_key_values"] = cache
    else:
        config = options.stock_config or config
    with torch.no_grad(), drawing_from(options.seed, device), _generating(model, config) as own:
        _feed_only_new_tokens(own, cache, options)
        output = own.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config, **extra
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
def _generating(model: Any, config: GenerationConfig) -> Iterator[Any]:
    """A second handle on the same modules, whose generation config is `config` and nothing else.

    transformers fills in what is unset from the model's own, and sets attributes on what it generates with;
    the model that the caller knows is left alone, also while other threads use it.
    """
    handle = copy.copy(model)
    handle.__dict__["generation_config"] = own_config = copy.deepcopy(config)
    for name in _ASSISTANCE:  # a model that assists itself generates within, and must not be assisted there
        setattr(own_config, name, getattr(model.generation_config, name, None))
    inner = [getattr(model, "base_model", None), getattr(getattr(model, "base_model", None), "model", None)]
    kept = [(each, vars(each)["generation_config"]) for each in inner if "generation_config" in _fields(each)]
    layers = getattr(model.config, "num_hidden_layers", None)
    try:
        yield handle
    finally:
        for each, own in kept:  # adapters hand theirs on to the model inside
            each.__dict__["generation_config"] = own
        if layers is not None and model.config.num_hidden_layers != layers:
            model.config.num_hidden_layers = layers  # an early exit that failed in the middle


def _fields(value: Any) -> dict[str, Any]:
    return vars(value) if isinstance(value, torch.nn.Module) else {}


def _feed_only_new_tokens(handle: Any, cache: Cache | None, options: GenerationOptions) -> None:
    """Let assisted decoding leave out, in its first forward, what the cache holds already."""
    assisted = options.kind is DecodingKind.ASSISTED_GENERATION
    if cache is None or not assisted or not ASSISTED_FEEDS_WHOLE_PROMPT:
        return
    own = handle.prepare_inputs_for_generation
    held_tokens = cache.get_seq_length

    @functools.wraps(own)
    def prepare(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is cache and kwargs.get("next_sequence_length") is None:
            kwargs["next_sequence_length"] = input_ids.shape[1] - held_tokens()
        return own(input_ids, *args, **kwargs)

    handle.__dict__["prepare_inputs_for_generation"] = prepare


class _Drawing(TorchFunctionMode):
    """Inside, and in this thread alone, random numbers come from a generator of its own."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.multinomial or func is torch.rand:
            kwargs.setdefault("generator", self._generator)
        elif func is torch.rand_like:
            like = args[0]
            return torch.rand(like.shape, generator=self._generator, dtype=like.dtype, device=like.device)
        return func(*args, **kwargs)


@contextmanager
def drawing_from(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw from `seed` inside; the random state of other threads and of the caller is left alone."""
    if seed is None:
        yield
        return
    with _Drawing(torch.Generator(device).manual_seed(seed)):
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


def last_stop(start: int, total: int, block: int | None) -> int:
    """Where generate takes over: the last forward of a prompt of `total` tokens is its own."""
    stop = start
    while (following := next_stop(stop, total, block)) < total:
        stop = following
    return stop


@contextmanager
def running(model: Any, *, fast: bool, was_read: bool = False) -> Iterator[None]:
    """Hold the model for forwards; with `fast` on our kernels where they apply.

    `was_read` says that the caller has read the model's state for this run, so that it need not be read
    again.
    """
    with model_lock(model), torch.no_grad(), ExitStack() as kernels:
        if torch.is_inference_mode_enabled():  # what is kept must be written to outside of it too
            kernels.enter_context(torch.inference_mode(False))
            kernels.enter_context(torch.no_grad())
        if fast:
            kernels.enter_context(linears.faster(model, was_read=was_read))
        if fast and can_fold(model):
            kernels.enter_context(forward_scope(model, FoldedAttention()))
        yield
