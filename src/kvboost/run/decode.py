"""Running a model over a cache: prefill in blocks, then transformers' own generate.

Decoding goes through `model.generate` with our cache, so every generation option, logits
processor, stopping criterion and streamer of transformers works. Knows how to run a model, not
what is in the cache or where it came from.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Callable, Iterator
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
from kvboost.kernels import linears
from kvboost.kernels.folded import FoldedAttention, can_fold
from kvboost.kernels.scope import forward_scope
from kvboost.locks import model_lock
from kvboost.run.options import GenerationOptions

# What lets a model assist itself.
_ASSISTANCE = ("assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp")
# The most tokens that one forward prefills, and the largest mask that it may need.
_MAX_PREFILL_TOKENS = 32_768
_MAX_MASK_ELEMENTS = 1 << 24


class Watch(StoppingCriteria):
    """Notes the time of the first token, and stops generation when it is cancelled."""

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
    """An answer: the new tokens, when the first one came, and why it ended."""

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
    index: int = 0,
) -> Decoded:
    """Answer `token_ids` `[tokens]`, number `index` of its call; `cache` may hold all but the last."""
    device = model.get_input_embeddings().weight.device
    input_ids = torch.from_numpy(token_ids).to(device).unsqueeze(0)
    extra = options.taken_for(index)
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
    # A model that assists itself calls generate inside, where it must not be assisted again.
    for name in _ASSISTANCE:
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
    """In the first forward of assisted decoding, leave out the tokens that the cache holds already."""
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
    """Inside, and in this thread alone, sampling draws from a generator of its own."""

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
    """Hold the model's lock for forwards; with `fast`, use our kernels where they apply.

    `was_read` says that the caller has read the model's state for this run already.
    """
    with model_lock(model), torch.no_grad(), ExitStack() as kernels:
        if torch.is_inference_mode_enabled():  # tensors that we keep are written to outside of it too
            kernels.enter_context(torch.inference_mode(False))
            kernels.enter_context(torch.no_grad())
        if fast:
            kernels.enter_context(linears.faster(model, was_read=was_read))
        if fast and can_fold(model):
            kernels.enter_context(forward_scope(model, FoldedAttention()))
        yield
