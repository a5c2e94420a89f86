"""The tokens of an answer: how they are chosen and scored in transformers' terms, and how they become text.

Choosing knows the fields of a request and logits; the server's other parts know no transformers. Detokenizing
knows a tokenizer's `decode`, and every step costs the same, however long the answer is. Knows no HTTP.
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from kvboost.errors import KVBoostError
from kvboost.models import GenerationResult
from kvboost.requests.request import Arguments
from kvboost.server.tickets import Ticket

if TYPE_CHECKING:  # it needs pydantic, and what becomes of tokens does not
    from kvboost.server.schemas import Generation

Decode = Callable[[list[int]], str]
FinishReason = Literal["stop", "length"]

LEAST_TEMPERATURE = 1e-5  # below it, decoding is greedy
_LEAST_TOP_P = 1e-6
_MAX_SEED = 2**63
_LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity
# Neutral values for what a model's generation_config may narrow sampling by: only the request decides. None
# would mean the model's own value.
_NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
_INCOMPLETE = "\ufffd"  # what half a character decodes to
_LONGEST_CHARACTER = 4  # bytes, so at most so many tokens
_LONG_WAIT = 8  # tokens without a whole character: these bytes will never be one
_GIVE_UP = 32
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


# --- how tokens are chosen -------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenScore:
    """A token with its log-probability, and the likeliest tokens in its place, best first.

    `offset` is where its text begins in the answer, in characters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int = 0


def sampling_arguments(
    fields: Generation, index: int, prompt_tokens: int, recorder: LogprobRecorder | None
) -> Arguments:
    """How choice number `index` is sampled; with a seed it draws from seed + index."""
    options: dict[str, Any] = {"num_beams": 1}
    temperature = 1.0 if fields.temperature is None else fields.temperature
    do_sample = temperature >= LEAST_TEMPERATURE
    if do_sample:
        options |= _NEUTRAL
        options["top_p"] = 1.0 if fields.top_p is None else max(fields.top_p, _LEAST_TOP_P)
    processors: list[LogitsProcessor] = [] if recorder is None else [recorder]
    frequency, presence = fields.frequency_penalty or 0.0, fields.presence_penalty or 0.0
    if frequency or presence:
        processors.append(RepeatPenalties(prompt_tokens, frequency, presence))
    if processors:
        options["logits_processor"] = LogitsProcessorList(processors)
    if not do_sample:
        return Arguments(options=options)
    seed = secrets.randbelow(_MAX_SEED) if fields.seed is None else (fields.seed + index) % _MAX_SEED
    return Arguments(temperature=temperature, do_sample=True, seed=seed, options=options)


class LogprobRecorder(LogitsProcessor):
    """Notes the model's own distribution at each step, before penalties, temperature and top_p.

    The model's thread notes a step before it hands out the token; the event loop takes it afterwards.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._steps: deque[tuple[torch.Tensor, list[tuple[int, float]]]] = deque()

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note `scores` `[1, vocab]`, and leave them as they are."""
        logprobs = scores[0].float().log_softmax(-1).cpu()
        best = logprobs.topk(min(self._top, len(logprobs)))
        top = list(zip(best.indices.tolist(), map(_finite, best.values.tolist()), strict=True))
        self._steps.append((logprobs, top))
        return scores

    def take(self, token: int, offset: int = 0) -> TokenScore:
        """The next step, in which `token` was chosen."""
        logprobs, top = self._steps.popleft()
        return TokenScore(token, _finite(float(logprobs[token])), tuple(top), offset)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


class RepeatPenalties(LogitsProcessor):
    """Lowers the scores of tokens that were generated before: by `frequency` each time, `presence` once."""

    def __init__(self, prompt_tokens: int, frequency: float, presence: float) -> None:
        self._seen = prompt_tokens  # the prompt's own tokens do not count
        self._frequency = frequency
        self._presence = presence
        self._known: set[int] = set()
        self._penalties: torch.Tensor | None = None  # [vocab]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` `[1, vocab]` less the penalties for `input_ids` `[1, tokens]`."""
        if self._penalties is None:
            self._penalties = torch.zeros(scores.shape[-1], device=scores.device)
        for token in input_ids[0, self._seen :].tolist():
            self._penalties[token] += self._frequency + (0.0 if token in self._known else self._presence)
            self._known.add(token)
        self._seen = input_ids.shape[1]
        return scores - self._penalties


# --- how tokens become text ------------------------------------------------------------------------


