"""What proofs need of an engine, and a second engine on the same model with an empty cache.

Knows no engine itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from kvboost.choices import GenerationMode
from kvboost.identity.namespace import Namespace
from kvboost.kv.layout import KVLayout
from kvboost.kv.rope import KeyRotation
from kvboost.models import GenerationResult
from kvboost.requests.prompts import Prompt
from kvboost.reuse.assembler import PromptAssembler
from kvboost.settings import EngineSettings


class HasSettings(Protocol):
    """An engine, as far as another is made like it."""

    model: Any
    tokenizer: Any
    settings: EngineSettings

    @property
    def core(self) -> Any:
        """What stands behind it; its `engine_class` makes engines."""


class ReusesText(Protocol):
    """An engine, as far as trials need one."""

    model: Any
    tokenizer: Any
    layout: KVLayout
    assembler: PromptAssembler

    def namespace(self, cache_salt: str | None = None) -> Namespace:
        """Whose KV it is."""

    def warm(self, text: Any) -> Any:
        """Read a text and keep its KV."""

    def warm_documents(self, texts: Sequence[Any], *, progress: bool | None = None) -> Any:
        """Read documents together and keep their KV."""

    def clear(self) -> None:
        """Forget all cached text."""


class Verifiable(ReusesText, HasSettings, Protocol):
    """An engine, as far as checks need one."""

    chunk_size: int

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

    def close(self) -> None:
        """Free what it holds."""

    def generate(
        self, prompt: Prompt, max_new_tokens: int = 64, mode: GenerationMode | str = ..., **options: Any
    ) -> GenerationResult:
        """Answer a prompt."""

    def generate_batch(self, prompts: Sequence[Prompt], max_new_tokens: int = 64) -> list[GenerationResult]:
        """Answer prompts together."""


Engine = TypeVar("Engine", bound=HasSettings)


def fresh_engine(engine: Engine, **changes: Any) -> Engine:
    """A plain engine on the same model with the same settings but `changes`, with a cache of its own."""
    options = {**engine.settings.engine_options, "device": None, "max_chunks": None, "max_cache_bytes": None}
    options |= {"disk_cache_dir": None, "disk_cache_bytes": None, "remote_cache": None, **changes}
    made: Engine = engine.core.engine_class(engine.model, engine.tokenizer, strict=False, **options)
    made.core.notice.silence()  # nobody asked for its answers
    return made
