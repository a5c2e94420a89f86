"""A prompt made ready for one's own `model.generate(**prepared)`. Knows arenas, no store."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvboost.choices import Origin
from kvboost.errors import InvalidRequestError
from kvboost.identity.namespace import Namespace
from kvboost.kv.arena import Arena
from kvboost.models import ReuseCounts, Span

CHANGED_REASON = "the model changed meanwhile"
LENGTH_REASON = "the cache does not hold what prompt and answer say"


class PreparedPrompt(dict[str, Any], ReuseCounts):
    """`input_ids` and `attention_mask` `[1, tokens]`, and `past_key_values` with what is known.

    `spans` say where each prompt token's KV comes from.
    """

    def __init__(
        self,
        model: Any,
        token_ids: np.ndarray,
        cache: Any,
        spans: tuple[Span, ...],
        namespace: Namespace | None,
    ) -> None:
        device = model.get_input_embeddings().weight.device
        input_ids = torch.from_numpy(token_ids).to(device).unsqueeze(0)
        super().__init__(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), past_key_values=cache
        )
        self.token_ids = token_ids
        self.arena: Arena | None = cache if isinstance(cache, Arena) else None
        self.spans = spans
        self.prompt_tokens = len(token_ids)
        self.cached_tokens = sum(span.length for span in spans if span.origin is not Origin.LIVE)
        self.namespace = namespace
        self._was_changed = False

    @classmethod
    def gated(cls, model: Any, token_ids: np.ndarray, reason: str) -> PreparedPrompt:
        """With an empty stock cache: this prompt's KV can be neither reused nor stored."""
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        return cls(model, token_ids, cache, (Span(0, len(token_ids), Origin.LIVE, reason),), None)

    def check_with(self, is_current: Callable[[Namespace], bool]) -> Callable[[], None]:
        """What to call at every forward: notes where the model is not what it was when this was prepared."""
        own = weakref.ref(self)

        def check() -> None:
            prepared = own()
            if prepared is not None and prepared.namespace is not None and not is_current(prepared.namespace):
                prepared._was_changed = True

        return check

    def why_not_stored(self, ids: np.ndarray) -> str:
        """Why the KV of `ids` `[tokens]`, from `computed_ids`, must not be stored; empty where it may."""
        if self._was_changed:
            return CHANGED_REASON
        if self.arena is not None and self.arena.batch == 1 and self.arena.length != len(ids):
            return LENGTH_REASON
        return ""

    def computed_ids(self, output_ids: torch.Tensor | Sequence[int]) -> np.ndarray | None:
        """The ids `[tokens]` whose KV the cache holds now; None where it holds nothing to store."""
        values = output_ids.detach().cpu().numpy() if isinstance(output_ids, torch.Tensor) else output_ids
        ids = np.asarray(values, dtype=np.int64)
        if ids.ndim == 2 and len(ids) == 1:
            ids = ids[0]
        prompt = self.token_ids
        if ids.ndim != 1 or len(ids) < len(prompt) or not np.array_equal(ids[: len(prompt)], prompt):
            raise InvalidRequestError(
                "output_ids must be the one row that model.generate returned for this prompt: the "
                f"prompt's {len(prompt)} tokens followed by the answer's; got shape {tuple(ids.shape)}"
            )
        if self.arena is None:
            return None
        if self.arena.batch > 1:
            return prompt  # beams: all sequences agree on the prompt, not on the answer
        # generate leaves out the last token; one's own loop may have run it too
        return ids if self.arena.length == len(ids) else ids[:-1]
