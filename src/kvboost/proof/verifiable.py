"""What verifying needs of an engine. Knows no engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvboost.choices import GenerationMode
from kvboost.identity.namespace import Namespace
from kvboost.kv.layout import KVLayout
from kvboost.kv.rope import KeyRotation
from kvboost.models import GenerationResult
from kvboost.proof.fresh_engine import HasSettings
from kvboost.requests.prompts import Prompt
from kvboost.reuse.assembler import PromptAssembler


class Verifiable(HasSettings, Protocol):
    """An engine, as far as checks need one."""

    layout: KVLayout
    chunk_size: int
    assembler: PromptAssembler

    @property
    def why_not_packed(self) -> str:
        """Why sequences cannot share a forward."""

    @property
    def kv_cache_bits(self) -> object:
        """Bits of a stored number."""

    @property
    def is_quantized(self) -> bool:
        """Whether stored KV has fewer bits than the model's."""

    @property
    def is_lossy(self) -> bool:
        """Whether chunks do not see all the text before them (overlap encoding)."""

    @property
    def rotation(self) -> KeyRotation | str:
        """What moves keys, or why nothing does."""

    @property
    def max_positions(self) -> int | None:
        """Positions that the model has."""

    def tokenize(self, prompt: Prompt) -> list[int]:
        """A prompt as token ids."""

    def namespace(self, cache_salt: str | None = None) -> Namespace:
        """Whose KV it is."""

    def warm(self, text: Prompt, position_offset: int = 0) -> Any:
        """Read a text and keep its KV."""

    def clear(self) -> None:
        """Forget all cached text."""

    def close(self) -> None:
        """Free what it holds."""

    def generate(
        self, prompt: Prompt, max_new_tokens: int = 64, mode: GenerationMode | str = ..., **options: Any
    ) -> GenerationResult:
        """Answer a prompt."""

    def generate_batch(self, prompts: Sequence[Prompt], max_new_tokens: int = 64) -> list[GenerationResult]:
        """Answer prompts together."""
