"""Choosing the next token of a sequence in a batch.

The second decoding loop beside transformers' own: each sequence has the logits processors, the stopping
criteria and the random generator that `model.generate` would give it, so it gets the tokens that it would
get alone. Knows logits and options, no cache.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode as DecodingKind
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StopStringCriteria,
)

from kvboost.run.decode import Decoded, finish_reason
from kvboost.run.options import GenerationOptions
from kvboost.run.packed_step import ForwardLogits

# How generate would run, and what it would return: a sequence has its own cache, and takes only tokens.
_NOT_FOR_BATCHES: dict[str, Any] = {
    "use_cache": False,
    "cache_implementation": None,
    "prefill_chunk_size": None,
    "token_healing": False,
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
}


def why_alone(options: GenerationOptions) -> str:
    """Why a request with these options needs transformers' own loop; empty where it does not."""
    kind = options.config.get_generation_mode(options.call_options.get("assistant_model"))
    if kind not in (DecodingKind.GREEDY_SEARCH, DecodingKind.SAMPLE):
        return str(kind.value).replace("_", " ")
    if options.config.guidance_scale not in (None, 1) or "negative_prompt_ids" in options.call_options:
        return "guidance"
    return ""


class SequenceSampler:
    """One sequence's answer as it grows. `index` is the request's number as its caller counts."""

    def __init__(
        self, model: Any, tokenizer: Any, token_ids: np.ndarray, options: GenerationOptions, index: int = 0
    ) -> None:
        self.options = options
        self.new_ids: list[int] = []
        self.first_token_at = 0.0
        self.finished_at: float | None = None
        self._prompt_tokens = len(token_ids)
        self._processors = LogitsProcessorList()
        self._criteria = StoppingCriteriaList()
        self._max_length = len(token_ids) + options.max_new_tokens
        self._least_tokens = 0  # before these, no end token is taken; else a processor sees to it
        device = model.get_input_embeddings().weight.device
        if options.is_plain_greedy:
            self._ends = frozenset(options.end_tokens)
            self._least_tokens = options.config.min_new_tokens or 0
        else:
            self._take_from_generate(model, tokenizer, token_ids, index)
        self._generator: torch.Generator | None = None
        if options.seed is not None and options.config.do_sample:
            self._generator = torch.Generator(device).manual_seed(options.seed)

    def _take_from_generate(self, model: Any, tokenizer: Any, token_ids: np.ndarray, index: int) -> None:
        """Take the processors and criteria that `model.generate` would use."""
        device = model.get_input_embeddings().weight.device
        with torch.inference_mode(False):  # it is written to outside of the caller's mode
            self._ids = torch.empty(1, self._max_length, dtype=torch.long, device=device)
        self._ids[0, : len(token_ids)] = torch.from_numpy(token_ids)
        self._processors, criteria = _as_generate_would(model, tokenizer, self._so_far, self.options, index)
        lengths = [each.max_length for each in criteria if isinstance(each, MaxLengthCriteria)]
        self._max_length = min([self._max_length, *lengths])
        ends = [each.eos_token_id for each in criteria if type(each) is EosTokenCriteria]
        self._ends = frozenset(int(token) for each in ends for token in torch.as_tensor(each).flatten())
        known = (MaxLengthCriteria, EosTokenCriteria)
        self._criteria = StoppingCriteriaList([each for each in criteria if type(each) not in known])

    @property
    def _so_far(self) -> torch.Tensor:
        """Prompt and answer, `[1, tokens]`."""
        return self._ids[:, : self._prompt_tokens + len(self.new_ids)]

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the one with the largest logit, whatever came before."""
        return not self._processors and not self.options.config.do_sample and not self._criteria

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token `[]` from `logits` `[vocab]`, where these are: nothing waits for the device."""
        if not self._processors and not self.options.config.do_sample:
            if len(self.new_ids) < self._least_tokens and self._ends:
                ends = [end for end in self._ends if 0 <= end < len(logits)]
                barred = torch.tensor(ends, dtype=torch.long, device=logits.device)
                logits = logits.index_fill(0, barred, -torch.inf)
            return logits.argmax(-1)
        # A copy: processors may write into what they are given.
        scores = self._processors(self._so_far, logits.unsqueeze(0).to(torch.float32, copy=True))
        if not self.options.config.do_sample:
            return torch.argmax(scores[0])
        return torch.multinomial(scores.softmax(-1), 1, generator=self._generator)[0, 0]

    def refuses(self, token: int) -> bool:
        """Whether the token with the largest logit is an end that comes too early."""
        return len(self.new_ids) < self._least_tokens and token in self._ends

    def append(self, token: int) -> None:
        """Take the next token, and note whether it was the last."""
        if self._processors or self._criteria:  # nobody else looks at them
            self._ids[0, self._prompt_tokens + len(self.new_ids)] = token
        self.new_ids.append(token)
        if len(self.new_ids) == 1:
            self.first_token_at = time.perf_counter()
        ended = token in self._ends or self._prompt_tokens + len(self.new_ids) >= self._max_length
        if ended or bool(self._criteria(self._so_far, None).all() if self._criteria else False):
            self.finished_at = time.perf_counter()

    def decoded(self) -> Decoded:
        """The answer so far, as generate gives it."""
        return Decoded(self.new_ids, self.first_token_at, finish_reason(self.new_ids, self.options))


