"""What an evaluation of a user's own questions compares, checked. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvboost.choices import GenerationMode, choice
from kvboost.errors import InvalidRequestError
from kvboost.proof.evaluation_rows import Contestant

MODES = tuple(mode.value for mode in GenerationMode)
RATIOS = (0.10, 0.15, 0.30)
NEW_TOKENS = 32
READ = ("alone", "together")


@dataclass(frozen=True)
class EvaluationSettings:
    """What is compared, and how. BASELINE is always asked: all others are measured against it."""

    modes: tuple[str, ...] = MODES
    ratios: tuple[float, ...] = RATIOS
    max_new_tokens: int = NEW_TOKENS
    read: str = READ[0]

    @classmethod
    def checked(
        cls, modes: Sequence[GenerationMode | str], ratios: Sequence[float], max_new_tokens: int, read: str
    ) -> EvaluationSettings:
        """The settings, each once and in order; an error says which is wrong."""
        for name, given in (("modes", modes), ("ratios", ratios)):
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise InvalidRequestError(f"{name} must be a list, got {given!r}")
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InvalidRequestError(f"max_new_tokens must be at least 1, got {max_new_tokens!r}")
        named = {choice(GenerationMode, "modes", mode).value for mode in modes}
        for ratio in ratios:
            if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
                raise InvalidRequestError(f"ratios must be numbers from 0 to 1, got {ratio!r}")
        if GenerationMode.CHUNK_KV_REUSE.value in named and not ratios:
            raise InvalidRequestError('ratios must not be empty with mode "chunk_kv_reuse"')
        if read not in READ:
            raise InvalidRequestError(f'read must be "alone" or "together", got {read!r}')
        kept = tuple(mode for mode in MODES if mode in named | {GenerationMode.BASELINE.value})
        return cls(kept, tuple(sorted({float(ratio) for ratio in ratios})), max_new_tokens, read)

    @property
    def contestants(self) -> list[Contestant]:
        """Each mode once, and the approximate one at every ratio."""
        approximate = GenerationMode.CHUNK_KV_REUSE.value
        found = [Contestant(mode) for mode in self.modes if mode != approximate]
        return found + [Contestant(approximate, ratio) for ratio in self.ratios if approximate in self.modes]
