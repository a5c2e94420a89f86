"""The engine's options, checked. Knows their names and limits, not what they do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast

from kvboost.errors import InvalidRequestError
from kvboost.models import KVBits, RecomputeStrategy, is_width

_Choice = TypeVar("_Choice", bound=Enum)
CACHE_DEVICES = ("cpu", "model")
SELECTORS = ("guided", "deviation")


def choice(kind: type[_Choice], name: str, value: _Choice | str) -> _Choice:
    """The member of an enum that `value` names."""
    try:
        return kind(value)
    except ValueError as error:
        choices = ", ".join(repr(member.value) for member in kind)
        raise InvalidRequestError(f"{name} must be one of {choices}; got {value!r}") from error


@dataclass(frozen=True)
class EngineSettings:
    """The constructor options of the engine that need neither model nor tokenizer to be checked."""

    chunk_size: int = 128
    max_chunks: int | None = 128
    recompute_overlap: int = 16
    recompute_strategy: RecomputeStrategy | str = RecomputeStrategy.SELECTIVE
    recompute_ratio: float | str = 0.15
    kv_cache_bits: int | str | None = 16
    disk_cache_dir: str | os.PathLike[str] | None = None
    chunk_boundary_window: int = 0
    overlap_k: int = 0
    sink_tokens: int = 0
    selector: str = "guided"
    max_kl: float | None = None
    max_cache_bytes: int | None = None
    disk_cache_bytes: int | None = None
    cache_device: str = "cpu"
    bit_exact: bool = False
    cache_salt: str = ""
    prefill_block: int | None = None
    pack_weights: bool | None = None
    weights_check_seconds: float | None = 60.0

    def __post_init__(self) -> None:
        choice(RecomputeStrategy, "recompute_strategy", self.recompute_strategy)
        self._at_least("chunk_size", 1)
        self._at_least("recompute_overlap", 0)
        self._at_least("overlap_k", 0)
        self._at_least("sink_tokens", 0)
        self._at_least("max_chunks", 0, or_none=True)
        self._at_least("max_cache_bytes", 0, or_none=True)
        self._at_least("prefill_block", 1, or_none=True)
        if self.pack_weights not in (True, False, None):
            raise InvalidRequestError(f"pack_weights must be True, False or None, got {self.pack_weights!r}")
        seconds = self.weights_check_seconds
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0
        ):
            raise InvalidRequestError(
                f"weights_check_seconds must be None or greater than 0, got {seconds!r}"
            )
        self._check_repair()
        if self.kv_cache_bits is not None and not is_width(self.kv_cache_bits):
            raise InvalidRequestError(
                f'kv_cache_bits must be 16, 8, 4, "k8v4" or None, got {self.kv_cache_bits!r}'
            )
        if self.bit_exact and self.bits != 16:
            raise InvalidRequestError(
                f"bit_exact needs KV as it was computed: set kv_cache_bits to 16, not {self.kv_cache_bits!r}"
            )
        self._at_least("disk_cache_bytes", 0, or_none=True)
        if self.disk_cache_dir is not None and not isinstance(self.disk_cache_dir, (str, os.PathLike)):
            raise InvalidRequestError(f"disk_cache_dir must be a folder, got {self.disk_cache_dir!r}")
        if self.disk_cache_bytes is not None and self.disk_cache_dir is None:
            raise InvalidRequestError("disk_cache_bytes needs a folder: pass disk_cache_dir with it")
        if self.cache_device not in CACHE_DEVICES:
            raise InvalidRequestError(f'cache_device must be "cpu" or "model", got {self.cache_device!r}')
        if not isinstance(self.cache_salt, str):
            raise InvalidRequestError(f"cache_salt must be text, got {self.cache_salt!r}")
        if not 0 <= self.chunk_boundary_window < self.chunk_size:
            raise InvalidRequestError(
                f"chunk_boundary_window must be from 0 to chunk_size - 1 ({self.chunk_size - 1}), "
                f"got {self.chunk_boundary_window}"
            )
        if self.bit_exact and self.chunk_boundary_window:
            raise InvalidRequestError("bit_exact needs blocks of equal size: set chunk_boundary_window to 0")
        if self.bit_exact and self.overlap_k:
            raise InvalidRequestError("bit_exact needs chunks that saw all before them: set overlap_k to 0")

    def _check_repair(self) -> None:
        if self.selector not in SELECTORS:
            raise InvalidRequestError(f'selector must be "guided" or "deviation", got {self.selector!r}')
        ratio, bound = self.recompute_ratio, self.max_kl
        if ratio != "auto" and (isinstance(ratio, (str, bool)) or not 0 <= ratio <= 1):
            raise InvalidRequestError(f'recompute_ratio must be from 0 to 1 or "auto", got {ratio!r}')
        if bound is not None:
            if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not bound > 0:
                raise InvalidRequestError(f"max_kl must be None or greater than 0, got {bound!r}")
            if ratio != "auto":
                raise InvalidRequestError('max_kl chooses the ratio: pass recompute_ratio="auto" with it')

    def _at_least(self, name: str, least: int, *, or_none: bool = False) -> None:
        value: Any = getattr(self, name)
        if value is None and or_none:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            allowed = f"None or at least {least}" if or_none else f"at least {least}"
            raise InvalidRequestError(f"{name} must be {allowed}, got {value!r}")

    @property
    def bits(self) -> KVBits:
        """How many bits a stored number has."""
        return cast(KVBits, self.kv_cache_bits or 16)

    @property
    def block(self) -> int | None:
        """Tokens per forward of a prefill; None = as many as memory allows."""
        return self.chunk_size if self.bit_exact else self.prefill_block