def choose_tokens(forward: ForwardLogits, samplers: Mapping[int, SequenceSampler]) -> dict[int, Exception]:
    """Choose the next tokens of sequences by their rows of logits; returns why that failed, by row.

    All of them come from the device at once.
    """
    failed: dict[int, Exception] = {}
    if not samplers:
        return failed
    tokens = forward.largest_tokens
    chosen: dict[int, torch.Tensor] = {}
    for row, sampler in samplers.items():
        if not sampler.is_plain_greedy:
            try:
                chosen[row] = sampler.choose(forward.logits[row]).to(tokens.device)
            except Exception as error:  # a processor of the request: the others go on
                failed[row] = error
    if chosen:
        rows = torch.tensor(list(chosen), device=tokens.device)
        tokens = tokens.index_copy(0, rows, torch.stack(list(chosen.values())))
    found = tokens.tolist()
    for row, sampler in samplers.items():
        if row not in failed:
            try:
                early = row not in chosen and sampler.refuses(found[row])
                sampler.append(int(sampler.choose(forward.logits[row]) if early else found[row]))
            except Exception as error:  # a stopping criterion of the request
                failed[row] = error
    return failed


def _as_generate_would(
    model: Any, tokenizer: Any, input_ids: torch.Tensor, options: GenerationOptions, index: int
) -> tuple[LogitsProcessorList, StoppingCriteriaList]:
    """The processors and criteria that `model.generate` would use for `input_ids` `[1, tokens]`."""

    def take(
        _model: Any,
        _input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,  # noqa: ARG001
        **_kwargs: Any,
    ) -> tuple[LogitsProcessorList, StoppingCriteriaList]:
        return logits_processor, stopping_criteria

    extra = options.taken_for(index)
    extra.pop("streamer", None)  # whoever runs the sequence hands its tokens on
    config = copy.deepcopy(options.config)
    for name, value in _NOT_FOR_BATCHES.items():
        setattr(config, name, value)
    if config.stop_strings:  # a decoding function of one's own is not given the tokenizer that they need
        config.stop_strings = None
        stops = StopStringCriteria(tokenizer, options.config.stop_strings)
        extra["stopping_criteria"] = StoppingCriteriaList([*(extra.get("stopping_criteria") or []), stops])
    made: tuple[LogitsProcessorList, StoppingCriteriaList] = _handle(model, config).generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        generation_config=config,
        custom_generate=take,
        **extra,
    )
    return made


def _handle(model: Any, config: GenerationConfig) -> Any:
    """A second handle on the model's modules, whose generation config is `config` and nothing else.

    transformers fills in what is unset from the model's own, and adapters hand theirs on to the model inside.
    """
    inside = getattr(model, "get_base_model", None)
    handle = copy.copy(inside() if inside is not None else model)
    handle.__dict__["generation_config"] = config
    return handle
