"""The kvboost of PyPI, through what its documentation describes. Text in; token ids through `on_token`."""

from __future__ import annotations

from typing import Any

import torch
from protocol import Clock, Peer, answered, packed, serve, versions
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost import KVBoost

CACHE_BYTES = 4_000_000_000
MAX_CHUNKS = 4_096  # room for everything; the default is 128


class PyPIKVBoost(Peer):
    def load(self, model: str, gguf: str | None, context_tokens: int, threads: int) -> dict[str, Any]:  # noqa: ARG002
        torch.set_num_threads(threads)
        self._engine: Any = KVBoost(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(),
            AutoTokenizer.from_pretrained(model),
            max_cache_bytes=CACHE_BYTES,
            max_chunks=MAX_CHUNKS,
            device="cpu",
        )
        return {
            "versions": versions("kvboost", "torch", "transformers"),
            "weights": "float32",
            "distribution": True,
            "approximate": True,
            "note": "default options and a larger cache; takes text, so its times include tokenizing",
        }

    def warm(self, token_ids: list[int], text: str) -> dict[str, Any]:  # noqa: ARG002
        self._engine.warm(text)
        return {}

    def answer(self, token_ids: list[int], text: str, new_tokens: int, distribution: bool) -> dict[str, Any]:
        new_ids: list[int] = []

        def on_token(token: int) -> None:
            clock.token()
            new_ids.append(int(token))

        clock = Clock()
        result = self._engine.generate(text, max_new_tokens=new_tokens, do_sample=False, on_token=on_token)
        logits = result.first_token_logits
        return answered(
            clock,
            token_ids=new_ids,
            reused_tokens=result.cached_tokens,
            reported_ttft_ms=result.ttft_ms,
            prompt_tokens=result.prompt_tokens,
            same_prompt=result.prompt_tokens == len(token_ids),
            logits=packed(logits.reshape(-1).tolist()) if distribution and logits is not None else None,
        )


if __name__ == "__main__":
    serve(PyPIKVBoost())
