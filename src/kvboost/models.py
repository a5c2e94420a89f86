"""Data that the other modules pass around: chunks, prompts, results, the two hashes.

Nothing here touches a model, a store or a file. KV tensors have the Hugging Face layout: one
`(key, value)` pair per layer, each `[batch=1, kv_heads, tokens, head_dim]` (`PastKVType`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from kvboost import html_view
from kvboost.choices import AssemblyMode as AssemblyMode
from kvboost.choices import ChunkStrategy as ChunkStrategy
from kvboost.choices import GenerationMode as GenerationMode
from kvboost.choices import Origin as Origin
from kvboost.choices import RecomputeStrategy as RecomputeStrategy

PastKVType: TypeAlias = tuple[tuple[torch.Tensor, torch.Tensor], ...]
TokenIds: TypeAlias = Sequence[int]


def token_bytes(token_ids: TokenIds | np.ndarray) -> bytes:
    """The ids as bytes, 4 per token, little-endian: what is hashed and compared."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


def content_hash_from_tokens(token_ids: TokenIds | np.ndarray) -> str:
    """SHA-256 hex digest of the token ids, wherever they stand."""
    return hashlib.sha256(token_bytes(token_ids)).hexdigest()


chunk_id_from_tokens = content_hash_from_tokens


def chained_hash(token_ids: TokenIds | np.ndarray, parent_hash: str | None = None) -> str:
    """SHA-256 hex digest of the parent's digest (or `root`) followed by the token ids."""
    return chained_hash_from_bytes(token_bytes(token_ids), parent_hash)


def chained_hash_from_bytes(tokens: bytes, parent_hash: str | None = None) -> str:
    """`chained_hash` of ids that are bytes already."""
    return hashlib.sha256((parent_hash or "root").encode() + tokens).hexdigest()


def kv_bytes(past_key_values: PastKVType) -> int:
    """Bytes of all tensors in `past_key_values`."""
    return sum(k.nbytes + v.nbytes for k, v in past_key_values)


@dataclass(frozen=True)
class Borrow:
    """Prompt positions `[start, end)` whose KV is that of the chunk `donor`, from its token `offset` on."""

    start: int
    end: int
    donor: str
    offset: int


@dataclass(frozen=True, eq=False)
class CompositeChunk:
    """KV put together from other chunks: what is borrowed, and the positions `[n]` held by itself.

    A position that is both borrowed and held counts as held: it was computed again.
    """

    borrows: tuple[Borrow, ...]
    own_positions: np.ndarray


@dataclass(eq=False)
class CachedChunk:
    """A slice of tokenized text with its KV, computed at positions `[position_start, position_end)`.

    `past_key_values` holds `[1, kv_heads, length, head_dim]` pairs. `chunk_id` is the prefix hash.
    `parent_hash` is the prefix hash of the chunk before it ("" = none known).
    """

    chunk_id: str
    text: str
    token_ids: TokenIds
    past_key_values: PastKVType
    position_start: int
    position_end: int
    prefix_hash: str = ""
    content_hash: str = ""
    created_at: float = field(default_factory=time.time)
    access_count: int = 0
    recomputed: bool = False
    parent_hash: str = field(default="", kw_only=True)

    @property
    def length(self) -> int:
        return self.position_end - self.position_start

    def touch(self) -> None:
        """Count one use."""
        self.access_count += 1

    def memory_bytes(self) -> int:
        """Bytes of all its tensors."""
        return kv_bytes(self.past_key_values)

    def __repr__(self) -> str:
        return (
            f"CachedChunk({self.chunk_id[:8]}, positions {self.position_start}-{self.position_end}, "
            f"{self.length} tokens, {self.memory_bytes() / 1e6:.2f} MB, {self.access_count} hits)"
        )


@dataclass(frozen=True)
class Span:
    """Prompt tokens `[start, end)` with one origin, and why they have it."""

    start: int
    end: int
    origin: Origin
    reason: str = ""
    donor: str = ""  # chunk id that the KV came from

    @property
    def length(self) -> int:
        return self.end - self.start


class ReusedRun(NamedTuple):
    """Prompt tokens `[start, end)` from one donor, moved by `shift` positions; `exact` needs no repair."""

    start: int
    end: int
    shift: int
    exact: bool


