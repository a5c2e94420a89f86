"""A kvboost engine as a model of lm_eval, under the name `kvboost` once this module is imported.

lm_eval's requests become calls of the engine; contexts that are too long lose their first tokens, as in
lm_eval's own `hf` model, and answers end at a stop text. Knows lm_eval's model interface and the engine's
public calls, no task, no cache.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvboost.batching.many import check_batch_tokens
from kvboost.choices import GenerationMode, choice
from kvboost.engine import InferenceEngine
from kvboost.errors import InvalidRequestError
from kvboost.integrations.harness.api import (
    TemplateLM,
    get_rolling_token_windows,
    handle_stop_sequences,
    make_disjoint_window,
    normalize_gen_kwargs,
    postprocess_generated_text,
    register_model,
    resolve_max_length,
)
from kvboost.kv import rope
from kvboost.models import GenerationResult, ScoreResult

NAME = "kvboost"
_logger = logging.getLogger(__name__)
_LOOK_BACK = 2  # a stop text may have more tokens inside an answer than it has alone

Encoded = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, context, continuation


@register_model(NAME)
class KVBoostLM(TemplateLM):
    """A model for lm_eval's runner. Requests of one kind go to the engine together.

    `pretrained` is an engine, or what `from_pretrained` loads with `engine_options`; then `close` closes it.
    Of contexts longer than `max_length` the last tokens are kept. `batch_size` can only be "auto": the engine
    fills its batches by tokens, up to `max_batch_tokens`.
    """

    def __init__(
        self,
        pretrained: str | InferenceEngine = "builtin",
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        mode: GenerationMode | str = GenerationMode.PREFIX_CACHE,
        max_batch_tokens: int | None = None,
        batch_size: str | int | None = None,
        **engine_options: Any,
    ) -> None:
        super().__init__()
        if batch_size not in (None, "auto"):
            raise InvalidRequestError(
                f'batch_size must be "auto", got {batch_size!r}: kvboost fills its batches by tokens; '
                "max_batch_tokens bounds them"
            )
        for name, value in (("max_length", max_length), ("max_gen_toks", max_gen_toks)):
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidRequestError(f"{name} must be an integer of at least 1, got {value!r}")
        if not isinstance(pretrained, str) and engine_options:
            raise InvalidRequestError(
                f"{', '.join(engine_options)}: options cannot be changed when the engine is there already"
            )
        check_batch_tokens(max_batch_tokens)
        checked_mode = choice(GenerationMode, "mode", mode)
        self._owns_engine = isinstance(pretrained, str)
        self.engine = (
            InferenceEngine.from_pretrained(pretrained, **engine_options)
            if isinstance(pretrained, str)
            else pretrained
        )
        self.tokenizer = self.engine.tokenizer
        self._device = self.engine.model.device
        self.max_gen_toks = max_gen_toks
        self.max_length = self._checked_max_length(max_length)
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._sharing: dict[str, Any] = {"mode": checked_mode, "max_batch_tokens": max_batch_tokens}
        self.prompt_tokens = 0
        self.cached_tokens = 0
        if self.eot_token_id is None:
            raise InvalidRequestError(
                "lm_eval needs a tokenizer with an end-of-text token; this one has none"
            )

    def _checked_max_length(self, max_length: int | None) -> int:
        model = self.engine.model
        if max_length is None:
            return int(resolve_max_length(model.config, self.tokenizer))
        limit = rope.max_positions(model)
        if limit is not None and max_length > limit:
            raise InvalidRequestError(f"max_length must be at most {limit}, the model's, got {max_length}")
        return max_length

    def close(self) -> None:
        """Close the engine, if it was loaded here."""
        if self._owns_engine:
            self.engine.close()

    # --- what lm_eval asks about ---------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The model's configuration; lm_eval takes the model's name from it."""
        return self.engine.model.config

    @property
    def eot_token_id(self) -> Any:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> Any:
        """What stands before a continuation without a context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval writes into its results about the model."""
        model = self.engine.model
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "model_dtype": str(model.dtype),
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None
    ) -> list[int]:
        """Token ids; special tokens are not added to a text that begins with the prefix token already."""
        if add_special_tokens is None:
            starts = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = False if string.startswith(starts) else self._add_bos_token
        ids = self._encode(string, add_special_tokens)
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def _encode(self, string: str, add_special_tokens: bool | None) -> list[int]:
        """Token ids; None = as the tokenizer does by itself."""
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, verbose=False, **options)["input_ids"])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages as text; a template that takes no system message gets the others."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )
        except jinja2.TemplateError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise InvalidRequestError(f"the chat template refused the messages: {error}") from error
            _logger.warning("the chat template refused a system message (%s); it is left out", error)
            return self.apply_chat_template(others, add_generation_prompt)
        except ValueError as error:
            raise InvalidRequestError(f"messages need a chat template: {error}") from error

    # --- log-likelihoods -----------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of every continuation, and whether it is the greedy one."""
        contexts, continuations, shortened = [], [], 0
        for texts, context, continuation in requests:
            if not context or not 0 < len(continuation) <= self.max_length:
                raise InvalidRequestError(
                    f"a context needs at least 1 token and a continuation from 1 to max_length="
                    f"{self.max_length}, got {len(context)} and {len(continuation)}: {_shortened(texts)}"
                )
            # The model never reads the continuation's last token, so one more token fits.
            room = self.max_length + 1 - len(continuation)
            shortened += len(context) > room
            contexts.append(context[-room:])
            continuations.append(continuation)
        self._report_shortened(shortened, len(requests))
        results = self.engine.score(
            contexts, continuations, progress=False if disable_tqdm else None, **self._sharing
        )
        self._count(results)
        answers = [(result.log_likelihood, result.is_greedy) for result in results]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of `max_length` that predict every token once."""
        windows: list[Encoded] = []
        owners: list[int] = []
        for number, (text,) in enumerate(request.args for request in requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            owners += [number] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for number, (score, _) in zip(owners, scores, strict=True):
            totals[number] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # --- answers -------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers up to a stop text; requests with the same options go together."""
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            key = json.dumps(request.args[1], sort_keys=True, default=repr)
            alike.setdefault(key, []).append(number)
        answers = [""] * len(requests)
        for numbers in alike.values():
            contexts = [requests[number].args[0] for number in numbers]
            options = requests[numbers[0]].args[1]
            for number, answer in zip(numbers, self._answers(contexts, options, disable_tqdm), strict=True):
                answers[number] = answer
                self.cache_hook.add_partial("generate_until", requests[number].args, answer)
        return answers

    def _answers(
        self, contexts: Sequence[str], gen_kwargs: dict[str, Any], disable_tqdm: bool
    ) -> Iterator[str]:
        options = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        stops = handle_stop_sequences(options.pop("until"), eos=self.tokenizer.decode(self.eot_token_id))
        new_tokens = options.pop("max_gen_toks")
        temperature = options.pop("temperature", 0.0)
        room = self.max_length - new_tokens
        if room < 1:
            raise InvalidRequestError(
                f"max_gen_toks must be less than max_length={self.max_length}, got {new_tokens}"
            )
        prompts = [self._encode_prompt(context) for context in contexts]
        self._report_shortened(sum(len(prompt) > room for prompt in prompts), len(prompts))
        prompts = [prompt[-room:] for prompt in prompts]
        results = self.engine.generate_many(
            prompts,
            new_tokens,
            temperature if options["do_sample"] else 1.0,
            options.pop("do_sample"),
            progress=False if disable_tqdm else None,
            stopping_criteria=StoppingCriteriaList([StopText(self.tokenizer, stops, prompts)]),
            **self._sharing,
            **options,
        )
        self._count(results)
        for result in results:
            yield str(postprocess_generated_text(result.output_text, stops, None))

    def _encode_prompt(self, context: str) -> list[int]:
        """A context to be continued, which may be empty."""
        begin = self.tokenizer.bos_token
        has_begin = begin is not None and context.startswith(begin)
        return self._encode(context, False if has_begin else self._add_bos_token) or [self.prefix_token_id]

    # --- small parts ---------------------------------------------------------------------------

    def _count(self, results: Sequence[ScoreResult] | Sequence[GenerationResult]) -> None:
        self.prompt_tokens += sum(result.prompt_tokens for result in results)
        self.cached_tokens += sum(result.cached_tokens for result in results)

    def _report_shortened(self, count: int, total: int) -> None:
        if count:
            _logger.warning(
                "%d of %d requests are longer than max_length=%d and lose their first tokens",
                count,
                total,
                self.max_length,
            )


