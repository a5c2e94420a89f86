"""The generation options of a request: checked, and turned into transformers' GenerationConfig.

Options that would change what a cache holds, or what an answer looks like, are refused with what to do
instead. Knows a model's generation config, no weights, no cache and no tokens.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode as DecodingKind

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
# Settings of a model's own generation config that a result of ours cannot carry.
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
# Kinds of decoding that transformers no longer has.
_GONE_KINDS = ("contrastive_search", "dola_generation", "group_beam_search", "constrained_beam_search")
# With these a cache holds what the model computed; with others ("quantized") it holds less.
_LOSSLESS_CACHES = (None, "dynamic", "dynamic_full", "static", "hybrid", "hybrid_chunked", "sliding_window")
_OFFLOADED = ("offloaded", "offloaded_static", "offloaded_hybrid", "offloaded_hybrid_chunked")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")  # have no effect without do_sample
# Fields of a generation config that take no part in choosing tokens greedily, and values with no effect.
_NOT_CHOOSING = frozenset(
    {
        "max_new_tokens",
        "min_new_tokens",  # the sampler sees to it
        "eos_token_id",
        "pad_token_id",
        "bos_token_id",
        "decoder_start_token_id",
        "use_cache",
        "cache_implementation",
        "cache_config",
        "transformers_version",
        "generation_kwargs",
        "return_legacy_cache",
        "disable_compile",
        "compile_config",
        "_commit_hash",
        "_from_model_config",
        "_original_object_hash",
        *_SAMPLING,
    }
)
_DEFAULTS = vars(GenerationConfig())
_IDLE = {**_NEUTRAL, "do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "min_length": 0}
_TINY, _MANY = 1e-6, float("inf")
_RANGES: dict[str, tuple[float, float]] = {  # outside of these, transformers ignores an option silently
    "top_p": (_TINY, 1),
    "min_p": (0, 1),
    "typical_p": (_TINY, 1),
    "top_k": (0, _MANY),
    "num_beams": (1, _MANY),
    "repetition_penalty": (_TINY, _MANY),
    "min_new_tokens": (0, _MANY),
    "no_repeat_ngram_size": (0, _MANY),
}


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

    def taken_for(self, index: int) -> dict[str, Any]:
        """The call's own options, for prompt number `index` of it."""
        taken = dict(self.call_options)
        if (allowed := taken.get("prefix_allowed_tokens_fn")) is not None:
            taken["prefix_allowed_tokens_fn"] = lambda _batch_id, ids: allowed(index, ids)
        return taken

    @property
    def kind(self) -> DecodingKind:
        """How transformers decodes with these options, as it decides itself."""
        return self.config.get_generation_mode(self.call_options.get("assistant_model"))

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end an answer."""
        ends = self.config.eos_token_id
        return [] if ends is None else [int(end) for end in (ends if isinstance(ends, list) else [ends])]

    @cached_property
    def is_plain_greedy(self) -> bool:
        """Whether transformers would do nothing but take the largest logit until an end token comes.

        End tokens may be barred from the first `min_new_tokens`. True only where no field but those known to
        change nothing else differs from its default.
        """
        if self.call_options.keys() - {"streamer"} or self.config.do_sample:
            return False
        if type(self.config.min_new_tokens) not in (int, type(None)):
            return False
        return all(
            value is None or name in _NOT_CHOOSING or value in (_DEFAULTS.get(name), _IDLE.get(name))
            for name, value in vars(self.config).items()
        )

    @property
    def why_plain(self) -> str:
        """Why the model must run with its own kernels and its own cache; empty where it need not."""
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
        """Whether another model or the prompt assists: only then is our cache fed each token once."""
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
    _check_arguments(max_new_tokens, temperature, do_sample, seed)
    config = copy.deepcopy(model.generation_config) or GenerationConfig()
    if config.token_healing:
        raise InvalidRequestError(
            "model.generation_config.token_healing rewrites the prompt after it was looked up; switch it off"
        )
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    _check_options(options, fields)
    config.update(**_NEUTRAL, max_new_tokens=max_new_tokens, do_sample=do_sample)
    if do_sample:
        config.update(temperature=float(temperature))
    else:  # transformers would warn that what only sampling uses is unused
        neutral = GenerationConfig()
        config.update(**{name: getattr(neutral, name) for name in _SAMPLING})
    config.update(**{name: value for name, value in options.items() if name in fields})
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


def _check_arguments(max_new_tokens: Any, temperature: Any, do_sample: Any, seed: Any) -> None:
    """Refuse bad values of the arguments that every request has."""
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


def _check_options(options: Mapping[str, Any], fields: Set[str]) -> None:
    """Refuse options that are unknown, cannot be kept, or are out of range."""
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