class Detokenizer:
    """Turns tokens into pieces of text that add up to the text of all of them.

    A token's text depends on its neighbours: a character may need several tokens, and many decoders drop a
    space at the start. So tokens are decoded behind those whose text went out last, and wait until the end
    of the text is a whole character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before: list[int] = []  # tokens whose text was given out
        self._before_text = ""
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """The text that is certain with this token, which may be empty."""
        self._waiting.append(token)
        text = self._decode(self._before + self._waiting)
        if text.endswith(_INCOMPLETE):
            return self._settled() if len(self._waiting) > _LONG_WAIT else ""
        return self._give_out(text, len(self._waiting))

    def end(self) -> str:
        """The rest, with U+FFFD in place of half a character."""
        return self._give_out(self._decode(self._before + self._waiting), len(self._waiting))

    def _give_out(self, text: str, count: int) -> str:
        """Give out the first `count` waiting tokens, whose text behind those before is `text`."""
        tokens, self._waiting = self._waiting[:count], self._waiting[count:]
        goes_on = text.startswith(self._before_text)  # otherwise the decoder has changed its earlier text
        new = text[len(self._before_text) :] if goes_on else self._decode(tokens)
        if new or len(self._before) + len(tokens) > _GIVE_UP:
            self._before = tokens
            self._before_text = self._decode(tokens)
        else:  # they have no text, and the next one would be decoded as if it came first
            self._before = self._before + tokens
            self._before_text = text
        return new

    def _settled(self) -> str:
        """Of bytes that make no character: all but those at the end that still may.

        Tokens can be told apart where the texts of both sides add up to that of the whole.
        """
        waiting = self._waiting
        whole = self._decode(waiting)
        for cut in range(len(waiting) - 1, len(waiting) - 1 - _LONGEST_CHARACTER, -1):
            if self._decode(waiting[:cut]) + self._decode(waiting[cut:]) == whole:
                return self._give_out(self._decode(self._before + waiting[:cut]), cut)
        return self.end() if len(waiting) > _GIVE_UP else ""


class StopFinder:
    """Lets text through up to the first stop string, and holds back what may become one.

    What it does depends on the text only, not on the pieces that it comes in.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _fallbacks(stop)) for stop in dict.fromkeys(stops)]
        self._matched = [0] * len(self._stops)  # characters at the end of the text that begin each stop
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The part of the text so far that can be sent now."""
        if not self._stops or self.found:
            return "" if self.found else text
        said = self._held + text
        for at, character in enumerate(text, start=len(self._held)):
            if longest := self._advance(character):
                self.found = True
                self._held = ""
                return said[: at + 1 - longest]
        keep = len(said) - max(self._matched)
        self._held = said[keep:]
        return said[:keep]

    def end(self) -> str:
        """What was held back and is not a stop string after all."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Take one character; returns the length of the longest stop string that it completes."""
        longest = 0
        for number, (stop, fallbacks) in enumerate(self._stops):
            matched = self._matched[number]
            while matched and stop[matched] != character:
                matched = fallbacks[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                longest = max(longest, matched)
                matched = fallbacks[matched - 1]
            self._matched[number] = matched
        return longest


def _fallbacks(stop: str) -> list[int]:
    """For each beginning of `stop`: how many of its last characters begin `stop` again."""
    table = [0]
    for character in stop[1:]:
        matched = table[-1]
        while matched and stop[matched] != character:
            matched = table[matched - 1]
        table.append(matched + (stop[matched] == character))
    return table


class TokenNames:
    """How single tokens are shown: their bytes, and a text even where they are half a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_of = _byte_alphabet()
        self.bytes_of = lru_cache(maxsize=65_536)(self._bytes_of)

    def name_of(self, token: int) -> str:
        """Its text, or its bytes spelled out where they are no text, or its number where it has none."""
        raw = self.bytes_of(token)
        if not raw:
            return f"token:{token}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes_of(self, token: int) -> bytes:
        spelled = self._tokenizer.convert_ids_to_tokens(token)
        if spelled is None:  # the model has more embeddings than the tokenizer has tokens
            return b""
        alone = str(self._tokenizer.decode([token]))
        if all(character in self._byte_of for character in spelled):
            raw = bytes(self._byte_of[character] for character in spelled)
            if raw.decode(errors="replace") == alone:
                return raw
        if byte := _BYTE_TOKEN.fullmatch(spelled):
            return bytes([int(byte[1], 16)])
        twice = str(self._tokenizer.decode([token, token]))  # the first token of a text may lose its space
        if twice.startswith(alone) and len(twice) > 2 * len(alone):
            return twice[len(alone) :].encode()
        return alone.encode()


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers spell bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


# --- one answer ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Text to send, and the scores of the tokens that begin in it."""

    text: str
    scores: list[TokenScore]


class Choice:
    """One answer as it grows; `text` is what was sent of it."""

    def __init__(
        self, index: int, ticket: Ticket, recorder: LogprobRecorder | None, decode: Decode, stops: list[str]
    ) -> None:
        self.index = index
        self.ticket = ticket
        self.completion_tokens = 0
        self.text = ""
        self._recorder = recorder
        self._detokenizer = Detokenizer(decode)
        self._stops = StopFinder(stops)
        self._scores: deque[TokenScore] = deque()  # of tokens whose text was not sent
        self._decoded = 0  # characters

    def take(self, token: int) -> Piece | None:
        """The text that is certain with the next token; none behind a stop string, where it ends."""
        if self._stops.found:
            return None  # was generated before the cancellation
        self.completion_tokens += 1
        if self._recorder is not None:
            self._scores.append(self._recorder.take(token, self._decoded))
        piece = self._piece(self._stops.add(self._decoded_text(self._detokenizer.add(token))))
        if self._stops.found:
            self.ticket.end()
        return piece

    def end(self) -> Piece | None:
        """What is left of the text, after the last token."""
        if self.ticket.error is not None:
            raise self.ticket.error
        if self._stops.found:
            return None
        if self.result.finish_reason == "cancelled":
            raise KVBoostError("the request was cancelled")
        rest = self._decoded_text(self._detokenizer.end())
        return self._piece(self._stops.add(rest) + self._stops.end())

    @property
    def result(self) -> GenerationResult:
        return self.ticket.result

    @property
    def finish_reason(self) -> FinishReason:
        return "stop" if self._stops.found or self.result.finish_reason == "stop" else "length"

    def _decoded_text(self, text: str) -> str:
        self._decoded += len(text)
        return text

    def _piece(self, text: str) -> Piece | None:
        if not text:
            return None
        self.text += text
        scores = []
        while self._scores and self._scores[0].offset < len(self.text):
            scores.append(self._scores.popleft())
        return Piece(text, scores)