def _shortened(texts: tuple[str, str] | None) -> str:
    """Both texts, shortened to fit into an error message."""
    if texts is None:
        return "a window of a text"
    context, continuation = texts
    return f"{context[-40:]!r} with {continuation[:40]!r}"


class StopText(StoppingCriteria):  # type: ignore[misc, unused-ignore]
    """Ends an answer that has one of `stops` in it; stop texts in the prompt do not count.

    It sees sequences and is not told where their prompts end. It recognizes a sequence by the tokens before
    its newest; if two prompts are possible, it takes the longer one. So it may stop late, never early, and
    text behind a stop text is cut off anyway.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompts: Sequence[Sequence[int]]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        encoded = [tokenizer(stop, add_special_tokens=False)["input_ids"] for stop in self._stops]
        self._window = max(map(len, encoded), default=0) + _LOOK_BACK
        self._prompt_tokens: dict[int, int] = {}  # by the hash of a sequence so far
        for prompt in prompts:
            self._note(torch.tensor(prompt), len(prompt))

    def _note(self, sequence: torch.Tensor, prompt_tokens: int) -> None:
        key = _hash(sequence)
        self._prompt_tokens[key] = max(prompt_tokens, self._prompt_tokens.get(key, 0))

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_options: Any) -> torch.Tensor:
        ended = [self._has_ended(sequence) for sequence in input_ids.cpu()]
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)

    def _has_ended(self, sequence: torch.Tensor) -> bool:
        prompt_tokens = self._prompt_tokens.get(_hash(sequence[:-1]))
        if prompt_tokens is None:
            return False
        self._note(sequence, prompt_tokens)
        latest = sequence[max(prompt_tokens, len(sequence) - self._window) :]
        text = self._tokenizer.decode(latest.tolist())
        return any(stop in text for stop in self._stops)


def _hash(sequence: torch.Tensor) -> int:
    return hash(sequence.numpy().tobytes())