@dataclass
class AssembledPrompt:
    """A prompt with the KV that was found for it.

    `cached_past_kv` is the concatenation of the reused chunks, `[1, kv_heads, cached_length,
    head_dim]` per layer, or None. `chunk_boundaries` are half-open prompt positions, one pair per
    reused chunk. `runs` are (start, end, shift, exact): neighbours from one donor and one shift.
    """

    full_token_ids: list[int]
    cached_past_kv: PastKVType | None
    cached_length: int
    live_token_ids: list[int]
    live_position_ids: list[int]
    chunk_boundaries: list[tuple[int, int]]
    cache_hit_ratio: float
    has_approximate: bool = False
    runs: tuple[tuple[int, int, int, bool], ...] = ()

    @property
    def total_length(self) -> int:
        return len(self.full_token_ids)


@dataclass(frozen=True)
class WarmResult:
    """What `warm` left in the cache. Truthy, and an int, through `chunks_stored`.

    `chunks_stored` counts the chunks of this text that the cache holds after the call, `evicted_chunks` those
    that had to go for them.
    """

    chunks_stored: int
    token_count: int
    chunk_size: int
    chunk_boundary_aligned: bool
    partial_tail_tokens: int
    alignment_warning: str | None = None
    evicted_chunks: int = 0

    def __bool__(self) -> bool:
        return self.chunks_stored > 0

    def __int__(self) -> int:
        return self.chunks_stored

    __index__ = __int__

    def __repr__(self) -> str:
        tail = "aligned" if self.chunk_boundary_aligned else f"tail of {self.partial_tail_tokens} tokens"
        gone = f", {self.evicted_chunks} evicted" if self.evicted_chunks else ""
        return f"WarmResult({self.chunks_stored} chunks, {self.token_count} tokens, {tail}{gone})"


class ReuseCounts:
    """What a result's `spans` and `cached_tokens` say in numbers of prompt tokens."""

    spans: tuple[Span, ...]
    cached_tokens: int

    @property
    def approximate_tokens(self) -> int:
        """Served from the cache approximately, and not computed again."""
        return self._count(Origin.APPROXIMATE)

    @property
    def exact_tokens(self) -> int:
        """Served from the cache exactly."""
        return self.saved_tokens - self.approximate_tokens

    @property
    def saved_tokens(self) -> int:
        """Not computed in this request: exact and approximate ones."""
        return self.cached_tokens - self._count(Origin.RECOMPUTED)

    def _count(self, origin: Origin) -> int:
        return sum(span.length for span in self.spans if span.origin is origin)


@dataclass
class GenerationResult(ReuseCounts):
    """An answer, its timing, and the origin of every prompt token.

    `ttft_ms` is wall time from the call to the first token, with everything inside it.
    `spans` cover the prompt without gaps; `cached_tokens` are those found in the cache.
    """

    mode: str
    prompt: str
    output_text: str
    generated_tokens: int
    ttft_ms: float
    total_ms: float
    tokens_per_sec: float
    kv_reuse_ratio: float
    prompt_tokens: int
    cached_tokens: int
    token_ids: list[int] = field(default_factory=list)
    spans: tuple[Span, ...] = ()
    recomputed_tokens: int = 0
    finish_reason: str = "length"

    @property
    def decode_tokens_per_sec(self) -> float:
        """Tokens per second behind the first one; 0.0 where there is none."""
        seconds = (self.total_ms - self.ttft_ms) / 1e3
        return (self.generated_tokens - 1) / seconds if self.generated_tokens > 1 and seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: the fields, and what follows from them."""
        derived = ("exact_tokens", "approximate_tokens", "saved_tokens", "decode_tokens_per_sec")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def _repr_html_(self) -> str:
        """For notebooks: the answer, its times, and the prompt by origin."""
        spans = [(span.start, span.end, span.origin.value, span.reason) for span in self.spans]
        summary = (
            f"first token after {self.ttft_ms:,.0f} ms; {self.cached_tokens:,} of {self.prompt_tokens:,} "
            f"prompt tokens from the cache; {self.generated_tokens} new ({self.finish_reason})"
        )
        return (
            html_view.paragraph(self.output_text)
            + html_view.paragraph(summary)
            + (html_view.origin_bar(spans, self.prompt_tokens) if spans else "")
        )


@dataclass(frozen=True)
class ScoreResult(ReuseCounts):
    """How likely a continuation is behind a prompt, and the origin of every prompt token.

    `log_likelihood` is the sum of `token_log_likelihoods` (natural logarithm, one per continuation token);
    `is_greedy` says whether greedy decoding would have written just this. It works as a float, too.
    """

    mode: str
    prompt: str
    continuation: str
    log_likelihood: float
    is_greedy: bool
    token_ids: list[int]
    token_log_likelihoods: list[float]
    total_ms: float
    kv_reuse_ratio: float
    prompt_tokens: int
    cached_tokens: int
    spans: tuple[Span, ...] = ()

    def __float__(self) -> float:
        return self.log_likelihood
