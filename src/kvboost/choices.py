"""The words that options take: modes, strategies, widths of stored numbers. Imports nothing heavy."""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeAlias, TypeVar, get_args

from kvboost.errors import InvalidRequestError

KVBits: TypeAlias = Literal[4, 8, 16, "k8v4"]  # bits of a stored number; "k8v4" = keys 8, values 4
BITS: tuple[KVBits, ...] = (16, 8, 4, "k8v4")
Selector = Literal["guided", "deviation"]  # how CacheBlend finds the tokens worth computing again
SELECTORS: tuple[str, ...] = get_args(Selector)
REMOTE_WRITES = ("all", "reused")  # what goes to a store that several machines share
_Choice = TypeVar("_Choice", bound=Enum)


def is_width(bits: object) -> bool:
    """Whether `bits` is one of `BITS`, and not just a number that equals one."""
    return type(bits) in (int, str) and bits in BITS


class GenerationMode(str, Enum):
    """How much of the cache a request may use."""

    BASELINE = "baseline"  # no cache read, no cache write
    PREFIX_CACHE = "prefix_cache"  # exact prefix hits only
    CHUNK_KV_REUSE = "chunk_kv_reuse"


class RecomputeStrategy(str, Enum):
    """How reused KV is repaired where its surroundings changed."""

    SELECTIVE = "selective"
    CACHEBLEND = "cacheblend"
    NONE = "none"


class ChunkStrategy(str, Enum):
    """Where a text is cut into chunks."""

    FIXED = "fixed"
    SEMANTIC = "semantic"  # paragraph and sentence ends
    DOCUMENT = "document"  # one chunk


class AssemblyMode(str, Enum):
    """What the prompt assembler may take from the cache."""

    PREFIX_ONLY = "prefix_only"
    CHUNK_REUSE = "chunk_reuse"


class Origin(str, Enum):
    """Where the KV of a prompt token came from."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    RECOMPUTED = "recomputed"
    LIVE = "live"


def choice(kind: type[_Choice], name: str, value: _Choice | str) -> _Choice:
    """The member of an enum that `value` names; `name` is the option's, for the error."""
    try:
        return kind(value)
    except ValueError as error:
        choices = ", ".join(repr(member.value) for member in kind)
        raise InvalidRequestError(f"{name} must be one of {choices}; got {value!r}") from error
